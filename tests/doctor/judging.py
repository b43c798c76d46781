"""A config judged without a file."""

from pathlib import Path

from posenc.dialects.files.source import Source
from posenc.dialects.files.spelling import as_transformers
from posenc.dialects.runtimes import RUNTIMES
from posenc.doctor.case import Case
from posenc.doctor.rules import findings

NOWHERE = Path("no-such-folder/config.json")


def case(config, named=tuple(RUNTIMES), length=None):
    return Case(Source(NOWHERE, "transformers", as_transformers(config), config), named, length)


def judge(config, named=tuple(RUNTIMES), length=None):
    """The findings for a config's dict."""
    return findings(case(config, named, length))


def codes(config, named=tuple(RUNTIMES), severity="EWI"):
    return {f.code for f in judge(config, named) if f.severity in severity}
