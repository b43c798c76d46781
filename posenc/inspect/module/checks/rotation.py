"""Check that a rotation is one: of pairs, from none at position 0, alike for queries and keys, at
the stated frequencies."""

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from posenc.inspect.module.errors import in_head
from posenc.inspect.module.subject import Measured, Subject, modules_of

CLOSE = 1e-3
"""Radians, or parts of a length: what float32 adds up to over a few positions."""
_FIRST = torch.tensor([0, 1, 4, 9])
"""Places whose rotations are read, and then those as much later as the module's length allows."""

_BASES = ("base", "theta", "rope_theta", "rotary_emb_base", "rope_base")
_SCALED = re.compile(r"scal|factor|alpha|ntk|yarn|interpol|freqs_for|custom", re.I)
_PLAIN = ("default", "lang")
"""Values of options with such names that mean RoPE's own frequencies; as 0, 1, None and False."""
_USUAL = (10000.0, 500000.0, 1000000.0)
"""Bases at which a module that states none is looked for rounded frequencies."""


def position_zero(subject: Subject) -> Measured:
    """Check that position 0 is not rotated. Where it is, cosines and sines are exchanged, or the
    positions begin elsewhere."""
    if subject.view.kind != "rotation" or subject.view.how == "sinusoids":
        return None, "rotates nothing"
    first = subject.see(subject.inputs(min(8, subject.length)))[:1]
    worst = first.angle().abs().max().item()
    quarter = (first.angle().abs() - math.pi / 2).abs().max().item() <= CLOSE
    text = f"position 0 is rotated by up to {worst:.2g} rad"
    if not worst <= CLOSE and subject.view.how == "rotated content":
        text += in_head(subject.view.by_head(first).angle().abs())
    return worst <= CLOSE, text + ("; cosines and sines are exchanged" if quarter else "")


def pairs(subject: Subject) -> Measured:
    """Check that each pair of channels is rotated and scaled, and nothing else: both channels by
    the same cosine, and by sines of opposite signs."""
    if subject.view.how in ("cos and sin", "complex"):
        lengths = subject.see(subject.inputs(min(24, subject.length))).abs()
        worst = (lengths / lengths[:1] - 1).abs().max().item()
        return worst <= CLOSE, f"cos² + sin² changes by up to {worst:.2g} with the position"
    if subject.view.how != "rotated content":
        return None, "rotates nothing"
    first, second = (list(side) for side in zip(*subject.view.pairs, strict=True))
    worst, signs, scale = 0.0, 0.0, 0.0
    for side in _matrices(subject):
        a, b = side[..., first, first], side[..., first, second]
        c, d = side[..., second, first], side[..., second, second]
        scale = max(scale, side.abs().max().item())
        worst = max(worst, (a - d).abs().max().item(), (b + c).abs().max().item())
        signs = max(signs, (b - c).abs().max().item())
    text = f"the two channels of a pair differ from a rotation by up to {worst / scale:.2g}"
    if worst > CLOSE * scale and signs <= CLOSE * scale:
        text += "; both sines have the same sign, as in rotate_half without its minus"
    return worst <= CLOSE * scale, text


def shift(subject: Subject) -> Measured:
    """Check that the score of a query and a key, of any content, is the same where both stand
    later."""
    if subject.way != "rotate":
        return None, "rotates nothing"
    if subject.view.how != "rotated content":
        return None, "its pairs of channels are not known"
    sides = _matrices(subject)
    if len(sides) == 1:
        lengths = sides[0].norm(dim=-2)  # (places, heads, channels)
        if ((lengths / lengths[:1] - 1).abs() > CLOSE).any():
            return None, "scales what it rotates, and shows one side only"
    queries, keys = sides[0], sides[-1]
    count = len(_FIRST)
    changes = []
    for i in range(count):
        for j in range(count):
            score = queries[i].mT @ keys[j]  # (heads, channels, channels)
            moved = queries[count + i].mT @ keys[count + j] - score
            sizes = score.abs().amax((-2, -1)).clamp(min=1e-30)
            changes.append(moved.abs().amax((-2, -1)) / sizes)
    worst = torch.stack(changes).max().item()
    step = _step(subject)
    text = f"scores change by up to {worst:.2g} of their size where both tokens stand {step} later"
    return worst <= CLOSE, text


def _step(subject: Subject) -> int:
    """Return by how much tokens are moved. A scale that grows by a 4,096th with each token changes
    nothing over three."""
    return max(3, subject.length - int(_FIRST.max()) - 1)


def _matrices(subject: Subject) -> list[Tensor]:
    """Return the linear map of each side at the first and the later places: (places, heads,
    channels out, channels in)."""
    places = torch.cat([_FIRST, _FIRST + _step(subject)])
    last = int(places.max()) + 1
    module = subject.fresh()
    columns = []
    for unit in torch.eye(subject.width):
        returned = subject.form.call(module, subject.inputs(last, probe=unit))
        columns.append([side[places] for side in subject.view.channels(returned)])
    return [torch.stack(side, dim=-1) for side in zip(*columns, strict=True)]


