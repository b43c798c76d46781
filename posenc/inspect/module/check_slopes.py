"""Check that the slopes of linear biases are those of ALiBi, and name known mistakes."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from posenc.encodings import ALiBi
from posenc.inspect.module.results import is_hidden, num_distinct_values
from posenc.inspect.module.stated import states_both_sides
from posenc.inspect.module.subject import Caution, CheckResult, Subject

_TOLERANCE = 1e-3
"""Relative difference below which two slopes are one; chosen, not derived."""
_BFLOAT16_ROUNDING = 2**-7
"""Largest relative error that is taken for rounding to bfloat16: that of two roundings, of the
distance and of its product with the slope, each by at most 2^-8."""
_NUM_TOKENS = 64
"""Tokens of the call in which slopes are read; chosen, not derived."""
_USUAL_EXPONENT = 8.0
"""ALiBi's bias_max: the last of a power of two heads has the slope 2^-8."""


def judge_slopes(subject: Subject) -> CheckResult | Caution:
    """Check that the slopes of a linear bias are those of ALiBi's authors; if not, name the known
    mistake that gives them. Other slopes get no verdict (None)."""
    if subject.reader.kind != "bias":
        return None, "no bias"
    bias = subject.read_result(subject.make_inputs(min(_NUM_TOKENS, subject.length)))
    measured_slopes = _line_slopes(bias)
    if measured_slopes is None:
        # Without the query's own place the line is straight, and begins one step too far away.
        earlier_slopes = _line_slopes(bias[..., :-1])
        step_to_own_place = bias[:, -1, -1] - bias[:, -1, -2]
        if earlier_slopes is not None and _all_are_close(
            step_to_own_place.abs(), 2 * earlier_slopes.abs()
        ):
            return False, "the distance of every earlier key is one too large"
        return None, "no straight line"
    rewards_distance = bool((measured_slopes < 0).all())
    if not (rewards_distance or (measured_slopes > 0).all()):
        return None, "does not fall with distance"
    departure_in_words, is_rounded = _describe_departure_from_line(subject, measured_slopes)
    if is_rounded:
        return False, departure_in_words
    magnitudes = measured_slopes.abs()
    num_heads = len(measured_slopes)
    slopes_in_words = (
        f"{num_heads} heads: {_first_three_in_words(measured_slopes)}, ..."
        f"{_describe_rewarded_future(bias)}"
    )
    exponent = _stated_exponent(subject.module)
    expected_slopes = _authors_slopes(num_heads, exponent)
    mistakes = ["the sign: distance is rewarded"] if rewards_distance else []
    if not _all_are_close(magnitudes, expected_slopes):
        mistake = _name_mistake(magnitudes, exponent) or _describe_odd_head(
            magnitudes, expected_slopes
        )
        if mistake is None:
            multiple_in_words = _describe_multiple(magnitudes, expected_slopes)
            text = f"slopes of its own: {slopes_in_words}{multiple_in_words}"
            return None, f"{text}; {departure_in_words}" if departure_in_words else text
        mistakes.append(mistake)
    if departure_in_words:
        mistakes.append(departure_in_words)
    rewards_future = _gain_of_future(bias) > 0
    if rewards_future and states_both_sides(subject):
        mistakes.append("it states attention to both sides, and rewards keys ahead")
    if mistakes:
        return (
            False,
            f"{slopes_in_words}; the authors' {_first_three_in_words(expected_slopes)}, ...: "
            f"{'; '.join(mistakes)}",
        )
    if rewards_future:
        return Caution(
            "for causal attention only, because keys ahead are rewarded", slopes_in_words
        )
    return True, slopes_in_words


def _line_slopes(bias: Tensor) -> Tensor | None:
    """Return by how much each head's bias grows with each key, (heads,), for the last query; None
    if its steps differ."""
    steps = bias[:, -1].diff(dim=-1)
    last_steps = steps[:, -1]
    differences = (steps - last_steps[:, None]).abs()
    # 1e-9 for steps of 0, no fraction of which is left for rounding.
    is_straight = differences.le(_TOLERANCE * last_steps.abs()[:, None] + 1e-9).all()
    return last_steps if is_straight else None


