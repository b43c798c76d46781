"""Generate the page of all rules from their table: python -m posenc.doctor.answer.reference."""

from __future__ import annotations

from posenc.dialects.runtimes import VERSIONS
from posenc.doctor.rule import SEVERITIES
from posenc.doctor.rules import RULES

PAGES = "../posenc/doctor/pages"
"""Where the rules' pages are, from docs/."""


def markdown() -> str:
    """Return docs/doctor.md's section about runtimes and rules."""
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


if __name__ == "__main__":
    print(markdown())