def frequencies(subject: Subject) -> Measured:
    """Compare the frequencies with those of the module's own base for its number of pairs."""
    if subject.view.kind != "rotation":
        return None, "rotates nothing"
    heads = _frequencies_by_head(subject)
    turning = [head for head in heads if head is not None]
    if not turning:
        return None, "some pairs are not rotated, or it is asked for too few positions"
    inv_freq = turning[0]
    if len(turning) < len(heads) or not all(_equal(head, inv_freq) for head in turning):
        return None, "its heads have frequencies of their own, or none"
    bases = set(_stated(subject, _BASES))
    is_scaled = _is_scaled(subject)
    if len(bases) != 1:
        return _unstated(inv_freq)
    (base,) = bases
    count = len(inv_freq)
    if _equal(inv_freq, _rope_frequencies(base, count)):
        return True, f"those of base {base:g} for {count} pairs"
    if subject.view.how == "sinusoids" and _equal(inv_freq, _down_to_base(base, count)):
        return True, f"those of {count} pairs from 1 down to 1/{base:g}, as in tensor2tensor"
    if is_scaled:
        return None, f"scaled, as it states; base {base:g}"
    return _not_of_base(inv_freq, base)


def _not_of_base(inv_freq: Tensor, base: float) -> Measured:
    """Return the known mistake, if there is one, in frequencies that are not those of their
    base."""
    exact = _rope_frequencies(base, len(inv_freq))
    stated = f"states base {base:g} for {len(inv_freq)} pairs"
    for name, mistaken in _mistakes(inv_freq, base):
        if _equal(inv_freq, mistaken):
            return False, f"{stated}: {name}"
    if _equal(inv_freq.sort(descending=True).values, exact):
        return False, f"{stated}: pairs have each other's frequencies"
    off = ~_are_close(inv_freq, exact)
    # Methods for long texts slow the last pairs down. None changes a few pairs before exact ones.
    if off.sum() <= len(off) / 4 and not off[-1]:
        pair = int(off.int().argmax())
        speed = (inv_freq[pair] / exact[pair]).item()
        return False, f"{stated}: pair {pair}, from 0, turns {speed:.4g} times as fast"
    return None, f"frequencies of its own for base {base:g}"


def _unstated(inv_freq: Tensor) -> Measured:
    """Return what the frequencies of a module are that states no base."""
    count = len(inv_freq)
    for base in _USUAL:
        for name, mistaken in _rounded(base, count):
            if _equal(inv_freq, mistaken) and not _equal(inv_freq, _rope_frequencies(base, count)):
                return False, f"those of base {base:g}, {name}"
    base = _geometric(inv_freq)
    if base is None:
        return None, "states no base; frequencies of its own"
    times = "" if abs(inv_freq[0] - 1) <= CLOSE else f"{inv_freq[0]:.4g} times "
    return None, f"states no base; {times}those of base {base:.6g} for {count} pairs"


def _mistakes(inv_freq: Tensor, base: float) -> Iterator[tuple[str, Tensor]]:
    """Yield names of known mistakes, with the frequencies that they give."""
    count = len(inv_freq)
    exact = _rope_frequencies(base, count)
    yield from _rounded(base, count)
    yield "they begin at i = 1, not 0", exact * base ** (-1 / count)
    yield f"they are {inv_freq[0]:.4g} times those", exact * inv_freq[0]
    other = _geometric(inv_freq)
    if other is None or abs(inv_freq[0] - 1) > CLOSE:
        return
    width = 2 * count * math.log(base) / math.log(other)
    yield (
        f"they are those of base {other:.6g}, or of a width of {width:.4g} instead of {2 * count}",
        _rope_frequencies(other, count),
    )


def _rounded(base: float, count: int) -> Iterator[tuple[str, Tensor]]:
    """Yield RoPE's frequencies as they are after rounding to bfloat16 and to float16."""
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield f"rounded to {name}", _rope_frequencies(base, count).to(dtype).double()


def _rope_frequencies(base: float, count: int) -> Tensor:
    """Return RoPE's frequencies of `count` pairs: base^(-i / count)."""
    return base ** (-torch.arange(count, dtype=torch.float64) / count)


def _down_to_base(base: float, count: int) -> Tensor:
    """Return frequencies that fall by one ratio from 1 to 1 / base, which tensor2tensor and fairseq
    take for sinusoids: base^(-i / (count - 1))."""
    return base ** (-torch.arange(count, dtype=torch.float64) / max(count - 1, 1))


