"""Rotate pairs of channels: what every rotary method does to q and k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posenc.numbers.precision import at_least_float32
from posenc.numbers.tracking import has_tangent, transformed
from posenc.queries_keys.rotation import kernel as rope

FEW = 1 << 12
"""Numbers in q and k up to which calling an operation costs more than what it does."""
CHUNK = 1 << 17
"""Numbers rotated at a time on the CPU, few enough that every step between the first read and the
last write stays in a core's cache."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of x (batch, heads, len, head_dim); the rest
    passes through.

    Pair t is (2t, 2t+1) if `interleaved`, else (t, t + rotary_dim/2). cos and sin are (len, pairs)
    or (batch, len, pairs); the rotation is computed in their dtype or x's, whichever is wider, and
    rounded once. A learned cos or sin gets its gradient.
    """
    return rotate_together((x,), cos, sin, interleaved=interleaved)[0]


def rotate_together(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool
) -> Sequence[Tensor]:
    """`rotate` for q and k of the same tokens, which may differ in heads: one launch on CUDA, one
    node of the gradient's graph."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    graded = torch.is_grad_enabled()
    if (
        torch.compiler.is_compiling()  # a compiler fuses plain operations by itself
        or (graded and (cos.requires_grad or sin.requires_grad))
        or any(type(x) is not Tensor for x in xs)
        or transformed()
        or has_tangent(*xs, cos, sin)
    ):
        return [_plain(x, cos, sin, interleaved) for x in xs]
    if graded and any(x.requires_grad for x in xs):
        return _Rotate.apply(cos, sin, interleaved, *xs)  # type: ignore[return-value]
    return _once(xs, cos, sin, interleaved)


def _plain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    wide = x[..., :rotary_dim].to(_work_dtype(x, cos))
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    a, b = first * cos - second * sin, second * cos + first * sin
    out = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    out = out.to(x.dtype)
    return out if rotary_dim == x.shape[-1] else torch.cat([out, x[..., rotary_dim:]], dim=-1)


class _Rotate(torch.autograd.Function):
    """The backward pass is the rotation the other way; nothing of x is kept."""

    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, sin: Tensor, interleaved: bool, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return tuple(_once(xs, cos, sin, interleaved))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled() and any(grad.requires_grad for grad in grads):
            # somebody needs a gradient of this gradient
            turned: Sequence[Tensor] = _Rotate.apply(cos, -sin, ctx.interleaved, *grads)  # type: ignore[assignment]
        else:
            turned = _once(grads, cos, -sin, ctx.interleaved)
        return None, None, None, *turned


def _once(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool) -> Sequence[Tensor]:
    """Write each output once and allocate nothing else of its size."""
    if sum(x.numel() for x in xs) <= FEW and xs[0].device.type == "cpu":
        return _few(xs, cos, sin, interleaved)
    if rope.takes(xs, cos):
        return rope.rotate(xs, cos, sin, interleaved)
    return [_in_chunks(x, cos, sin, interleaved) for x in xs]


def _few(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool) -> Sequence[Tensor]:
    """A token or two: as few operations as there can be, for q and k together."""
    alike = len({(x.shape[0], x.shape[2:], x.dtype) for x in xs}) == 1
    if len(xs) == 1 or not alike:
        return [_plain(x, cos, sin, interleaved) for x in xs]
    turned = _plain(torch.cat(list(xs), dim=1), cos, sin, interleaved)
    return turned.split([x.shape[1] for x in xs], dim=1)


def _in_chunks(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The leanest plain operations: a few tokens at a time."""
    rotary_dim, length = 2 * cos.shape[-1], x.shape[-2]
    work = _work_dtype(x, cos)
    cos, sin = cos.to(work), sin.to(work)
    out = torch.empty_like(x)
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    source, target = x[..., :rotary_dim], out[..., :rotary_dim]
    narrow = x.dtype != work or (interleaved and not (_pairs(source) and _pairs(target)))
    step = max(1, length)  # enough for a single operation: interleaved and not narrow
    if x.device.type == "cpu" and (narrow or not interleaved):
        step = max(1, CHUNK * length // max(1, source.numel()))
    factor = torch.complex(cos, sin) if interleaved else torch.cat([cos, cos], dim=-1)
    scratch: tuple[Tensor, Tensor] | None = None
    for start in range(0, length, step):
        count = min(step, length - start)
        x_part = source.narrow(-2, start, count)
        out_part = target.narrow(-2, start, count)
        if narrow:  # the same two buffers for all chunks: they stay in the cache
            if scratch is None or scratch[0].shape != x_part.shape:
                shape = x_part.shape
                scratch = (
                    torch.empty(shape, dtype=work, device=x.device),
                    torch.empty(shape, dtype=work, device=x.device),
                )
            wide, result = scratch
            wide.copy_(x_part)
        else:
            wide, result = x_part, out_part
        part_factor, part_sin = (t.narrow(-2, start, count) for t in (factor, sin))
        if interleaved:
            complex_x, complex_out = (
                torch.view_as_complex(t.unflatten(-1, (-1, 2))) for t in (wide, result)
            )
            torch.mul(complex_x, part_factor, out=complex_out)
        else:
            (first, second), (a, b) = wide.chunk(2, -1), result.chunk(2, -1)
            torch.mul(wide, part_factor, out=result)
            a.addcmul_(second, part_sin, value=-1)
            b.addcmul_(first, part_sin)
        if narrow:
            out_part.copy_(result)
    return out


def _pairs(t: Tensor) -> bool:
    """Whether neighbours can be seen as one complex number where they lie."""
    return (
        t.stride(-1) == 1
        and t.storage_offset() % 2 == 0
        and all(stride % 2 == 0 for stride in t.stride()[:-1])
    )


def _work_dtype(x: Tensor, cos: Tensor) -> torch.dtype:
    return torch.promote_types(at_least_float32(x.dtype), cos.dtype)
