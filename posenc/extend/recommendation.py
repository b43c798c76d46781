"""Recommend what to do with a checkpoint: extend it, leave it, or cut texts to its window."""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from posenc.extend.measure.evaluation import Evaluation
from posenc.extend.options import Options
from posenc.extend.variants import WINDOW, Variant
from posenc.statistics.text_intervals import Estimate, estimate_mean

Measured = dict[str, tuple[Variant, Evaluation]]
"""By name, each variant of a checkpoint with what was measured of it; "none" is always there."""
DECISIVE_DIFFERENCE = 0.02
"""A smaller difference from the baseline, in nats per token, decides nothing; chosen, not
derived."""
UNREADABLE_LOSS = math.log(1000)
"""A model with a higher loss within its training length, in nats, does not know this text."""


def best_method(measured: Measured, options: Options) -> str | None:
    """Return the name of the method with the lowest mean loss among those that stock tools can load
    and, unless `options` allows others, whose cache is exact; None if none was measured.

    The mean is over buckets of positions. Every bucket counts the same, so that neither the short
    range nor the long one is sacrificed.
    """
    loss_by_method = {
        name: evaluation.mean_over_buckets()
        for name, (variant, evaluation) in measured.items()
        if name != "none"
        and not variant.needs_special_runtime
        and (variant.cache_safe or options.allow_cache_unsafe)
    }
    return min(loss_by_method, key=lambda name: loss_by_method[name], default=None)


def recommend(
    measured: Measured,
    train_length: int,
    options: Options,
    documents: np.ndarray | None = None,
    tuned: tuple[str, Evaluation] | None = None,
    *,
    out_of_domain: bool = False,
) -> tuple[str, str]:
    """Compare the best method, or the tuned one, with the unchanged model and with the window.

    Args:
        documents: the document of every measured token; without it there are no intervals.
        tuned: the method that was tuned, and what was measured after it.
        out_of_domain: True if the text was not chosen for this model.

    Returns: the method to use, "none" to leave the model as it is, or "" without a recommendation;
    and the reason, whose first sentence says what to do.
    """
    base = measured["none"][1]
    # Written with "not", so that a loss of NaN is refused, too.
    if out_of_domain and not base.mean_within(train_length) <= UNREADABLE_LOSS:
        # The cap keeps exp() from overflowing.
        perplexity = math.exp(min(base.mean_within(train_length), 50))
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
    evidence = _Evidence(measured, train_length, documents, was_tuned=tuned is not None)
    if name is None or not chosen.mean_over_buckets() < base.mean_over_buckets():
        return "none", _why_no_method(evidence)
    return _compare_with_baseline(evidence, name, chosen)


@dataclass(frozen=True)
class _Evidence:
    """Hold the measurements on which a recommendation rests.

    train_length: the training length in tokens. documents: the document of every measured token, or
    None. was_tuned: True if the method was tuned before it was measured.
    """

    measured: Measured
    train_length: int
    documents: np.ndarray | None
    was_tuned: bool

    @property
    def base(self) -> Evaluation:
        """Return the evaluation of the unchanged model."""
        return self.measured["none"][1]

    @property
    def window(self) -> Evaluation | None:
        """Return the evaluation of the unchanged model with a window of the training length; None
        if it was not measured."""
        return self.measured[WINDOW][1] if WINDOW in self.measured else None

    @property
    def window_in_words(self) -> str:
        """Return the name of this baseline for sentences, as "cutting to the last 512 tokens"."""
        return f"cutting to the last {self.train_length} tokens"

    @property
    def tuning_hint(self) -> str:
        """Return a space and a sentence on what else to try, for a model that is left as it is."""
        return "" if self.was_tuned else " Tuning may change that (--tune)."


def _why_no_method(evidence: _Evidence) -> str:
    """Return the reason to leave a model whose mean loss no method lowers."""
    base = evidence.base
    window = evidence.window
    if window is not None and _is_clearly_lower(loss_difference(window, base, evidence.documents)):
        return (
            f"Do not extend this one: {evidence.window_in_words} reads better. Against the "
            f"unchanged model it {_change_beyond_in_words(window, base, evidence.train_length)}, "
            f"and no method saves anything over all positions.{evidence.tuning_hint}"
        )
    advice = "Leave this one as it is: no method that stock tools load lowers its mean loss."
    return f"{advice}{evidence.tuning_hint}{_better_map_remark(evidence.measured, base)}"


