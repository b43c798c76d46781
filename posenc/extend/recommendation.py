"""Recommend what to do with a checkpoint: extend it, leave it, or cut texts to its window."""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from posenc.extend.measure.evaluation import Evaluation
from posenc.extend.measure.intervals import Estimate, estimate
from posenc.extend.options import Options
from posenc.extend.variants.variant import WINDOW, Variant

Measured = dict[str, tuple[Variant, Evaluation]]
LEVEL = 0.02
"""A smaller difference from the window, in nats per token, decides nothing."""
UNREADABLE = math.log(1000)
"""A model with a higher loss within its training length, in nats, does not know this text."""


def best_method(measured: Measured, options: Options) -> str | None:
    """Return the method with the lowest mean loss over all buckets that stock tools can load.

    Every bucket counts the same, so that neither the short range nor the long one is sacrificed.
    """
    allowed = {
        name: evaluation.average()
        for name, (variant, evaluation) in measured.items()
        if name != "none"
        and not variant.needs_runtime
        and (variant.cache_safe or options.allow_cache_unsafe)
    }
    return min(allowed, key=lambda name: allowed[name], default=None)


def recommend(
    measured: Measured,
    trained: int,
    options: Options,
    documents: np.ndarray | None = None,
    tuned: tuple[str, Evaluation] | None = None,
    *,
    foreign: bool = False,
) -> tuple[str, str]:
    """Compare the best method, or the tuned one, with the unchanged model and with the window.

    Args:
        documents: the document of every measured token; without it there are no intervals.
        tuned: the method that was tuned, and what was measured after it.
        foreign: True if the text was not chosen for this model.

    Returns: the method to use, "none" to leave the model as it is, or "" without a recommendation;
    and the reason, whose first sentence says what to do.
    """
    base = measured["none"][1]
    if foreign and not base.short(trained) <= UNREADABLE:
        perplexity = math.exp(min(base.short(trained), 50))
        return "", (
            "No recommendation: the model does not know this text, its perplexity is "
            f"{perplexity:,.0f} within its training length. Give --text with text like the model's "
            "own."
        )
    if tuned is not None:
        name, chosen = tuned
    else:
        name = best_method(measured, options)
        chosen = base if name is None else measured[name][1]
    case = _Case(measured, trained, documents, tuned is not None)
    if name is None or not chosen.average() < base.average():
        return "none", _why_no_method(case)
    return _against_rival(case, name, chosen)


@dataclass(frozen=True)
class _Case:
    """What a method is judged by. documents: the document of every measured token, or None. tuned:
    True if the method was tuned."""

    measured: Measured
    trained: int
    documents: np.ndarray | None
    tuned: bool

    @property
    def base(self) -> Evaluation:
        """Return what was measured of the unchanged model."""
        return self.measured["none"][1]

    @property
    def window(self) -> Evaluation | None:
        """Return the same on the last tokens alone; None if that was not measured."""
        return self.measured[WINDOW][1] if WINDOW in self.measured else None

    @property
    def cut(self) -> str:
        """Return the window in words."""
        return f"cutting to the last {self.trained} tokens"

    @property
    def hint(self) -> str:
        """Return a space and a sentence on what else to try, for a model that is left as it is."""
        return "" if self.tuned else " Tuning may change that (--tune)."


def _why_no_method(case: _Case) -> str:
    """Return the reason to leave a model whose mean loss no method lowers."""
    base, window = case.base, case.window
    if window is not None and _is_lower(difference(window, base, case.documents)):
        return (
            f"Do not extend this one: {case.cut} reads better. Against the unchanged model it "
            f"{_beyond(window, base, case.trained)}, and no method saves anything over all "
            f"positions.{case.hint}"
        )
    leave_it = "Leave this one as it is: no method that stock tools load lowers its mean loss."
    return f"{leave_it}{case.hint}{_better_map(case.measured, base)}"


