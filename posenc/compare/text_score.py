"""The score of a trial of text between 0 and 1, so that text can be pooled with the tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from posenc.compare.results import Study, TrialResult
from posenc.tasks.known import TEXT

ZERO = "nope"
"""The encoding whose mean loss beyond the training length scores 0."""


def text_scores(study: Study) -> dict[tuple[str, int], float]:
    """By encoding and seed, of the encodings that were checked:

    score = (zero - loss) / (zero - best), cut to 0 .. 1

    loss is a trial's mean bits per byte over all tests but that of the training length, zero the
    mean loss of NoPE there, and best the lowest mean over seeds that an encoding has at the
    training length: nothing is chosen by unseen lengths. Trials that cannot run a test have no
    score; nobody has one where NoPE is missing or is not above `best`, which leaves no scale.
    """
    losses: dict[tuple[str, int], tuple[float, float]] = {}
    own = set()
    for result in study.finished:
        config = result.config
        if config.task == TEXT and config.encoding not in study.unchecked:
            bits = list(_bits(result))
            if len(bits) > 1 and len(bits) == len(config.test_lengths):
                losses[config.encoding, config.seed] = bits[0], fmean(bits[1:])
                if not config.code:
                    own.add(config.encoding)
    if ZERO not in own:  # or it is a class of the user's of that name
        return {}
    zero = fmean(far for (name, _), (_, far) in losses.items() if name == ZERO)
    names = dict.fromkeys(name for name, _ in losses)
    best = min(fmean(near for (n, _), (near, _) in losses.items() if n == name) for name in names)
    if not zero > best:
        return {}
    return {
        key: min(max((zero - far) / (zero - best), 0.0), 1.0) for key, (_, far) in losses.items()
    }


def _bits(result: TrialResult) -> Iterator[float]:
    """At the lengths that it can run, the training length first."""
    for score in result.by_length:
        if score.bits_per_byte is not None and math.isfinite(score.bits_per_byte):
            yield score.bits_per_byte
