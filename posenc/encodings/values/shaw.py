"""Shaw's relative positions: learned vectors by clipped distance, added to keys and values."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import check_count
from posenc.encodings.base.check_inputs import require_integers
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import PositionEncoding, check_head_dim
from posenc.encodings.base.products_by_distance import ProductsByDistance
from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.numerics.tensor_views import grouped_matmul, repeat_kv_heads
from posenc.positions.tokens import distances


class Shaw(PositionEncoding):
    """Add a learned vector to each key and each value, by the distance clipped to max_distance.

    score[i, j] = scale * q_i . (k_j + key_table[r]),  out_i = sum_j weight[i, j] (v_j +
    value_table[r]),  r = clip(position_j - position_i, -max_distance, max_future) + max_distance

    No tensor q_len x kv_len x head_dim is materialized: q . key_table has a column per distance,
    and weights are summed per distance before they are multiplied with value_table.

    Args:
        head_dim: size of one head; the tables are shared by all heads.
        max_distance: larger distances use the row of this one (k in the paper).
        values: False leaves out value_table; the paper finds little loss without it.
        max_future: the same for keys after the query; None: max_distance, as in the paper. w2v-BERT
            2.0 is Shaw(head_dim, max_distance=64, max_future=8, values=False).

    Shapes: q_positions (q_len), kv_positions (kv_len), integer -> like scores and values. Tables:
    (max_distance + max_future + 1, head_dim), row 0 for keys max_distance or more behind the
    query's position.
    Units: distances in tokens. Precision: in float32 or better.
    Raises: ValueError if max_distance or max_future is below 1; TypeError for positions that are
    not integers.
    Source: Shaw et al. 2018, arXiv:1803.02155, equations 3-5; github.com/tensorflow/tensor2tensor.

    >>> shaw = posenc.Shaw(head_dim=16, max_distance=4)
    >>> shaw.table_row(torch.tensor([-9, -1, 0, 1, 9]))
    tensor([8, 5, 4, 3, 0])
    """

    claims = Claims(
        places=(3, 4),
        source="Shaw et al. 2018, arXiv:1803.02155, equations 3-5",
        reads_scale=True,
        scope="layer",
    )

    def __init__(
        self,
        head_dim: int,
        *,
        max_distance: int = 16,
        values: bool = True,
        max_future: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_distance = max_distance
        self.max_future = max_distance if max_future is None else max_future
        check_count("Shaw", "max_future", self.max_future)
        self.claims = replace(self.claims, places=(3, 4) if values else (3,))
        num_rows = max_distance + self.max_future + 1
        self.key_table = nn.Parameter(torch.empty(num_rows, head_dim))
        self.value_table = nn.Parameter(torch.empty(num_rows, head_dim)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Glorot uniform values, as the authors' code does."""
        nn.init.xavier_uniform_(self.key_table)
        if self.value_table is not None:
            nn.init.xavier_uniform_(self.value_table)

    def table_row(self, distance: Int[Tensor, "*where"]) -> Int[Tensor, "*where"]:
        """Return the row of the tables for each integer distance (positive: the past)."""
        return self.max_distance - distance.clamp(-self.max_future, self.max_distance)

    def term(self, q: Tokens, k: Tokens) -> "ShawTerm":
        require_integers("Shaw", q.positions, k.positions)
        assert q.x is not None
        check_head_dim(self, self.head_dim, q.x)
        return ShawTerm(q, k, self)


