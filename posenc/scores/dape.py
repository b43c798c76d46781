"""DAPE: a score bias that adapts to the scores of all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encoding.base import PositionEncoding, Rows, check_heads
from posenc.encoding.shape import ModelShape
from posenc.numbers.precision import without_autocast
from posenc.scores.alibi import ALiBi
from posenc.scores.fire import FIRE
from posenc.scores.kerple import Kerple
from posenc.terms.term import ScoreMod

BIASES: dict[str, tuple[type[PositionEncoding], dict[str, Any]]] = {
    "alibi": (ALiBi, {}),
    "kerple": (Kerple, {}),
    "fire": (FIRE, {"leaky": True}),
}
"""The biases that the paper adapts, and options as in the authors' code."""


class DAPE(PositionEncoding):
    """Adapt another encoding's bias to the scores, with one small network for every query-key pair.

    score[:, i, j] += B[:, i, j] + mlp([score[:, i, j]; B[:, i, j]]), mlp: 2 heads -> width -> heads

    The network sees a pair's scores in all heads at once, so this runs where whole scores are
    formed (reference and blockwise). Each layer has its own network and its own inner bias, as in
    the authors' code.

    Args:
        inner: the encoding that gives B at place 3, such as ALiBi, Kerple or FIRE; from_shape also
            takes one of these by name.
        num_heads: number of query heads.
        mlp_width: width of the hidden layer.

    Shapes: scores (batch, num_heads, q_len, kv_len) -> the same.
    Units: logits. Precision: the network in float32 or better; autocast does not reach it.
    Raises: ValueError where `inner` is not at place 3 alone.
    Source: Zheng et al. 2024, arXiv:2405.14722, section 3; github.com/chuanyang-Zheng/DAPE.
    """

    places = (3,)
    scope = "layer"
    source = "Zheng et al. 2024, arXiv:2405.14722, section 3"

    def __init__(self, inner: PositionEncoding, num_heads: int, *, mlp_width: int = 32) -> None:
        super().__init__()
        if inner.places != (3,) or not inner.pointwise:
            raise ValueError(
                f"DAPE: inner must add a bias to each score and act nowhere else, "
                f"got {type(inner).__name__} (places {inner.places})."
            )
        self.inner = inner
        self.hidden = nn.Linear(2 * num_heads, mlp_width)
        self.out = nn.Linear(mlp_width, num_heads)
        self.shift_invariant = inner.shift_invariant
        self.permutation_invariant = inner.permutation_invariant
        self.causal_only = inner.causal_only
        self.cache_safe = inner.cache_safe
        self.needs_raw_k = inner.needs_raw_k
        self.reads_scale = inner.reads_scale
        self.max_positions = inner.max_positions
        self.shared_parameters = tuple(f"inner.{name}" for name in inner.shared_parameters)

    @classmethod
    def from_shape(
        cls, shape: ModelShape, *, inner: PositionEncoding | str = "kerple", **options: Any
    ) -> DAPE:
        if isinstance(inner, str):
            if inner not in BIASES:
                raise ValueError(f"DAPE: inner must be one of {', '.join(BIASES)}, got {inner!r}.")
            kind, own = BIASES[inner]
            inner = kind.from_shape(shape, **own)
        return super().from_shape(shape, inner=inner, **options)

    def reset_parameters(self) -> None:
        self.hidden.reset_parameters()
        self.out.reset_parameters()

    def scale(self, head_dim: int) -> float:
        return self.inner.scale(head_dim)

    def token_state(self, x: Tensor, positions: Tensor, past: Tensor | None = None):
        return self.inner.token_state(x, positions, past)

    def score_mod(
        self, q, k, q_positions, kv_positions, q_state=None, kv_state=None
    ) -> ScoreMod | None:
        check_heads(self, self.out.out_features, q)
        return self.inner.score_mod(q, k, q_positions, kv_positions, q_state, kv_state)

    def score_rows(
        self, scores: Tensor, mod: ScoreMod | None, mask: Tensor | None, rows: Rows
    ) -> Tensor:
        assert mod is not None  # inner is at place 3
        bias = mod(scores.new_zeros(()), rows.batch, rows.head, rows.q_idx, rows.kv_idx)
        with without_autocast(scores.device):
            hidden = F.leaky_relu(self._hidden(scores, bias))
            change = torch.einsum("hw,...wqk->...hqk", self.out.weight.to(hidden.dtype), hidden)
        return scores + bias + change + self.out.bias.to(hidden.dtype)[:, None, None]

    def _hidden(self, scores: Tensor, bias: Tensor) -> Tensor:
        """(batch, width, q_len, kv_len); B is the same for every row of the batch, and is
        multiplied once."""
        weight = self.hidden.weight.to(scores.dtype)
        for_scores, for_bias = weight.chunk(2, dim=1)
        total = torch.einsum("wh,...hqk->...wqk", for_scores, scores)
        total = total + torch.einsum("wh,...hqk->...wqk", for_bias, bias)
        return total + self.hidden.bias.to(scores.dtype)[:, None, None]
