"""One claim: what is said, by whom, and a function that measures it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Verdict = Literal["true", "false", "partly true", "cannot be checked here"]
TRUE: Verdict = "true"
FALSE: Verdict = "false"
PARTLY: Verdict = "partly true"
OPEN: Verdict = "cannot be checked here"

TUTORIALS = "told in tutorials"


class Finding(NamedTuple):
    """What was measured, in a sentence, and whether the claim stands."""

    measured: str
    verdict: Verdict


class Claim(NamedTuple):
    """A claim with its source and its measurement, which takes seconds at most."""

    claim: str
    source: str
    measure: Callable[[], Finding]


def amount(x: float) -> str:
    """A difference with two digits, or "rounding", which differs between machines."""
    return "nothing but rounding" if abs(x) < 1e-9 else f"{x:.2g}"


def judge(holds: bool) -> Verdict:
    """ "true" or "false"."""
    return TRUE if holds else FALSE
