"""Rotate pairs of channels, for every rotary method; convert weights between the two layouts."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from posenc.arguments import explain_misfits
from posenc.encodings.numerics.precision import at_least_float32

MAX_TORCH_OPS_ELEMENTS = 1 << 12
"""Number of elements of q and k together up to which the CPU rotates by plain operations of torch:
for so few, they are faster than a node of autograd written in Python."""
STRIP_ELEMENTS = 1 << 17
"""Elements rotated at a time on the CPU, so that intermediate results stay in its cache: 512 KiB in
float32."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of x (batch, heads, len, head_dim); the rest is
    unchanged. Pair t is (2t, 2t+1) if `interleaved`, else (t, t + rotary_dim/2). cos and sin are
    (len, pairs) or (batch, len, pairs). The rotation is computed in their dtype or x's, whichever
    is wider, in at least float32, and rounded once. Gradients flow to cos and sin too."""
    return rotate_together((x,), cos, sin, interleaved=interleaved)[0]


def rotate_together(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool
) -> Sequence[Tensor]:
    """Rotate q and k of the same tokens, see `rotate`, by one launch on CUDA and one node in
    autograd's graph. Their numbers of heads may differ.

    Raises: RuntimeError if cos and sin do not fit the tokens or the channels.
    """
    cos = cos.unsqueeze(-3)  # one axis for the heads
    sin = sin.unsqueeze(-3)
    # A compiler fuses plain operations; subclasses of Tensor may have no memory to write into.
    if torch.compiler.is_compiling() or any(type(x) is not Tensor for x in xs):
        return _rotate_each_with_torch_ops(interleaved, cos, sin, *xs)
    if xs[0].device.type == "cpu" and sum(x.numel() for x in xs) <= MAX_TORCH_OPS_ELEMENTS:
        return _rotate_each_with_torch_ops(interleaved, cos, sin, *xs)
    return _OnePassRotation.apply(interleaved, cos, sin, *xs)  # type: ignore[return-value]


def _rotate_each_with_torch_ops(
    interleaved: bool, cos: Tensor, sin: Tensor, *xs: Tensor
) -> tuple[Tensor, ...]:
    """Return each x rotated as by `rotate_together`, with plain operations, which every transform
    of torch can follow."""
    return tuple(_rotate_with_torch_ops(x, cos, sin, interleaved) for x in xs)


def _rotate_with_torch_ops(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x with (a cos - b sin, b cos + a sin) for each pair (a, b) of rotated channels, by
    plain operations."""
    rotary_dim = 2 * cos.shape[-1]
    rotary_channels = x[..., :rotary_dim].to(_work_dtype(x, cos))
    if interleaved:
        a = rotary_channels[..., 0::2]
        b = rotary_channels[..., 1::2]
    else:
        a, b = rotary_channels.chunk(2, dim=-1)
    new_a = torch.addcmul(a * cos, b, sin, value=-1)
    new_b = torch.addcmul(b * cos, a, sin)
    if interleaved:
        out = torch.stack([new_a, new_b], -1).flatten(-2).to(x.dtype)
    else:
        out = torch.cat([new_a, new_b], -1).to(x.dtype)
    if rotary_dim == x.shape[-1]:
        return out
    return torch.cat([out, x[..., rotary_dim:]], dim=-1)


