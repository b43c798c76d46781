"""`posenc compare`. torch is imported when it runs."""

from __future__ import annotations

from typing import Any

from posenc.compare.options import Options
from posenc.report.machine.options import AsJson, with_options_of


@with_options_of(Options)
def compare(*, as_json: AsJson = False, **given: Any) -> None:
    """Train each encoding short, test it long, and recommend one.

    The same command resumes an interrupted one and skips finished trials.
    """
    from posenc.compare import study

    study.run_study(Options(**given), as_json=as_json)
