"""Describe a claim: what is said, by whom, and a function that measures it."""

from collections.abc import Callable
from typing import Literal, NamedTuple

Verdict = Literal[
    "true",
    "false",
    "partly true",
    "an identity",
    "contradicted by its source",
    "cannot be checked here",
]
PARTLY: Verdict = "partly true"
IDENTITY: Verdict = "an identity"
"""The claim follows from the definitions; the measurement checks that the code obeys them."""
SOURCE: Verdict = "contradicted by its source"
"""The cited text says another number."""
OPEN: Verdict = "cannot be checked here"
TUTORIALS = "told in tutorials"

Measured = tuple[str, bool | Verdict]
"""A sentence about what was measured, and whether the claim holds."""


class Claim(NamedTuple):
    """A claim with its source and its measurement, which takes seconds at most."""

    claim: str
    source: str
    measure: Callable[[], Measured]


class Group(list[Claim]):
    """Claims about one thing."""

    def add(
        self, claim: str, source: str = TUTORIALS
    ) -> Callable[[Callable[[], Measured]], Callable[[], Measured]]:
        """Add the claim that the decorated function measures."""

        def decorate(measure: Callable[[], Measured]) -> Callable[[], Measured]:
            self.append(Claim(claim, source, measure))
            return measure

        return decorate


def amount(x: float) -> str:
    """Return a difference with two digits, or "rounding" where machines would differ."""
    return "nothing but rounding" if abs(x) < 1e-9 else f"{x:.2g}"