class _OnePassRotation(torch.autograd.Function):
    """Rotate in one pass over memory, as one node of autograd's graph.

    The gradient is the rotation by the negative angle, so x is saved only if cos and sin need
    gradients. The rotation is linear in x and in (cos, sin): a tangent is the sum of two rotations.
    """

    @staticmethod
    def forward(interleaved: bool, cos: Tensor, sin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        if xs[0].device.type == "cuda" and has_triton():
            from posenc.encodings.queries_keys import triton_rotation

            return triton_rotation.rotate_by_kernel(xs, cos, sin, interleaved)
        return tuple(_rotate_in_strips(x, cos, sin, interleaved) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.interleaved, cos, sin, *xs = inputs
        ctx.tables_need_gradient = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(cos, sin, *(xs if ctx.tables_need_gradient else ()))
        ctx.save_for_forward(cos, sin, *xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *xs = ctx.saved_tensors
        if ctx.tables_need_gradient:
            rotate_each = functools.partial(_rotate_each_with_torch_ops, ctx.interleaved)
            return None, *torch.func.vjp(rotate_each, cos, sin, *xs)[1](grads)
        gradients = _OnePassRotation.apply(ctx.interleaved, cos, -sin, *grads)
        return None, None, None, *gradients  # type: ignore[misc]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        _, d_cos, d_sin, *d_xs = tangents
        cos, sin, *xs = ctx.saved_tensors
        rotary_dim = 2 * cos.shape[-1]
        through_x = _rotate_each_with_torch_ops(ctx.interleaved, cos, sin, *d_xs)
        through_tables = _rotate_each_with_torch_ops(
            ctx.interleaved, d_cos, d_sin, *(x[..., :rotary_dim] for x in xs)
        )
        return tuple(
            tangent_through_x
            + F.pad(tangent_through_tables, (0, tangent_through_x.shape[-1] - rotary_dim))
            for tangent_through_x, tangent_through_tables in zip(
                through_x, through_tables, strict=True
            )
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], int]:
        rotate_each = functools.partial(_rotate_each_with_torch_ops, args[0])
        return torch.vmap(rotate_each, in_dims[1:])(*args[1:]), 0


def _rotate_in_strips(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x (batch, heads, len, head_dim) rotated as by `rotate_together`, on the CPU. It works
    on a few tokens at a time, so that main memory is read and written only once."""
    rotary_dim = 2 * cos.shape[-1]
    length = x.shape[-2]
    work_dtype = _work_dtype(x, cos)
    cos = cos.to(work_dtype).expand(*cos.shape[:-2], length, -1)
    sin = sin.to(work_dtype).expand(*sin.shape[:-2], length, -1)
    factor = torch.complex(cos, sin) if interleaved else torch.cat([cos, cos], dim=-1)
    if interleaved and x.dtype == work_dtype:  # one operation
        rotated = _rotate_neighbours(x[..., :rotary_dim], factor)
        unrotated = x[..., rotary_dim:]
        return torch.cat([rotated, unrotated], dim=-1) if unrotated.shape[-1] else rotated
    out = torch.empty_like(x)  # all of it is written below
    out[..., rotary_dim:] = x[..., rotary_dim:]
    strip_length = max(1, STRIP_ELEMENTS * length // max(1, x.numel()))
    for start in range(0, length, strip_length):
        strip = slice(start, start + strip_length)
        x_strip = x[..., strip, :rotary_dim].to(work_dtype)
        out_strip = out[..., strip, :rotary_dim]
        if interleaved:
            out_strip.copy_(_rotate_neighbours(x_strip, factor[..., strip, :]))
        elif x.dtype == work_dtype:  # in place in the result
            out_strip.copy_(x_strip)
            _rotate_half_split_pairs(x_strip, out_strip, factor[..., strip, :], sin[..., strip, :])
        else:
            # `x_strip` is a copy in the work dtype, and is read while `rotated_strip` is written:
            # each half of the result needs both halves of it.
            rotated_strip = x_strip.clone()
            out_strip.copy_(
                _rotate_half_split_pairs(
                    x_strip, rotated_strip, factor[..., strip, :], sin[..., strip, :]
                )
            )
    return out


def _rotate_neighbours(x: Tensor, factor: Tensor) -> Tensor:
    """Return x (..., channels) with each pair (2t, 2t+1) rotated: as a complex number x[2t] + i
    x[2t+1], times `factor`, (..., channels / 2), which is cos + i sin."""
    # A view as complex numbers needs both channels of a pair in one place of 2 numbers.
    is_aligned = all(step % 2 == 0 for step in (*x.stride()[:-1], x.storage_offset()))
    if not is_aligned or x.stride(-1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factor).reshape(x.shape)


def _rotate_half_split_pairs(x: Tensor, out: Tensor, cos_twice: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (t, t + num_pairs) of `out` in place, and return it.

    x: (..., 2 * num_pairs), the vectors to rotate. out: a copy of x.
    cos_twice: (..., 2 * num_pairs), the cosine of a pair at both of its channels. sin: (...,
    num_pairs).
    """
    num_pairs = sin.shape[-1]
    out.mul_(cos_twice)
    out[..., :num_pairs].addcmul_(x[..., num_pairs:], sin, value=-1)
    out[..., num_pairs:].addcmul_(x[..., :num_pairs], sin)
    return out


def _work_dtype(x: Tensor, cos: Tensor) -> torch.dtype:
    """Return the dtype in which x is rotated: the wider one of the dtypes of x and cos, at least
    float32."""
    return torch.promote_types(at_least_float32(x.dtype), cos.dtype)


@functools.cache
def has_triton() -> bool:
    """Return True if Triton 3 or newer can be imported; the kernel needs its operations."""
    try:
        return int(importlib.import_module("triton").__version__.partition(".")[0]) >= 3
    except (ImportError, AttributeError, ValueError):
        return False


def layout_permutation(
    head_dim: int, rotary_dim: int | None = None, *, to: Literal["half_split", "interleaved"]
) -> Int[Tensor, " {head_dim}"]:
    """Return, for each channel of a head in the layout `to`, the index of the same channel in the
    other layout: (head_dim,).

    Pair t is channels (2t, 2t+1) if interleaved, (t, t + rotary_dim/2) if half-split. Channels from
    rotary_dim on, which do not rotate, keep their index.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"layout_permutation: rotary_dim must be even and between 2 and head_dim={head_dim}, "
            f"got {rotary_dim}."
        )
    if to not in ("half_split", "interleaved"):
        raise ValueError(
            f"layout_permutation: to must be 'half_split' or 'interleaved', got {to!r}."
        )
    rotated_indices = torch.arange(rotary_dim).view((2, -1) if to == "interleaved" else (-1, 2)).T
    return torch.cat([rotated_indices.flatten(), torch.arange(rotary_dim, head_dim)])


@explain_misfits
def convert_layout(
    weight: Shaped[Tensor, "*shape"],
    head_dim: int,
    *,
    to: Literal["half_split", "interleaved"],
    rotary_dim: int | None = None,
    dim: int = 0,
) -> Shaped[Tensor, "*shape"]:
    """Permute the output channels of a query or key weight from one layout to the other.

    weight'[h * head_dim + c] = weight[h * head_dim + permutation[c]]

    Convert all weights that produce or scale q and k: projections, their biases, q- and k-norms. Do
    not convert v and o. The number of heads follows from the size, so grouped queries need no
    special case.

    Args:
        weight: (num_heads * head_dim, in_features) as torch stores it, or a bias
            (num_heads * head_dim), or a norm's weight (head_dim) or (num_heads * head_dim).
        head_dim: size of one head.
        to: the new layout; the weight must be in the other one.
        rotary_dim: number of rotated channels, the first of each head; None means all.
        dim: the axis of output channels; -1 for kernels stored (in_features, out_features).

    Returns: a new tensor like `weight`.
    Raises: ValueError if the sizes do not fit.
    Source: Su et al. 2021, arXiv:2104.09864, for the pairs.

    >>> weight = torch.arange(4.0)[:, None]  # one head of four channels
    >>> posenc.convert_layout(weight, head_dim=4, to="half_split")[:, 0]
    tensor([0., 2., 1., 3.])
    """
    num_channels = weight.shape[dim]
    if num_channels % head_dim:
        raise ValueError(
            f"convert_layout: axis {dim} must be whole heads of {head_dim} channels, "
            f"got {num_channels} (weight with shape {tuple(weight.shape)})."
        )
    permutation = layout_permutation(head_dim, rotary_dim, to=to)
    head_starts = torch.arange(0, num_channels, head_dim)[:, None]
    return weight.index_select(dim, (head_starts + permutation).flatten().to(weight.device))
