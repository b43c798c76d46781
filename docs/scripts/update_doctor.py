"""Write the generated part of docs/doctor.md: runtimes, rules, golden cases; see `make readme`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/doctor.md"
START = "<!-- from here on written by make readme -->\n"
PAGES = "../posenc/doctor/pages"
"""Where the rules' pages are, from docs/."""


def reference() -> str:
    """The runtimes that are emulated, and all rules from their table."""
    from posenc.doctor.rule import SEVERITIES
    from posenc.doctor.rules import RULES
    from posenc.runtimes.known import RELEASES_IN_WORDS

    lines = ["## Runtimes", "", "| runtime | versions |", "|---|---|"]
    lines += [f"| {name} | {versions} |" for name, versions in RELEASES_IN_WORDS.items()]
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


def families() -> str:
    """How many families were held to the runtimes' own modules, and what is known of each."""
    sys.path.insert(0, str(ROOT))
    try:
        from tests.doctor.oracles import swept
    finally:
        sys.path.remove(str(ROOT))
    from posenc.runtimes.families import RUNTIME_FILES, all_families

    lines = [
        "*run*: what posenc says equals what the runtime's own modules compute, from the class's "
        "defaults and from each variation. *read*: its source was read and not run. An empty cell: "
        "not known to posenc, and not judged.",
        "",
    ]
    seen: dict[tuple[str, str], str] = {}
    for runtime, said in swept.kept().items():
        parts = [f"{n} {verdict}" for verdict, n in swept.counts(runtime).most_common()]
        towers = list(said["towers"].values())
        if towers:
            right = towers.count("")
            parts.append(f"of {len(towers)} classes with several modalities {right} right")
        lines.append(
            f"- {runtime} {said['version']}, {len(said['rows'])} classes: {', '.join(parts)}."
        )
        seen |= {(runtime, name): verdict for name, verdict, _ in said["rows"].values()}
    words = {"right": "run", "differs": "**differs**"}
    lines += [
        "",
        f"| family | {' | '.join(RUNTIME_FILES)} |",
        f"|---|{'---|' * len(RUNTIME_FILES)}",
    ]
    for name, facts in all_families().items():
        if "text" not in facts:
            read = {r: facts.get(cell, "") for r, cell in RUNTIME_FILES.items()}
            usual = {r: "no model" if v is None else "read" if v else "" for r, v in read.items()}
            row = [words.get(seen.get((r, name), ""), usual[r]) for r in RUNTIME_FILES]
            lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def golden_cases() -> str:
    """Each recorded config beside each runtime: does its emulator give what the runtime gave?"""
    sys.path.insert(0, str(ROOT))
    try:
        from posenc.runtimes.known import RUNTIMES
        from tests.runtimes.golden_cases import cells
        from tests.runtimes.test_golden import assert_reproduced
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
    parts = (reference(), f"## Families\n\n{families()}", f"## Golden cases\n\n{golden_cases()}")
    return f"{before}{START}\n" + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
