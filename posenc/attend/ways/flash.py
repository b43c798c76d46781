"""Run torch's flash attention on the CPU, forward and backward, and get its log-sum-exp.

These two operators are the only private names of torch that attention uses. torch's public function
does not return the log-sum-exp, which is needed to join attention over parts of the keys and to
differentiate a part. Versions of torch without these operators run plain operations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.encodings.numbers.heads import for_every_head
from posenc.encodings.numbers.precision import at_least_float32

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q k^T + bias) v and the log-sum-exp of each row.

    q (batch, num_heads, rows, width); k, v (batch, num_kv_heads, keys, width), all of one width,
    see `same_width`; bias broadcasts to (batch, num_heads, rows, keys) and has four axes.
    """
    if _FORWARD is None:
        return _plain(q, k, v, bias, scale)
    return _FORWARD(q, k, v, attn_mask=bias, scale=scale)


def gradients(
    mine: Sequence[Tensor], theirs: tuple[Tensor, Tensor], bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from those of the output. `mine`: gradient of the output,
    q, output and log-sum-exp; `theirs`: k and v, with as many heads as q, possibly only part of the
    keys, whose bias is `bias`."""
    if _BACKWARD is None:
        return _plain_gradients(mine, theirs, bias, scale)
    (grad, q, out, lse), (k, v) = mine, theirs
    return _BACKWARD(grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale)


def join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint sets of keys, each (output, log-sum-exp), into that over all. A
    query that sees no key of a set has log-sum-exp -inf and output 0 in it."""
    out, lse = parts[0]
    for more, more_lse in parts[1:]:
        share = (more_lse - lse).nan_to_num(0).sigmoid()  # NaN: neither part has a key
        out = torch.lerp(out, more, share.unsqueeze(-1).to(out.dtype))
        lse = torch.logaddexp(lse, more_lse)
    return out, lse


def same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad the tensors to the widest head dimension, with contiguous channels, because the operators
    read as many channels of k and v as q has."""
    width = max(t.shape[-1] for t in tensors)
    missing = [width - t.shape[-1] for t in tensors]
    return [adjacent(F.pad(t, (0, m)) if m else t) for t, m in zip(tensors, missing, strict=True)]


def adjacent(t: Tensor) -> Tensor:
    """Copy t if its channels are not contiguous in memory."""
    return t if t.stride(-1) == 1 else t.clone(memory_format=torch.contiguous_format)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    wide = at_least_float32(q.dtype)
    scores = scale * q.to(wide) @ for_every_head(k, q.shape[1]).to(wide).mT
    return scores if bias is None else scores + bias


def _plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias, scale)
    weights = scores.softmax(-1).nan_to_num(0)  # a row that sees no key
    out = weights @ for_every_head(v, q.shape[1]).to(weights.dtype)
    return out.to(q.dtype), scores.logsumexp(-1)


def _plain_gradients(
    mine: Sequence[Tensor], theirs: tuple[Tensor, Tensor], bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    (grad, q, out, lse), (k, v) = mine, theirs
    weights = (_scores(q, k, bias, scale) - lse[..., None]).exp().nan_to_num(0)
    wide = weights.dtype
    grad, v, out = grad.to(wide), v.to(wide), out.to(wide)
    mean = (grad * out).sum(-1, keepdim=True)
    d_scores = scale * weights * (grad @ v.mT - mean)
    d_q, d_k = d_scores @ k.to(wide), d_scores.mT @ q.to(wide)
    return d_q.to(q.dtype), d_k.to(k.dtype), (weights.mT @ grad).to(q.dtype)
