"""Which pairs of encodings are in another order because every encoding was tuned alike."""

import itertools
import math
from collections.abc import Iterable, Mapping

from posenc.compare.results import RateCheck

Pairs = list[tuple[str, str]]
"""Pairs (a, b) of encodings, by their texts with the usual settings: `a` is ahead after tuning
alike, and `b` where less is tuned."""


def pairs_turned_by_tuning(checks: Iterable[RateCheck], margin: float = 0.0) -> Pairs:
    """Return the pairs of which `b` is ahead with the recipe's rates and the usual settings. Both
    leads are above `margin` bits, among the trials of a search."""
    losses = {name_before_tuning(check): (_best_bits(check), check.plain_bits) for check in checks}
    return _turned_pairs(losses, margin)


def pairs_turned_by_rates(checks: Iterable[RateCheck], margin: float = 0.0) -> Pairs:
    """Return the pairs of which `b` is ahead with the usual settings and one learning rate for all
    parameters, tables among them. Both leads are above `margin` bits."""
    losses = {
        name_before_tuning(check): (_best_bits(check), check.one_rate_bits) for check in checks
    }
    return _turned_pairs(losses, margin)


def name_before_tuning(check: RateCheck) -> str:
    """Return the text of an encoding with its usual setting, without what a search chose."""
    if check.plain_at is None:
        return check.encoding
    return check.tried[check.plain_at].encoding or check.encoding


def bits_saved_by_setting(check: RateCheck) -> float | None:
    """Return how many bits the setting that a search chose saved against the encoding's usual one,
    at the rates at which the usual one was best of those that both were tried with; None if the
    usual one was chosen, or they share no rates."""
    if check.plain_at is None or check.best is None:
        return None
    usual_setting = check.tried[check.plain_at].encoding
    chosen_setting = check.best.encoding
    if chosen_setting == usual_setting:
        return None
    bits_of_usual: dict[tuple[float, float], float] = {}
    bits_of_chosen: dict[tuple[float, float], float] = {}
    for attempt in check.tried:
        if attempt.bits is None or not math.isfinite(attempt.bits):
            continue
        rates = attempt.lr, attempt.encoding_lr
        if attempt.encoding == usual_setting:
            bits_of_usual[rates] = attempt.bits
        elif attempt.encoding == chosen_setting:
            bits_of_chosen[rates] = attempt.bits
    shared_rates = bits_of_usual.keys() & bits_of_chosen.keys()
    if not shared_rates:
        return None
    best_rates = min(shared_rates, key=bits_of_usual.__getitem__)
    return bits_of_usual[best_rates] - bits_of_chosen[best_rates]


def _best_bits(check: RateCheck) -> float | None:
    """Return the loss of what was chosen; None if nothing could be trained."""
    return None if check.best is None else check.best.bits


def _turned_pairs(
    losses: Mapping[str, tuple[float | None, float | None]], margin: float
) -> list[tuple[str, str]]:
    """Return the pairs of names (a, b) in which `a` has the lower first loss and `b` the lower
    second one, both by more than `margin`. Names without one of the losses are left out."""
    known = {}
    for name, (first, second) in losses.items():
        if first is not None and second is not None:
            known[name] = (first, second)
    turned = []
    for a, b in itertools.permutations(known, 2):
        lead_of_a = known[b][0] - known[a][0]
        lead_of_b = known[a][1] - known[b][1]
        if lead_of_a > margin and lead_of_b > margin:
            turned.append((a, b))
    return turned
