"""Run torch's flash attention on the CPU, forward and backward, and get its log-sum-exp.

Where torch lacks these two operators, or they compute wrongly, attention runs in another way. The
log-sum-exp lets `join_attention` combine attention over disjoint sets of keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend import torch_faults
from posenc.encodings.numerics.tensor_views import repeat_kv_heads
from posenc.encodings.numerics.torch_modes import is_readable


def runs_on(device: torch.device) -> bool:
    """Return True if torch's two operators for flash attention exist, run on this device and
    compute right."""
    return why_cannot_run_on(device) == ""


def why_cannot_run_on(device: torch.device) -> str:
    """Return why torch's two operators for flash attention cannot run on this device, "" if they
    can."""
    if device.type != "cpu":
        return "only torch's flash kernel for the CPU can run it"
    return torch_faults.faults().operators_fault


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q k^T + bias) v, (batch, num_heads, rows, width), and the log-sum-exp
    of each row, (batch, num_heads, rows).

    q (batch, num_heads, rows, width); k, v (batch, num_kv_heads, keys, width), all of one width,
    see `pad_to_same_width`. bias has four axes, broadcasts to (batch, num_heads, rows, keys), and
    is -inf where `visible` is False; for bias=None a causal mask applies. Queries that see no key
    get zeros and -inf.
    """
    assert torch_faults.FLASH_FORWARD is not None
    k, v = zero_hidden_keys(visible, k, v)
    if torch_faults.faults().reads_grouped_heads_wrongly:
        k = repeat_kv_heads(k, q.shape[1])
        v = repeat_kv_heads(v, q.shape[1])
    if bias is None:
        return torch_faults.FLASH_FORWARD(q, k, v, is_causal=True, scale=scale)
    # Up to torch 2.6 the kernel takes no notice of the stride of keys.
    out, lse = torch_faults.FLASH_FORWARD(
        q, k, v, attn_mask=make_last_axis_contiguous(bias), scale=scale
    )
    if visible is not None:
        sees_no_key = ~visible.any(-1)
        out = out.masked_fill(sees_no_key[..., None], 0)
        lse = lse.masked_fill(sees_no_key, -torch.inf)
    # The kernel's log-sum-exp over no key is 0: without a 0 there is nothing to correct.
    if not (is_readable(lse) and bool(lse.all())):
        lse = lse.masked_fill(bias.amax(-1) == -torch.inf, -torch.inf)
    return out, lse


def attend_on_any_device(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, visible: Tensor | None
) -> Tensor:
    """Return the output of `attend` from torch's kernel for any device, which reads a bias in the
    dtype of q only.

    Adding a number to a row of bias does not change the softmax. Here the largest bias of each row
    becomes 0, so that rounding matters only to keys with less weight: with 8,192 keys it changes
    the output by at most 0.2 %, which bfloat16 does anyway. Without this, Sandwich's bias, of up to
    128, would change it by 1.3 %.
    """
    largest_bias = bias.amax(-1, keepdim=True)
    sees_no_key = largest_bias == -torch.inf
    bias = (bias - largest_bias.masked_fill(sees_no_key, 0)).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q,
        *zero_hidden_keys(visible, k, v),
        attn_mask=bias,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.masked_fill(sees_no_key, 0)


def zero_hidden_keys(visible: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with zeros for those that no query sees: padding may be NaN, and 0
    times NaN is NaN. `visible`: (batch, heads, rows, keys), True for visible pairs; None if all are
    visible."""
    if visible is None:
        return k, v
    # A key counts as hidden only if no query of any head sees it: heads may share keys.
    is_hidden = ~visible.any(-2).any(1, keepdim=True)[..., None]
    return k.masked_fill(is_hidden, 0), v.masked_fill(is_hidden, 0)


class QueryRows(NamedTuple):
    """Hold tensors of some queries that the backward kernel reads, each (batch, num_heads, rows,
    ...)."""

    grad: Tensor
    """Gradient of the output."""
    q: Tensor
    out: Tensor
    lse: Tensor


def gradients(
    rows: QueryRows, k_and_v: tuple[Tensor, Tensor], bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the gradient of the output.

    rows: the queries, with their results and the gradient of the output.
    k_and_v: keys and values, with as many heads as q; they may be only a part of those that the
        forward pass read.
    bias: of these rows and keys, (batch or 1, num_heads or 1, rows, keys).
    """
    assert torch_faults.FLASH_BACKWARD is not None
    grad, q, out, lse = rows
    k, v = k_and_v
    bias = make_last_axis_contiguous(bias)  # as in `attend`
    return torch_faults.FLASH_BACKWARD(
        grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale
    )


def join_attention(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint sets of keys, each given as (output, log-sum-exp), and return
    (output, log-sum-exp) of attention over all keys. A query that sees no key of a set has output 0
    and log-sum-exp -inf in it.

    lse = log(sum of exp(lse_s) over sets s), out = sum of exp(lse_s - lse) out_s
    """
    if len(results) == 1:
        return results[0]
    joined_lse = torch.stack([lse for _, lse in results]).logsumexp(0)
    # A query without keys has -inf, and -inf - -inf would be NaN; exp(-inf - 0) is 0.
    finite_lse = joined_lse.masked_fill(joined_lse == -torch.inf, 0)
    factors = [(lse - finite_lse).exp()[..., None] for _, lse in results]
    first_out, _ = results[0]
    out = first_out * factors[0]
    for (next_out, _), factor in zip(results[1:], factors[1:], strict=True):
        out = out.addcmul_(next_out.to(out.dtype), factor)
    return out.to(first_out.dtype), joined_lse


def pad_to_same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad the tensors to the widest head dimension, with contiguous channels, because the operators
    read as many channels of k and v as q has."""
    width = max(t.shape[-1] for t in tensors)
    return [make_last_axis_contiguous(_pad_width(t, width)) for t in tensors]


def _pad_width(t: Tensor, width: int) -> Tensor:
    """Append channels of zeros to t, up to `width` of them; return t itself if it has as many."""
    num_missing = width - t.shape[-1]
    return F.pad(t, (0, num_missing)) if num_missing else t


def make_last_axis_contiguous(t: Tensor) -> Tensor:
    """Return t, or a copy if its last axis is not contiguous in memory."""
    return t if t.stride(-1) == 1 else t.clone(memory_format=torch.contiguous_format)
