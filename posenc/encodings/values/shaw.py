"""Shaw's relative positions: learned vectors by clipped distance, added to keys and values."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encodings.base.base import PositionEncoding, check_head_dim
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.placed import require_whole
from posenc.encodings.numbers.heads import for_every_head, grouped_matmul
from posenc.encodings.numbers.precision import at_least_float32
from posenc.encodings.terms.by_distance import ByDistance
from posenc.encodings.terms.tokens import Tokens
from posenc.positions import distances


class Shaw(PositionEncoding):
    """Add a learned vector to each key and each value, by the distance clipped to max_distance.

    score[i, j] = scale * q_i . (k_j + key_table[r]),  out_i = sum_j weight[i, j] (v_j +
    value_table[r]),  r = clip(position_j - position_i, -max_distance, max_distance) + max_distance

    No tensor q_len x kv_len x head_dim is materialized: q . key_table has a column per distance,
    and weights are summed per distance before they are multiplied with value_table.

    Args:
        head_dim: size of one head; the tables are shared by all heads.
        max_distance: larger distances use the row of this one (k in the paper).
        values: False leaves out value_table; the paper finds little loss without it.

    Shapes: q_positions (q_len), kv_positions (kv_len), integer -> like scores and values. Tables:
    (2 * max_distance + 1, head_dim), row 0 for keys max_distance or more behind the query's
    position.
    Units: distances in tokens. Precision: in float32 or better.
    Raises: ValueError if max_distance < 1; TypeError for positions that are not integers.
    Source: Shaw et al. 2018, arXiv:1803.02155, equations 3-5; github.com/tensorflow/tensor2tensor.

    >>> shaw = posenc.Shaw(head_dim=16, max_distance=4)
    >>> shaw.row(torch.tensor([-9, -1, 0, 1, 9]))
    tensor([8, 5, 4, 3, 0])
    """

    claims = Claims(
        places=(3, 4),
        source="Shaw et al. 2018, arXiv:1803.02155, equations 3-5",
        reads_scale=True,
        scope="layer",
    )

    def __init__(self, head_dim: int, *, max_distance: int = 16, values: bool = True) -> None:
        super().__init__()
        self.head_dim, self.max_distance = head_dim, max_distance
        self.claims = replace(self.claims, places=(3, 4) if values else (3,))
        rows = 2 * max_distance + 1
        self.key_table = nn.Parameter(torch.empty(rows, head_dim))
        self.value_table = nn.Parameter(torch.empty(rows, head_dim)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Glorot uniform values, as the authors' code does."""
        nn.init.xavier_uniform_(self.key_table)
        if self.value_table is not None:
            nn.init.xavier_uniform_(self.value_table)

    def row(self, distance: Int[Tensor, "*where"]) -> Int[Tensor, "*where"]:
        """Return the row of the tables for each distance (positive: the past)."""
        return self.max_distance - distance.clamp(-self.max_distance, self.max_distance)

    def term(self, q: Tokens, k: Tokens) -> "ShawTerm":
        require_whole("Shaw", q.positions, k.positions)
        assert q.x is not None
        check_head_dim(self, self.head_dim, q.x)
        return ShawTerm(q, k, self)