def _against_rival(case: _Case, name: str, chosen: Evaluation) -> tuple[str, str]:
    """Compare a method that lowers the mean loss with the window, without one with the unchanged
    model; return what to use and the reason."""
    base, trained = case.base, case.trained
    within = _saved(chosen.short(trained) - base.short(trained))
    against = (
        f"against the unchanged model it {within} within {trained} tokens and "
        f"{_beyond(chosen, base, trained)}."
    )
    rest = f"{_better_map(case.measured, chosen)}{_retrieval(chosen)}"
    label = f"{name}, tuned," if case.tuned else name
    extend_it = f"Extend it with {label.rstrip(',')}"
    if case.window is None:
        rival, rival_evaluation = "the unchanged model", base
    else:
        rival, rival_evaluation = case.cut, case.window
    gap = difference(chosen, rival_evaluation, case.documents)
    if gap.mean == -math.inf:  # the rival cannot read the longest texts
        return name, f"{extend_it}: {against}{rest}"
    interval = _interval(gap)
    distance = f"{label} is {abs(gap.mean):.2f} nats per token"
    if gap.mean > LEVEL and gap.low > 0:
        worse = f"{distance} worse over all positions{interval}; {against}"
        return "none", f"Do not extend this one: {rival} reads better. {worse}{case.hint}{rest}"
    if not _is_lower(gap):
        alike = f"{label} and {rival} differ by {gap.mean:+z.2f} nats per token{interval}"
        return "none", (
            f"Do not extend this one on this evidence: {alike}; {against}{case.hint}{rest}"
        )
    return name, (
        f"{extend_it}: it reads better than {rival}. {distance} better over all positions"
        f"{interval}; {against}{rest}"
    )


def difference(a: Evaluation, b: Evaluation, documents: np.ndarray | None) -> Estimate:
    """Return the mean loss of `a` minus that of `b` on the same tokens, in nats, each bucket of
    positions with the same weight. The interval is NaN without the losses of every token; all is
    infinite where only one of them could be evaluated in every bucket."""
    if not math.isfinite(gap := a.average() - b.average()):
        return Estimate(gap, gap, gap, 0)
    if a.losses is None or b.losses is None or documents is None:
        return Estimate(gap, math.nan, math.nan, 0)
    buckets = list(itertools.pairwise(a.edges))
    gaps = a.losses - b.losses
    for low, high in buckets:
        gaps[:, low:high] *= np.isfinite(gaps).sum() / (
            len(buckets) * np.isfinite(gaps[:, low:high]).sum()
        )
    return estimate(gaps, documents)


def _is_lower(gap: Estimate) -> bool:
    """Return True if a loss is lower by more than LEVEL, and by an interval that excludes 0."""
    return gap.mean < -LEVEL and gap.high < 0


def _interval(gap: Estimate) -> str:
    """Return the interval of a difference in brackets, after a space."""
    if math.isnan(gap.low):
        return " (too few documents for an interval)"
    return f" (95 % interval {gap.low:+z.2f} to {gap.high:+z.2f})"


def _saved(change: float) -> str:
    """Return a rise of the mean loss in words: "costs" for one above 0, else "saves"."""
    return f"{'costs' if change > 0 else 'saves'} {abs(change):.2f} nats per token"


def _beyond(better: Evaluation, base: Evaluation, trained: int) -> str:
    """Return how the loss beyond the training length, `trained` tokens, changes from `base` to
    `better`, in words."""
    change = better.long(trained) - base.long(trained)
    if math.isnan(change):  # a table that ends
        return f"saves all text beyond, which it reads at {better.long(trained):.2f} nats per token"
    return f"{_saved(change)} beyond"


def _retrieval(chosen: Evaluation) -> str:
    """Return a sentence, after a space, on whether the method was asked for facts from far back."""
    if chosen.passkey or chosen.tasks:
        shown = "tasks" if chosen.tasks else "passkeys on the page (--report)"
        return f" Loss says nothing about facts from far back: see the {shown} for that."
    return " Whether it finds facts from far back was not measured."


def _better_map(measured: Measured, chosen: Evaluation) -> str:
    """Return a sentence about a position map that reads better than all that stock tools load."""
    maps = {
        name: evaluation.average()
        for name, (variant, evaluation) in measured.items()
        if variant.needs_runtime and variant.window is None
    }
    best_map = min(maps, key=lambda name: maps[name], default=None)
    if best_map is None or not chosen.average() - maps[best_map] > LEVEL:  # NaN is none
        return ""
    gain = chosen.average() - maps[best_map]
    return (
        f" {best_map} reads {gain:.2f} nats better over all positions, but no stock tool runs it."
    )
