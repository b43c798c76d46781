"""Write docs/claims.md: every claim, measured anew."""

from __future__ import annotations

from pathlib import Path

from posenc.inspect.claims.sheet import check

PAGE = Path(__file__).parent / "claims.md"


def markdown() -> str:
    """The whole page."""
    lines = [
        "# Claims about position encodings, checked",
        "",
        "What is often said, and what comes out when it is measured. Every line is computed by",
        "`posenc inspect claims`, in seconds; this page is written by",
        "`python docs/update_claims.py`. An identity follows from definitions; a claim",
        "contradicted by its source says another number than the text that it cites.",
    ]
    for heading, claims in check().items():
        lines += ["", f"## {heading}", "", "| claim | verdict | measured | source |"]
        lines.append("| --- | --- | --- | --- |")
        for c in claims:
            cells = (c.claim, f"**{c.verdict}**", c.measured, c.source)
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
