"""DAPE: a score bias that adapts to the scores of all heads."""

from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import explain_misfits
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import (
    Hidden,
    ModelShape,
    Past,
    PositionEncoding,
    State,
    check_heads,
    require_encoding,
)
from posenc.encodings.base.term import PairwiseBias, Scores, Term, Tokens, VisiblePairs
from posenc.encodings.numerics.precision import read_linear
from posenc.encodings.scores.alibi import ALiBi
from posenc.encodings.scores.fire import FIRE
from posenc.encodings.scores.kerple import Kerple
from posenc.positions.tokens import PositionTensor

INNER_BIASES: dict[str, tuple[type[PositionEncoding], dict[str, Any]]] = {
    "alibi": (ALiBi, {}),
    "kerple": (Kerple, {}),
    "fire": (FIRE, {"leaky": True}),
}
"""The biases that the paper adapts: their classes and the options of the authors' code, by name."""


class DAPE(PositionEncoding):
    """Adapt another encoding's bias to the scores by a small network for each query-key pair.

    score[:, i, j] += B[:, i, j] + mlp([score[:, i, j]; B[:, i, j]]), mlp: 2 heads -> width -> heads

    The network reads a pair's scores in all heads, so scores are materialized (the ways `reference`
    and `blocks`). Each layer has its own network and its own inner bias, as in the authors' code.

    Args:
        inner: the encoding with bias B, such as ALiBi, Kerple or FIRE; from_shape also accepts
            these by name.
        num_heads: number of query heads.
        mlp_width: width of the hidden layer.

    Shapes: scores (batch, num_heads, q_len, kv_len) -> the same.
    Units: logits. Precision: the network in float32 or better, also under autocast.
    Raises: ValueError if `inner` does anything but add a bias to the scores.
    Source: Zheng et al. 2024, arXiv:2405.14722, section 3; github.com/chuanyang-Zheng/DAPE.

    >>> dape = posenc.DAPE(posenc.ALiBi(num_heads=4), num_heads=4)
    >>> q = k = v = torch.randn(1, 4, 6, 16)
    >>> p = torch.arange(6)
    >>> posenc.attention(q, k, v, dape, q_positions=p, kv_positions=p).shape
    torch.Size([1, 4, 6, 16])
    """

    claims = Claims(
        places=(3,),
        source="Zheng et al. 2024, arXiv:2405.14722, section 3",
        additive=False,
        scope="layer",
    )

    def __init__(self, inner: PositionEncoding, num_heads: int, *, mlp_width: int = 32) -> None:
        super().__init__()
        inner = require_encoding("DAPE", inner)
        if inner.claims.places != (3,) or not inner.claims.additive:
            raise ValueError(
                f"DAPE: inner must add the same bias to any scores and act nowhere else, "
                f"got {type(inner).__name__} (places {inner.claims.places})."
            )
        self.inner = inner
        self.hidden = nn.Linear(2 * num_heads, mlp_width)
        self.out = nn.Linear(mlp_width, num_heads)
        self.claims = replace(
            inner.claims,
            source=self.claims.source,
            scope="layer",
            additive=False,
            shared_parameters=tuple(f"inner.{name}" for name in inner.claims.shared_parameters),
        )

    @classmethod
    @explain_misfits
    def from_shape(
        cls, shape: ModelShape, *, inner: PositionEncoding | str = "kerple", **options: Any
    ) -> "DAPE":
        """Build the encoding for a model; `inner` may be a name in INNER_BIASES."""
        if isinstance(inner, str):
            if inner not in INNER_BIASES:
                raise ValueError(
                    f"DAPE: inner must be one of {', '.join(INNER_BIASES)}, got {inner!r}."
                )
            inner_class, inner_options = INNER_BIASES[inner]
            inner = inner_class.from_shape(shape, **inner_options)
        return super().from_shape(shape, inner=inner, **options)

    def reset_parameters(self) -> None:
        self.hidden.reset_parameters()
        self.out.reset_parameters()

    def scale(self, head_dim: int) -> float:
        return self.inner.scale(head_dim)

    def with_scale(self, scale: float) -> Self:
        scaled = super().with_scale(scale)
        scaled._modules = {**self._modules, "inner": self.inner.with_scale(scale)}
        return scaled

    def state(self, x: Hidden, positions: PositionTensor, past: Past | None = None) -> State | None:
        return self.inner.state(x, positions, past)

    def term(self, q: Tokens, k: Tokens) -> "DAPETerm":
        assert q.x is not None
        check_heads(self, self.out.out_features, q.x)
        inner = self.inner.term(q, k)
        assert inner is not None  # it claims to change scores
        return DAPETerm(q, k, inner, self)


class DAPETerm(Term):
    """Add to the scores the inner bias, and what DAPE's network computes from the scores and that
    bias."""

    def __init__(self, q: Tokens, k: Tokens, inner: Term, dape: DAPE) -> None:
        super().__init__(q, k)
        self.inner = inner
        self.dape = dape

    def prepare_blocks(self, max_rows: int, causal: bool) -> "DAPETerm":
        return DAPETerm(
            self.q_tokens, self.k_tokens, self.inner.prepare_blocks(max_rows, causal), self.dape
        )

    def extra_score_arrays(self, needs_grad: bool) -> float:
        num_heads, num_units = self.dape.out.weight.shape
        # Arrays of the scores' size, (batch, heads, ...), counted as Term.extra_score_arrays says:
        # three of the hidden layer, which have `num_units` instead of heads, and three with as many
        # heads.
        return 3 * num_units / num_heads + 3

    def add(self, scores: Scores, rows: slice, keys: slice, mask: VisiblePairs | None) -> Scores:
        bias = self._bias(scores, rows, keys)
        hidden_weight, hidden_bias = read_linear(self.dape.hidden, scores.dtype)
        out_weight, out_bias = read_linear(self.dape.out, scores.dtype)
        assert hidden_bias is not None and out_bias is not None
        score_weight, bias_weight = hidden_weight.chunk(2, dim=1)
        finite_bias = bias.masked_fill(bias == -torch.inf, 0)  # the sum hides these keys
        # The hidden layer of [scores; bias], as a sum of two products, because the bias often has
        # one row for the whole batch, for which its product is computed once.
        hidden_from_bias = (
            torch.einsum("wh,...hqk->...wqk", bias_weight, finite_bias) + hidden_bias[:, None, None]
        )
        hidden = torch.einsum("wh,...hqk->...wqk", score_weight, scores) + hidden_from_bias
        hidden = F.leaky_relu(hidden, inplace=True)
        change = torch.einsum("hw,...wqk->...hqk", out_weight, hidden)
        return scores + change + (bias + out_bias[:, None, None])

    def _bias(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """Return the inner encoding's bias for a block of scores, (batch or 1, num_heads, rows,
        keys)."""
        if isinstance(self.inner, PairwiseBias):
            return self.inner.bias_of_block(rows, keys).to(scores.dtype)
        return self.inner.add(torch.zeros_like(scores), rows, keys, None)
