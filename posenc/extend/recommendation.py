"""Recommend what to do with a checkpoint: extend it, leave it, or cut texts to its window."""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from posenc.extend.export.prover import Proof
from posenc.extend.measure.evaluation import Evaluation, mean_loss_rise
from posenc.extend.measure.first_window import UNREADABLE_LOSS
from posenc.extend.options import Options
from posenc.extend.variants import WINDOW, Variant
from posenc.hf.checkpoint.loading import Checkpoint
from posenc.statistics.text_intervals import Estimate, estimate_mean
from posenc.tasks.scoring import LEAST_LEARNED_EXACT_MATCH

Measured = dict[str, tuple[Variant, Evaluation]]
"""By name, each variant of a checkpoint with what was measured of it; "none" is always there."""
DECISIVE_DIFFERENCE = 0.02
"""A smaller difference from the baseline, in nats per token, decides nothing; chosen, not
derived."""


@dataclass
class Outcome:
    """Hold all variants measured, the recommendation, and what was exported.

    target: the new length in tokens. measured: each variant with its evaluation, by name.
    recommended: a method, "window" to read only the last tokens of a text, "none" to leave the
    model as it is, "" without a recommendation. reason: sentences for the user. not_measured: by
    name, why a variant could not be measured on this checkpoint. short_documents: the document of
    every token of the short texts, (texts, trained length). tuned: the measurements of the exported
    variant after its tuning; None without. tuning_losses: of each step, in nats. config_diff: the
    lines in which the new config.json differs. files_not_copied: names of files in the old folder
    that the new one lacks. proof: None if nothing was written.
    """

    checkpoint: Checkpoint
    target: int
    measured: Measured
    recommended: str
    reason: str
    not_measured: dict[str, str] = field(default_factory=dict)
    short_documents: np.ndarray | None = None
    tuned: Evaluation | None = None
    tuning_losses: list[float] = field(default_factory=list)
    config_diff: list[str] = field(default_factory=list)
    files_not_copied: list[str] = field(default_factory=list)
    proof: Proof | None = None

    def short_text_rises(self) -> dict[str, Estimate]:
        """Return by method how much its loss on texts of the training length, read by themselves,
        is above that of the unchanged model, in nats per token; {} if it was not measured."""
        unchanged_losses = self.measured["none"][1].short_text_losses
        if unchanged_losses is None or self.short_documents is None:
            return {}
        return {
            name: mean_loss_rise(
                unchanged_losses, evaluation.short_text_losses, self.short_documents
            )
            for name, evaluation in self.evaluations().items()
            if evaluation.short_text_losses is not None and name != "none"
        }

    def score_is_meaningful(self, task: str, length: int) -> bool:
        """Return True if the fractions of right answers to this task at this length mean something:
        at the shortest length always, beyond it only if some method answers the task there."""
        score_tables = [evaluation.task_scores for evaluation in self.evaluations().values()]
        shortest_length = min(
            tested_length
            for scores in score_tables
            for name, tested_length in scores
            if name == task
        )
        scores = [
            table[task, shortest_length]
            for table in score_tables
            if (task, shortest_length) in table
        ]
        return length == shortest_length or any(
            score.exact_share.mean >= LEAST_LEARNED_EXACT_MATCH for score in scores
        )

    def evaluations(self) -> dict[str, Evaluation]:
        """Return all evaluations by name, the tuned checkpoint last."""
        evaluation_by_name = {name: evaluation for name, (_, evaluation) in self.measured.items()}
        return (
            evaluation_by_name
            if self.tuned is None
            else {**evaluation_by_name, "tuned": self.tuned}
        )


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
    document_of_token: np.ndarray | None = None,
    tuned: tuple[str, Evaluation] | None = None,
    *,
    out_of_domain: bool = False,
) -> tuple[str, str]:
    """Compare the best method, or the tuned one, with the unchanged model and with the window.

    Args:
        document_of_token: the document of every measured token; without it there are no intervals.
        tuned: the method that was tuned, and what was measured after it.
        out_of_domain: True if the text was not chosen for this model.

    Returns: the method to use, WINDOW to read only the last tokens of a text, "none" to leave the
    model as it is, or "" without a recommendation; and the reason, whose first sentence says what
    to do.
    """
    unchanged_evaluation = measured["none"][1]
    # Written with "not", so that a loss of NaN is refused, too.
    if out_of_domain and not unchanged_evaluation.mean_within(train_length) <= UNREADABLE_LOSS:
        # The cap keeps exp() from overflowing.
        perplexity = math.exp(min(unchanged_evaluation.mean_within(train_length), 50))
        return "", (
            "No recommendation: the model does not know this text, its perplexity is "
            f"{perplexity:,.0f} within its training length. Give --text with text like the model's "
            "own."
        )
    if tuned is not None:
        method_name, chosen_evaluation = tuned
    else:
        method_name = best_method(measured, options)
        chosen_evaluation = (
            unchanged_evaluation if method_name is None else measured[method_name][1]
        )
    evidence = _Evidence(measured, train_length, document_of_token, was_tuned=tuned is not None)
    if (
        method_name is None
        or not chosen_evaluation.mean_over_buckets() < unchanged_evaluation.mean_over_buckets()
    ):
        return _window_or_nothing(evidence)
    return _compare_with_baseline(evidence, method_name, chosen_evaluation)


