"""Write one sentence per figure, computed from its numbers."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from posenc.extend.recommendation import LEVEL
from posenc.extend.variants.variant import WINDOW
from posenc.sentence import listed, sentence


def in_losses(losses: Mapping[str, Sequence[float]], ends: Sequence[int], trained: int) -> str:
    """Return what the unchanged model loses beyond its training length, against the window on the
    same tokens, and which method does best there."""
    beyond = [i for i, end in enumerate(ends) if end > trained]
    means = {
        name: fmean(found)
        for name, values in losses.items()
        if (found := [values[i] for i in beyond]) and not any(map(math.isnan, found))
    }
    start = []
    if "none" in means and WINDOW in means:
        rise = means["none"] - means[WINDOW]
        reads = "reads as well as" if abs(rise) <= LEVEL else f"reads {abs(rise):.2f} nats"
        if abs(rise) > LEVEL:
            reads += " worse than" if rise > 0 else " better than"
        start.append(
            f"beyond {trained:,} tokens the unchanged model {reads} with only the last {trained:,}"
        )
    elif "none" in losses and "none" not in means:
        start.append(f"unchanged, the model cannot read beyond {trained:,} tokens")
    others = {name: mean for name, mean in means.items() if name != "none"}
    if others:
        best = min(others, key=others.__getitem__)
        start.append(f"lowest beyond {trained:,} tokens: {best}, at {others[best]:.2f} nats")
    return sentence(start or ["nothing was measured beyond the training length"])


def in_contexts(losses: Mapping[str, Mapping[int, float]], trained: int) -> str:
    """Return which methods improve with context beyond the training length."""
    gains = {
        name: found[trained] - found[max(found)]
        for name, found in losses.items()
        if trained in found and max(found) > trained and not math.isnan(found[max(found)])
    }
    if not gains:
        return "No method was measured with more context than in training."
    falls = [name for name, gain in gains.items() if gain > LEVEL]
    worst = min(gains, key=gains.__getitem__)
    parts = [
        f"improved by context beyond {trained:,} tokens: {listed(falls)}"
        if falls
        else f"no method improves with context beyond {trained:,} tokens"
    ]
    if gains[worst] < -LEVEL:
        parts.append(f"{worst} loses most, {-gains[worst]:.2f} nats")
    return sentence(parts)


def in_entropies(entropies: Mapping[str, Sequence[float]]) -> str:
    """Return where attention is broadest and narrowest at the longest context."""
    ends = {name: values[-1] for name, values in entropies.items() if not math.isnan(values[-1])}
    if not ends:
        return "Nothing was measured at the far end."
    most, least = max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)
    if len(ends) == 1 or ends[most] - ends[least] <= LEVEL:
        return f"At the far end attention spreads over about {math.exp(ends[most]):,.0f} tokens."
    return (
        f"At the far end attention spreads over about {math.exp(ends[most]):,.0f} tokens with "
        f"{most}, over {math.exp(ends[least]):,.0f} with {least}."
    )


def in_wavelengths(unfinished: int, pairs: int) -> str:
    """Return how many pairs are at risk."""
    if not unfinished:
        return f"All {pairs} pairs finish a turn in training; none leaves its trained range."
    verb = "does" if unfinished == 1 else "do"
    return f"{unfinished} of {pairs} pairs {verb} not finish a turn in training."


def in_passkeys(grids: Mapping[str, Mapping[tuple[int, float], float]]) -> str:
    """Return whether the model finds keys at all, and which method finds most in the longest
    text."""
    shortest = min(length for grid in grids.values() for length, _ in grid)
    longest = max(length for grid in grids.values() for length, _ in grid)

    def mean(name: str, length: int) -> float:
        return fmean([share for (n, _), share in grids[name].items() if n == length] or [math.nan])

    if not max(mean(name, shortest) for name in grids) >= 0.5:
        return (
            f"Read nothing into this: not even at {shortest:,} tokens does the model find half of "
            "the keys."
        )
    far = {name: mean(name, longest) for name in grids if not math.isnan(mean(name, longest))}
    best = max(far, key=far.__getitem__)
    return f"At {longest:,} tokens {best} finds most, {far[best]:.0%} of the key's tokens."