class ShawTerm(ProductsByDistance):
    """Add to each score the product of the query with the vector of key_table for the pair's
    distance, and to the output the vectors of value_table, with the weights of the values."""

    def __init__(self, q: Tokens, k: Tokens, shaw: Shaw) -> None:
        assert q.x is not None
        dtype = at_least_float32(q.x.dtype)
        scale = shaw.scale(shaw.head_dim)

        def key_vectors(distance: Tensor) -> Tensor:
            return scale * shaw.key_table.to(dtype)[None, shaw.table_row(distance)]

        ends = (-shaw.max_future, shaw.max_distance)
        super().__init__(q, k, ends, q.x.to(dtype), key_vectors)
        self.shaw = shaw
        self.dtype = dtype
        if type(self) is ShawTerm:  # a subclass may do more to far keys than `far_terms` says
            self.far_from = shaw.max_distance

    @property
    def sum_values(self):  # type: ignore[override]
        """Return the function that computes the output from weights and values, instead of weights
        @ v, see Term; None without value_table."""
        return None if self.shaw.value_table is None else self._sum_values

    def _sum_values(self, weights: Tensor, v: Tensor, rows: slice, keys: slice) -> Tensor:
        """Return the output sum_j weight[i, j] (v_j + value_table[r]) of a block, (batch,
        num_heads, rows, v_dim). For the second summand the weights are added up by distance, and
        their sums multiplied with the table."""
        self._check_value_width(v)
        shaw = self.shaw
        assert shaw.value_table is not None
        out = grouped_matmul(weights, v.to(weights.dtype))
        distance = distances(self.q_tokens[rows].positions, self.k_tokens[keys].positions)
        if distance.ndim == 3:  # (batch, rows, keys)
            distance = distance[:, None]
        table_rows = shaw.table_row(distance).expand(weights.shape)
        weight_sums = weights.new_zeros(*weights.shape[:-1], len(shaw.value_table))
        weight_sums = weight_sums.scatter_add(-1, table_rows, weights)
        return out + weight_sums @ shaw.value_table.to(weight_sums.dtype)

    def _check_value_width(self, v: Tensor) -> None:
        """Raise ValueError if there is a value_table whose width, head_dim, is not that of v."""
        shaw = self.shaw
        if shaw.value_table is not None and v.shape[-1] != shaw.head_dim:
            raise ValueError(
                f"Shaw: built for head_dim={shaw.head_dim}, got v with shape {tuple(v.shape)}. "
                "Use values=False if values have another width."
            )

    def attend_near(  # type: ignore[override]
        self,
        q: Float[Tensor, "batch num_heads rows {self.shaw.head_dim}"],
        k: Float[Tensor, "batch num_kv_heads keys {self.shaw.head_dim}"],
        v: Float[Tensor, "batch num_kv_heads keys v_dim"],
    ) -> tuple[Float[Tensor, "batch num_heads rows v_dim"], Float[Tensor, "batch num_heads rows"]]:
        """Return output and logsumexp of causal attention to the keys nearer than max_distance, for
        a block of max_distance queries at a time.

        Let w be max_distance. The w queries of a block see 2w - 1 keys together, from w - 1 before
        the first query on. Query r sees w of them, from column r on. For w = 3:

            key       -2  -1   0   1   2
            query 0    x   x   x
            query 1        x   x   x
            query 2            x   x   x

        All products of a block are one matrix product. `_diagonals_to_columns` moves the visible
        ones of each query to w columns by falling distance: column c is for distance w - 1 - c.
        Before the product with the values, `_columns_to_diagonals` moves the weights back.
        """
        self._check_value_width(v)
        shaw = self.shaw
        window = shaw.max_distance
        num_heads, length = q.shape[1:3]
        q = q.to(self.dtype)
        num_blocks = -(-length // window)
        num_missing_queries = num_blocks * window - length  # queries that the last block lacks
        num_missing_keys = window - 1 - (k.shape[2] - length)  # keys that the first block lacks
        table_rows = shaw.table_row(torch.arange(window - 1, -1, -1, device=q.device))

        def by_block(t: Tensor) -> Tensor:
            """Return the keys or values t by block of queries, (batch, heads, blocks, width, 2w -
            1), with zeros where a block reaches beyond the first or the last key."""
            t = F.pad(t.to(q.dtype), (0, 0, num_missing_keys, num_missing_queries))
            return repeat_kv_heads(t.unfold(2, 2 * window - 1, window), num_heads)

        def by_query_block(t: Tensor) -> Tensor:
            """Return t, (batch, heads, rows, width), by block of queries, (batch, heads, blocks, w,
            width), with zeros after the last query."""
            return F.pad(t, (0, 0, 0, num_missing_queries)).unflatten(2, (num_blocks, window))

        queries_by_block = by_query_block(q)
        # Each step takes the name of the one before, so that memory holds one of them.
        scores = _diagonals_to_columns(queries_by_block @ by_block(k)).flatten(2, 3)[:, :, :length]
        scores = scores + q @ shaw.key_table.to(q.dtype)[table_rows].mT
        scores = shaw.scale(shaw.head_dim) * scores

        key_index = torch.arange(length, device=q.device)[:, None] - num_missing_keys
        key_index = key_index + torch.arange(window, device=q.device)
        scores = scores.masked_fill(key_index < 0, -torch.inf)
        logsumexp = scores.logsumexp(-1)
        weights = (scores - logsumexp[..., None]).exp()

        out = _columns_to_diagonals(by_query_block(weights)) @ by_block(v).mT
        out = out.flatten(2, 3)[:, :, :length]
        if shaw.value_table is not None:
            out = out + weights @ shaw.value_table.to(q.dtype)[table_rows]
        return out, logsumexp

    def far_terms(  # type: ignore[override]
        self, q: Float[Tensor, "batch num_heads rows {self.shaw.head_dim}"]
    ) -> tuple[Float[Tensor, "batch num_heads rows"], Float[Tensor, "*v_dim"]]:
        """Return what the term adds for a key at max_distance or farther, which is the same for all
        such keys: to the score of each query its product with their row of key_table, (batch,
        num_heads, rows), and to the value their row of value_table, (head_dim) or 0 if there is
        none."""
        shaw = self.shaw
        q = q.to(self.dtype)
        row = shaw.table_row(torch.tensor(shaw.max_distance, device=q.device))
        scores = shaw.scale(shaw.head_dim) * (q @ shaw.key_table[row].to(q.dtype))
        if shaw.value_table is None:
            return scores, q.new_zeros(())
        return scores, shaw.value_table[row].to(q.dtype)


def _diagonals_to_columns(block: Tensor) -> Tensor:
    """Return columns r to r + w - 1 of each row r of block (..., w, 2w - 1), as (..., w, w).

    In memory, row r begins at element r (2w - 1), so its column r + c is element 2w r + c. With w
    more elements at the end the block can be read as rows of 2w, of which the first w columns are
    kept.
    """
    w = block.shape[-2]
    return F.pad(block.flatten(-2), (0, w)).unflatten(-1, (w, 2 * w))[..., :w]


def _columns_to_diagonals(columns: Tensor) -> Tensor:
    """Return (..., w, 2w - 1), in which row r has row r of (..., w, w) in its columns r to r + w -
    1, and zeros elsewhere: the inverse of `_diagonals_to_columns`."""
    w = columns.shape[-2]
    numbers = F.pad(columns, (0, w)).flatten(-2)[..., : w * (2 * w - 1)]
    return numbers.unflatten(-1, (w, 2 * w - 1))