@dataclass(frozen=True)
class _Evidence:
    """Hold the measurements on which a recommendation rests.

    train_length: the training length in tokens. document_of_token: the document of every measured
    token, or None. was_tuned: True if the method was tuned before it was measured.
    """

    measured: Measured
    train_length: int
    document_of_token: np.ndarray | None
    was_tuned: bool

    @property
    def unchanged_evaluation(self) -> Evaluation:
        """Return the evaluation of the unchanged model."""
        return self.measured["none"][1]

    @property
    def window_evaluation(self) -> Evaluation | None:
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


def _window_or_nothing(evidence: _Evidence) -> tuple[str, str]:
    """Return (what to use: WINDOW or "none", the reason) for a model whose mean loss no method
    lowers."""
    unchanged_evaluation = evidence.unchanged_evaluation
    window_evaluation = evidence.window_evaluation
    if window_evaluation is not None and _is_clearly_lower(
        loss_difference(window_evaluation, unchanged_evaluation, evidence.document_of_token)
    ):
        change_beyond = _change_beyond_in_words(
            window_evaluation, unchanged_evaluation, evidence.train_length
        )
        return WINDOW, (
            f"Do not extend this one: {evidence.window_in_words} reads better. Against the "
            f"unchanged model it {change_beyond}, and no method saves anything over all "
            f"positions.{evidence.tuning_hint}"
        )
    advice = "Leave this one as it is: no method that stock tools load lowers its mean loss."
    map_remark = _better_map_remark(evidence.measured, unchanged_evaluation)
    return "none", f"{advice}{evidence.tuning_hint}{map_remark}"


def _compare_with_baseline(
    evidence: _Evidence, method_name: str, chosen_evaluation: Evaluation
) -> tuple[str, str]:
    """Compare a method that lowers the mean loss with the window or, if that was not measured, with
    the unchanged model. Return (what to use: the method, WINDOW or "none", the reason)."""
    unchanged_evaluation = evidence.unchanged_evaluation
    train_length = evidence.train_length
    change_within = _change_in_words(
        chosen_evaluation.mean_within(train_length) - unchanged_evaluation.mean_within(train_length)
    )
    baseline_clause = (
        f"against the unchanged model it {change_within} within {train_length} tokens and "
        f"{_change_beyond_in_words(chosen_evaluation, unchanged_evaluation, train_length)}."
    )
    map_remark = _better_map_remark(evidence.measured, chosen_evaluation)
    remarks = f"{map_remark}{_retrieval_remark(chosen_evaluation)}"
    label = f"{method_name}, tuned," if evidence.was_tuned else method_name
    advice = f"Extend it with {label.rstrip(',')}"
    if evidence.window_evaluation is None:
        rival_in_words = "the unchanged model"
        rival_evaluation = unchanged_evaluation
    else:
        rival_in_words = evidence.window_in_words
        rival_evaluation = evidence.window_evaluation
    difference = loss_difference(chosen_evaluation, rival_evaluation, evidence.document_of_token)
    if difference.mean == -math.inf:  # the rival cannot read the longest texts
        return method_name, f"{advice}: {baseline_clause}{remarks}"
    interval_in_words = _interval_in_words(difference)
    difference_in_words = f"{label} is {abs(difference.mean):.2f} nats per token"
    if difference.mean > DECISIVE_DIFFERENCE and difference.low > 0:
        worse_in_words = (
            f"{difference_in_words} worse over all positions{interval_in_words}; {baseline_clause}"
        )
        return (
            "none" if evidence.window_evaluation is None else WINDOW,
            f"Do not extend this one: {rival_in_words} reads better. {worse_in_words}"
            f"{evidence.tuning_hint}{remarks}",
        )
    if not _is_clearly_lower(difference):
        alike_in_words = (
            f"{label} and {rival_in_words} differ by {difference.mean:+z.2f} nats per token"
            f"{interval_in_words}"
        )
        return "none", (
            f"Do not extend this one on this evidence: {alike_in_words}; "
            f"{baseline_clause}{evidence.tuning_hint}{remarks}"
        )
    return method_name, (
        f"{advice}: it reads better than {rival_in_words}. {difference_in_words} better "
        f"over all positions{interval_in_words}; {baseline_clause}{remarks}"
    )


