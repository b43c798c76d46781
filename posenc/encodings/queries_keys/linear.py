"""Linear attention with RoPE: a function of its own, because it has no scores to change."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from posenc.arguments import answered
from posenc.encodings.base.boundary import check_vectors
from posenc.encodings.numbers.precision import at_least_float32
from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.queries_keys.rotation.base import Rotation
from posenc.positions import Positions


def elu_feature(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return elu(x) + 1, which is positive: the usual feature map of linear attention."""
    return F.elu(x) + 1


@answered
def linear_attention(
    q: Float[Tensor, "batch num_heads len head_dim"],
    k: Float[Tensor, "batch num_heads len head_dim"],
    v: Float[Tensor, "batch num_heads len v_dim"],
    rope: RoPE,
    positions: Positions,
    *,
    causal: bool = True,
    feature: Callable[[Tensor], Tensor] = elu_feature,
    chunk_size: int = 128,
) -> Float[Tensor, "batch num_heads len v_dim"]:
    """Compute linear attention with rotated features, O(len) in time and memory.

    out_i = sum_j (R_i f(q_i)) . (R_j f(k_j)) v_j / sum_j f(q_i) . f(k_j)

    The denominator is not rotated, so it stays positive.

    Args:
        rope: the rotation R, built for the head_dim of q and k.
        positions: (len) or (batch, len), for `rope`; causal attention follows the order in memory.
        causal: sum over j <= i; False: over all j.
        feature: f, a function that makes the channels positive.
        chunk_size: tokens computed at once in the causal form.

    Shapes: q, k (batch, num_heads, len, head_dim), v (batch, num_heads, len, v_dim) -> like v.
    Precision: float32 or better, returned in v's dtype.
    Raises: ValueError if the heads of k or v differ from those of q.
    Source: Su et al. 2021, arXiv:2104.09864, section 3.3, equation 19.

    >>> rope = posenc.RoPE(head_dim=16, interleaved=False)
    >>> q = k = v = torch.randn(1, 4, 6, 16)
    >>> posenc.linear_attention(q, k, v, rope, torch.arange(6)).shape
    torch.Size([1, 4, 6, 16])
    """
    check_vectors("linear_attention", q=q, k=k, v=v)
    if not isinstance(rope, Rotation):
        raise TypeError(
            f"linear_attention: rope must be a rotation, such as RoPE, got {type(rope).__name__}."
        )
    if chunk_size < 1:
        raise ValueError(f"linear_attention: chunk_size must be at least 1, got {chunk_size}.")
    if q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        raise ValueError(
            "linear_attention: q and k must have one shape, and v their batch, heads and length, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}."
        )
    dtype = at_least_float32(v.dtype)
    fq, fk, values = feature(q.to(dtype)), feature(k.to(dtype)), v.to(dtype)
    rotated_q, rotated_k = rope(fq, fk, positions)
    if not causal:
        total = fq @ fk.sum(-2, keepdim=True).mT
        return (rotated_q @ (rotated_k.mT @ values) / total).to(v.dtype)
    state = values.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    norm = values.new_zeros(*q.shape[:2], q.shape[-1], 1)
    out = []
    for start in range(0, max(1, q.shape[2]), chunk_size):
        part = slice(start, start + chunk_size)
        nq, nk = fq[:, :, part], fk[:, :, part]
        rq, rk, rv = rotated_q[:, :, part], rotated_k[:, :, part], values[:, :, part]
        above = rq @ state + (rq @ rk.mT).tril() @ rv
        below = nq @ norm + (nq @ nk.mT).tril().sum(-1, keepdim=True)
        out.append(above / below)
        state = state + rk.mT @ rv
        norm = norm + nk.sum(-2)[..., None]
    return torch.cat(out, dim=2).to(v.dtype)
