"""The words of the checks of a module: what it returns, and what fails."""

from posenc.inspect.module.measurements import ModuleSheet
from posenc.report.report import Report, Section
from posenc.report.table import Table

_RETURNED = {
    "rotated content": "rotated queries or keys",
    "sinusoids": "sines and cosines of positions",
    "cos and sin": "cosines and sines of angles",
    "complex": "angles as complex numbers",
    "bias": "a bias of the scores",
    "values": "values by position",
}
"""What a module returns, by the meaning of its numbers."""
_VERDICT_IN_WORDS = {True: "yes", False: "no", None: "–"}


def report_of(sheet: ModuleSheet) -> Report:
    """Return the report: the finding in a sentence or two, the call, and a verdict for each
    check."""
    answer = _answer(sheet)
    call = f"{sheet.path}, called as {sheet.called_as}, {sheet.length:,} tokens"
    rows = [
        [verdict.check, _VERDICT_IN_WORDS[verdict.holds], verdict.measured]
        for verdict in sheet.checks
    ]
    return Report(
        f"The positions of {sheet.name}",
        answer,
        {
            "module": sheet.path,
            "called_as": sheet.called_as,
            "shows": _RETURNED[sheet.meaning],
            "length": sheet.length,
            "answer": answer,
            "checks": sheet.checks,
        },
        [Section("Checks", [call, Table(["check", "holds", "measured"], rows)])],
    )


def _answer(sheet: ModuleSheet) -> str:
    """Return what the module returns, and which of the checks that apply fail."""
    num_passed = sum(verdict.holds is True for verdict in sheet.checks)
    start = f"{sheet.name} returns {_RETURNED[sheet.meaning]}, computed from positions."
    if not sheet.wrong:
        return f"{start} All {num_passed} checks that apply pass."
    names = "; ".join(verdict.check for verdict in sheet.wrong)
    return f"{start} {len(sheet.wrong)} of {num_passed + len(sheet.wrong)} checks fail: {names}."