def loss_difference(a: Evaluation, b: Evaluation, document_of_token: np.ndarray | None) -> Estimate:
    """Return the mean loss of `a` minus that of `b` on the same tokens, in nats, each bucket of
    positions with the same weight.

    All is infinite where only one of them could be evaluated in every bucket, and NaN where neither
    could. The interval is NaN without the losses of every token.

    document_of_token: the document of each token, in the shape of the losses; None if it is not
    known.
    """
    if not math.isfinite(mean_difference := a.mean_over_buckets() - b.mean_over_buckets()):
        return Estimate(mean_difference, mean_difference, mean_difference, 0)
    if a.losses is None or b.losses is None or document_of_token is None:
        return Estimate(mean_difference, math.nan, math.nan, 0)
    buckets = list(itertools.pairwise(a.edges))
    differences = a.losses - b.losses
    # The mean over all tokens becomes the mean over buckets: each bucket is weighted by the inverse
    # of its share of the tokens.
    for low, high in buckets:
        differences[:, low:high] *= np.isfinite(differences).sum() / (
            len(buckets) * np.isfinite(differences[:, low:high]).sum()
        )
    return estimate_mean(differences, document_of_token)


def _is_clearly_lower(difference: Estimate) -> bool:
    """Return True if a difference of losses is below -DECISIVE_DIFFERENCE, and its whole interval
    below 0."""
    return difference.mean < -DECISIVE_DIFFERENCE and difference.high < 0


def _interval_in_words(difference: Estimate) -> str:
    """Return the interval of a difference as text in brackets, after a space."""
    if math.isnan(difference.low):
        return " (too few documents for an interval)"
    return f" (95 % interval {difference.low:+z.2f} to {difference.high:+z.2f})"


def _change_in_words(change: float) -> str:
    """Return a change of the mean loss in words: 0.5 -> "costs 0.50 nats per token", and "saves"
    for one below 0."""
    return f"{'costs' if change > 0 else 'saves'} {abs(change):.2f} nats per token"


def _change_beyond_in_words(better: Evaluation, unchanged: Evaluation, train_length: int) -> str:
    """Return how the loss beyond the training length, `train_length` tokens, changes from
    `unchanged` to `better`, in words."""
    change = better.mean_beyond(train_length) - unchanged.mean_beyond(train_length)
    if math.isnan(change):  # a table that ends
        loss = better.mean_beyond(train_length)
        return f"saves all text beyond, which it reads at {loss:.2f} nats per token"
    return f"{_change_in_words(change)} beyond"


def _retrieval_remark(chosen_evaluation: Evaluation) -> str:
    """Return a sentence, after a space, on whether the method was asked for facts from far back."""
    if chosen_evaluation.passkey_shares or chosen_evaluation.task_scores:
        shown_in_words = (
            "tasks" if chosen_evaluation.task_scores else "passkeys on the page (--report)"
        )
        return f" Loss says nothing about facts from far back: see the {shown_in_words} for that."
    return " Whether it finds facts from far back was not measured."


def _better_map_remark(measured: Measured, chosen_evaluation: Evaluation) -> str:
    """Return a sentence, after a space, on the best position map, which no stock tool runs, if its
    mean loss is lower than that of the chosen method; else ""."""
    loss_by_map = {
        name: evaluation.mean_over_buckets()
        for name, (variant, evaluation) in measured.items()
        if variant.needs_special_runtime and variant.window_length is None
    }
    best_map = min(loss_by_map, key=lambda name: loss_by_map[name], default=None)
    if best_map is None:
        return ""
    gain = chosen_evaluation.mean_over_buckets() - loss_by_map[best_map]
    if not gain > DECISIVE_DIFFERENCE:  # written with "not", so that a NaN gives no remark
        return ""
    return (
        f" {best_map} reads {gain:.2f} nats better over all positions, but no stock tool runs it."
    )
