"""From trials to one row per encoding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posenc.compare.results import EncodingSummary, LengthSummary, Study, TrialResult

WITHIN = 1.05
"""How far above its own loss at the training length an encoding may come and still count as
reaching."""


def summarise(study: Study) -> tuple[EncodingSummary, ...]:
    """One row per encoding that has a finished trial, in the order asked for."""
    groups = {
        name: [r for r in study.finished if r.config.encoding == name] for name in study.encodings
    }
    rows = []
    for name, results in groups.items():
        if not results:
            continue
        by_length = _by_length(results)
        speeds = [r.timing.tokens_per_second for r in results if r.timing]
        rows.append(
            EncodingSummary(
                encoding=name,
                parameters=results[0].parameters,
                num_seeds=len(results),
                by_length=by_length,
                reach=_reach(by_length, study.trials[0].train_length),
                tokens_per_second=sum(speeds) / len(speeds) if speeds else None,
            )
        )
    return tuple(rows)


def _reach(scores: Sequence[LengthSummary], train_length: int) -> int | None:
    """The last tested length before the first one at which the loss leaves the bound."""
    bound = WITHIN * mean_at(scores, train_length)
    reach = None
    for score in sorted(scores, key=lambda score: score.length):
        if score.length < train_length:
            continue
        if score.mean is None or not score.mean <= bound < math.inf:
            break
        reach = score.length
    return reach


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


def mean_at(scores: Sequence[LengthSummary], length: int) -> float:
    """The mean at one length, infinite where there is none."""
    return next((s.mean for s in scores if s.length == length and s.mean is not None), math.inf)
