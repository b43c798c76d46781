"""Measure every claim, and write docs/claims.md with its source and the verdict:
python -m experiments.claims."""

from pathlib import Path
from typing import NamedTuple

from experiments.claims import biases, context, embeddings, masking, rotary, sizes

PAGE = Path(__file__).parents[2] / "docs/claims.md"
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


def check() -> dict[str, list[Checked]]:
    """Measure every claim, by group."""
    checked: dict[str, list[Checked]] = {}
    for heading, claims in GROUPS.items():
        checked[heading] = []
        for claim in claims:
            measured, holds = claim.measure()
            verdict = holds if isinstance(holds, str) else ("true" if holds else "false")
            checked[heading].append(Checked(claim.claim, claim.source, measured, verdict))
    return checked


def markdown() -> str:
    """Return the whole page."""
    lines = [
        "# Claims about position encodings, checked",
        "",
        "What is often said, and what comes out when it is measured. Every line is computed, in",
        "seconds, by `python -m experiments.claims`, which writes this page. An identity follows",
        "from definitions; a claim contradicted by its source says another number than the text",
        "that it cites.",
    ]
    for heading, claims in check().items():
        lines += ["", f"## {heading}", "", "| claim | verdict | measured | source |"]
        lines.append("| --- | --- | --- | --- |")
        for checked in claims:
            verdict = f"**{checked.verdict}**"
            cells = (checked.claim, verdict, checked.measured, checked.source)
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
