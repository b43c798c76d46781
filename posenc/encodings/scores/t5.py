"""T5's bucketed relative position bias."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor, nn

from posenc.arguments import explain_misfits
from posenc.encodings.base.distance_bias import DistanceBias
from posenc.encodings.base.position_encoding import ModelShape
from posenc.encodings.base.term import PairwiseBias, Tokens
from posenc.encodings.numerics.caches import Constants
from posenc.encodings.numerics.precision import float_distance
from posenc.encodings.numerics.slopes_and_buckets import t5_bucket_edges


class T5Bias(DistanceBias):
    """Add a learned bias per head and distance bucket to the attention scores.

    score[h, i, j] += weight[bucket(position_i - position_j), h]

    The nearest half of the buckets has one distance each; the others are logarithmic up to
    max_distance. All larger distances are in the last one (from 113 on with the defaults, from 91
    on if bidirectional).

    AdamW moves an entry by about the learning rate per step, and entries must move by several
    logits. So in a short training give the table a higher learning rate than the weights: posenc
    compare multiplies that of an encoding's parameters by 20.

    T5's own models do not divide q . k by sqrt(head_dim); their initial weights compensate. Take
    unscaled=True for weights of such a model. Any other model keeps its scale by default.

    Args:
        num_heads: number of query heads.
        bidirectional: half of the buckets for each direction; False: the past only, all future
            distances are in bucket 0.
        num_buckets: rows of the table, at least 2 per direction, and even if bidirectional.
        max_distance: end of the logarithmic buckets, in tokens.
        init_std: standard deviation of the initial values.
        unscaled: the scale of q . k is 1, as in T5, instead of 1/sqrt(head_dim).

    Shapes: q_positions (q_len), kv_positions (kv_len) -> (num_heads, q_len, kv_len). weight:
    (num_buckets, num_heads).
    Units: distances in tokens; the bias is in logits. Precision: bucket edges are exact whole
    numbers.
    Raises: ValueError for invalid buckets.
    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1; github.com/google-research/t5x.

    >>> t5 = posenc.T5Bias(num_heads=8)
    >>> t5.bucket(torch.tensor([0, 1, 15, 16, 100, 1000]))
    tensor([ 0,  1, 15, 16, 30, 31])
    """

    claims = replace(
        DistanceBias.claims, source="Raffel et al. 2020, arXiv:1910.10683, section 2.1"
    )
    bias_tensors = ("weight",)

    def __init__(
        self,
        num_heads: int,
        *,
        bidirectional: bool = False,
        num_buckets: int = 32,
        max_distance: int = 128,
        init_std: float = 0.02,
        unscaled: bool = False,
    ) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.unscaled = unscaled
        # Otherwise all future distances are in one bucket.
        self.claims = replace(self.claims, causal_only=not bidirectional, own_scale=unscaled)
        self.init_std = init_std
        self.edges = t5_bucket_edges(num_buckets, max_distance, bidirectional, "T5Bias")
        self._edges = Constants(self.edges)
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options) -> "T5Bias":
        """Build the encoding for a model, bidirectional if queries see future keys."""
        return super().from_shape(shape, **{"bidirectional": not shape.causal, **options})

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)

    def scale(self, head_dim: int) -> float:
        return 1.0 if self.unscaled else super().scale(head_dim)

    def bucket(self, distance: Real[Tensor, "*where"]) -> Int[Tensor, "*where"]:
        """Return the row of the table for each distance in tokens (positive: the past)."""
        bucketed_distance = distance.abs() if self.bidirectional else distance.clamp(min=0)
        bucket = torch.bucketize(
            bucketed_distance.contiguous(), self._edges.like(bucketed_distance), right=True
        )
        if not self.bidirectional:
            return bucket
        buckets_per_side = len(self.edges) + 1
        return bucket + buckets_per_side * (distance < 0)  # the second half is for the future

    def bias(self, distance: Real[Tensor, "*where"]) -> Float[Tensor, "num_heads *where"]:
        dtype = torch.promote_types(self.weight.dtype, float_distance(distance).dtype)
        buckets = self.bucket(distance)
        bias_by_head = self.weight.to(dtype).T.contiguous().index_select(1, buckets.flatten())
        return bias_by_head.view(self.weight.shape[1], *buckets.shape)

    def term(self, q: Tokens, k: Tokens) -> PairwiseBias:
        term = super().term(q, k)
        if self.computes_bias_of(T5Bias):
            term.constant_from = self.edges[-1]
        return term
