"""Contextual position encoding: a token's position is a running count of gates that content
opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from posenc.encoding.base import PositionEncoding, Rows, check_head_dim
from posenc.numbers.heads import grouped_matmul
from posenc.numbers.precision import at_least_float32, without_autocast
from posenc.terms.skew import Part, add_parts

KEYS = 128
"""How many keys are counted at a time."""


class CoPE(PositionEncoding):
    """Count gates between key and query, and score the query against a vector for that count.

    score[i, j] += scale * q_i . e[p_ij],  p_ij = min(sum over visible l >= j of g_il,
    num_positions - 1),  g_il = sigmoid(scale * q_i . k_l)

    e at a fractional count is interpolated between its neighbours. The sum runs along the keys in
    the order they have in memory, and includes the query's own; positions are not read. It needs
    whole rows of scores, and so no pointwise implementation. Composed, gates come from the scores
    as they arrive.

    Args:
        head_dim: size of one head; e is shared by all heads.
        num_positions: rows of e; larger counts are clipped to the last (npos_max).
        divide: multiply the term by scale, as the authors' code does by default; False: as in the
            paper's listing and x-transformers.
        gates: what the query meets for its gates: "key"; "separate_key", a projection of its own;
            "value", the values, handed to posenc.attention as kv_state.
        embed_dim, num_kv_heads: of the attention; needed for "separate_key" alone.

    Shapes: scores (batch, num_heads, rows, kv_len) -> the same. e (num_positions, head_dim).
    Units: counts of open gates; the term is in logits. Precision: gates, their running sum and the
    term in float32 or better.
    Raises: ValueError for fewer than 2 positions, unknown gates or missing sizes.
    Source: Golovneva et al. 2024, arXiv:2405.18719, section 4; github.com/facebookresearch/RAM,
    projects/cope.
    """

    places = (3,)
    permutation_invariant = False
    scope = "layer"
    reads_scale = True
    source = "Golovneva et al. 2024, arXiv:2405.18719, section 4; code of facebookresearch/RAM"

    def __init__(
        self,
        head_dim: int,
        embed_dim: int | None = None,
        num_kv_heads: int | None = None,
        *,
        num_positions: int = 64,
        divide: bool = True,
        gates: Literal["key", "value", "separate_key"] = "key",
    ) -> None:
        super().__init__()
        if num_positions < 2:
            raise ValueError(f"CoPE: num_positions must be at least 2, got {num_positions}.")
        if gates not in ("key", "value", "separate_key"):
            raise ValueError(f"CoPE: gates must be key, value or separate_key, got {gates!r}.")
        if gates == "separate_key" and (embed_dim is None or num_kv_heads is None):
            raise ValueError("CoPE: gates='separate_key' needs embed_dim and num_kv_heads.")
        self.head_dim, self.num_positions = head_dim, num_positions
        self.divide, self.gates = divide, gates
        self.e = nn.Parameter(torch.empty(num_positions, head_dim))
        self.gate_key = None
        if gates == "separate_key":
            self.gate_key = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=False)  # type: ignore[arg-type]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """e starts at zero, as in the authors' code."""
        nn.init.zeros_(self.e)
        if self.gate_key is not None:
            self.gate_key.reset_parameters()

    def token_state(
        self, x: Tensor, positions: Tensor, past: Tensor | None = None
    ) -> Tensor | None:
        if self.gate_key is None:
            return None
        return self.gate_key(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def score_mod(
        self, q, k, q_positions, kv_positions, q_state=None, kv_state=None
    ) -> CountedGates:
        check_head_dim(self, self.head_dim, q)
        dtype, scale = at_least_float32(q.dtype), self.scale(self.head_dim)
        q, gate_scores = q.to(dtype), None
        if self.gates != "key" and kv_state is None:
            what = "v" if self.gates == "value" else "token_state(x, positions)"
            raise ValueError(f"CoPE: gates={self.gates!r} needs kv_state={what}.")
        with without_autocast(q.device):
            table = q @ self.e.to(dtype).mT
            if self.gates != "key":
                assert kv_state is not None
                gate_scores = grouped_matmul(q * scale, kv_state.to(dtype).mT)
        return CountedGates(table * scale if self.divide else table, gate_scores)

    def score_rows(self, scores: Tensor, mod, mask: Tensor | None, rows: Rows) -> Tensor:
        assert isinstance(mod, CountedGates)
        return mod.add_to(scores, scores, mask)


class CountedGates:
    """What CoPE adds to whole rows of scores.

    table (batch, num_heads, rows, num_positions) holds the score of every whole count;
    gate_scores, what the gates are the sigmoid of, None for the scores themselves.
    """

    def __init__(self, table: Tensor, gate_scores: Tensor | None) -> None:
        self.table, self.gate_scores = table, gate_scores

    def add_to(self, into: Tensor, scores: Tensor, mask: Tensor | None) -> Tensor:
        """`into` plus what these scores add, in place; it may be the scores themselves.

        From the last key to the first, where reading is free: once all counts are at their limit,
        no further gate is looked at.
        """
        keys, most = scores.shape[-1], self.table.shape[-1] - 1
        if scores.device.type != "cpu" or torch.compiler.is_compiling():
            return into.add_(self._at(self._count(scores, mask, 0, keys).clamp(max=most)))
        return add_parts(into, self._parts(scores, mask, most))

    def _parts(self, scores: Tensor, mask: Tensor | None, most: int) -> Iterator[Part]:
        after = None
        for last in range(scores.shape[-1], 0, -KEYS):
            if after is not None and bool((after >= most).all()):
                yield 0, last, self.table[..., -1:]
                return
            first = max(0, last - KEYS)
            count = self._count(scores, mask, first, last)
            count = count if after is None else count + after
            yield first, last, self._at(count.clamp(max=most))
            after = count[..., :1]

    def _count(self, scores: Tensor, mask: Tensor | None, first: int, last: int) -> Tensor:
        """How many gates are open from each key to the one before `last`."""
        gate_scores = scores if self.gate_scores is None else self.gate_scores
        gates = gate_scores[..., first:last].sigmoid()
        if mask is not None:
            gates = gates.masked_fill(~mask[..., first:last], 0)
        return gates.flip(-1).cumsum(-1).flip(-1)

    def _at(self, count: Tensor) -> Tensor:
        """The table at fractional counts."""
        below, above = count.detach().floor().long(), count.detach().ceil().long()
        low, high = self.table.gather(-1, below), self.table.gather(-1, above)
        return low + (count - below) * (high - low)

    def __call__(self, score, batch, head, q_idx, kv_idx) -> NoReturn:
        raise TypeError("CoPE needs whole rows of scores: it has no pointwise form.")
