"""Attention with linear biases."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Real
from torch import Tensor, nn

from posenc.encodings.base.distance_bias import DistanceBias
from posenc.encodings.base.term import Formula, PairwiseBias, Tokens
from posenc.encodings.numerics.caches import Constants
from posenc.encodings.numerics.precision import float_distance, per_head
from posenc.encodings.numerics.slopes_and_buckets import alibi_slopes_and_sides
from posenc.positions.tokens import subtract_first_key


class ALiBi(DistanceBias):
    """Add a penalty that grows linearly with distance to the attention scores.

    score[h, i, j] += -slope[h] * |position_i - position_j|

    With a causal mask this is the paper's method. Without one, form="symmetric" does not
    distinguish past from future; form="left_right" does: the first half of the heads sees the past
    and the token itself, the second half the future and the token itself (-inf elsewhere), each
    half with the slopes of num_heads / 2 heads.

    Args:
        num_heads: number of query heads of this process, > 0.
        form: "symmetric" or "left_right"; the latter is for self-attention in encoders.
        learned: train the slopes, stored as logarithms, from the paper's values.
        bias_max: the exponent of the last slope of a power of two heads; MPT calls it
            alibi_bias_max.
        total_heads: heads of the whole model, if num_heads are those of one rank.
        head_offset: index of the first head of this rank.

    `slopes` is a tuple with the slope of each head (initial values if learned), for kernels that
    take them, such as flash-attn's alibi_slopes.

    Shapes: q_positions (batch, q_len), kv_positions (batch, kv_len) -> (batch, num_heads, q_len,
    kv_len).
    Units: positions in tokens; the bias is in logits (added before softmax, after
    1/sqrt(head_dim)).
    Precision: computed in float32 from the distance, so far positions lose no precision: distances
    are differences of whole numbers, and exact at any offset up to 2^62.
    Raises: ValueError if the heads do not fit total_heads or the form.
    Source: Press et al. 2022, arXiv:2108.12409, section 3;
    github.com/ofirpress/attention_with_linear_biases, its issue 5 for encoders.

    >>> posenc.ALiBi(num_heads=2)(torch.arange(3), torch.arange(3))[0]
    tensor([[-0.0000, -0.0625, -0.1250],
            [-0.0625, -0.0000, -0.0625],
            [-0.1250, -0.0625, -0.0000]])
    """

    claims = replace(DistanceBias.claims, source="Press et al. 2022, arXiv:2108.12409, section 3")
    bias_tensors = ("log_slopes",)

    def __init__(
        self,
        num_heads: int,
        *,
        form: Literal["symmetric", "left_right"] = "symmetric",
        learned: bool = False,
        bias_max: float = 8.0,
        total_heads: int | None = None,
        head_offset: int = 0,
    ) -> None:
        super().__init__()
        num_all_heads = num_heads if total_heads is None else total_heads
        if not 0 <= head_offset <= num_all_heads - num_heads:
            raise ValueError(
                f"ALiBi: heads {head_offset} to {head_offset + num_heads - 1} are not among "
                f"total_heads={num_all_heads}. total_heads counts the heads of all ranks."
            )
        if form not in ("symmetric", "left_right"):
            raise ValueError(f"ALiBi: form must be 'symmetric' or 'left_right', got {form!r}.")
        if form == "left_right" and num_all_heads % 2:
            raise ValueError(
                f"ALiBi: form='left_right' needs an even number of heads, got {num_all_heads}."
            )
        heads_of_rank = slice(head_offset, head_offset + num_heads)
        all_slopes, sides = alibi_slopes_and_sides(num_all_heads, form == "left_right", bias_max)
        self.form = form
        self.slopes = all_slopes[heads_of_rank]
        self._slopes = Constants(self.slopes)
        # 1 for a head that sees the past only, -1 for the future only; None if all see both.
        self._sides = Constants(sides[heads_of_rank]) if form == "left_right" else None
        self.log_slopes = nn.Parameter(torch.empty(num_heads)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.log_slopes is not None:
            with torch.no_grad():
                self.log_slopes.copy_(torch.tensor(self.slopes, dtype=torch.float64).log())

    def bias(self, distance: Real[Tensor, "*where"]) -> Float[Tensor, "num_heads *where"]:
        signed_distance = float_distance(distance)
        slope = per_head(self._slopes_like(signed_distance), signed_distance)
        bias = -slope * signed_distance.abs()
        if self._sides is None:
            return bias
        side = per_head(self._sides.like(signed_distance), signed_distance)
        return bias.masked_fill(side * signed_distance < 0, -torch.inf)

    def term(self, q: Tokens, k: Tokens) -> PairwiseBias:
        term = super().term(q, k)
        slopes = self.log_slopes
        needs_gradient = slopes is not None and slopes.requires_grad and torch.is_grad_enabled()
        # Not for learned slopes: their gradient is a sum of score gradients times distances.
        # Computed from one gradient per key, it would be a difference of large sums.
        if self._sides is None and not needs_gradient:
            term.query_and_key_bias = lambda: self._query_and_key_bias(q.positions, k.positions)
        if self.computes_bias_of(ALiBi):
            term.formulas = lambda: [self._formula(q.device)]
        return term

    def _formula(self, device: torch.device | None) -> Formula:
        """Return `bias` as a Formula, which a kernel evaluates for each pair."""
        like = torch.empty(0, device=device)
        slope = self._slopes_like(like).float()
        if self._sides is None:
            return Formula(_bias_of_both_sides, (slope,))
        return Formula(_bias_of_one_side, (slope, self._sides.like(like)))

    def _query_and_key_bias(
        self, q_positions: Tensor, kv_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (query_bias, key_bias), each (num_heads, len) or (batch, num_heads, len) in
        float64: the bias of query i and a past key j is query_bias[i] - key_bias[j]. Positions are
        counted from the first key of each batch row, so that both numbers are small."""
        q_positions, kv_positions = subtract_first_key(q_positions, kv_positions)
        slope = self._slopes_like(q_positions)[:, None]
        return -slope * q_positions.unsqueeze(-2), -slope * kv_positions.unsqueeze(-2)

    def _slopes_like(self, like: Tensor) -> Tensor:
        """Return the slope of each head, (num_heads,), on the device of `like` and in its dtype.
        Learned slopes are in their own dtype if that is wider."""
        if self.log_slopes is None:
            return self._slopes.like(like)
        return self.log_slopes.to(torch.promote_types(self.log_slopes.dtype, like.dtype)).exp()


def _bias_of_both_sides(distance: Tensor, slope: Tensor) -> Tensor:
    """Return -slope |distance|, the bias of a head that sees past and future keys, for
    Formula.compute."""
    return -slope * distance.abs()


def _bias_of_one_side(distance: Tensor, slope: Tensor, side: Tensor) -> Tensor:
    """Return -slope |distance|, the bias of a head that sees past keys only (side 1) or future keys
    only (side -1), and -inf for keys on the other side, for Formula.compute."""
    return torch.where(side * distance < 0, -torch.inf, -slope * distance.abs())
