"""From trials to one row per encoding and one recommendation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posenc.compare.results import EncodingSummary, LengthSummary, Study, TrialResult

WITHIN = 1.05
"""How far above the best loss at the training length still counts as reached."""


def summarise(study: Study) -> tuple[EncodingSummary, ...]:
    """One row per encoding that has a finished trial, in the order asked for."""
    groups = {
        name: [r for r in study.finished if r.config.encoding == name] for name in study.encodings
    }
    groups = {name: results for name, results in groups.items() if results}
    lengths = {name: _by_length(results) for name, results in groups.items()}
    train_length = study.trials[0].train_length
    at_train = [_mean(row, train_length) for row in lengths.values()]
    rows = []
    for name, results in groups.items():
        speeds = [r.timing.tokens_per_second for r in results if r.timing]
        limit = WITHIN * min(at_train)
        reached = [s.length for s in lengths[name] if s.mean is not None and s.mean <= limit]
        rows.append(
            EncodingSummary(
                encoding=name,
                parameters=results[0].parameters,
                num_seeds=len(results),
                by_length=lengths[name],
                reach=max(reached, default=None),
                tokens_per_second=sum(speeds) / len(speeds) if speeds else None,
            )
        )
    return tuple(rows)


def recommend_encoding(study: Study, rows: Sequence[EncodingSummary]) -> str:
    """Which encoding to use, by the numbers, and what the numbers do not show."""
    if not rows:
        return "No trial has finished, so there is nothing to recommend_encoding."
    train_length, longest = study.trials[0].train_length, max(study.trials[0].test_lengths)
    at_train = {row.encoding: _mean(row.by_length, train_length) for row in rows}
    near = min(rows, key=lambda row: at_train[row.encoding])
    far = max(rows, key=lambda row: (row.reach or 0, -_mean(row.by_length, row.reach)))
    best = at_train[near.encoding]
    close = _indistinct(rows, near, train_length)
    if (far.reach or 0) <= train_length:
        advice = (
            f"Take {near.encoding} ({best:.3f} bits per byte at {train_length}) and train at the "
            f"length you need: no encoding here stays within 5 % of that beyond {train_length}"
        )
    elif far is near or far.encoding in close:
        which = "the best" if far is near else "within the spread of the best"
        advice = (
            f"Take {far.encoding}: {which} at the training length "
            f"({at_train[far.encoding]:.3f} bits per byte at {train_length}), and within 5 % of "
            f"the best loss there up to {far.reach}"
        )
    else:
        advice = (
            f"Take {far.encoding} to read beyond the training length without more training: it is "
            f"within 5 % of the best loss at {train_length} up to {far.reach}; take "
            f"{near.encoding} ({best:.3f} bits per byte against "
            f"{at_train[far.encoding]:.3f}) where inputs never exceed {train_length}"
        )
    if far.reach == longest and longest > train_length:
        advice += " (nothing longer was tested)"
    if close:
        names = " and ".join(close)
        advice += f"; at {train_length} the seeds cannot separate {names} from {near.encoding}"
    return f"{advice}. {_limits(study, far, train_length)}"


def context_gain(results: Sequence[TrialResult], train_length: int, length: int) -> float | None:
    """Bits per byte that context beyond the training length saves on the same targets, averaged
    over seeds; None if that was not measured."""
    gains = []
    for result in results:
        scores = {score.length: score.bits_per_byte for score in result.by_context}
        near, far = scores.get(train_length), scores.get(length)
        if near is None or far is None:
            return None
        gains.append(near - far)
    return sum(gains) / len(gains) if gains else None


def _limits(study: Study, far: EncodingSummary, train_length: int) -> str:
    trial = study.trials[0]
    text = (
        f"This does not show larger models than {far.parameters / 1e6:.2g} M parameters, longer "
        f"training than {trial.steps} steps, other text, or recall of single facts from afar"
    )
    if far.num_seeds == 1:
        text += ", and one seed has no spread"
    if far.reach is not None and far.reach > train_length:
        results = [r for r in study.finished if r.config.encoding == far.encoding]
        gain = context_gain(results, train_length, far.reach)
        if gain is not None:
            text += (
                f"; and reach is not use: on the same bytes, {far.reach} bytes of context "
                f"instead of {train_length} {'save' if gain >= 0 else 'cost'} {far.encoding} "
                f"{abs(gain):.3f} bits per byte"
            )
    return text + "."


def _indistinct(
    rows: Sequence[EncodingSummary], near: EncodingSummary, train_length: int
) -> tuple[str, ...]:
    """The encodings whose range over seeds overlaps the best one's."""

    def ends(row: EncodingSummary) -> tuple[float, float]:
        score = next(s for s in row.by_length if s.length == train_length)
        mean, spread = score.mean or 0.0, score.spread or 0.0
        return mean - spread, mean + spread

    return tuple(
        row.encoding
        for row in rows
        if row is not near
        and min(row.num_seeds, near.num_seeds) > 1
        and ends(row)[0] <= ends(near)[1]
    )


def _by_length(results: Sequence[TrialResult]) -> tuple[LengthSummary, ...]:
    rows = []
    for scores in zip(*(r.by_length for r in results), strict=True):
        values = [s.bits_per_byte for s in scores if s.bits_per_byte is not None]
        if len(values) < len(scores):
            reason = next(s.cannot for s in scores if s.cannot)
            rows.append(LengthSummary(scores[0].length, None, None, reason))
        else:
            mean, spread = sum(values) / len(values), (max(values) - min(values)) / 2
            rows.append(LengthSummary(scores[0].length, mean, spread))
    return tuple(rows)


def _mean(scores: Sequence[LengthSummary], length: int | None) -> float:
    """The mean at one length, infinite where there is none."""
    return next((s.mean for s in scores if s.length == length and s.mean is not None), math.inf)
