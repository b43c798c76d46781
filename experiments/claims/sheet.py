"""Measure every claim, with its source and the verdict."""

from typing import NamedTuple

from experiments.claims import biases, context, embeddings, masking, rotary, sizes

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