def _describe_departure_from_line(subject: Subject, slopes: Tensor) -> tuple[str, bool]:
    """Return as text where, at full length, the biases of earlier keys leave the lines with these
    slopes ("" if they keep them), and True if they do so because distances are rounded."""
    bias = subject.read_result(subject.make_inputs(subject.length))
    num_keys = bias.shape[-1]
    query_positions = torch.arange(num_keys)[-bias.shape[1] :]  # of a bias by key the last query
    distance = (query_positions[:, None] - torch.arange(num_keys)).double()
    errors_by_head = torch.stack(
        [_relative_error_of_line(*row, distance).max() for row in zip(bias, slopes, strict=True)]
    )
    head = int(errors_by_head.argmax())  # which takes NaN for the largest
    worst = errors_by_head[head].item()
    if worst <= _TOLERANCE:
        return "", False
    errors = _relative_error_of_line(bias[head], slopes[head], distance)
    worst_index = int(errors.argmax())
    worst_distance = distance.flatten()[worst_index].item()
    if worst <= _BFLOAT16_ROUNDING:
        distinct_in_words = f"{num_distinct_values(bias[:, -1]):,} of {num_keys:,} distinct"
        return (
            f"distances are rounded: off by {worst:.2g} of {worst_distance:,.0f}; "
            f"{distinct_in_words}",
            True,
        )
    first_distance = distance[~(errors <= _TOLERANCE)].min().item()
    drop_at_worst = _drop_from_own_place(bias[head], distance).flatten()[worst_index].item()
    return (
        f"head {head} leaves its line from distance {first_distance:,.0f} on: {-drop_at_worst:.4g} "
        f"and not {-slopes[head].item() * worst_distance:.4g} at {worst_distance:,.0f}"
    ), False


def _relative_error_of_line(bias: Tensor, slope: Tensor, distance: Tensor) -> Tensor:
    """Return how far each bias's drop, from that at the query's own position, is from slope *
    distance, relative to it; 0 for later keys, and for hidden ones, as beyond a window.

    bias, distance, result: (queries, keys). slope: one number.
    """
    errors = (_drop_from_own_place(bias, distance) - slope * distance).abs()
    errors = errors / (slope.abs() * distance.clamp(min=1))
    return errors.masked_fill((distance <= 0) | is_hidden(bias), 0.0)


def _drop_from_own_place(bias: Tensor, distance: Tensor) -> Tensor:
    """Return by how much the bias of each key is below that at the query's own position, where
    `distance` is 0; all are (queries, keys)."""
    own_index = (distance == 0).int().argmax(-1, keepdim=True)
    return bias.gather(1, own_index) - bias


def _name_mistake(measured: Tensor, exponent: float) -> str | None:
    """Return the name of the known mistake that gives these slopes; None if there is none.

    exponent: the exponent of the right slopes, see `_mistaken_slopes`.
    """
    for name, mistaken in _mistaken_slopes(measured, exponent):
        if _all_are_close(measured, mistaken):
            return name
    return None


def _describe_odd_head(measured: Tensor, expected: Tensor) -> str | None:
    """Return as text the first head whose slope is not the expected one; None if more than a
    quarter of the heads have others, which is another rule and no slip."""
    is_off = ~((measured - expected).abs() <= _TOLERANCE * expected)
    if is_off.sum() > len(is_off) / 4:
        return None
    head = int(is_off.int().argmax())
    return f"head {head}, from 0, has {measured[head]:.4g}, not {expected[head]:.4g}"


def _mistaken_slopes(measured: Tensor, exponent: float) -> Iterator[tuple[str, Tensor]]:
    """Yield names of known mistakes, with the slopes that each gives for as many heads as
    `measured` has.

    exponent: b of the right slopes 2^(-b h / H).
    """
    num_heads = len(measured)
    if num_heads == 1:  # one slope may be anything
        return
    head_numbers = torch.arange(1, num_heads + 1, dtype=torch.float64)
    power_of_two = 1 << (num_heads.bit_length() - 1)
    expected = _authors_slopes(num_heads, exponent)
    slopes_of_twice = _authors_slopes(2 * power_of_two, exponent)
    yield "heads are in reversed order", expected.flip(0)
    if num_heads > power_of_two:  # the authors add every second slope of twice as many heads
        first_slopes = expected[:power_of_two]
        num_further = num_heads - power_of_two
        only_in_words = "holds for powers of two only"
        yield (
            f"2^(-{exponent:g} h / H) {only_in_words}",
            _geometric_slopes(head_numbers, num_heads, exponent),
        )
        yield (
            "further heads repeat the first ones",
            torch.cat([first_slopes, first_slopes[:num_further]]),
        )
        name_of_first_slopes = (
            f"further heads take the first slopes of {2 * power_of_two} heads, not every second one"
        )
        yield name_of_first_slopes, torch.cat([first_slopes, slopes_of_twice[:num_further]])
        yield (
            f"the slopes are the first ones of {2 * power_of_two} heads",
            slopes_of_twice[:num_heads],
        )
    for start in (0, 2, 0.5, 1.5):
        shift = start - 1
        name_of_counting = f"heads are counted from {start:g}, not from 1"
        yield name_of_counting, _geometric_slopes(head_numbers + shift, num_heads, exponent)
        # Of further heads, where they are counted as the others.
        for further_shift in (shift, 2 * shift):
            further_numbers = (
                torch.arange(1, 2 * power_of_two + 1, 2)[: num_heads - power_of_two] + further_shift
            )
            slope_parts = [
                _geometric_slopes(head_numbers[:power_of_two] + shift, power_of_two, exponent),
                _geometric_slopes(further_numbers, 2 * power_of_two, exponent),
            ]
            yield name_of_counting, torch.cat(slope_parts)
    reordered = torch.empty_like(expected)
    reordered[measured.argsort(stable=True)] = expected.sort().values
    yield "heads are in another order", reordered
    name_of_base = "the base is e, not 2"
    yield name_of_base, torch.exp(-exponent * head_numbers / num_heads)
    yield name_of_base, _authors_slopes(num_heads, exponent / math.log(2))
    if num_heads < 3:  # any two slopes are of some exponent
        return
    for name, other_exponent, slopes in _slopes_of_other_exponents(
        measured, head_numbers, power_of_two
    ):
        yield f"{name}the exponent is {other_exponent:.3g}, not {exponent:g}", slopes


