"""Write one sentence per figure, computed from what it shows."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from posenc.inspect.encoding.answer import LEVEL
from posenc.inspect.encoding.scores import Decay
from posenc.sentence import join_names

Array = np.ndarray
# The numbers below decide between sentences; they are chosen, not derived.
_HARDLY_MOVES = 0.1
"""Range of a dimension over positions, relative to the largest value, below which it stands."""
_ABOUT_AS_MUCH = 1.5
"""Ratio of the most to the least moving curve up to which all are said to move alike."""
_AS_ALIKE = 0.1
"""Difference of cosines up to which near and far positions are said to be as alike."""
_UNLEARNED = 0.1
"""Logits below which a bias is said to have learned nothing."""
_SAME_WAVELENGTH = 0.005
"""Relative difference up to which two wavelengths are the same."""


def in_scores(decays: Mapping[str, Decay], *, same: bool) -> str:
    """Return a caption: how far scores move from the nearest token to the farthest, and for which
    encoding most.

    decays: by the encoding's name. same: of keys equal to the query, else of unrelated ones.
    """
    moves = {name: _nearest_and_farthest_score(decay, same=same) for name, decay in decays.items()}
    what = "" if same else ", on average"
    if len(moves) == 1:
        ((name, (near, far)),) = moves.items()
        ends = f"{format_number(near)} near, {format_number(far)} far"
        return f"{name} {_verb_of_change(near, far)}: {ends}{what}."
    most = max(moves, key=lambda name: abs(moves[name][0] - moves[name][1]))
    level = [name for name, ends in moves.items() if _verb_of_change(*ends) == "stays level"]
    if most in level:
        return f"No encoding here moves with distance{what}."
    near, far = moves[most]
    rest = ""
    if level:
        rest = f"; {join_names(level)} {'stays' if len(level) == 1 else 'stay'} level"
    change = format_number(abs(near - far))
    return f"{most} {_verb_of_change(near, far)} most{what}, by {change} logits{rest}."


def _nearest_and_farthest_score(decay: Decay, *, same: bool) -> tuple[float, float]:
    """Return the scores of the nearest and the farthest token that is seen, of keys equal to the
    query or of others; the query itself counts only where it is alone."""
    nearest = min(1, decay.distances[-1])
    points = zip(decay.distances, decay.same if same else decay.mean, strict=True)
    values = [value for distance, value in points if value is not None and distance >= nearest]
    return (values[0], values[-1]) if values else (0.0, 0.0)


def _verb_of_change(near: float, far: float) -> str:
    """Return the verb for scores from `near` to `far`: "falls", "rises" or "stays level"."""
    if near - far > LEVEL:
        return "falls"
    if far - near > LEVEL:
        return "rises"
    return "stays level"


def in_wavelengths(series: Mapping[str, Sequence[float | None]], train_length: int) -> str:
    """Return a caption: how many pairs of each encoding turn less than once in training and, of
    two encodings, by which factors their wavelengths differ.

    series: wavelengths in tokens by the encoding's name; None for a pair that does not rotate.
    """
    slow = {}
    parts = []
    for name, waves in series.items():
        slow[name] = sum(w is None or w > train_length for w in waves)
        whose = f" ({name})" if len(series) > 1 else ""
        parts.append(f"{slow[name]} of {len(waves)} pairs{whose}")
    if not any(slow.values()):
        return "Every pair completes a turn in training."
    stretch = _stretch_in_words(series) if len(series) == 2 else ""
    return f"Above the line: {', '.join(parts)}{stretch}."


def _stretch_in_words(series: Mapping[str, Sequence[float | None]]) -> str:
    """Return a clause: the smallest and largest ratio of the second encoding's wavelengths to the
    first's; "" if they are the same, or of another number of pairs."""
    (before, waves_before), (after, waves_after) = series.items()
    if len(waves_before) != len(waves_after):
        return ""
    ratios = []
    for a, b in zip(waves_before, waves_after, strict=True):
        if a is not None and b is not None:
            ratios.append(b / a)
    lowest, highest = 1 - _SAME_WAVELENGTH, 1 + _SAME_WAVELENGTH
    if not ratios or lowest <= min(ratios) <= max(ratios) <= highest:
        return ""
    return (
        f"; {after} has wavelengths {min(ratios):.3g} to {max(ratios):.3g} times those of {before}"
    )


def in_precision(reach: Mapping[str, int], last: int) -> str:
    """Return a caption: up to which position each way of computing angles is right.

    reach: the last right position by way. last: the last position that was tested.
    """
    right = [name for name, position in reach.items() if position >= last]
    wrong = {name: position for name, position in reach.items() if position < last}
    if not wrong:
        return f"Every way is right to the last position tested, {last:,}."
    parts = [f"{name} only to {position:,}" for name, position in wrong.items()]
    if not right:
        return f"Right {join_names(parts)}."
    return f"Right throughout: {join_names(right)}; {join_names(parts)}."


def in_added(table: Array) -> str:
    """Return a caption: how many dimensions change sign over the positions shown, and how many
    hardly move; table (positions, dimensions)."""
    changing_sign = int((np.sign(table).min(0) < np.sign(table).max(0)).sum())
    hardly_moving = int((np.ptp(table, 0) < _HARDLY_MOVES * max(1e-12, np.abs(table).max())).sum())
    return (
        f"{changing_sign} of {table.shape[1]} dimensions change sign within these {table.shape[0]} "
        f"positions; {hardly_moving} hardly move."
    )


