"""Linear attention with RoPE: a function of its own, because it has no scores to change."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from posenc.arguments import explain_misfits
from posenc.encodings import RoPE, Rotation
from posenc.encodings.base.check_inputs import check_vectors
from posenc.encodings.numerics.precision import at_least_float32
from posenc.positions.tokens import Positions


def elu_feature_map(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return elu(x) + 1, which is positive: the usual feature map of linear attention."""
    return F.elu(x) + 1


@explain_misfits
def linear_attention(
    q: Float[Tensor, "batch num_heads len head_dim"],
    k: Float[Tensor, "batch num_heads len head_dim"],
    v: Float[Tensor, "batch num_heads len v_dim"],
    rope: RoPE,
    positions: Positions,
    *,
    causal: bool = True,
    feature_map: Callable[[Tensor], Tensor] = elu_feature_map,
    chunk_size: int = 128,
) -> Float[Tensor, "batch num_heads len v_dim"]:
    """Compute linear attention with rotated features, O(len) in time and memory.

    out_i = sum_j (R_i f(q_i)) . (R_j f(k_j)) v_j / sum_j f(q_i) . f(k_j)

    The denominator is not rotated, so it stays positive.

    Args:
        rope: the rotation R, built for the head_dim of q and k.
        positions: (len) or (batch, len), for `rope`; causal attention follows the order in memory.
        causal: sum over j <= i; False: over all j.
        feature_map: f, a function of q or k in float32 or better, to positive numbers of the same
            shape.
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
    q_features = feature_map(q.to(dtype))
    k_features = feature_map(k.to(dtype))
    values = v.to(dtype)
    rotated_q, rotated_k = rope(q_features, k_features, positions)
    if causal:
        out = _attend_causally(q_features, k_features, rotated_q, rotated_k, values, chunk_size)
    else:
        denominator = q_features @ k_features.sum(-2, keepdim=True).mT
        out = rotated_q @ (rotated_k.mT @ values) / denominator
    return out.to(v.dtype)


def _attend_causally(
    q_features: Tensor,
    k_features: Tensor,
    rotated_q: Tensor,
    rotated_k: Tensor,
    values: Tensor,
    chunk_size: int,
) -> Tensor:
    """Return the output of causal linear attention, (batch, num_heads, len, v_dim), computed for a
    chunk of queries at a time.

    Keys of the same chunk are summed by a masked product, those of earlier chunks by two running
    sums, so that no matrix has len x len numbers.
    """
    # What all earlier chunks add: sum_j R_j f(k_j) v_j^T and sum_j f(k_j).
    key_value_sum = values.new_zeros(*q_features.shape[:2], q_features.shape[-1], values.shape[-1])
    key_sum = values.new_zeros(*q_features.shape[:2], q_features.shape[-1], 1)
    outputs = []
    for start in range(0, max(1, q_features.shape[2]), chunk_size):
        chunk_slice = slice(start, start + chunk_size)
        q_chunk = q_features[:, :, chunk_slice]
        k_chunk = k_features[:, :, chunk_slice]
        rotated_q_chunk = rotated_q[:, :, chunk_slice]
        rotated_k_chunk = rotated_k[:, :, chunk_slice]
        v_chunk = values[:, :, chunk_slice]
        scores = (rotated_q_chunk @ rotated_k_chunk.mT).tril()
        numerator = rotated_q_chunk @ key_value_sum + scores @ v_chunk
        weights = (q_chunk @ k_chunk.mT).tril()
        denominator = q_chunk @ key_sum + weights.sum(-1, keepdim=True)
        outputs.append(numerator / denominator)
        key_value_sum = key_value_sum + rotated_k_chunk.mT @ v_chunk
        key_sum = key_sum + k_chunk.sum(-2)[..., None]
    return torch.cat(outputs, dim=2)