def _compare_with_baseline(evidence: _Evidence, name: str, chosen: Evaluation) -> tuple[str, str]:
    """Compare a method that lowers the mean loss with the window or, if that was not measured, with
    the unchanged model. Return (what to use: the method or "none", the reason)."""
    base = evidence.base
    train_length = evidence.train_length
    change_within = _change_in_words(
        chosen.mean_within(train_length) - base.mean_within(train_length)
    )
    against_baseline = (
        f"against the unchanged model it {change_within} within {train_length} tokens and "
        f"{_change_beyond_in_words(chosen, base, train_length)}."
    )
    remarks = f"{_better_map_remark(evidence.measured, chosen)}{_retrieval_remark(chosen)}"
    label = f"{name}, tuned," if evidence.was_tuned else name
    advice = f"Extend it with {label.rstrip(',')}"
    if evidence.window is None:
        rival_in_words = "the unchanged model"
        rival_evaluation = base
    else:
        rival_in_words = evidence.window_in_words
        rival_evaluation = evidence.window
    gap = loss_difference(chosen, rival_evaluation, evidence.documents)
    if gap.mean == -math.inf:  # the rival cannot read the longest texts
        return name, f"{advice}: {against_baseline}{remarks}"
    interval_in_words = _interval_in_words(gap)
    difference_in_words = f"{label} is {abs(gap.mean):.2f} nats per token"
    if gap.mean > DECISIVE_DIFFERENCE and gap.low > 0:
        worse_in_words = (
            f"{difference_in_words} worse over all positions{interval_in_words}; {against_baseline}"
        )
        return (
            "none",
            f"Do not extend this one: {rival_in_words} reads better. {worse_in_words}"
            f"{evidence.tuning_hint}{remarks}",
        )
    if not _is_clearly_lower(gap):
        alike_in_words = (
            f"{label} and {rival_in_words} differ by {gap.mean:+z.2f} nats per token"
            f"{interval_in_words}"
        )
        return "none", (
            f"Do not extend this one on this evidence: {alike_in_words}; "
            f"{against_baseline}{evidence.tuning_hint}{remarks}"
        )
    return name, (
        f"{advice}: it reads better than {rival_in_words}. {difference_in_words} better "
        f"over all positions{interval_in_words}; {against_baseline}{remarks}"
    )


def loss_difference(a: Evaluation, b: Evaluation, documents: np.ndarray | None) -> Estimate:
    """Return the mean loss of `a` minus that of `b` on the same tokens, in nats, each bucket of
    positions with the same weight.

    All is infinite where only one of them could be evaluated in every bucket, and NaN where neither
    could. The interval is NaN without the losses of every token.

    documents: the document of each token, in the shape of the losses; None if it is not known.
    """
    if not math.isfinite(gap := a.mean_over_buckets() - b.mean_over_buckets()):
        return Estimate(gap, gap, gap, 0)
    if a.losses is None or b.losses is None or documents is None:
        return Estimate(gap, math.nan, math.nan, 0)
    buckets = list(itertools.pairwise(a.edges))
    gaps = a.losses - b.losses
    # The mean over all tokens becomes the mean over buckets: each bucket is weighted by the inverse
    # of its share of the tokens.
    for low, high in buckets:
        gaps[:, low:high] *= np.isfinite(gaps).sum() / (
            len(buckets) * np.isfinite(gaps[:, low:high]).sum()
        )
    return estimate_mean(gaps, documents)


def _is_clearly_lower(gap: Estimate) -> bool:
    """Return True if a difference of losses is below -DECISIVE_DIFFERENCE, and its whole interval
    below 0."""
    return gap.mean < -DECISIVE_DIFFERENCE and gap.high < 0


def _interval_in_words(gap: Estimate) -> str:
    """Return the interval of a difference as text in brackets, after a space."""
    if math.isnan(gap.low):
        return " (too few documents for an interval)"
    return f" (95 % interval {gap.low:+z.2f} to {gap.high:+z.2f})"


def _change_in_words(change: float) -> str:
    """Return a change of the mean loss in words: 0.5 -> "costs 0.50 nats per token", and "saves"
    for one below 0."""
    return f"{'costs' if change > 0 else 'saves'} {abs(change):.2f} nats per token"


def _change_beyond_in_words(better: Evaluation, base: Evaluation, train_length: int) -> str:
    """Return how the loss beyond the training length, `train_length` tokens, changes from `base` to
    `better`, in words."""
    change = better.mean_beyond(train_length) - base.mean_beyond(train_length)
    if math.isnan(change):  # a table that ends
        loss = better.mean_beyond(train_length)
        return f"saves all text beyond, which it reads at {loss:.2f} nats per token"
    return f"{_change_in_words(change)} beyond"


def _retrieval_remark(chosen: Evaluation) -> str:
    """Return a sentence, after a space, on whether the method was asked for facts from far back."""
    if chosen.passkey or chosen.tasks:
        shown_in_words = "tasks" if chosen.tasks else "passkeys on the page (--report)"
        return f" Loss says nothing about facts from far back: see the {shown_in_words} for that."
    return " Whether it finds facts from far back was not measured."


def _better_map_remark(measured: Measured, chosen: Evaluation) -> str:
    """Return a sentence, after a space, on the best position map, which no stock tool runs, if its
    mean loss is lower than that of the chosen method; else ""."""
    loss_by_map = {
        name: evaluation.mean_over_buckets()
        for name, (variant, evaluation) in measured.items()
        if variant.needs_special_runtime and variant.window is None
    }
    best_map = min(loss_by_map, key=lambda name: loss_by_map[name], default=None)
    if best_map is None:
        return ""
    gain = chosen.mean_over_buckets() - loss_by_map[best_map]
    if not gain > DECISIVE_DIFFERENCE:  # written with "not", so that a NaN gives no remark
        return ""
    return (
        f" {best_map} reads {gain:.2f} nats better over all positions, but no stock tool runs it."
    )
