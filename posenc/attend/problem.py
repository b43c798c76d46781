"""One softmax attention over one set of keys, ready to run, and what it costs.

A `Problem` answers what the ways of attention ask: which keys a mask may show to some queries
(`keys_maybe_visible`) and which it shows for sure (`keys_visible_to_all`), the scores and the bias
of some queries, and the sum of values. Queries and keys are counted by index, from 0. `first_key`
is above 0 if a problem was restricted to some keys by `restricted_to_keys`.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.encodings import PairwiseBias, ProductsByDistance, Term, Tokens
from posenc.encodings.base.position_encoding import PositionEncoding, check_heads
from posenc.encodings.numerics.precision import at_least_float32, without_autocast
from posenc.encodings.numerics.tensor_views import grouped_matmul, repeat_kv_heads
from posenc.encodings.numerics.torch_modes import autocast_enabled
from posenc.masks import Mask
from posenc.positions.tokens import are_known_equal

BEYOND_ANY_DISTANCE = 2**62
"""A distance that no pair reaches, in place of infinity."""


class Cost(NamedTuple):
    """Hold the expected time and memory of one softmax attention by one implementation."""

    time_growth: str
    """How the time grows with the lengths, such as "O(q_len * kv_len)"."""
    extra_bytes: int
    """Peak memory in addition to inputs, output and gradients, including the backward pass if
    gradients are needed."""


@dataclass(frozen=True)
class Problem:
    """Hold the arguments of one softmax attention, checked, and transformed by the encoding."""

    q: Tensor
    """Transformed queries (batch, num_heads, q_len, width)."""
    k: Tensor
    """Transformed keys (batch, num_kv_heads, kv_len, width)."""
    v: Tensor
    """Values (batch, num_kv_heads, kv_len, v_dim)."""
    queries: Tokens
    """Untransformed queries, with their positions and states."""
    keys: Tokens
    """Untransformed keys, with their positions and states, but without vectors unless the term
    reads them."""
    term: Term | None
    """What changes the scores and the sum of values; None for nothing."""
    encoding: PositionEncoding
    mask: Mask | None
    """Mask bound to positions; None if every query sees every key."""
    scale: float
    """Factor of q . k before any bias."""
    dropout_p: float
    """Probability of dropping an attention weight."""
    needs_lse: bool
    """True if the log-sum-exp of each row of scores is needed."""
    needs_grad: bool
    """True if autograd tracks q, k, v, a state or a parameter of the encoding."""
    query_offset: int | None = None
    """Position of the first query minus that of the first key; None unless both are known, without
    waiting for the device, to be consecutive."""
    mask_query_offset: int | None = None
    """The same difference for the positions to which the mask is bound; without a mask equal to
    query_offset."""
    first_key: int = 0
    """Index of the first key of `k` among all keys, which mask and term count; above 0 if this
    problem was restricted to some of them."""

    @property
    def q_len(self) -> int:
        """Return the number of queries."""
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        """Return the number of keys of this problem."""
        return self.k.shape[2]

    @property
    def is_autocast(self) -> bool:
        """Return True if torch's autocast is enabled for the device of q."""
        return autocast_enabled(self.q.device.type)

    @property
    def product_dtype(self) -> torch.dtype:
        """Return the dtype in which torch's kernels multiply: that of q, or autocast's."""
        if not self.is_autocast or self.q.dtype == torch.float64:
            return self.q.dtype
        return torch.get_autocast_dtype(self.q.device.type)

    @property
    def is_causal_by_index(self) -> bool:
        """Return True if the mask equals torch's is_causal: query i sees keys 0 to i. If
        `restricted_to_keys` returned this problem, the answer is about all keys, not only those
        that are left."""
        mask = self.mask
        # A mask is exact if it hides no more keys than its `causal` and `window` say.
        if mask is None or not mask.causal or not mask.exact:
            return False
        # Both are consecutive if this is not None, so that an equal start is an equal position.
        starts_are_equal = self.mask_query_offset == 0
        lengths_are_equal = len(self.queries) == len(self.keys)
        return starts_are_equal and lengths_are_equal and mask.window is None

    @property
    def every_query_sees_a_key(self) -> bool:
        """Return True if each query is known to see at least one key."""
        mask = self.mask
        if mask is None:
            return True
        assert mask.q_positions is not None and mask.kv_positions is not None
        # Causality and windows show a query the key at its own position.
        return mask.exact and are_known_equal(mask.q_positions, mask.kv_positions)

    @property
    def visible_distances(self) -> tuple[int, int]:
        """Return the least and the greatest distance at which the mask may show a key. A distance
        is the index of a query minus the index of a key."""
        mask = self.mask
        offset = self.mask_query_offset
        if mask is None or offset is None:
            return -BEYOND_ANY_DISTANCE, BEYOND_ANY_DISTANCE
        # A window counts the query itself, so that its last key is window - 1 away.
        largest_distance = BEYOND_ANY_DISTANCE if mask.window is None else mask.window - 1
        smallest_distance = 0 if mask.causal else -largest_distance
        return smallest_distance - offset, largest_distance - offset  # from positions to indices

    def keys_maybe_visible(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range [kv_start, kv_stop) that includes all keys visible to any of queries
        [start, stop); not empty unless there are no keys."""
        if self.mask_query_offset is None:
            return 0, self.kv_len
        least_distance, greatest_distance = self.visible_distances
        # The last query, stop - 1, sees keys up to stop - 1 - least_distance; the first one from
        # start - greatest_distance on. One key stays even if the mask hides all. These count from
        # the mask's first key, and the range from `first_key`.
        kv_stop = min(self.kv_len, stop - least_distance - self.first_key)
        kv_stop = max(kv_stop, min(1, self.kv_len))
        kv_start = max(0, min(start - greatest_distance - self.first_key, kv_stop - 1))
        return kv_start, kv_stop

    def keys_visible_to_all(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range [kv_start, kv_stop) of keys known to be visible to all queries [start,
        stop)."""
        if self.mask is None:
            return 0, self.kv_len
        if self.mask_query_offset is None or not self.mask.exact:
            return 0, 0
        least_distance, greatest_distance = self.visible_distances
        # Here the last query limits the first key, and the first query the last one.
        kv_start = max(0, stop - 1 - greatest_distance - self.first_key)
        kv_stop = min(self.kv_len, start - least_distance + 1 - self.first_key)
        return (kv_start, kv_stop) if kv_start < kv_stop else (0, 0)

    def mask_scores_in_place(self, scores: Tensor, start: int, stop: int) -> Tensor | None:
        """Write -inf into `scores` (batch, num_heads, stop - start, kv_len) where a key is hidden
        from queries [start, stop).

        Return the mask of these pairs, True for visible ones, which broadcasts to `scores`. Kernels
        need it where a query may see no key, or a key may be hidden from all queries, see
        `flash.attend`. Return None if neither can be: if nothing is hidden, or if some keys are
        known to be visible to all queries.
        """
        kv_start, kv_stop = self.keys_visible_to_all(start, stop)
        if kv_start == kv_stop:
            return self._mask_scores_of_keys(scores, start, stop, 0, self.kv_len)
        # Then only causality and a window hide keys, and never padding, whose values may be NaN.
        self._mask_scores_of_keys(scores, start, stop, 0, kv_start)
        self._mask_scores_of_keys(scores, start, stop, kv_stop, self.kv_len)
        return None

    def _mask_scores_of_keys(
        self, scores: Tensor, start: int, stop: int, kv_start: int, kv_stop: int
    ) -> Tensor | None:
        """Write -inf into `scores` (batch, num_heads, stop - start, kv_len) where one of keys
        [kv_start, kv_stop) is hidden from queries [start, stop). Return the mask of these pairs,
        True for visible ones; None if none is hidden."""
        if kv_start >= kv_stop:
            return None
        visible = self.restricted_to_keys(kv_start, kv_stop).visibility_mask(start, stop)
        if visible is not None:
            scores[..., kv_start:kv_stop].masked_fill_(~visible, -torch.inf)
        return visible

    def with_prepared_term(self, max_rows: int) -> "Problem":
        """Return the same problem, whose term has computed what blocks of at most `max_rows`
        queries have in common, such as a table by distance. Called once, before `scores` or
        `bias`."""
        if self.term is None:
            return self
        with without_autocast(self.q.device):
            term = self.term.prepare_blocks(max_rows, self._hides_later_keys())
        return self if term is self.term else replace(self, term=term)

    def _hides_later_keys(self) -> bool:
        """Return True if the mask is known to hide all keys at later positions than the query's, as
        the term counts positions."""
        mask = self.mask
        if mask is None or not mask.causal:
            return False
        assert mask.q_positions is not None and mask.kv_positions is not None
        queries_have_same_positions = are_known_equal(
            self.queries.positions_or_range, mask.q_positions
        )
        return queries_have_same_positions and are_known_equal(
            self.keys.positions_or_range, mask.kv_positions
        )

    def restricted_to_keys(self, kv_start: int, kv_stop: int) -> "Problem":
        """Return the attention from all queries to keys [kv_start, kv_stop) of this problem only,
        counted from 0. Its `first_key` counts the keys left out before them, because mask, term and
        `visible_distances` keep the indices of all keys."""
        if (kv_start, kv_stop) == (0, self.kv_len):
            return self
        return replace(
            self,
            k=self.k[:, :, kv_start:kv_stop],
            v=self.v[:, :, kv_start:kv_stop],
            first_key=self.first_key + kv_start,
        )

    def widen_dtype(self, t: Tensor) -> Tensor:
        """Return t in at least float32. Under autocast return t itself, because autocast would cast
        it back."""
        return t if self.is_autocast else t.to(at_least_float32(t.dtype))

    def scores(self, start: int, stop: int, visible: Tensor | None = None) -> Tensor:
        """Return the scaled scores of queries [start, stop) with the term applied, before masking:
        (batch, num_heads, stop - start, kv_len). `visible` is for terms that read the mask."""
        q = self.widen_dtype(self.q[:, :, start:stop])
        k = self.widen_dtype(self.k)
        scores = grouped_matmul(q * self.scale, k.mT)
        scores = scores.to(at_least_float32(scores.dtype))
        if self.term is None:
            return scores
        with without_autocast(scores.device):
            changed_scores = self.term.add(scores, slice(start, stop), self.key_slice, visible)
        return changed_scores.to(scores.dtype)  # states may be wider than q

    def bias(self, start: int, stop: int) -> Tensor:
        """Return the bias of an additive term for queries [start, stop): (batch or 1, num_heads,
        stop - start, kv_len). Called without autocast, which would round it."""
        term = self.term
        assert term is not None
        row_slice = slice(start, stop)
        num_rows = stop - start
        if self.has_bias_by_distance:
            bias_by_distance = self.bias_of_distances(
                stop - 1 - self.first_key, num_rows + self.kv_len - 1
            )
            # A prepared encoding keeps the row for later calls. It is returned as it is only where
            # nobody writes to it, as `mask_scores_in_place` does for hidden keys.
            nothing_to_hide = self.keys_visible_to_all(start, stop) == (0, self.kv_len)
            if num_rows == 1 and nothing_to_hide:
                return bias_by_distance[None, :, None]
            # Each query's part of the row begins one entry later than that of the next query.
            return bias_by_distance.unfold(1, self.kv_len, 1).flip(1)[None]

        dtype = at_least_float32(self.q.dtype)
        if isinstance(term, PairwiseBias):
            # (1, ...) if rows of the batch share the bias. `mask_scores_in_place` may write to what
            # is returned, so that a tensor which belongs to the user's encoding is copied.
            return term.bias_of_block(row_slice, self.key_slice).to(
                dtype, copy=not term.block_is_new_memory
            )
        product = (
            term.product(row_slice, self.key_slice)
            if isinstance(term, ProductsByDistance)
            else None
        )
        if product is not None:
            return product.to(dtype)
        zeros = self.q.new_zeros(*self.q.shape[:2], num_rows, self.kv_len, dtype=dtype)
        return term.add(zeros, row_slice, self.key_slice, None).to(dtype)

    @property
    def has_bias_by_distance(self) -> bool:
        """Return True if the term adds a bias by head and distance, and positions are known to
        be consecutive, so that `bias_of_distances` gives it."""
        term = self.term
        return term is not None and term.by_distance is not None and self.query_offset is not None

    def bias_of_distances(self, farthest: int, num_distances: int) -> Tensor:
        """Return the bias of the distances farthest, farthest - 1, ..., (num_heads, num_distances).

        farthest: index of a query minus index of a key, counted among all keys. The distance
            between their positions is larger by `query_offset`.
        """
        assert self.term is not None and self.term.by_distance is not None
        assert self.query_offset is not None
        row = self.term.by_distance(self.query_offset + farthest, num_distances, self.q)
        check_heads(self.encoding, row.shape[0], self.q)
        return row

    def scores_bytes(self, num_rows: int) -> int:
        """Return the bytes needed to materialize the scores of `num_rows` queries with all keys of
        this problem."""
        batch, num_heads = self.q.shape[:2]
        element_bytes = max(4, self.q.element_size())  # scores are float32 or wider
        return batch * num_heads * num_rows * self.kv_len * element_bytes

    def dense_bytes(self, num_rows: int) -> int:
        """Return the bytes needed to attend from `num_rows` queries at once: scores, weights,
        temporary results of the term and, if gradients are needed, saved weights."""
        multiple_of_scores: float = 2  # scores and weights
        if self.term is not None:
            multiple_of_scores += self.term.extra_score_arrays(self.needs_grad)
        if self.needs_grad:  # weights are saved before rows without a key are set to zero
            multiple_of_scores += 1 if self.every_query_sees_a_key else 2
        return int(multiple_of_scores * self.scores_bytes(num_rows))

    def negligible_threshold(self) -> Tensor:
        """Return a threshold for each head, (num_heads,), below 0: a key does not matter to a query
        if its bias minus that of another key, which the query also sees, is less than this.

        Products scale * q . k are at most a = scale * max |q| * max |k| in size, so two of them
        differ by at most 2 a. A key whose bias lies 40 + log(kv_len) + 2 a below has a weight below
        exp(-40) / kv_len of the other key's. All such keys together have less than exp(-40) of it,
        which is less than the rounding of float64.

        NaN unless all of q, k and v are finite: no bias is less than NaN, so that then no key is
        left out.
        """
        dtype = at_least_float32(self.q.dtype)
        num_heads = self.q.shape[1]
        longest_q_norm = _longest_norm(self.q, num_heads, dtype)
        longest_k_norm = _longest_norm(self.k, num_heads, dtype)
        # 2.04 instead of 2: vectors may be rounded to 16 bits.
        largest_difference = 2.04 * abs(self.scale) * longest_q_norm * longest_k_norm
        # 0 times infinity or NaN is NaN. The norms of q and k make the sum NaN by themselves.
        nan_unless_finite = 0 * self.v.detach().sum(dtype=dtype)
        return -40 - math.log(self.kv_len) - largest_difference + nan_unless_finite

    def visibility_mask(self, start: int, stop: int) -> Tensor | None:
        """Return the mask of queries [start, stop), True for visible keys, which broadcasts to
        their scores. None if all keys are known to be visible."""
        if self.mask is None or self.keys_visible_to_all(start, stop) == (0, self.kv_len):
            return None
        batch, num_heads = self.q.shape[:2]
        return self.mask.rows(
            batch, num_heads, start, stop, self.kv_len, self.q.device, first_key=self.first_key
        )

    def sum_values(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """Return the sum of values by `weights` (batch, num_heads, stop - start, kv_len) for
        queries [start, stop), in the dtype of q. A term may add to it."""
        v = self.widen_dtype(self.v)
        if self.term is None or self.term.sum_values is None:
            return grouped_matmul(weights, v).to(self.q.dtype)
        with without_autocast(weights.device):
            out = self.term.sum_values(weights, v, slice(start, stop), self.key_slice)
        return out.to(self.q.dtype)

    @property
    def key_slice(self) -> slice:
        """Return the slice that selects this problem's keys among all keys, which mask and term
        count."""
        return slice(self.first_key, self.first_key + self.kv_len)


def _longest_norm(vectors: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return the norm of the longest of the vectors (batch, heads, len, width) for each query head,
    (num_heads,), computed in `dtype`."""
    norms = torch.linalg.vector_norm(vectors.detach(), dim=-1, dtype=dtype)
    return repeat_kv_heads(norms.amax((0, 2)), num_heads, 0)