class ShawTerm(ByDistance):
    """Add queries times key_table to the scores, and weights times value_table to the output."""

    def __init__(self, q: Tokens, k: Tokens, shaw: Shaw) -> None:
        assert q.x is not None
        dtype, scale = at_least_float32(q.x.dtype), shaw.scale(shaw.head_dim)
        ends = (-shaw.max_distance, shaw.max_distance)
        super().__init__(
            q, k, ends, q.x.to(dtype), lambda d: scale * shaw.key_table.to(dtype)[None, shaw.row(d)]
        )
        self.shaw, self.dtype = shaw, dtype
        if type(self) is ShawTerm:
            self.far_from = shaw.max_distance

    @property
    def combine(self):  # type: ignore[override]
        return None if self.shaw.value_table is None else self._combine

    def _combine(self, weights: Tensor, v: Tensor, rows: slice, keys: slice) -> Tensor:
        shaw = self._checked(v)
        out = grouped_matmul(weights, v.to(weights.dtype))
        assert shaw.value_table is not None
        distance = distances(self.q[rows].positions, self.k[keys].positions)
        index = shaw.row(distance if distance.ndim == 2 else distance[:, None])
        sums = weights.new_zeros(*weights.shape[:-1], shaw.value_table.shape[0])
        sums = sums.scatter_add(-1, index.expand(weights.shape), weights)
        return out + sums @ shaw.value_table.to(sums.dtype)

    def _checked(self, v: Tensor) -> Shaw:
        shaw = self.shaw
        if shaw.value_table is not None and v.shape[-1] != shaw.head_dim:
            raise ValueError(
                f"Shaw: built for head_dim={shaw.head_dim}, got v with shape {tuple(v.shape)}. "
                "Use values=False if values have another width."
            )
        return shaw

    def attend_near(  # type: ignore[override]
        self, q: Float[Tensor, "batch num_heads rows {self.shaw.head_dim}"],
        k: Float[Tensor, "batch num_kv_heads keys {self.shaw.head_dim}"],
        v: Float[Tensor, "batch num_kv_heads keys v_dim"],
    ) -> tuple[
        Float[Tensor, "batch num_heads rows v_dim"], Float[Tensor, "batch num_heads rows"]
    ]:  # fmt: skip
        shaw, near, (heads, n) = self._checked(v), self.shaw.max_distance, q.shape[1:3]
        q, blocks, before = q.to(self.dtype), -(-n // near), k.shape[2] - n
        missing = blocks * near - n
        falling = shaw.row(torch.arange(near - 1, -1, -1, device=q.device))

        def windows(t: Tensor) -> Tensor:
            """Return the keys of each block of `near` queries, (..., width, 2 near - 1)."""
            t = t.to(q.dtype)
            ends = (t[:, :, :1].expand(-1, -1, count, -1) for count in (near - 1 - before, missing))
            first, last = map(torch.zeros_like, ends)
            t = torch.cat([first, t, last], 2).unfold(2, 2 * near - 1, near)
            return for_every_head(t, heads)

        # Row i of a block has its keys, by falling distance, from column i on.
        scores = F.pad(q, (0, 0, 0, missing)).unflatten(2, (blocks, near)) @ windows(k)
        scores = F.pad(scores.flatten(3), (0, near)).unflatten(3, (near, 2 * near))[..., :near]
        scores = scores.flatten(2, 3)[:, :, :n] + q @ shaw.key_table.to(q.dtype)[falling].mT
        key = torch.arange(n, device=q.device)[:, None] - (near - 1 - before)
        key = key + torch.arange(near, device=q.device)
        scores = (shaw.scale(shaw.head_dim) * scores).masked_fill(key < 0, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        moved = F.pad(weights, (0, near, 0, missing)).unflatten(2, (blocks, near)).flatten(3)
        moved = moved[..., : near * (2 * near - 1)].unflatten(3, (near, 2 * near - 1))
        out = (moved @ windows(v).mT).flatten(2, 3)[:, :, :n]
        if shaw.value_table is not None:
            out = out + weights @ shaw.value_table.to(q.dtype)[falling]
        return out, lse

    def far(  # type: ignore[override]
        self, q: Float[Tensor, "batch num_heads rows {self.shaw.head_dim}"]
    ) -> tuple[Float[Tensor, "batch num_heads rows"], Float[Tensor, "*v_dim"]]:
        shaw, q = self.shaw, q.to(self.dtype)
        row = shaw.row(torch.tensor(shaw.max_distance, device=q.device))
        value = q.new_zeros(()) if shaw.value_table is None else shaw.value_table[row].to(q.dtype)
        return shaw.scale(shaw.head_dim) * (q @ shaw.key_table[row].to(q.dtype)), value
