"""One ordinary attention, ready to run: what a kernel gets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from posenc.encoding.base import PositionEncoding
from posenc.masks import Mask
from posenc.numbers.heads import grouped_matmul
from posenc.numbers.precision import at_least_float32, without_autocast
from posenc.numbers.tracking import has_tangent
from posenc.positions import run_start, same
from posenc.terms.term import Term
from posenc.terms.tokens import Tokens


@dataclass(frozen=True)
class Problem:
    """One ordinary attention after place 2.

    q (batch, num_heads, q_len, width) and k (batch, num_kv_heads, kv_len, width) come from place 2.
    `term` is what the encoding makes of scores and values, None for nothing; `queries` and `keys`
    are the tokens as they were before place 2. `first_key` is where these keys begin among those
    that mask and term know.
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
    first_key: int = 0
    _read: dict[str, tuple[int, int] | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def q_len(self) -> int:
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        return self.k.shape[2]

    @property
    def needs_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        tokens = (self.queries, self.keys)
        inputs = [self.q, self.k, self.v, *(t.x for t in tokens), *(t.state for t in tokens)]
        return any(t is not None and t.requires_grad for t in inputs) or any(
            p.requires_grad for p in self.encoding.parameters()
        )

    @property
    def autocast(self) -> bool:
        device = self.q.device.type
        return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype in which torch's kernels multiply q, k and v: under autocast its own."""
        if not self.autocast or self.q.dtype == torch.float64:
            return self.q.dtype
        return torch.get_autocast_dtype(self.q.device.type)

    @property
    def runs(self) -> tuple[int, int] | None:
        """The first query's and the first key's position where both are runs of consecutive
        positions, known without synchronising."""
        return self._runs_of("own", self.queries.positions, self.keys.positions)

    @property
    def mask_runs(self) -> tuple[int, int] | None:
        """The same of the positions that the mask is bound to."""
        if self.mask is None:
            return None
        q_positions, kv_positions = self.mask.q_positions, self.mask.kv_positions
        assert q_positions is not None and kv_positions is not None
        return self._runs_of("mask", q_positions, kv_positions)

    def _runs_of(
        self, whose: str, q_positions: Tensor, kv_positions: Tensor
    ) -> tuple[int, int] | None:
        if whose not in self._read:  # reading positions costs a pass over them
            q, kv = run_start(q_positions), run_start(kv_positions)
            self._read[whose] = None if q is None or kv is None else (q, kv)
        return self._read[whose]

    @property
    def sees_no_later_position(self) -> bool:
        """Whether the mask is known to hide every pair of a negative distance."""
        mask = self.mask
        if mask is None or not mask.causal:
            return False
        assert mask.q_positions is not None and mask.kv_positions is not None
        return same(mask.q_positions, self.queries.positions) and same(
            mask.kv_positions, self.keys.positions
        )

    @property
    def every_row_sees_a_key(self) -> bool:
        """Whether this is known without reading masks: each token sees itself under an exact mask
        over one set of positions."""
        mask = self.mask
        if mask is None:
            return True
        assert mask.q_positions is not None and mask.kv_positions is not None
        return mask.exact and same(mask.q_positions, mask.kv_positions)

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """first, last: queries start .. stop see no key before `first`, nor from `last` on; at
        least one key."""
        first, last = 0, self.kv_len
        mask, runs = self.mask, self.mask_runs
        if mask is not None and runs is not None:
            shift = runs[0] - runs[1]  # the key at a query's own position
            if mask.causal:
                last = min(last, stop + shift)
            if mask.window is not None:
                first = max(first, start + shift - mask.window + 1)
                last = min(last, stop - 1 + shift + mask.window)
        last = max(last, min(1, self.kv_len))
        return max(0, min(first, last - 1)), last

    def clear(self, start: int, stop: int) -> tuple[int, int]:
        """first, last: keys first .. last are visible to all queries start .. stop, as far as is
        known without looking."""
        mask, runs = self.mask, self.mask_runs
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
        """Write `value` where queries start .. stop do not see the key, in place. What they see,
        where that was not known without looking."""
        first, last = self.clear(start, stop)
        if first == last:
            visible = self.visible(start, stop)
            if visible is not None:
                _fill(scores, visible, value)
            return visible
        for begin, end in ((0, first), (last, self.kv_len)):
            visible = self.among(begin, end).visible(start, stop) if begin < end else None
            if visible is not None:
                _fill(scores[..., begin:end], visible, value)
        return None

    def ready(self, rows: int) -> Problem:
        """The same problem, with everything computed that its blocks of at most `rows` queries
        share."""
        if self.term is None:
            return self
        with without_autocast(self.q.device):
            return replace(self, term=self.term.ready(rows, self.sees_no_later_position))

    def among(self, first: int, last: int) -> Problem:
        """The same attention over keys first .. last only."""
        if (first, last) == (0, self.kv_len):
            return self
        return replace(
            self,
            k=self.k[:, :, first:last],
            v=self.v[:, :, first:last],
            first_key=self.first_key + first,
        )

    def widen(self, t: Tensor) -> Tensor:
        """t in at least float32; as it is under autocast, which would cast it back."""
        return t if self.autocast else t.to(at_least_float32(t.dtype))

    def scores(
        self, start: int, stop: int, visible: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Scaled scores of queries start .. stop with the term applied and not yet masked:
        (batch, num_heads, stop - start, kv_len). `visible` is for terms that read the mask; `out`,
        if given, is where the products are written."""
        q, k = self.widen(self.q[:, :, start:stop]), self.widen(self.k)
        scores = grouped_matmul(q * self.scale, k.mT, out)
        scores = scores.to(at_least_float32(scores.dtype))
        return self.with_term(scores, start, stop, visible)

    def with_term(
        self, scores: Tensor, start: int, stop: int, visible: Tensor | None = None
    ) -> Tensor:
        """These scores of queries start .. stop with the term applied; it may write into them."""
        if self.term is None:
            return scores
        with without_autocast(scores.device):
            added = self.term.add(scores, slice(start, stop), self.span, visible)
        return added.to(scores.dtype)  # states may be wider than q

    def visible(self, start: int, stop: int) -> Tensor | None:
        """Booleans that broadcast to the scores of queries start .. stop; None where everything
        is visible, as far as is known without looking."""
        if self.mask is None or self.clear(start, stop) == (0, self.kv_len):
            return None
        batch, heads = self.q.shape[:2]
        return self.mask.rows(
            batch, heads, start, stop, self.kv_len, self.q.device, first_key=self.first_key
        )

    def combine(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """What queries start .. stop gather from the values, in the dtype of q."""
        v = self.widen(self.v)
        if self.term is None or self.term.combine is None:
            return grouped_matmul(weights, v).to(self.q.dtype)
        with without_autocast(weights.device):
            out = self.term.combine(weights, v, slice(start, stop), self.span)
        return out.to(self.q.dtype)

    @property
    def span(self) -> slice:
        """The keys of this problem among those that the term knows."""
        return slice(self.first_key, self.first_key + self.kv_len)


def _fill(scores: Tensor, visible: Tensor, value: float) -> None:
    """Write `value` where `visible`, which broadcasts to the scores, is False, in place.

    On the CPU torch fills number by number, and takes and joins bits many at a time, in half to a
    third of the time; where bits are taken NaN goes too.
    """
    followed = scores.requires_grad or has_tangent(scores)
    if scores.device.type != "cpu" or followed or 2 * visible.numel() > scores.numel():
        scores.masked_fill_(~visible, value)
        return
    whole = torch.int64 if scores.dtype == torch.float64 else torch.int32
    kept = -visible.to(whole)  # all bits or none
    filling = torch.full((), value, dtype=scores.dtype, device=scores.device).view(whole)
    scores.view(whole).bitwise_and_(kept).bitwise_or_(filling & ~kept)