def _geometric(inv_freq: Tensor) -> float | None:
    """Return the base of frequencies that fall by one ratio; None if they do not."""
    ratios = inv_freq[1:] / inv_freq[:-1]
    if len(inv_freq) < 3 or not (ratios / ratios[0] - 1).abs().max() <= CLOSE or ratios[0] >= 1:
        return None
    return float((inv_freq[-1] / inv_freq[0]) ** (-len(inv_freq) / (len(inv_freq) - 1)))


def _equal(measured: Tensor, exact: Tensor) -> bool:
    """Return True if all frequencies are equal, but for what is measured wrongly."""
    return measured.shape == exact.shape and bool(_are_close(measured, exact).all())


def _are_close(measured: Tensor, exact: Tensor) -> Tensor:
    """Return for each frequency whether it differs by less than the error of its measurement."""
    return (measured - exact).abs() <= 2e-4 * exact + 1e-7


def _frequencies_by_head(subject: Subject) -> list[Tensor | None]:
    """Return the frequencies of each head of rotated content; for others, those of all as one."""
    if subject.length < 65:
        return []
    seen = subject.see(subject.inputs(65))
    if subject.view.how != "rotated content":
        return [_frequencies(seen)]
    queries = subject.view.by_head(seen)[:, 0]  # keys are alike, or another check fails
    return [_frequencies(head) for head in queries.unbind(1)]


def _frequencies(seen: Tensor) -> Tensor | None:
    """Return the frequency of each pair, in radians per position; None where some do not rotate.

    seen: (65 positions, pairs). A pair that stands in it several times is returned once.
    """
    steps = [(seen[n] * seen[0].conj()).angle() for n in (1, 8, 64)]
    inv_freq = steps[0]
    for n, angle in zip((8, 64), steps[1:], strict=True):  # each step refines the one before
        off = torch.remainder(angle - n * inv_freq + math.pi, 2 * math.pi) - math.pi
        inv_freq = inv_freq + off / n
    inv_freq = _without_copies(inv_freq.abs())
    return None if not len(inv_freq) or inv_freq.min() < 1e-9 else inv_freq


def _without_copies(inv_freq: Tensor) -> Tensor:
    """Return each pair's frequency once, in order: there may be a cosine for each channel, and for
    each head.

    (1, 1, 0.1, 0.1) and (1, 0.1, 1, 0.1) become (1, 0.1).
    """
    count = len(inv_freq)
    for size in range(1, count):
        if count % size:
            continue
        copies = count // size
        in_turn = inv_freq[:size]
        side_by_side = inv_freq[::copies]
        if (inv_freq - in_turn.repeat(copies)).abs().max() <= 1e-8:
            return _without_copies(in_turn)
        if (inv_freq - side_by_side.repeat_interleave(copies)).abs().max() <= 1e-8:
            return _without_copies(side_by_side)
    return inv_freq


def _stated(subject: Subject, names: tuple[str, ...]) -> list[float]:
    """Return the numbers of these names that the module states: as an attribute, in its config, or
    as a default of its constructor."""
    arguments: list[Any] = [subject.given[name] for name in names if name in subject.given]
    if arguments:
        return [float(value) for value in arguments if isinstance(value, int | float)]
    stated: list[Any] = []
    for module in modules_of(subject.module):
        stated += _stated_by(module, names)
    return [float(v) for v in stated if isinstance(v, int | float) and not isinstance(v, bool)]


def _stated_by(module: Any, names: tuple[str, ...]) -> list[Any]:
    """Return the values of these names in one module and its config; without any, the defaults of
    its constructor."""
    config = getattr(module, "config", None)
    values = []
    for held in (vars(module), getattr(config, "__dict__", {}), _rope_parameters(config)):
        values += [held[name] for name in names if name in held]
    return values or [p.default for p in _parameters(module) if p.name in names]


def _is_scaled(subject: Subject) -> bool:
    """Return True if the module, its config or its arguments state a scaling of frequencies."""
    stated: dict[str, Any] = {}
    for module in modules_of(subject.module):
        config = getattr(module, "config", None)
        stated |= {p.name: p.default for p in _parameters(module) if p.default is not p.empty}
        stated |= vars(module) | vars(module).get("_buffers", {}) | _rope_parameters(config)
    stated |= subject.given
    if stated.get("rope_type", "default") != "default":
        return True
    named = [value for name, value in stated.items() if _SCALED.search(name)]
    return any(not callable(value) and not _is_plain(value) for value in named)


def _is_plain(value: Any) -> bool:
    """Return True for a value that scales nothing."""
    return value is None or (isinstance(value, int | float | str) and value in (0, 1, *_PLAIN))


def _rope_parameters(config: Any) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None)
    return parameters if isinstance(parameters, dict) else {}


def _parameters(module: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(type(module).__init__).parameters.values())
    except (TypeError, ValueError):
        return []
