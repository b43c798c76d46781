"""Check that the slopes of linear biases are those of ALiBi, and name known mistakes."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from posenc.encodings import ALiBi
from posenc.inspect.module.subject import Measured, Subject

_CLOSE = 1e-3
_ROUNDING = 2**-7
"""Largest relative error of a number that was rounded to bfloat16."""
_HIDDEN = -1e4
"""Logits that hide a key: less than any slope gives at the lengths of these checks."""
_USUAL = 8.0
"""ALiBi's bias_max: the last of a power of two heads has the slope 2^-8."""


def slopes(subject: Subject) -> Measured:
    """Compare with the authors' slopes, and with the mistakes in `_mistakes`."""
    if subject.view.kind != "bias":
        return None, "no bias"
    bias = subject.see(subject.inputs(min(64, subject.length)))
    measured = _line_slopes(bias)
    if measured is None:
        # Without the query's own place the line is straight, and begins one step too far away.
        earlier = _line_slopes(bias[..., :-1])
        own_step = bias[:, -1, -1] - bias[:, -1, -2]
        if earlier is not None and _equal(own_step.abs(), 2 * earlier.abs()):
            return False, "the distance of every earlier key is one too large"
        return None, "no straight line"
    rewarded = bool((measured < 0).all())
    if not (rewarded or (measured > 0).all()):
        return None, "does not fall with distance"
    far, is_rounded = _far(subject, measured)
    if is_rounded:
        return False, far
    size = measured.abs()
    count = len(measured)
    shown = f"{count} heads: {_few(measured)}, ...{_ahead(bias)}"
    power = _stated_power(subject.module)
    authors = _authors(count, power)
    wrong = ["the sign: distance is rewarded"] if rewarded else []
    if not _equal(size, authors):
        name = _mistake(size, power) or _few_others(size, authors)
        if name is None:
            text = f"slopes of its own: {shown}{_multiple(size, authors)}"
            return None, f"{text}; {far}" if far else text
        wrong.append(name)
    if far:
        wrong.append(far)
    if wrong:
        return False, f"{shown}; the authors' {_few(authors)}, ...: {'; '.join(wrong)}"
    return True, shown


def _line_slopes(bias: Tensor) -> Tensor | None:
    """Return by how much each head's bias grows with each key, (heads,), for the last query; None
    if its steps differ."""
    steps = bias[:, -1].diff(dim=-1)
    last = steps[:, -1]
    off = (steps - last[:, None]).abs()
    is_straight = off.le(_CLOSE * last.abs()[:, None] + 1e-9).all()
    return last if is_straight else None


def past(subject: Subject) -> Measured:
    """Check that keys before a query differ by distance. Where only those after it do, the sign of
    the distance is exchanged."""
    if subject.view.kind != "bias":
        return None, "no bias"
    bias = subject.see(subject.inputs(min(64, subject.length)))
    if bias.shape[1] == 1:
        return None, "a bias by key"
    before, after = (_num_distinct(bias[:, query]) for query in (-1, 0))
    if before > 1 or after == 1:
        return (True if before > 1 else None), f"{before} values over {bias.shape[-1]} keys"
    text = "all keys before the query have one value, and those after it"
    return False, f"{text} {after}: the sign of the distance is exchanged"


def _num_distinct(rows: Tensor) -> int:
    """Return how many different numbers the bias of one query (heads, keys) has, in the head with
    the most."""
    return max(len(head.unique()) for head in rows)


def _far(subject: Subject, slopes: Tensor) -> tuple[str, bool]:
    """Return where the biases of earlier keys leave the line that they have near the query ("" if
    they keep it), and True if they do so because distances are rounded."""
    bias = subject.see(subject.inputs(subject.length))
    count = bias.shape[-1]
    queries = torch.arange(count)[-bias.shape[1] :]  # of a bias by key the last query
    distance = (queries[:, None] - torch.arange(count)).double()
    by_head = torch.stack(
        [_off_line(*row, distance).max() for row in zip(bias, slopes, strict=True)]
    )
    head = int(by_head.argmax())  # which takes NaN for the largest
    worst = by_head[head].item()
    if worst <= _CLOSE:
        return "", False
    off = _off_line(bias[head], slopes[head], distance)
    at = int(off.argmax())
    far = distance.flatten()[at].item()
    if worst <= _ROUNDING:
        distinct = f"{_num_distinct(bias[:, -1]):,} of {count:,} distinct"
        return f"distances are rounded: off by {worst:.2g} of {far:,.0f}; {distinct}", True
    first = distance[~(off <= _CLOSE)].min().item()
    fall = _below_own(bias[head], distance).flatten()[at].item()
    return (
        f"head {head} leaves its line from distance {first:,.0f} on: {-fall:.4g} and not "
        f"{-slopes[head].item() * far:.4g} at {far:,.0f}"
    ), False


def _off_line(bias: Tensor, slope: Tensor, distance: Tensor) -> Tensor:
    """Return how far the biases (queries, keys) of one head are from slope * distance, relative to
    it; 0 for later keys, and for hidden ones, as beyond a window."""
    off = (_below_own(bias, distance) - slope * distance).abs()
    off = off / (slope.abs() * distance.clamp(min=1))
    return off.masked_fill((distance <= 0) | (bias <= _HIDDEN), 0.0)


def _below_own(bias: Tensor, distance: Tensor) -> Tensor:
    """Return by how much the bias of each key is below that of the query's own place."""
    own_place = (distance == 0).int().argmax(-1, keepdim=True)
    return bias.gather(1, own_place) - bias


