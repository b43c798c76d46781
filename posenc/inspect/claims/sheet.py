"""Check folklore: every claim with its source, what was measured, and the verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from posenc.inspect.claims import biases, context, embeddings, masking, rotary, sizes
from posenc.report.files.atomic import write_atomically

GROUPS = {
    "Embeddings": embeddings.CLAIMS,
    "Rotary position embeddings": rotary.CLAIMS,
    "Score biases": biases.CLAIMS,
    "Masks, and attention without positions": masking.CLAIMS,
    "Long contexts": context.CLAIMS,
    "Sizes and published numbers": sizes.CLAIMS,
}


class Checked(NamedTuple):
    """A claim after its measurement."""

    claim: str
    source: str
    measured: str
    verdict: str


def check(tell: Callable[[str], None] = lambda claim: None) -> dict[str, list[Checked]]:
    """Measure every claim, by group; `tell` is called with each one."""
    checked = {}
    for heading, claims in GROUPS.items():
        checked[heading] = []
        for claim in claims:
            tell(claim.claim)
            measured, holds = claim.measure()
            verdict = holds if isinstance(holds, str) else ("true" if holds else "false")
            checked[heading].append(Checked(claim.claim, claim.source, measured, verdict))
    return checked


def markdown() -> str:
    """Return the document docs/claims.md."""
    lines = [
        "# Claims about position encodings, checked",
        "",
        "What is often said, and what comes out when it is measured. Every line is computed by",
        "`posenc inspect claims`, in seconds; this page is written by",
        "`python -m posenc.inspect.claims.sheet docs/claims.md`. An identity follows from",
        "definitions; a claim contradicted by its source says another number than the text that it",
        "cites.",
    ]
    for heading, claims in check().items():
        lines += ["", f"## {heading}", "", "| claim | verdict | measured | source |"]
        lines.append("| --- | --- | --- | --- |")
        for c in claims:
            cells = (c.claim, f"**{c.verdict}**", c.measured, c.source)
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    write_atomically(sys.argv[1], markdown())
