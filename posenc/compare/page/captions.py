"""What to see in a figure of a study, in one sentence computed from its numbers."""

from statistics import fmean

from posenc.compare.judge.summary import WITHIN, context_gains, mean_at, saved
from posenc.compare.results import Study
from posenc.sentence import listed, phrase, sentence


def in_by_length(study: Study) -> str:
    """Name the encodings whose loss stays up to the longest length, and the one that rises most."""
    train, longest = study.trials[0].train_length, max(study.trials[0].test_lengths)
    ends = {
        row.encoding: (mean_at(row.by_length, train), mean_at(row.by_length, longest))
        for row in study.summary
    }
    cannot = [name for name, (_, far) in ends.items() if far == float("inf")]
    rises = {name: far - near for name, (near, far) in ends.items() if name not in cannot}
    kept = [name for name, rise in rises.items() if rise <= (WITHIN - 1) * ends[name][0]]
    parts = []
    if kept:
        facts = {"longest": longest, "within": 100 * (WITHIN - 1), "train": train}
        parts.append(phrase("loss stays up to", names=listed(kept), **facts))
    worst = max(rises, key=rises.__getitem__, default=None)
    if worst is not None and worst not in kept:
        parts.append(phrase("loss rises most", name=worst, rise=rises[worst]))
    if cannot:
        parts.append(phrase("{names} cannot run there", names=listed(cannot)))
    return sentence(parts or [phrase("nothing was measured here")])


def in_by_context(study: Study) -> str:
    """Name the encodings that gain from context beyond the training length in every seed."""
    gains = {r.encoding: context_gains(study, r.encoding) for r in study.summary}
    measured = {name: found[1] for name, found in gains.items() if found is not None}
    falls = [name for name, found in measured.items() if all(g > 0 for g in found)]
    rises = [name for name, found in measured.items() if all(g < 0 for g in found)]
    if not measured:
        return phrase("No encoding here was given more context than in training.")
    better = phrase("better from context", names=listed(falls)) if falls else None
    parts = [better or phrase("no context beyond training")]
    worst = min(rises, key=lambda name: fmean(measured[name]), default=None)
    if worst is not None and fmean(measured[worst]) <= -0.005:
        loss = -fmean(measured[worst])
        parts.append(phrase("loses most from context", name=worst, loss=loss))
    return sentence(parts)


def in_by_position(study: Study) -> str:
    """Name the encoding whose loss rises most beyond the training length."""
    train, rises = study.trials[0].train_length, {}
    for result in study.finished:
        before = [s.bits_per_byte for s in result.by_position if train / 2 <= s.start < train]
        after = [s.bits_per_byte for s in result.by_position if s.start >= train]
        if before and after:
            rise = fmean(after) - fmean(before)
            rises.setdefault(result.config.encoding, []).append(rise)
    if not rises:
        return phrase("No encoding here was tested beyond the training length.")
    means = {name: fmean(found) for name, found in rises.items()}
    worst, best = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    if means[worst] <= 0.05:
        return phrase("No line rises beyond the training length.")
    said = phrase("loss rises most beyond", name=worst, rise=means[worst])
    if best != worst:
        said = phrase("least beyond training", said=said, name=best, rise=means[best])
    return phrase("{sentence}.", sentence=said)


def in_training(study: Study) -> str:
    """Say how much the losses still fall."""
    fell = saved(study)
    if not fell:
        return phrase("The training was too short to estimate how much the loss still falls.")
    least, most = min(fell, key=fell.__getitem__), max(fell, key=fell.__getitem__)
    facts = {"most": most, "high": fell[most], "least": least, "low": fell[least]}
    return phrase("loss in the last doubling", **facts)
