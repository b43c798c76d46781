"""A config judged without a file, and what the command prints."""

from pathlib import Path

from posenc.doctor import run_command
from posenc.doctor.command import Options
from posenc.doctor.copy_report import report_of_fixed_copy, report_of_fixed_gguf
from posenc.doctor.cures import fixing
from posenc.doctor.misreadings import Case
from posenc.doctor.rules import findings
from posenc.report.report import as_json
from posenc.report.terminal import as_text
from posenc.runtimes.files.source import Source
from posenc.runtimes.files.spelling import as_transformers
from posenc.runtimes.known import RUNTIMES

NOWHERE = Path("no-such-folder/config.json")


def case(config, named=tuple(RUNTIMES), length=None):
    return Case(Source(NOWHERE, "transformers", as_transformers(config), config), named, length)


def judge(config, named=tuple(RUNTIMES), length=None):
    """The findings for a config's dict."""
    return findings(case(config, named, length))


def codes(config, named=tuple(RUNTIMES), severity="EWI"):
    return {f.code for f in judge(config, named) if f.severity in severity}


def run(options: Options) -> tuple[str, int]:
    """What `posenc doctor` prints on standard output, and its exit code."""
    report, code = run_command.run(options)
    return as_json(report) if options.as_json else as_text(report), code


def fix(source, out, named=tuple(RUNTIMES), length=None):
    """What `--fix` prints about a file that was read, and its exit code."""
    if source.metadata is not None:
        return as_text(report_of_fixed_gguf(out, fixing.fix_gguf(source, out, None))), 0
    copy = fixing.fix_config(source, out, named, length)
    return as_text(report_of_fixed_copy(out, copy)), int(bool(copy.recipe.misreadings))


def row_of(runtime: str, text: str) -> list[str]:
    """The cells of a runtime's row in what the command prints."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {runtime} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]