def _mistake(measured: Tensor, usual: float) -> str | None:
    """Return the name of the known mistake that gives these slopes."""
    for name, mistaken in _mistakes(measured, usual):
        if _equal(measured, mistaken):
            return name
    return None


def _few_others(measured: Tensor, authors: Tensor) -> str | None:
    """Return which head has another slope than the authors', where at most a quarter has."""
    off = ~((measured - authors).abs() <= _CLOSE * authors)
    if off.sum() > len(off) / 4:
        return None
    head = int(off.int().argmax())
    return f"head {head}, from 0, has {measured[head]:.4g}, not {authors[head]:.4g}"


def _mistakes(measured: Tensor, usual: float) -> Iterator[tuple[str, Tensor]]:
    """Yield names of known mistakes, with the slopes that they give for this number of heads.

    usual: the exponent b of the right slopes 2^(-b h / H).
    """
    count = len(measured)
    if count == 1:  # one slope may be anything
        return
    heads = torch.arange(1, count + 1, dtype=torch.float64)
    power = 1 << (count.bit_length() - 1)
    authors, twice = _authors(count, usual), _authors(2 * power, usual)
    yield "heads are in reversed order", authors.flip(0)
    if count > power:  # the authors add every second slope of twice as many heads
        first_heads = authors[:power]
        more = count - power
        only = "holds for powers of two only"
        yield f"2^(-{usual:g} h / H) {only}", _geometric(heads, count, usual)
        yield "further heads repeat the first ones", torch.cat([first_heads, first_heads[:more]])
        first_slopes = (
            f"further heads take the first slopes of {2 * power} heads, not every second one"
        )
        yield first_slopes, torch.cat([first_heads, twice[:more]])
        yield f"the slopes are the first ones of {2 * power} heads", twice[:count]
    for start in (0, 2, 0.5, 1.5):
        shift = start - 1
        counted = f"heads are counted from {start:g}, not from 1"
        yield counted, _geometric(heads + shift, count, usual)
        for between in (shift, 2 * shift):  # further heads, where they are counted as the others
            further = torch.arange(1, 2 * power + 1, 2)[: count - power] + between
            whole = [
                _geometric(heads[:power] + shift, power, usual),
                _geometric(further, 2 * power, usual),
            ]
            yield counted, torch.cat(whole)
    order = torch.empty_like(authors)
    order[measured.argsort(stable=True)] = authors.sort().values
    yield "heads are in another order", order
    natural = "the base is e, not 2"
    yield natural, torch.exp(-usual * heads / count)
    yield natural, _authors(count, usual / math.log(2))
    if count < 3:  # any two slopes are of some exponent
        return
    for name, exponent, slopes in _of_exponents(measured, heads, power):
        yield f"{name}the exponent is {exponent:.3g}, not {usual:g}", slopes


def _of_exponents(
    measured: Tensor, heads: Tensor, power: int
) -> Iterator[tuple[str, float, Tensor]]:
    """Yield slopes 2^(-b h / H) with the exponent b of the first head, or of the first two."""
    count = len(measured)
    first = -math.log2(measured[0].item())
    if first > 0:
        yield "", first * power, _authors(count, first * power)
        yield (
            "2^(-b h / H) holds for powers of two only, and ",
            first * count,
            _geometric(heads, count, first * count),
        )
    ratio = -math.log2((measured[1] / measured[0]).item()) * count
    if ratio > 0:
        yield (
            "heads are counted from 0, not from 1, and ",
            ratio,
            _geometric(heads - 1, count, ratio),
        )


def _geometric(heads: Tensor, count: int, exponent: float) -> Tensor:
    """Return the slopes 2^(-exponent * h / count) of these heads h."""
    return 2.0 ** (-exponent * heads.double() / count)


def _authors(count: int, power: float = _USUAL) -> Tensor:
    """Return the slopes of ALiBi's authors for `count` heads, the last of which is 2^-power if they
    are a power of two."""
    return torch.tensor(ALiBi(count, bias_max=power).slopes, dtype=torch.float64)


def _stated_power(module: nn.Module) -> float:
    """Return the exponent that the module or its config states, as MPT's alibi_bias_max; or 8."""
    for holder in (module, getattr(module, "config", None)):
        for name in ("bias_max", "alibi_bias_max"):
            stated = getattr(holder, name, None)
            if isinstance(stated, int | float) and 0 < stated < math.inf:
                return float(stated)
    return _USUAL


def _multiple(measured: Tensor, authors: Tensor) -> str:
    """Return that the slopes are a multiple of the authors', as in Falcon, which adds its bias
    before the division by sqrt(head_dim); "" if they are not."""
    factor = (measured[0] / authors[0]).item()
    same = _equal(measured, factor * authors)
    return f"; {factor:.4g} times the authors'" if same else ""


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= _CLOSE * b).all())


def _few(slopes: Tensor) -> str:
    """Return the first three slopes as text."""
    return ", ".join(f"{slope:.3g}" for slope in slopes[:3].tolist())


def _ahead(bias: Tensor) -> str:
    """Return a remark if the first query has a larger bias for the last key than for its own place;
    "" if not."""
    if bias.shape[1] == 1 or not (gain := (bias[:, 0, -1] - bias[:, 0, 0]).max().item()) > 0:
        return ""
    return f"; keys ahead are rewarded, by {gain:.3g} logits at {bias.shape[-1] - 1}: causal only"
