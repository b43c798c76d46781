"""Write the generated part of docs/doctor.md: runtimes, rules, golden cases; see `make readme`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/doctor.md"
START = "<!-- from here on written by make readme -->\n"
PAGES = "../posenc/doctor/pages"
"""Where the rules' pages are, from docs/."""


def reference() -> str:
    """The runtimes that are emulated, and all rules from their table."""
    from posenc.dialects.runtimes import VERSIONS
    from posenc.doctor.rule import SEVERITIES
    from posenc.doctor.rules import RULES

    lines = ["## Runtimes", "", "| runtime | versions |", "|---|---|"]
    lines += [f"| {name} | {versions} |" for name, versions in VERSIONS.items()]
    lines += ["", "## Rules", ""]
    lines += [
        "An error means that a runtime named by `--for` (default: all six that know the model) "
        "computes something else than is meant. The same finding is a warning where no named "
        "runtime is concerned.",
        "",
    ]
    lines += ["| rule | what it finds | severity |", "|---|---|---|"]
    lines += [
        f"| [{code}]({PAGES}/{code}.md) | {rule.title} | {SEVERITIES[rule.severity]} |"
        for code, rule in RULES.items()
    ]
    return "\n".join(lines)


def golden_cases() -> str:
    """Each recorded config beside each runtime: does its emulator give what the runtime gave?"""
    sys.path.insert(0, str(ROOT))
    try:
        from posenc.dialects.runtimes import RUNTIMES
        from tests.dialects.golden_cases import cells
        from tests.dialects.test_golden import assert_reproduced
    finally:
        sys.path.remove(str(ROOT))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells():
        try:
            assert_reproduced(cell, RUNTIMES[cell.runtime])
            said = "same" if cell.error is None else "both refuse"
        except AssertionError:
            said = "**differs**"
        rows.setdefault(cell.case, {})[cell.runtime] = said
    answers = [said for row in rows.values() for said in row.values()]
    right = sum(said != "**differs**" for said in answers)
    lines = [
        f"{right} of {len(answers)} recorded answers to {len(rows)} configs are reproduced: "
        "frequencies, multiplier and softmax scale within 1e-6, the rule of switching, refusals. "
        "An empty cell was not recorded.",
        "",
        f"| config | {' | '.join(RUNTIMES)} |",
        f"|---|{'---|' * len(RUNTIMES)}",
    ]
    for case, row in rows.items():
        cells_ = " | ".join(row.get(name, "") for name in RUNTIMES)
        lines.append(f"| {case} | {cells_} |")
    return "\n".join(lines)


def with_generated(page: str) -> str:
    """The page with its generated part as it is today."""
    before, _, _ = page.partition(START)
    assert before != page, f"{PAGE} lacks the line {START!r}"
    return f"{before}{START}\n{reference().rstrip()}\n\n## Golden cases\n\n{golden_cases()}\n"


if __name__ == "__main__":
    PAGE.write_text(with_generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
