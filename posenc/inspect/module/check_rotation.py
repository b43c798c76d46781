"""Check that a rotation is one: of pairs, from none at position 0, alike for queries and keys, at
the stated frequencies."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from posenc.inspect.module.results import worst_head_in_words
from posenc.inspect.module.stated import (
    stated_bases_of_any_name,
    stated_numbers,
    states_scaling,
)
from posenc.inspect.module.subject import CheckResult, Subject

_TOLERANCE = 1e-3
"""Radians, or parts of a length: what float32 adds up to over a few positions."""
_POSITIONS_READ = torch.tensor([0, 1, 4, 9])
"""Positions whose rotations are read, and then those as much later as the length allows."""

_BASE_NAMES = ("base", "theta", "rope_theta", "rotary_emb_base", "rope_base")
_DISTANCES = (1, 8, 64)
"""Positions over which angles are read to measure a frequency: each refines the one before."""
_LENGTH_FOR_POSITION_0 = 8
"""Tokens of the call in which position 0 is read. This number and the next are chosen."""
_LENGTH_FOR_SCALES = 24
"""Tokens of the call in which the lengths of cosines and sines are compared."""
_USUAL_BASES = (10000.0, 500000.0, 1000000.0)
"""Bases at which a module that states none is looked for rounded frequencies."""


def judge_position_zero(subject: Subject) -> CheckResult:
    """Check that position 0 is not rotated. If it is, cosines and sines are exchanged, or the
    positions begin elsewhere."""
    if subject.reader.kind != "rotation" or subject.reader.meaning == "sinusoids":
        return None, "rotates nothing"
    first_rotation = subject.read_result(
        subject.make_inputs(min(_LENGTH_FOR_POSITION_0, subject.length))
    )[:1]
    worst = first_rotation.angle().abs().max().item()
    is_quarter_turn = (first_rotation.angle().abs() - math.pi / 2).abs().max().item() <= _TOLERANCE
    text = f"position 0 is rotated by up to {worst:.2g} rad"
    if not worst <= _TOLERANCE and subject.reader.meaning == "rotated content":
        text += worst_head_in_words(subject.reader.by_head(first_rotation).angle().abs())
    return worst <= _TOLERANCE, text + (
        "; cosines and sines are exchanged" if is_quarter_turn else ""
    )


def judge_rotation_of_pairs(subject: Subject) -> CheckResult:
    """Check that each pair of channels is rotated and scaled, and nothing else.

    Of rotated content: both channels get the same cosine, and sines of opposite signs. Of cosines
    and sines: cos² + sin² is the same at each position.
    """
    if subject.reader.meaning in ("cos and sin", "complex"):
        magnitudes = subject.read_result(
            subject.make_inputs(min(_LENGTH_FOR_SCALES, subject.length))
        ).abs()
        worst = (magnitudes / magnitudes[:1] - 1).abs().max().item()
        return worst <= _TOLERANCE, f"cos² + sin² changes by up to {worst:.2g} with the position"
    if subject.reader.meaning != "rotated content":
        return None, "rotates nothing"
    first, second = (list(channels) for channels in zip(*subject.reader.pairs, strict=True))
    worst = 0.0
    sign_error = 0.0
    largest_entry = 0.0
    for side in _linear_maps(subject):
        a = side[..., first, first]
        b = side[..., first, second]
        c = side[..., second, first]
        d = side[..., second, second]
        largest_entry = max(largest_entry, side.abs().max().item())
        worst = max(worst, (a - d).abs().max().item(), (b + c).abs().max().item())
        sign_error = max(sign_error, (b - c).abs().max().item())
    text = f"the two channels of a pair differ from a rotation by up to {worst / largest_entry:.2g}"
    if worst > _TOLERANCE * largest_entry and sign_error <= _TOLERANCE * largest_entry:
        text += "; both sines have the same sign, as in rotate_half without its minus"
    return worst <= _TOLERANCE * largest_entry, text


def judge_shifted_scores(subject: Subject) -> CheckResult:
    """Check that the score of a query and a key, whatever their content, stays the same if both are
    moved to later positions."""
    if subject.as_word != "rotate":
        return None, "rotates nothing"
    if subject.reader.meaning != "rotated content":
        return None, "its pairs of channels are not known"
    sides = _linear_maps(subject)
    if len(sides) == 1:
        column_lengths = sides[0].norm(dim=-2)  # (places, heads, channels)
        if ((column_lengths / column_lengths[:1] - 1).abs() > _TOLERANCE).any():
            return None, "scales what it rotates, and shows one side only"
    queries = sides[0]
    keys = sides[-1]
    count = len(_POSITIONS_READ)
    changes = []
    for i in range(count):
        for j in range(count):
            score_map = queries[i].mT @ keys[j]  # (heads, channels, channels)
            change = queries[count + i].mT @ keys[count + j] - score_map
            score_sizes = score_map.abs().amax((-2, -1)).clamp(min=1e-30)
            changes.append(change.abs().amax((-2, -1)) / score_sizes)
    worst = torch.stack(changes).max().item()
    shift = _shift_length(subject)
    text = f"scores change by up to {worst:.2g} of their size where both tokens stand {shift} later"
    return worst <= _TOLERANCE, text


def _shift_length(subject: Subject) -> int:
    """Return by how many positions `judge_shifted_scores` moves tokens: as many as the length
    allows, because a scale that grows by 1/4096 with each token is seen only over many."""
    return max(3, subject.length - int(_POSITIONS_READ.max()) - 1)


def _linear_maps(subject: Subject) -> list[Tensor]:
    """Return the linear map of queries, and of keys if they are returned, at _POSITIONS_READ and
    then as much later as `_shift_length` says: (places, heads, channels out, channels in)."""
    positions = torch.cat([_POSITIONS_READ, _POSITIONS_READ + _shift_length(subject)])
    num_tokens = int(positions.max()) + 1
    module = subject.make_copy()
    columns = []
    for unit_vector in torch.eye(subject.width):
        returned = subject.form.call(module, subject.make_inputs(num_tokens, probe=unit_vector))
        columns.append([side[positions] for side in subject.reader.rotated_channels(returned)])
    return [torch.stack(side, dim=-1) for side in zip(*columns, strict=True)]


def judge_frequencies(subject: Subject) -> CheckResult:
    """Check that the frequencies are those of the base that the module states, for its number of
    pairs."""
    if subject.reader.kind != "rotation":
        return None, "rotates nothing"
    frequencies_by_head = _frequencies_by_head(subject)
    rotating_heads = [head for head in frequencies_by_head if head is not None]
    if not rotating_heads:
        return None, "some pairs are not rotated, or it is asked for too few positions"
    inv_freq = rotating_heads[0]
    if len(rotating_heads) < len(frequencies_by_head) or not all(
        _all_are_close(head, inv_freq) for head in rotating_heads
    ):
        return None, "its heads have frequencies of their own, or none"
    bases = set(stated_numbers(subject, _BASE_NAMES))
    is_scaled = states_scaling(subject)
    if len(bases) != 1:
        return _judge_without_stated_base(inv_freq)
    (base,) = bases
    num_pairs = len(inv_freq)
    if _all_are_close(inv_freq, _rope_frequencies(base, num_pairs)):
        return True, f"those of base {base:g} for {num_pairs} pairs"
    if subject.reader.meaning == "sinusoids" and _all_are_close(
        inv_freq, _tensor2tensor_frequencies(base, num_pairs)
    ):
        return True, f"those of {num_pairs} pairs from 1 down to 1/{base:g}, as in tensor2tensor"
    for other_base in stated_bases_of_any_name(subject):
        if _all_are_close(inv_freq, _rope_frequencies(other_base, num_pairs)):
            return True, f"those of base {other_base:g}, which it states beside {base:g}"
    if is_scaled:
        return None, f"scaled, as it states; base {base:g}"
    return _judge_other_frequencies(inv_freq, base)


def _judge_other_frequencies(inv_freq: Tensor, base: float) -> CheckResult:
    """Return the finding for frequencies that are not those of their base: False with the known
    mistake that makes them, or None if there is none."""
    expected = _rope_frequencies(base, len(inv_freq))
    stated_in_words = f"states base {base:g} for {len(inv_freq)} pairs"
    for name, mistaken in _mistaken_frequencies(inv_freq, base):
        if _all_are_close(inv_freq, mistaken):
            return False, f"{stated_in_words}: {name}"
    if _all_are_close(inv_freq.sort(descending=True).values, expected):
        return False, f"{stated_in_words}: pairs have each other's frequencies"
    is_off = ~_is_close_by_pair(inv_freq, expected)
    # Methods for long texts slow the last pairs down. None changes a few pairs before exact ones.
    if is_off.sum() <= len(is_off) / 4 and not is_off[-1]:
        pair = int(is_off.int().argmax())
        frequency_ratio = (inv_freq[pair] / expected[pair]).item()
        return (
            False,
            f"{stated_in_words}: pair {pair}, from 0, turns {frequency_ratio:.4g} times as fast",
        )
    return None, f"frequencies of its own for base {base:g}"


def _judge_without_stated_base(inv_freq: Tensor) -> CheckResult:
    """Return the finding for a module that states no base: False if its frequencies are rounded,
    else None with the base that they have."""
    num_pairs = len(inv_freq)
    for base in _USUAL_BASES:
        for name, mistaken in _rounded_frequencies(base, num_pairs):
            if _all_are_close(inv_freq, mistaken) and not _all_are_close(
                inv_freq, _rope_frequencies(base, num_pairs)
            ):
                return False, f"those of base {base:g}, {name}"
    base = _base_if_geometric(inv_freq)
    if base is None:
        return None, "states no base; frequencies of its own"
    factor_in_words = "" if abs(inv_freq[0] - 1) <= _TOLERANCE else f"{inv_freq[0]:.4g} times "
    return None, f"states no base; {factor_in_words}those of base {base:.6g} for {num_pairs} pairs"


def _mistaken_frequencies(inv_freq: Tensor, base: float) -> Iterator[tuple[str, Tensor]]:
    """Yield names of known mistakes with base `base`, and the frequencies that they give."""
    num_pairs = len(inv_freq)
    exact = _rope_frequencies(base, num_pairs)
    yield from _rounded_frequencies(base, num_pairs)
    yield "they begin at i = 1, not 0", exact * base ** (-1 / num_pairs)
    yield f"they are {inv_freq[0]:.4g} times those", exact * inv_freq[0]
    other_base = _base_if_geometric(inv_freq)
    if other_base is None or abs(inv_freq[0] - 1) > _TOLERANCE:
        return
    implied_width = 2 * num_pairs * math.log(base) / math.log(other_base)
    yield (
        f"they are those of base {other_base:.6g}, or of a width of {implied_width:.4g} instead of "
        f"{2 * num_pairs}",
        _rope_frequencies(other_base, num_pairs),
    )


def _rounded_frequencies(base: float, num_pairs: int) -> Iterator[tuple[str, Tensor]]:
    """Yield RoPE's frequencies as they are after rounding to bfloat16 and to float16."""
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield f"rounded to {name}", _rope_frequencies(base, num_pairs).to(dtype).double()


