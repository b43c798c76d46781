"""Write docs/claims.md, with every claim measured anew: python -m experiments.claims."""

from pathlib import Path

from experiments.claims.sheet import check

PAGE = Path(__file__).parents[2] / "docs/claims.md"


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
