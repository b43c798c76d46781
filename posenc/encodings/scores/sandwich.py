"""Sandwich: inner products of sinusoidal embeddings as a score bias."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Real
from torch import Tensor

from posenc.encodings.base.distance_bias import BiasMatrix, DistanceBias
from posenc.encodings.numerics.caches import Constants
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.encodings.numerics.precision import float_distance, per_head
from posenc.frequencies.series import geometric_series
from posenc.positions.tokens import FlatKeyPositions, FlatQueryPositions

DISTANCES_AT_ONCE = 256
"""Distances whose dim/2 cosines are in memory at the same time; chosen, not derived."""
GRID_KEYS = 64
"""Number of keys of the grid in `compute_bias_of_falling_distances`. The queries of the grid are as
many positions apart, so that each distance occurs once."""


class Sandwich(DistanceBias):
    """Add the inner product of the sinusoidal embeddings of two positions, smaller in later heads.

    score[h, i, j] += sum_t cos((position_i - position_j) / 10000^(2t/dim)) / (8 (h+1) / num_heads)

    Args:
        num_heads: number of query heads.
        dim: width of the sinusoidal embeddings, even; the paper uses 128 for every model.
        form: "paper", with t = 0 .. dim/2 - 1; or "nemo", NVIDIA NeMo's version, with t = 1 ..
            dim/2 and dim/2 subtracted, which differs by more than a constant.

    Shapes: q_positions (q_len), kv_positions (kv_len) -> (num_heads, q_len, kv_len). No parameters.
    Units: distances in tokens; the bias is in logits, up to num_heads * dim / 16.
    Precision: exact angles, see ExactFrequencies; each cosine rounded once, summed in float64.
    Raises: ValueError if dim is odd or the form is unknown.
    Source: Chi et al. 2022, arXiv:2212.10356, section 5 and its listing.

    >>> sandwich = posenc.Sandwich(num_heads=8)
    >>> sandwich(torch.arange(5), torch.arange(7)).shape
    torch.Size([8, 5, 7])
    """

    claims = replace(DistanceBias.claims, source="Chi et al. 2022, arXiv:2212.10356, section 5")
    bias_tensors = ()

    def __init__(
        self, num_heads: int, *, dim: int = 128, form: Literal["paper", "nemo"] = "paper"
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"Sandwich: dim must be even and at least 2, got {dim}.")
        if form not in ("paper", "nemo"):
            raise ValueError(f"Sandwich: form must be 'paper' or 'nemo', got {form!r}.")
        first_term = 0 if form == "paper" else 1  # the first t of the sum
        self.exact_frequencies = ExactFrequencies(
            geometric_series(dim // 2 + first_term, 10000, 2 / dim)[first_term:]
        )
        self.offset = first_term * dim / 2
        self._head_factors = Constants([num_heads / (8 * h) for h in range(1, num_heads + 1)])

    def bias(self, distance: Real[Tensor, "*where"]) -> Float[Tensor, "num_heads *where"]:
        dtype = float_distance(distance).dtype
        sums = []
        for some_distances in distance.flatten().split(DISTANCES_AT_ONCE):
            cosines = self.exact_frequencies.reduced_angles(some_distances).to(dtype).cos()
            sums.append(cosines.sum(-1, dtype=torch.float64))
        return self._scale_for_heads(torch.cat(sums).view(distance.shape), dtype)

    def bias_of_pairs(
        self,
        q_positions: FlatQueryPositions,
        kv_positions: FlatKeyPositions,
        in_float64: bool = False,
    ) -> BiasMatrix:
        """Return the bias of each pair, (num_heads, q_len, kv_len) or (batch, num_heads, q_len,
        kv_len), by one matrix product: cos(a - b) = cos a cos b + sin a sin b. in_float64: in
        float64."""
        q_sinusoids = torch.cat(self.exact_frequencies.cos_sin(q_positions, torch.float64), dim=-1)
        k_sinusoids = torch.cat(self.exact_frequencies.cos_sin(kv_positions, torch.float64), dim=-1)
        dtype = torch.float64 if in_float64 else float_distance(q_positions).dtype
        values = self._scale_for_heads(q_sinusoids @ k_sinusoids.mT, dtype)
        return values if values.ndim == 3 else values.movedim(0, 1)

    def compute_bias_of_falling_distances(
        self, farthest: int, count: int, in_float64: bool, device: torch.device
    ) -> Float[Tensor, "num_heads {count}"]:
        """Return the bias of the distances farthest, farthest - 1, ..., `count` of them:
        (num_heads, count), in float64 if `in_float64`, else float32.

        They are the distances of a grid of few queries and GRID_KEYS keys, in reading order: the
        row of a query has its distances to the keys 0, 1, ..., and the next query is GRID_KEYS
        positions before it. A product of two small tables thus replaces a cosine for each distance
        and frequency.
        """
        query_positions = torch.arange(farthest, farthest - count, -GRID_KEYS, device=device)
        positions = torch.cat((query_positions, torch.arange(GRID_KEYS, device=device)))
        cos_and_sin = torch.cat(self.exact_frequencies.cos_sin(positions, torch.float64), dim=-1)
        products = cos_and_sin[: len(query_positions)] @ cos_and_sin[len(query_positions) :].mT
        dtype = torch.float64 if in_float64 else torch.float32
        return self._scale_for_heads(products.flatten()[:count], dtype)

    def _scale_for_heads(self, cosine_sum: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias of each head, (num_heads, *cosine_sum.shape) in `dtype`. cosine_sum: the
        sum of the cosines of each distance."""
        cosine_sum = cosine_sum - self.offset
        return (per_head(self._head_factors.like(cosine_sum), cosine_sum) * cosine_sum).to(dtype)