def _rope_frequencies(base: float, num_pairs: int) -> Tensor:
    """Return RoPE's frequencies of `num_pairs` pairs: base^(-i / num_pairs)."""
    return base ** (-torch.arange(num_pairs, dtype=torch.float64) / num_pairs)


def _tensor2tensor_frequencies(base: float, num_pairs: int) -> Tensor:
    """Return frequencies that fall by one ratio from 1 to 1 / base, which tensor2tensor and fairseq
    take for sinusoids: base^(-i / (num_pairs - 1))."""
    return base ** (-torch.arange(num_pairs, dtype=torch.float64) / max(num_pairs - 1, 1))


def _base_if_geometric(inv_freq: Tensor) -> float | None:
    """Return the base of frequencies that fall by one ratio, as RoPE's; None if they do not.

    RoPE's are base^(-i / n) for n pairs. From the first to the last there are n - 1 steps, so that
    last / first = base^(-(n - 1) / n).
    """
    num_pairs = len(inv_freq)
    if num_pairs < 3:
        return None
    ratios = inv_freq[1:] / inv_freq[:-1]
    is_one_ratio = (ratios / ratios[0] - 1).abs().max() <= _TOLERANCE
    if not is_one_ratio or not ratios[0] < 1:
        return None
    last_over_first = inv_freq[-1] / inv_freq[0]
    return float(last_over_first ** (-num_pairs / (num_pairs - 1)))


