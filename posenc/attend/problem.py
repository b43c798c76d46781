"""One softmax attention over one set of keys, ready to run, and what is known about it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posenc.encodings import ByDistance, Dense, Term, Tokens
from posenc.encodings.base.base import PositionEncoding, check_heads
from posenc.encodings.numbers.heads import grouped_matmul
from posenc.encodings.numbers.precision import at_least_float32, without_autocast
from posenc.encodings.numbers.tracking import transformed
from posenc.masks import Mask
from posenc.positions import as_range, same


@dataclass(frozen=True)
class Known:
    """Record properties of one attention, found once per call without waiting for the device.

    runs: positions of the first query and the first key, if both are consecutive; otherwise None.
    mask_runs: the same for the positions that the mask is bound to.
    causal_by_index: the mask equals torch's is_causal.
    sees_no_later_position: the mask hides every pair of a negative distance.
    every_row_sees_a_key: each query sees at least one key.
    needs_grad: autograd tracks q, k, v, a state or a parameter of the encoding.
    compiling, transformed: torch.compile traces the call; a torch.func transform is active.
    """

    runs: tuple[int, int] | None
    mask_runs: tuple[int, int] | None
    causal_by_index: bool
    sees_no_later_position: bool
    every_row_sees_a_key: bool
    needs_grad: bool
    compiling: bool
    transformed: bool

    @classmethod
    def of(
        cls,
        queries: Tokens,
        keys: Tokens,
        vectors: tuple[Tensor, Tensor, Tensor],
        mask: Mask | None,
        encoding: PositionEncoding,
    ) -> "Known":
        """Find the properties of an attention whose mask is bound to positions. `vectors` are q and
        k as `encoding.transform` returns them, and v."""
        compiling = torch.compiler.is_compiling()
        runs = _runs(queries.where, keys.where)
        mask_runs, later, blind = None, False, False
        if mask is not None:
            q_where, k_where = mask.q_positions, mask.kv_positions
            assert q_where is not None and k_where is not None
            own = q_where is queries.where and k_where is keys.where
            mask_runs = runs if own else _runs(q_where, k_where)
            later = mask.causal and (
                own or (same(q_where, queries.where) and same(k_where, keys.where))
            )
            blind = not (mask.exact and same(q_where, k_where))
        causal = mask is not None and mask.exact and mask.causal and mask.window is None
        square = len(queries) == len(keys) and mask_runs is not None
        states = (queries.x, queries.state, keys.x, keys.state)
        grad = torch.is_grad_enabled()
        tensors = [*vectors, *states, *encoding.parameters()] if grad else []
        return cls(
            runs=runs,
            mask_runs=mask_runs,
            causal_by_index=bool(causal and square and mask_runs[0] == mask_runs[1]),  # type: ignore[index]
            sees_no_later_position=later,
            every_row_sees_a_key=not blind,
            needs_grad=any(t is not None and t.requires_grad for t in tensors),
            compiling=compiling,
            transformed=transformed(),
        )


def _runs(q_where: Tensor | range, k_where: Tensor | range) -> tuple[int, int] | None:
    q, k = as_range(q_where), as_range(k_where)
    return None if q is None or k is None else (q.start, k.start)


@dataclass(frozen=True)
class Problem:
    """Hold the arguments of one softmax attention, checked and transformed.

    q (batch, num_heads, q_len, width) and k (batch, num_kv_heads, kv_len, width) are results of
    `encoding.transform`; `queries` and `keys` are the untransformed tokens.
    `term` changes scores and values, or is None. `first_key` is the index of the first of these
    keys among those of mask and term.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    queries: Tokens
    keys: Tokens
    term: Term | None
    encoding: PositionEncoding
    mask: Mask | None
    scale: float
    dropout_p: float
    need_lse: bool
    known: Known
    first_key: int = 0

    @property
    def q_len(self) -> int:
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        return self.k.shape[2]

    @property
    def autocast(self) -> bool:
        device = self.q.device.type
        return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)

    @property
    def product_dtype(self) -> torch.dtype:
        """Return the dtype in which torch's kernels multiply: that of q, or autocast's."""
        if not self.autocast or self.q.dtype == torch.float64:
            return self.q.dtype
        return torch.get_autocast_dtype(self.q.device.type)

    def maybe_visible(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range [first, last) that includes all keys visible to any of queries [start,
        stop); not empty unless there are no keys."""
        first, last = 0, self.kv_len
        mask, runs = self.mask, self.known.mask_runs
        if mask is not None and runs is not None:
            shift = runs[0] - runs[1]  # from the index of a query to the key at its position
            if mask.causal:
                last = min(last, stop + shift)
            if mask.window is not None:
                first = max(first, start + shift - mask.window + 1)
                last = min(last, stop - 1 + shift + mask.window)
        last = max(last, min(1, self.kv_len))
        return max(0, min(first, last - 1)), last

    def all_visible(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range [first, last) of keys known to be visible to all queries [start, stop)."""
        mask, runs = self.mask, self.known.mask_runs
        if mask is None:
            return 0, self.kv_len
        if runs is None or not mask.exact:
            return 0, 0
        first, last = 0, self.kv_len
        shift = runs[0] - runs[1] - self.first_key
        if mask.causal:
            last = min(last, start + shift + 1)
        if mask.window is not None:
            first = max(first, stop + shift - mask.window)
            last = min(last, start + shift + mask.window)
        return (first, last) if first < last else (0, 0)

    def hide(self, scores: Tensor, start: int, stop: int, value: float) -> Tensor | None:
        """Write `value` in place where a key is hidden from queries [start, stop). Return the mask
        of visible pairs, or None if the mask did not have to be read."""
        first, last = self.all_visible(start, stop)
        if first == last:
            visible = self.visible(start, stop)
            if visible is not None:
                scores.masked_fill_(~visible, value)
            return visible
        for begin, end in ((0, first), (last, self.kv_len)):
            visible = self.among(begin, end).visible(start, stop) if begin < end else None
            if visible is not None:
                scores[..., begin:end].masked_fill_(~visible, value)
        return None

    def ready(self, rows: int) -> "Problem":
        """Precompute what blocks of at most `rows` queries have in common."""
        if self.term is None:
            return self
        with without_autocast(self.q.device):
            term = self.term.ready(rows, self.known.sees_no_later_position)
        return self if term is self.term else replace(self, term=term)

    def among(self, first: int, last: int) -> "Problem":
        """Restrict the attention to keys [first, last)."""
        if (first, last) == (0, self.kv_len):
            return self
        return replace(
            self,
            k=self.k[:, :, first:last],
            v=self.v[:, :, first:last],
            first_key=self.first_key + first,
        )

    def widen(self, t: Tensor) -> Tensor:
        """Convert t to at least float32, except under autocast, which would cast it back."""
        return t if self.autocast else t.to(at_least_float32(t.dtype))

    def scores(self, start: int, stop: int, visible: Tensor | None = None) -> Tensor:
        """Return the scaled scores of queries [start, stop) with the term applied, before masking:
        (batch, num_heads, stop - start, kv_len). `visible` is for terms that read the mask."""
        q, k = self.widen(self.q[:, :, start:stop]), self.widen(self.k)
        scores = grouped_matmul(q * self.scale, k.mT)
        scores = scores.to(at_least_float32(scores.dtype))
        if self.term is None:
            return scores
        with without_autocast(scores.device):
            added = self.term.add(scores, slice(start, stop), self.span, visible)
        return added.to(scores.dtype)  # states may be wider than q

    def bias(self, start: int, stop: int) -> Tensor:
        """Return the bias of an additive term for queries [start, stop): (batch or 1, num_heads,
        stop - start, kv_len)."""
        rows, dtype = slice(start, stop), at_least_float32(self.q.dtype)
        term, runs, count = self.term, self.known.runs, stop - start
        assert term is not None
        with without_autocast(self.q.device):
            if term.by_distance is not None and runs is not None:  # cached in a prepared encoding
                farthest = runs[0] + stop - 1 - runs[1] - self.first_key
                row = term.by_distance(farthest, count + self.kv_len - 1, self.q)
                check_heads(self.encoding, row.shape[0], self.q)
                if count == 1:
                    return row[None, :, None]
                return row.unfold(1, self.kv_len, 1).flip(1)[None]
            if isinstance(term, Dense):  # may be one row for the batch, and a tensor of the user
                return term.values(rows, self.span).to(dtype, copy=not term.owns_values)
            product = term.product(rows, self.span) if isinstance(term, ByDistance) else None
            if product is not None:
                return product.to(dtype)
            zeros = self.q.new_zeros(*self.q.shape[:2], count, self.kv_len, dtype=dtype)
            return term.add(zeros, rows, self.span, None).to(dtype)

    def visible(self, start: int, stop: int) -> Tensor | None:
        """Return the mask of queries [start, stop), True for visible keys, which broadcasts to
        their scores. None if all keys are known to be visible."""
        if self.mask is None or self.all_visible(start, stop) == (0, self.kv_len):
            return None
        batch, heads = self.q.shape[:2]
        return self.mask.rows(
            batch, heads, start, stop, self.kv_len, self.q.device, first_key=self.first_key
        )

    def combine(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """Return the weighted sum of values for queries [start, stop), in the dtype of q."""
        v = self.widen(self.v)
        if self.term is None or self.term.combine is None:
            return grouped_matmul(weights, v).to(self.q.dtype)
        with without_autocast(weights.device):
            out = self.term.combine(weights, v, slice(start, stop), self.span)
        return out.to(self.q.dtype)

    @property
    def span(self) -> slice:
        """Return the slice of these keys among all keys that the term knows."""
        return slice(self.first_key, self.first_key + self.kv_len)