def in_lines(table: Array, picked: Sequence[int], what: str) -> str:
    """Return a caption: which of the curves `picked` varies most, which least.

    table: (points, curves). what: the noun for a curve, such as "dimension".
    """
    moves = {i: float(np.abs(np.diff(table[:, i])).sum()) for i in picked}
    most, least = max(moves, key=moves.__getitem__), min(moves, key=moves.__getitem__)
    if moves[most] <= _ABOUT_AS_MUCH * moves[least]:
        return f"All {what}s shown move about as much."
    return f"{what.capitalize()} {most} moves most, {what} {least} least."


def in_similarity(cosines: Array, step: int = 1) -> str:
    """Return a caption: whether near positions are more alike than far ones.

    cosines: between every `step`-th position, (positions, positions).
    """
    near = float(np.diagonal(cosines, 1).mean())
    half = len(cosines) // 2
    far = float(np.diagonal(cosines, half).mean())
    half = half * step
    if near - far > _AS_ALIKE:
        return f"Neighbours are alike (cosine {near:.2f}), positions {half} apart less ({far:.2f})."
    if far - near > _AS_ALIKE:
        return f"Positions {half} apart are more alike ({far:.2f}) than neighbours ({near:.2f})."
    return f"Neighbours (cosine {near:.2f}) are as alike as positions {half} apart ({far:.2f})."


def in_turns(inv_freq: Sequence[float], positions: int) -> str:
    """Return a caption: how many pairs complete a turn within the positions shown, and how far the
    slowest turns.

    inv_freq: radians per position, one for each pair.
    """
    turns = [abs(f) * (positions - 1) / (2 * math.pi) for f in inv_freq]
    done = sum(turn >= 1 for turn in turns)
    slow = 360 * min(turns)
    tail = f"; the slowest turns by {slow:.3g} degrees" if done < len(turns) else ""
    return f"{done} of {len(turns)} pairs complete a turn within {positions} positions{tail}."


def in_steps(degrees: float) -> str:
    """Return a caption: after how many tokens a pair that turns by `degrees` a token is round."""
    if not degrees:
        return "This pair does not turn."
    return f"{degrees:.1f} degrees a token: after {360 / degrees:.1f} tokens it has come round."


def in_bias(values: Array, distances: Sequence[int]) -> str:
    """Return a caption: which head lowers the farthest keys most, which least.

    values: the bias in logits, (heads, distances).
    """
    start = list(distances).index(min(distances, key=abs))
    falls = values[:, start] - values[:, -1]
    most, least = int(falls.argmax()), int(falls.argmin())
    if np.abs(values).max() < _UNLEARNED:
        return (
            f"Within {np.abs(values).max():.2g} logits everywhere: nothing has been learned here."
        )
    if np.abs(falls).max() <= LEVEL:
        return f"No head tells distance {distances[-1]:,} from distance {distances[start]:,}."
    if len(values) == 1 or falls[most] - falls[least] <= LEVEL:
        return f"Every head {_fall_in_words(float(falls.mean()))} by distance {distances[-1]:,}."
    return (
        f"Head {most} {_fall_in_words(float(falls[most]))} by distance {distances[-1]:,}, head "
        f"{least} {_fall_in_words(float(falls[least]))}."
    )


def in_matrix(matrix: Array) -> str:
    """Return a caption: the bias of one head at the query's own position and at the farthest key.

    matrix: logits, (queries, keys).
    """
    near, far = float(np.diagonal(matrix).mean()), float(matrix[-1, 0])
    if abs(near - far) <= LEVEL:
        return f"Much the same on the diagonal, {near:.3g}, and at the farthest key, {far:.3g}."
    verb = "lose" if far < near else "gain"
    return f"{near:.3g} on the diagonal, {far:.3g} at the farthest key: far keys {verb}."


def in_slopes(slopes: Sequence[float]) -> str:
    """Return a caption: every how many tokens the steepest and the flattest head halve a weight.

    slopes: logits per token of distance, one for each head.
    """
    steep, flat = max(slopes), min(slopes)
    if not flat > 0:  # a head that lowers nothing halves no weight
        return f"Slopes from {flat:.3g} to {steep:.3g} logits per token."
    return (
        f"The steepest head halves a key's weight every {math.log(2) / steep:.3g} tokens, the "
        f"flattest every {math.log(2) / flat:.3g}."
    )


def in_buckets(past: Sequence[int]) -> str:
    """Return a caption: up to which distance buckets have one distance each, and where the last
    bucket begins.

    past: the bucket of each distance 0, 1, 2, ...
    """
    first_shared = next((d for d in range(1, len(past)) if past[d] == past[d - 1]), len(past) + 1)
    if past[-1] == past[0]:
        return "All distances share one bucket."
    last = list(past).index(past[-1])
    alone = f"Distances 0 to {first_shared - 2} have a bucket each"
    return f"{alone}; the last bucket shown begins at {last}."


def in_attention_distance(values: Array) -> str:
    """Return a caption: which layer and head look nearest and farthest.

    values: mean distance of attention in tokens, (layers, heads).
    """
    near, far = (np.unravel_index(f(values), values.shape) for f in (np.argmin, np.argmax))
    return (
        f"Head {far[1]} of layer {far[0]} looks farthest back, {values[far]:.1f} tokens on "
        f"average; head {near[1]} of layer {near[0]} nearest, {values[near]:.1f}."
    )


def _fall_in_words(fall: float) -> str:
    """Return how scores change from near to far, in words, if they fall by `fall` logits: "rises by
    2 logits" for -2."""
    if abs(fall) <= LEVEL:
        return "stays level"
    return f"{'falls' if fall > 0 else 'rises'} by {format_number(abs(fall))} logits"


def format_number(value: float) -> str:
    """Return a number as text with three digits, or more if it is large."""
    if abs(value) < 1e-6:  # what is left of sums that cancel
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
