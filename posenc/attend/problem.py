"""One softmax attention over one set of keys, ready to run."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posenc.encodings import ByDistance, Dense, Term, Tokens
from posenc.encodings.base.base import PositionEncoding, check_heads
from posenc.encodings.numbers.heads import for_every_head, grouped_matmul
from posenc.encodings.numbers.precision import at_least_float32, without_autocast
from posenc.encodings.numbers.torch_abilities import autocast_enabled
from posenc.masks import Mask
from posenc.positions import same

FAR = 2**62
"""Distance that no pair reaches."""


@dataclass(frozen=True)
class Problem:
    """Hold the arguments of one softmax attention, checked and transformed.

    q (batch, num_heads, q_len, width) and k (batch, num_kv_heads, kv_len, width) are results of
    `encoding.transform`; `queries` and `keys` are the untransformed tokens.
    `term` changes scores and values, or is None. `first_key` is the index of the first of these
    keys among those of mask and term.

    needs_grad: autograd tracks q, k, v, a state or a parameter of the encoding.
    shift: position of the first query minus that of the first key; None unless both are known,
        without waiting for the device, to be consecutive.
    mask_shift: the same for the positions that the mask is bound to, if there is one.
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
    needs_grad: bool
    shift: int | None = None
    mask_shift: int | None = None
    first_key: int = 0

    @property
    def q_len(self) -> int:
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        return self.k.shape[2]

    @property
    def autocast(self) -> bool:
        return autocast_enabled(self.q.device.type)

    @property
    def product_dtype(self) -> torch.dtype:
        """Return the dtype in which torch's kernels multiply: that of q, or autocast's."""
        if not self.autocast or self.q.dtype == torch.float64:
            return self.q.dtype
        return torch.get_autocast_dtype(self.q.device.type)

    @property
    def causal_by_index(self) -> bool:
        """Return True if the mask equals torch's is_causal."""
        mask = self.mask
        exact = mask is not None and mask.exact and mask.causal and mask.window is None
        return exact and self.mask_shift == 0 and len(self.queries) == len(self.keys)

    @property
    def every_row_sees_a_key(self) -> bool:
        """Return True if each query is known to see at least one key."""
        mask = self.mask
        if mask is None:
            return True
        assert mask.q_positions is not None and mask.kv_positions is not None
        return mask.exact and same(mask.q_positions, mask.kv_positions)

    @property
    def distances(self) -> tuple[int, int]:
        """Return the least and the greatest distance at which the mask may show a key, by index:
        that of a query minus that of a key."""
        mask, shift = self.mask, self.mask_shift
        if mask is None or shift is None:
            return -FAR, FAR
        most = FAR if mask.window is None else mask.window - 1
        return (0 if mask.causal else -most) - shift, most - shift

    def maybe_visible(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range [first, last) that includes all keys visible to any of queries [start,
        stop); not empty unless there are no keys."""
        if self.mask_shift is None:
            return 0, self.kv_len
        least, most = self.distances
        last = max(min(self.kv_len, stop - least), min(1, self.kv_len))
        return max(0, min(start - most, last - 1)), last

    def all_visible(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range [first, last) of keys known to be visible to all queries [start, stop)."""
        if self.mask is None:
            return 0, self.kv_len
        if self.mask_shift is None or not self.mask.exact:
            return 0, 0
        least, most = self.distances
        first = max(0, stop - 1 - most - self.first_key)
        last = min(self.kv_len, start - least + 1 - self.first_key)
        return (first, last) if first < last else (0, 0)

    def hide(self, scores: Tensor, start: int, stop: int) -> Tensor | None:
        """Write -inf in place where a key is hidden from queries [start, stop). Return the mask of
        visible pairs, or None if the mask did not have to be read."""
        first, last = self.all_visible(start, stop)
        spans = [(0, self.kv_len)] if first == last else [(0, first), (last, self.kv_len)]
        visible = None
        for begin, end in spans:
            visible = self.among(begin, end).visible(start, stop) if begin < end else None
            if visible is not None:
                scores[..., begin:end].masked_fill_(~visible, -torch.inf)
        return visible if first == last else None

    def ready(self, rows: int) -> "Problem":
        """Precompute what blocks of at most `rows` queries have in common."""
        if self.term is None:
            return self
        mask, own = self.mask, (self.queries.where, self.keys.where)
        causal = mask is not None and mask.causal
        if causal:  # by positions that are those of the term
            causal = all(map(same, own, (mask.q_positions, mask.kv_positions)))  # type: ignore[arg-type]
        with without_autocast(self.q.device):
            term = self.term.ready(rows, causal)
        return self if term is self.term else replace(self, term=term)

    def among(self, first: int, last: int) -> "Problem":
        """Restrict the attention to keys [first, last)."""
        if (first, last) == (0, self.kv_len):
            return self
        k, v = self.k[:, :, first:last], self.v[:, :, first:last]
        return replace(self, k=k, v=v, first_key=self.first_key + first)

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
        stop - start, kv_len). Called without autocast, which would round it."""
        rows, dtype = slice(start, stop), at_least_float32(self.q.dtype)
        term, count = self.term, stop - start
        assert term is not None
        if self.is_by_distance:
            row = self.by_distance(stop - 1 - self.first_key, count + self.kv_len - 1)
            if count == 1 and self.all_visible(start, stop) == (0, self.kv_len):
                return row[None, :, None]  # the encoding may keep the row: only to be read
            return row.unfold(1, self.kv_len, 1).flip(1)[None]
        if isinstance(term, Dense):  # may be one row for the batch, and a tensor of the user
            return term.values(rows, self.span).to(dtype, copy=not term.owns_values)
        product = term.product(rows, self.span) if isinstance(term, ByDistance) else None
        if product is not None:
            return product.to(dtype)
        zeros = self.q.new_zeros(*self.q.shape[:2], count, self.kv_len, dtype=dtype)
        return term.add(zeros, rows, self.span, None).to(dtype)

    @property
    def is_by_distance(self) -> bool:
        """Return True if the term adds a bias by distance and positions are consecutive."""
        term = self.term
        return term is not None and term.by_distance is not None and self.shift is not None

    def by_distance(self, farthest: int, count: int) -> Tensor:
        """Return the bias of `count` falling distances, (num_heads, count). `farthest` is the first
        one by index: that of a query minus that of a key."""
        assert self.term is not None and self.term.by_distance is not None
        assert self.shift is not None
        row = self.term.by_distance(self.shift + farthest, count, self.q)
        check_heads(self.encoding, row.shape[0], self.q)
        return row

    def negligible(self) -> Tensor:
        """Return for each head how far the bias of a key lies below that of another key, visible to
        the same query, if it does not matter: all such keys together have less than exp(-40) of the
        other key's weight, which is less than the rounding of float64. NaN, less than which is no
        number, unless all of q, k and v are finite."""
        dtype, heads = at_least_float32(self.q.dtype), self.q.shape[1]
        q, k, v = (t.detach() for t in (self.q, self.k, self.v))
        longest = (torch.linalg.vector_norm(t, dim=-1, dtype=dtype).amax((0, 2)) for t in (q, k))
        of_q, of_k = (for_every_head(t, heads, 0) for t in longest)
        # The largest difference of two scores, also of vectors rounded to 16 bits.
        apart = 2.04 * abs(self.scale) * of_q * of_k
        return -40 - math.log(self.kv_len) - apart + 0 * v.sum(dtype=dtype)

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
