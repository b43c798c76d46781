"""Transformer-XL's relative attention: learned biases in place of a query position, and a sinusoid
of the distance in place of a key position."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from posenc.encoding.base import PositionEncoding, check_head_dim, check_heads
from posenc.numbers.angles import Angles
from posenc.numbers.frequencies import inverse_frequencies
from posenc.numbers.precision import at_least_float32, without_autocast
from posenc.positions import distances
from posenc.terms.bands import AddBands, Bands
from posenc.terms.dense import DenseBias
from posenc.terms.skew import run_distances, shared_run, skew


class TransformerXL(PositionEncoding):
    """Score content against content and content against distance, each with a learned bias.

    score[h, i, j] = scale * ((q_i + u_h) . k_j + (q_i + v_h) . W_h R(position_i - position_j)),
    R(D) = [sin(D w_t) | cos(D w_t)],  w_t = 10000^(-2t/embed_dim)

    u joins the query at place 2, which adds u . k for every key. Where positions are runs, W R is
    one table over distances and the scores are its skewed view. For any other positions, integer or
    real, sin and cos of a difference are split into products of the query's and the key's, so that
    the term is one matrix product of inner size embed_dim: exact, and num_heads/2 times dearer.
    Earlier segments come in as Attention's `memory`, with their own positions.

    Args:
        embed_dim: width of the sinusoid, even.
        num_heads: number of query heads.
        head_dim: size of one head.
        clamp_len: distances beyond this count as this; None means none do.
        untied: every layer has its own u and v (the authors' untie_r); the paper shares them.

    Shapes: q_positions (batch, q_len), kv_positions (batch, kv_len) -> (batch, num_heads, q_len,
    kv_len). u, v (num_heads, head_dim); projection.weight (num_heads * head_dim, embed_dim).
    Units: distances in tokens; the term is in logits, scaled like q . k. Precision: exact angles,
    products in float32 or better; q + u is rounded once to the dtype of q.
    Raises: ValueError if embed_dim is odd or clamp_len below 1.
    Source: Dai et al. 2019, arXiv:1901.02860, section 3.3; github.com/kimiyoung/transformer-xl.
    """

    places = (2, 3)
    causal_only = False
    scope = "layer"
    reads_scale = True
    source = "Dai et al. 2019, arXiv:1901.02860, section 3.3"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        *,
        clamp_len: int | None = None,
        untied: bool = False,
    ) -> None:
        super().__init__()
        if embed_dim % 2:
            raise ValueError(f"TransformerXL: embed_dim must be even, got {embed_dim}.")
        if clamp_len is not None and clamp_len < 1:
            raise ValueError(f"TransformerXL: clamp_len must be at least 1, got {clamp_len}.")
        self.clamp_len = clamp_len
        self.shared_parameters = () if untied else ("u", "v")
        self.angles = Angles(inverse_frequencies(embed_dim))
        self.u = nn.Parameter(torch.empty(num_heads, head_dim))
        self.v = nn.Parameter(torch.empty(num_heads, head_dim))
        self.projection = nn.Linear(embed_dim, num_heads * head_dim, bias=False)
        self._bands: Bands | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 0.02, as in the authors' code."""
        for parameter in (self.u, self.v, self.projection.weight):
            nn.init.normal_(parameter, std=0.02)

    def sinusoid(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """R of each distance, clamped: (*distance.shape, embed_dim), all sines before all
        cosines."""
        if self.clamp_len is not None:
            distance = distance.clamp(-self.clamp_len, self.clamp_len)
        cos, sin = self.angles.cos_sin(distance, dtype)
        return torch.cat([sin, cos], dim=-1)

    def transform_qk(
        self, q: Tensor, k: Tensor, q_positions: Tensor, kv_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        check_heads(self, self.u.shape[0], q)
        check_head_dim(self, self.u.shape[1], q)
        dtype = at_least_float32(q.dtype)
        return (q.to(dtype) + self.u.to(dtype)[:, None]).to(q.dtype), k

    def for_blocks(
        self,
        q: Tensor,
        k: Tensor | None,
        q_positions: Tensor,
        kv_positions: Tensor,
        rows: int,
        causal: bool,
    ) -> Self:
        dtype = at_least_float32(q.dtype)
        ends = None if self.clamp_len is None else (-self.clamp_len, self.clamp_len)
        ready = self.shallow_copy()
        with without_autocast(q.device):
            ready._bands = Bands.of(
                q_positions, kv_positions, rows, causal, ends,
                for_q=lambda distance: self.sinusoid(distance, dtype) @ self._weight(dtype).mT,
            )  # fmt: skip
        return ready

    def _weight(self, dtype: torch.dtype) -> Tensor:
        """(num_heads, head_dim, embed_dim)"""
        return self.projection.weight.to(dtype).unflatten(0, self.u.shape)

    def score_mod(
        self, q, k, q_positions, kv_positions, q_state=None, kv_state=None
    ) -> DenseBias | AddBands:
        dtype = at_least_float32(q.dtype)
        shift = shared_run(q_positions, kv_positions)
        with without_autocast(q.device):
            q = (q.to(dtype) + self.v.to(dtype)[:, None]) * self.scale(q.shape[-1])
            weight = self._weight(dtype)
            if self._bands is not None:
                return self._bands.term(q_positions, kv_positions, q)
            if shift is None:
                return DenseBias(self._products(q @ weight, q_positions, kv_positions))
            kv_len = kv_positions.shape[-1]
            distance = run_distances(shift, q.shape[-2], kv_len, q.device)
            table = self.sinusoid(distance, dtype) @ weight.mT  # (num_heads, distances, head_dim)
            return DenseBias(skew(q @ table.mT, kv_len))

    def _products(self, coefficients: Tensor, q_positions: Tensor, kv_positions: Tensor) -> Tensor:
        """coefficients (batch, num_heads, q_len, embed_dim) . R(position_i - position_j) for all
        pairs."""
        on_sin, on_cos = coefficients.chunk(2, dim=-1)
        q_cos, q_sin = (
            t.unsqueeze(-3) for t in self.angles.cos_sin(q_positions, coefficients.dtype)
        )
        kv_cos, kv_sin = (
            t.unsqueeze(-3) for t in self.angles.cos_sin(kv_positions, coefficients.dtype)
        )
        left = torch.cat([on_sin * q_sin + on_cos * q_cos, on_cos * q_sin - on_sin * q_cos], dim=-1)
        values = left @ torch.cat([kv_cos, kv_sin], dim=-1).mT
        if self.clamp_len is None:
            return values
        distance = distances(q_positions, kv_positions)
        distance = distance if distance.ndim == 2 else distance[:, None]
        for limit, beyond in (
            (self.clamp_len, distance > self.clamp_len),
            (-self.clamp_len, distance < -self.clamp_len),
        ):
            end = self.sinusoid(torch.tensor([limit], device=values.device), values.dtype)
            values = torch.where(beyond, coefficients @ end.mT, values)
        return values