def _slopes_of_other_exponents(
    measured: Tensor, head_numbers: Tensor, power_of_two: int
) -> Iterator[tuple[str, float, Tensor]]:
    """Yield slopes 2^(-b h / H) for exponents b that fit the first head, or the first two. Each
    comes as a remark to put before the exponent in a message, the exponent and the slopes.

    head_numbers: 1, 2, ..., one for each head. power_of_two: the largest that is not above the
    number of heads.
    """
    num_heads = len(measured)
    first_exponent = -math.log2(measured[0].item())
    if first_exponent > 0:
        yield (
            "",
            first_exponent * power_of_two,
            _authors_slopes(num_heads, first_exponent * power_of_two),
        )
        yield (
            "2^(-b h / H) holds for powers of two only, and ",
            first_exponent * num_heads,
            _geometric_slopes(head_numbers, num_heads, first_exponent * num_heads),
        )
    ratio_exponent = -math.log2((measured[1] / measured[0]).item()) * num_heads
    if ratio_exponent > 0:
        yield (
            "heads are counted from 0, not from 1, and ",
            ratio_exponent,
            _geometric_slopes(head_numbers - 1, num_heads, ratio_exponent),
        )


def _geometric_slopes(head_numbers: Tensor, count: int, exponent: float) -> Tensor:
    """Return the slopes 2^(-exponent * h / count), one for each h of `head_numbers`."""
    return 2.0 ** (-exponent * head_numbers.double() / count)


def _authors_slopes(count: int, exponent: float = _USUAL_EXPONENT) -> Tensor:
    """Return the slopes of ALiBi's authors for `count` heads, (count). If `count` is a power of
    two, the last one is 2^-exponent."""
    return torch.tensor(ALiBi(count, bias_max=exponent).slopes, dtype=torch.float64)


def _stated_exponent(module: nn.Module) -> float:
    """Return the exponent that the module or its config states, as MPT's alibi_bias_max; or 8."""
    for holder in (module, getattr(module, "config", None)):
        for name in ("bias_max", "alibi_bias_max"):
            stated = getattr(holder, name, None)
            if isinstance(stated, bool):
                continue
            if isinstance(stated, int | float) and 0 < stated < math.inf:
                return float(stated)
    return _USUAL_EXPONENT


def _describe_multiple(measured: Tensor, expected: Tensor) -> str:
    """Return a remark if the slopes are a multiple of the expected ones: "; 8 times the authors'";
    else "". They are for Falcon, which adds its bias before the division by sqrt(head_dim)."""
    slope_ratio = (measured[0] / expected[0]).item()
    is_multiple = _all_are_close(measured, slope_ratio * expected)
    return f"; {slope_ratio:.4g} times the authors'" if is_multiple else ""


def _all_are_close(a: Tensor, b: Tensor) -> bool:
    """Return True if a and b have one shape and all slopes in a are those in b, see _TOLERANCE."""
    return a.shape == b.shape and bool(((a - b).abs() <= _TOLERANCE * b).all())


def _first_three_in_words(slopes: Tensor) -> str:
    """Return the first three slopes as text: "0.5, 0.25, 0.125"."""
    return ", ".join(f"{slope:.3g}" for slope in slopes[:3].tolist())


def _describe_rewarded_future(bias: Tensor) -> str:
    """Return a remark if keys ahead are rewarded; "" if not."""
    gain = _gain_of_future(bias)
    if not gain > 0:
        return ""
    return f"; keys ahead are rewarded, by {gain:.3g} logits at {bias.shape[-1] - 1}: causal only"


def _gain_of_future(bias: Tensor) -> float:
    """Return by how much the bias of the first query is larger for the last key, which is ahead of
    it, than for its own position; 0 for a bias by key."""
    if bias.shape[1] == 1:
        return 0.0
    return (bias[:, 0, -1] - bias[:, 0, 0]).max().item()
