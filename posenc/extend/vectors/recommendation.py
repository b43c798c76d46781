"""Recommend what to do with a model without a head, by the texts that its vectors find."""

import math

import numpy as np

from posenc.extend.measure.evaluation import Evaluation
from posenc.extend.options import Options
from posenc.extend.recommendation import Measured
from posenc.extend.variants import WINDOW
from posenc.extend.vectors.measurement import movement
from posenc.statistics.text_intervals import Estimate, estimate_mean, fraction_interval


def recommend_by_vectors(
    measured: Measured, train_length: int, options: Options
) -> tuple[str, str]:
    """Compare the best method with texts that are cut, and with the unchanged model.

    train_length: the training length in tokens.

    Returns: the method to use, WINDOW to cut texts, "none" to leave the model as it is, or ""
    without a recommendation; and the reason, whose first sentence says what to do.
    """
    unchanged = measured["none"][1]
    if not _finds_more_than_chance(unchanged, train_length):
        return "", (
            "No recommendation: among texts of its training length, too, its vectors find "
            f"{found_in_words(unchanged, train_length)}, where chance finds one. Name a --method "
            f"to write one all the same.{_movement_remark(measured, None)}"
        )
    means = {
        name: _mean_reciprocal_rank(evaluation, train_length)
        for name, (_, evaluation) in measured.items()
    }
    methods = [
        name
        for name, (variant, _) in measured.items()
        if name != "none"
        and not variant.needs_special_runtime
        and (variant.cache_safe or options.allow_cache_unsafe)
    ]
    method = max(methods, key=lambda name: means[name], default=None)
    rival = max([name for name in ("none", WINDOW) if name in measured], key=lambda n: means[n])
    rival_in_words = {
        "none": "the unchanged model",
        WINDOW: f"cutting to the first {train_length} tokens",
    }[rival]
    if method is None:
        return "none", "Leave this one as it is: no method was measured that stock tools load."
    best_scores = measured[method][1].vectors
    assert best_scores is not None
    target = max(best_scores.ranks)
    counts_in_words = (
        f"among texts of {target:,} tokens it finds {found_in_words(measured[method][1], target)}, "
        f"{rival_in_words} {found_in_words(measured[rival][1], target)}"
    )
    difference = rank_difference(measured[method][1], measured[rival][1], train_length)
    interval_in_words = (
        f"{difference.mean:+z.2f} in the mean reciprocal rank beyond {train_length:,} tokens, 95 % "
        f"interval {difference.low:+z.2f} to {difference.high:+z.2f}"
    )
    remark = _movement_remark(measured, method)
    if difference.low > 0:
        return method, (
            f"Extend it with {method}: {counts_in_words} ({interval_in_words}).{remark}"
        )
    if difference.high < 0:
        return rival, (
            f"Do not extend this one: {rival_in_words} finds more than {method}, the best method: "
            f"{counts_in_words} ({interval_in_words}).{remark}"
        )
    return "none", (
        f"Do not extend this one on this evidence: {method} and {rival_in_words} do not differ "
        f"clearly: {counts_in_words} ({interval_in_words}).{remark}"
    )


def rank_difference(a: Evaluation, b: Evaluation, train_length: int) -> Estimate:
    """Return the mean reciprocal rank of `a` minus that of `b` for the same questions at the same
    lengths beyond training, with a 95 % interval over questions. A length that a model cannot read
    counts as nothing found."""
    assert a.vectors is not None
    assert b.vectors is not None
    gains = []
    for length, ranks in a.vectors.ranks.items():
        if length > train_length:
            other_ranks = b.vectors.ranks.get(length, np.full(len(ranks), math.inf))
            gains.append(1 / ranks - 1 / other_ranks)
    questions = np.arange(len(gains[0]))[None].repeat(len(gains), 0)
    return estimate_mean(np.array(gains), questions)


def found_in_words(evaluation: Evaluation, length: int) -> str:
    """Return how many texts of this length in tokens are found, as "9 of 32"; "none of them" where
    the model cannot read so many tokens."""
    assert evaluation.vectors is not None
    ranks = evaluation.vectors.ranks.get(length)
    return "none of them" if ranks is None else f"{int((ranks == 1).sum())} of {len(ranks)}"


def _finds_more_than_chance(evaluation: Evaluation, length: int) -> bool:
    """Return True if clearly more questions than one find their text at this length."""
    assert evaluation.vectors is not None
    ranks = evaluation.vectors.ranks[length]
    low, _ = fraction_interval(int((ranks == 1).sum()), len(ranks))
    return low > 1 / len(ranks)


def _mean_reciprocal_rank(evaluation: Evaluation, train_length: int) -> float:
    """Return the mean of 1 / rank over questions and lengths beyond training; a length that cannot
    be read is left out, and none at all is -inf."""
    assert evaluation.vectors is not None
    means = [
        float((1 / ranks).mean())
        for length, ranks in evaluation.vectors.ranks.items()
        if length > train_length
    ]
    return float(np.mean(means)) if means else -math.inf


def _movement_remark(measured: Measured, method: str | None) -> str:
    """Return a sentence, after a space, on how far a method moves vectors of short texts; of the
    method that moves them least where it is None. "" if nothing was stretched."""
    unchanged = measured["none"][1].vectors
    assert unchanged is not None
    moves = {
        name: movement(unchanged.short_vectors, evaluation.vectors.short_vectors)
        for name, (_, evaluation) in measured.items()
        if name not in ("none", WINDOW) and evaluation.vectors is not None
    }
    if not moves:
        return ""
    name = method or max(moves, key=lambda n: moves[n].cosine)
    moved = moves[name]
    if moved.lowest_cosine > 1 - 1e-5:  # rounding
        return f" With {name}, vectors of short texts stay as they were."
    return (
        f" With {name}, vectors of short texts move to a cosine of {moved.cosine:.3f} with the old "
        f"ones ({moved.lowest_cosine:.3f} at least): an index has to be made anew."
    )
