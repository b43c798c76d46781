"""Contextual position encoding: a key's position is a sum of gates computed from content."""

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float, Real
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import PositionEncoding, check_head_dim
from posenc.encodings.base.term import Scores, Term, Tokens, VisiblePairs
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.numerics.tensor_views import ScoreColumns, add_columns, grouped_matmul
from posenc.encodings.numerics.torch_modes import is_readable

QUERIES_AT_ONCE = 64
"""Queries whose gates are counted together on the CPU; chosen, not derived. Few, because gates are
computed back to the farthest key that any query of the group still counts."""


class CoPE(PositionEncoding):
    """Score the query with a learned vector, selected by the number of open gates since the key.

    score[i, j] += scale * q_i . e[p_ij],  p_ij = min(sum over visible l >= j of g_il,
    num_positions - 1),  g_il = sigmoid(scale * q_i . k_l)

    e at a fractional count is interpolated between its neighbours. The sum follows the order of
    keys in memory, and includes the query's own key; positions are not read. It reads whole rows of
    scores, so FlexAttention cannot run it. In a Compose the gates are computed from the scores
    after earlier terms.

    Args:
        head_dim: size of one head; e is shared by all heads.
        num_positions: rows of e; larger counts use the last (npos_max).
        scale_term: True: the term is multiplied by scale(), like q . k, as in the authors' code;
            False: it is not, as in the paper's listing and x-transformers. The gates are scaled in
            any case.
        gates: vectors that are multiplied with the query to compute its gates: "key";
            "separate_key", another projection; "value", the values, passed to posenc.attention as
            kv_state.
        embed_dim, num_kv_heads: sizes of the attention; required only for "separate_key".

    Shapes: scores (batch, num_heads, rows, kv_len) -> the same. e (num_positions, head_dim).
    Units: counts of open gates; the term is in logits. Precision: gates, their running sum and the
    term in float32 or better.
    Raises: ValueError for fewer than 2 positions, unknown gates or missing sizes.
    Source: Golovneva et al. 2024, arXiv:2405.18719, section 4; github.com/facebookresearch/RAM,
    projects/cope.

    >>> cope = posenc.CoPE(head_dim=16)
    >>> q = k = v = torch.randn(1, 4, 6, 16)
    >>> where = {"q_positions": torch.arange(6), "kv_positions": torch.arange(6)}
    >>> posenc.attention(q, k, v, cope, mask=posenc.masks.causal, **where).shape
    torch.Size([1, 4, 6, 16])
    """

    claims = Claims(
        places=(3,),
        source="Golovneva et al. 2024, arXiv:2405.18719, section 4; code of facebookresearch/RAM",
        permutation_invariant=False,
        causal_only=True,
        additive=False,
        reads_scale=True,
        scope="layer",
    )

    def __init__(
        self,
        head_dim: int,
        embed_dim: int | None = None,
        num_kv_heads: int | None = None,
        *,
        num_positions: int = 64,
        scale_term: bool = True,
        gates: Literal["key", "value", "separate_key"] = "key",
    ) -> None:
        super().__init__()
        if num_positions < 2:
            raise ValueError(f"CoPE: num_positions must be at least 2, got {num_positions}.")
        if gates not in ("key", "value", "separate_key"):
            raise ValueError(f"CoPE: gates must be key, value or separate_key, got {gates!r}.")
        if gates == "separate_key" and (embed_dim is None or num_kv_heads is None):
            raise ValueError("CoPE: gates='separate_key' needs embed_dim and num_kv_heads.")
        self.head_dim = head_dim
        self.num_positions = num_positions
        self.scale_term = scale_term
        self.gates = gates
        self.e = nn.Parameter(torch.empty(num_positions, head_dim))
        self.gate_key = None
        if gates == "separate_key":
            self.gate_key = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=False)  # type: ignore[arg-type]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set e to zero, as in the authors' code."""
        nn.init.zeros_(self.e)
        if self.gate_key is not None:
            self.gate_key.reset_parameters()

    def state(
        self,
        x: Float[Tensor, "batch seq_len embed_dim"],
        positions: Real[Tensor, "#batch seq_len"] | Real[Tensor, " seq_len"],
        past: Float[Tensor, "batch num_kv_heads past_len head_dim"] | None = None,
    ) -> Float[Tensor, "batch num_kv_heads seq_len head_dim"] | None:
        """Return the separate keys of gates, (batch, num_kv_heads, seq_len, head_dim); None unless
        gates="separate_key"."""
        if self.gate_key is None:
            return None
        return self.gate_key(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def term(self, q: Tokens, k: Tokens) -> "CoPETerm":
        assert q.x is not None
        check_head_dim(self, self.head_dim, q.x)
        if self.gates != "key" and k.state is None:
            needed_state = "v" if self.gates == "value" else "state(x, positions)"
            raise ValueError(f"CoPE: gates={self.gates!r} needs kv_state={needed_state}.")
        return CoPETerm(q, k, self)


class CoPETerm(Term):
    """Add CoPE's term to the scores. A block of scores must have all keys of its queries."""

    reads_mask = True

    def __init__(self, q: Tokens, k: Tokens, cope: CoPE) -> None:
        super().__init__(q, k)
        self.cope = cope
        self.scale = cope.scale(cope.head_dim)

    def extra_score_arrays(self, needs_grad: bool) -> float:
        # Arrays of the scores' size at the peak of memory, counted as Term.extra_score_arrays says.
        # The backward pass needs the count and what it is interpolated from. Without gradients only
        # a few queries are computed at a time.
        return 9.0 if needs_grad else 1.0

    def add(self, scores: Scores, rows: slice, keys: slice, mask: VisiblePairs | None) -> Scores:
        """Return the scores with the term added. On the CPU it is computed for QUERIES_AT_ONCE
        queries at a time, from their last key to the first, until all counts have reached their
        limit."""
        q = self.q_tokens[rows].x
        assert q is not None
        q = q.to(at_least_float32(q.dtype))
        query_products = self._query_table_products(q)
        gate_logits = scores
        if self.cope.gates != "key":
            state = self.k_tokens[keys].state
            assert state is not None
            gate_logits = grouped_matmul(q * self.scale, state.to(q.dtype).mT)
        if not is_readable(gate_logits):  # in a trace: whether all counts are full cannot be asked
            return scores.add_(_interpolate(query_products, _count_open_gates(gate_logits, mask)))
        visible = scores.new_ones((1,) * 4, dtype=torch.bool) if mask is None else mask
        visible = visible.expand(*visible.shape[:2], *scores.shape[-2:])
        # split, because the gradient of a slice would be of full size
        groups_of_queries = zip(
            query_products.split(QUERIES_AT_ONCE, -2),
            gate_logits.split(QUERIES_AT_ONCE, -2),
            visible.split(QUERIES_AT_ONCE, -2),
            strict=True,
        )
        column_parts = [_term_by_columns(*group) for group in groups_of_queries]
        return add_columns(scores, *column_parts, rows_per_tile=QUERIES_AT_ONCE)

    def _query_table_products(self, q: Tensor) -> Tensor:
        """Return the products of each query with each row of e, (batch, num_heads, rows,
        num_positions + 1). The last product is there twice, so that `_interpolate` finds an upper
        neighbour for it."""
        rows = torch.cat([self.cope.e, self.cope.e[-1:]]).to(q.dtype)
        products = F.linear(q, rows)
        return products * self.scale if self.cope.scale_term else products


def _term_by_columns(
    query_products: Tensor, gate_logits: Tensor, visible: Tensor
) -> Iterator[ScoreColumns]:
    """Yield the term of a few queries for some keys at a time, from the last keys to the first, as
    (first key, end, term).

    query_products: products of the queries with the rows of e. gate_logits: (..., queries, keys).
    visible: True for visible keys, in the same shape.

    A key's count of open gates is that of the keys after it plus its own gate. Once the counts of
    all queries have reached the last row of e, all earlier keys get that row.
    """
    max_count = query_products.shape[-1] - 2  # the greatest count: the last of num_positions rows
    seen_key_indices = visible.flatten(0, -2).any(0).nonzero()
    # No query sees a key from here on.
    end_key = int(seen_key_indices[-1]) + 1 if len(seen_key_indices) else 0
    # Keys per step. Gates are half open before training, so that 2 * max_count keys reach
    # max_count; half of it more leaves room. The first query ends up to a block of queries
    # before the last key.
    keys_per_step = gate_logits.shape[-2] + 5 * max_count // 2
    part_sizes = [
        end_key % keys_per_step,
        *[keys_per_step] * (end_key // keys_per_step),
        gate_logits.shape[-1] - end_key,
    ]
    # Split, because the gradient of a slice would be of full size.
    *parts, hidden_part = gate_logits.split(part_sizes, -1)
    yield end_key, end_key + hidden_part.shape[-1], query_products[..., :1]
    counts_after: Tensor | None = None  # the count of the first key of the part before
    for part in reversed(parts):
        if counts_after is not None and bool((counts_after >= max_count).all()):
            yield 0, end_key, query_products[..., -1:]
            return
        first_key = end_key - part.shape[-1]
        counts = _count_open_gates(part, visible[..., first_key:end_key])
        if counts_after is not None:
            counts = counts + counts_after
        yield first_key, end_key, _interpolate(query_products, counts)
        counts_after = counts[..., :1]
        end_key = first_key


def _count_open_gates(gate_logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return the sum of sigmoid(gate_logits) from each key to the last one, (..., keys); hidden
    keys count 0.

    gate_logits: (..., keys). mask: True for visible keys; None if all are visible.
    """
    open_gates = gate_logits.sigmoid()
    if mask is not None:
        open_gates = open_gates.masked_fill(~mask, 0)
    return open_gates.flip(-1).cumsum(-1).flip(-1)


def _interpolate(table: Tensor, count: Tensor) -> Tensor:
    """Return the table's entry at each count of open gates, in the shape of `count`: linearly
    interpolated at fractional counts, the last entry at larger counts, NaN for NaN.

    table: (..., num_positions + 1), an entry for each count; the last one is a copy of the one
    before.
    """
    max_count = table.shape[-1] - 2
    count = count.clamp(max=max_count)
    index_below = count.detach().long().clamp_(0, max_count)  # NaN as an integer may be any
    value_below = table.gather(-1, index_below)
    value_above = table[..., 1:].gather(-1, index_below)
    return torch.lerp(value_below, value_above, count.frac())