def _all_are_close(measured: Tensor, exact: Tensor) -> bool:
    """Return True if all frequencies are equal up to the error of their measurement."""
    return measured.shape == exact.shape and bool(_is_close_by_pair(measured, exact).all())


def _is_close_by_pair(measured: Tensor, exact: Tensor) -> Tensor:
    """Return for each frequency whether it differs by less than the error of its measurement."""
    return (measured - exact).abs() <= 2e-4 * exact + 1e-7  # chosen, not derived


def _frequencies_by_head(subject: Subject) -> list[Tensor | None]:
    """Return the frequencies of each head of rotated queries, None for a head with a pair that is
    not rotated; of cosines and sines, which have no heads, those of all pairs as one item. An empty
    list for a module that takes too few tokens."""
    count = _DISTANCES[-1] + 1
    if subject.length < count:
        return []
    result = subject.read_result(subject.make_inputs(count))
    if subject.reader.meaning != "rotated content":
        return [_measure_frequencies(result)]
    queries = subject.reader.by_head(result)[:, 0]  # keys are alike, or another check fails
    return [_measure_frequencies(head) for head in queries.unbind(1)]


def _measure_frequencies(rotations: Tensor) -> Tensor | None:
    """Return the frequency of each pair, in radians per position; None if some pair does not
    rotate.

    rotations: complex (positions, pairs), for all of _DISTANCES and position 0. A pair that is in
    it several times is returned once.
    """
    angles = [(rotations[n] * rotations[0].conj()).angle() for n in _DISTANCES]
    inv_freq = angles[0]
    for n, angle in zip(_DISTANCES[1:], angles[1:], strict=True):
        excess_angle = torch.remainder(angle - n * inv_freq + math.pi, 2 * math.pi) - math.pi
        inv_freq = inv_freq + excess_angle / n
    inv_freq = _without_copies(inv_freq.abs())
    return None if not len(inv_freq) or inv_freq.min() < 1e-9 else inv_freq


def _without_copies(inv_freq: Tensor) -> Tensor:
    """Return each frequency once if all of them are repeated: there may be a cosine for each
    channel, and for each head.

    (1, 1, 0.1, 0.1) and (1, 0.1, 1, 0.1) become (1, 0.1).
    """
    count = len(inv_freq)
    for num_distinct in range(1, count):
        if count % num_distinct:
            continue
        num_copies = count // num_distinct
        first_frequencies = inv_freq[:num_distinct]
        every_nth_frequency = inv_freq[::num_copies]
        if (inv_freq - first_frequencies.repeat(num_copies)).abs().max() <= 1e-8:
            return _without_copies(first_frequencies)
        if (inv_freq - every_nth_frequency.repeat_interleave(num_copies)).abs().max() <= 1e-8:
            return _without_copies(every_nth_frequency)
    return inv_freq
