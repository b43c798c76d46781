"""Check folklore: every claim with its source, what was measured, and the verdict."""

import json
from collections.abc import Callable
from typing import NamedTuple

from posenc.inspect.claims import biases, context, embeddings, masking, rotary, sizes
from posenc.report.page.console import print_table, stdout
from posenc.report.page.progress import tell
from posenc.report.page.visible import visible

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


def run(as_json: bool) -> None:
    """Print every claim with source, measurement and verdict."""
    groups = check(lambda claim: tell(f"measuring: {claim}"))
    tell("")
    found = [c for claims in groups.values() for c in claims]
    if as_json:
        print(visible(json.dumps([c._asdict() for c in found], indent=1, ensure_ascii=False)))
    else:
        rows = [(c.claim, c.verdict, c.measured, c.source) for c in found]
        header = ("claim", "verdict", "measured", "source")
        print_table(stdout(160), header, rows, show_lines=True)
