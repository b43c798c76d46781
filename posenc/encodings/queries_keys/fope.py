"""FoPE: rotate each pair of channels with several frequencies at once."""

import math

import torch
from torch import Tensor, nn

from posenc.encodings.base.claims import Claims
from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.numerics.tensor_views import repeat_kv_heads
from posenc.encodings.queries_keys.rotate import rotate
from posenc.encodings.queries_keys.rotation import QueryKeyEncoding, RotatedQueriesKeys, check_keys
from posenc.frequencies.series import inverse_frequencies


class FoPE(QueryKeyEncoding):
    """Rotate each pair of channels by a Fourier series of frequencies with periods seen in
    training.

    (x_a, x_b) -> (x_a c_t - x_b s_t, x_b c_t + x_a s_t), pairs t and t + head_dim/2
    c_t(p) = sum_m cos_weight[h, m, t] cos(p theta_m), s_t with sin_weight and sin
    theta_m = rope_theta^(-2m/head_dim), only those with a period of at most train_length

    The weights are not trained: 1 for one frequency of each pair, plus small random numbers. There
    are at most head_dim/4 such pairs; the others get c = s = 1 at every position, as in the
    authors' code.

    Args:
        head_dim: size of one head, even and at least 4.
        num_kv_heads: number of key/value heads; each has its own weights, shared by its query
            heads.
        train_length: tokens in training; frequencies with a longer period are left out.
        rope_theta: base of the geometric series of frequencies.
        gain: gain of Xavier's normal distribution, over all heads, for the random numbers. The
            authors use 0.3 for 60 M parameters, 0.4 for 180 M and 0.6 for 1.2 G.

    Shapes: q (batch, num_heads, q_len, head_dim), k (batch, num_kv_heads, kv_len, head_dim) -> the
    same. cos_weight, sin_weight: (num_kv_heads, frequencies, pairs).
    Units: positions in tokens. Precision: exact angles, the series in float32, rounded once.
    Raises: ValueError if no frequency completes a turn in train_length, or k has another shape.
    Source: Hua et al. 2024, arXiv:2412.17739; the authors' training code, which does not divide by
    the sum of weights as the paper does.

    >>> fope = posenc.FoPE(head_dim=16, num_kv_heads=4, train_length=128)
    >>> q, k = fope(torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16), torch.arange(6))
    >>> fope.cos_weight.shape
    torch.Size([4, 3, 3])
    """

    claims = Claims(
        places=(2,),
        source="Hua et al. 2024, arXiv:2412.17739",
        shift_invariant=False,
        own_scale=True,
        scope="layer",
    )

    def __init__(
        self,
        head_dim: int,
        num_kv_heads: int,
        train_length: int,
        rope_theta: float = 10000.0,
        *,
        gain: float = 0.3,
    ) -> None:
        super().__init__()
        if head_dim < 4 or head_dim % 2:
            raise ValueError(f"FoPE: head_dim must be even and at least 4, got {head_dim}.")
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.gain = gain
        self.train_length = train_length
        self.rope_theta = rope_theta
        slowest_frequency = 2 * math.pi / train_length
        kept_frequencies = [
            f for f in inverse_frequencies(head_dim, rope_theta) if float(f) >= slowest_frequency
        ]
        if not kept_frequencies:
            raise ValueError(
                f"FoPE: train_length must be at least 7, got {train_length}: no frequency would "
                "complete a turn."
            )
        self.exact_frequencies = ExactFrequencies(kept_frequencies)
        weight_shape = (
            num_kv_heads,
            len(kept_frequencies),
            min(len(kept_frequencies), head_dim // 4),
        )
        self.cos_weight = nn.Parameter(torch.empty(weight_shape), requires_grad=False)
        self.sin_weight = nn.Parameter(torch.empty(weight_shape), requires_grad=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw random weights, and add 1 to the weight of one frequency of each pair."""
        _, num_frequencies, num_pairs = self.cos_weight.shape
        # Pair t turns mainly with frequency t * frequencies_per_pair; the last pairs may have none.
        frequencies_per_pair = -(-num_frequencies // num_pairs)
        pair_indices = torch.arange(
            -(-num_frequencies // frequencies_per_pair), device=self.cos_weight.device
        )
        for weight in (self.sin_weight, self.cos_weight):
            nn.init.xavier_normal_(weight, self.gain)
            weight[:, pair_indices * frequencies_per_pair, pair_indices] += 1

    def transform(self, q: Tokens, k: Tokens) -> RotatedQueriesKeys:
        assert q.x is not None and k.x is not None
        check_keys(self, k.x)
        return self._rotate_by_series(q.x, q.positions), self._rotate_by_series(k.x, k.positions)

    def _rotate_by_series(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x (batch, heads, len, head_dim) with each pair of channels rotated by the series
        of its head and pair, see the class."""
        dtype = torch.promote_types(at_least_float32(x.dtype), self.cos_weight.dtype)
        cosines, sines = self.exact_frequencies.cos_sin(positions, dtype)
        cos = self._series_by_head(cosines, self.cos_weight, x)
        sin = self._series_by_head(sines, self.sin_weight, x)
        flat_heads = x.flatten(0, 1)[:, None]  # a row of the batch for each head
        return rotate(flat_heads, cos, sin, interleaved=False).view_as(x)

    def _series_by_head(self, waves: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """Return the series of each head and pair, (batch * num_heads, len, head_dim/2): weighted
        sums of cosines or of sines.

        waves: cosines or sines of all frequencies, (len, frequencies) or (batch, len, frequencies).
        weight: cos_weight or sin_weight. x: the vectors to rotate, of which only the sizes are
        read.
        """
        series = waves.unsqueeze(-3) @ weight.to(waves.dtype)
        num_missing = self.head_dim // 2 - series.shape[-1]  # pairs without a frequency: c = s = 1
        series = nn.functional.pad(series, (0, num_missing), value=1.0)
        series = series.expand(x.shape[0], *series.shape[-3:])
        return repeat_kv_heads(series, x.shape[1]).flatten(0, 1)
