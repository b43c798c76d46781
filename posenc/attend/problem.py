"""One attention ready to run: what the host hands to an implementation, and where the encoding acts
on its scores and values (places 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from posenc.encoding.base import PositionEncoding, Rows
from posenc.masks import Mask
from posenc.numbers.heads import grouped_matmul
from posenc.numbers.precision import at_least_float32
from posenc.positions import part, run_start
from posenc.terms.term import ScoreMod


@dataclass(frozen=True)
class Call:
    """One ordinary attention after place 2: what an implementation needs to run it.

    q (batch, num_heads, q_len, width) and k (batch, num_kv_heads, kv_len, width) come from place 2;
    raw_q and raw_k from before it, raw_k with as many heads as q and only where the encoding needs
    it. `first_key` is where these keys begin among those the mask is bound to.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    raw_q: Tensor
    raw_k: Tensor | None
    encoding: PositionEncoding
    q_positions: Tensor
    kv_positions: Tensor
    q_state: Tensor | None
    kv_state: Tensor | None
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
    def changes_scores(self) -> bool:
        """Whether places 3 or 4 act, so that scores or weights must be seen."""
        return 3 in self.encoding.places or 4 in self.encoding.places

    @property
    def needs_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        inputs = (self.q, self.k, self.v, self.raw_q, self.raw_k, self.q_state, self.kv_state)
        return any(t is not None and t.requires_grad for t in inputs) or any(
            p.requires_grad for p in self.encoding.parameters()
        )

    @property
    def runs(self) -> tuple[int, int] | None:
        """The first query's and the first key's position where both are runs of consecutive
        positions, known without synchronising."""
        return self._runs_of("own", self.q_positions, self.kv_positions)

    @property
    def mask_runs(self) -> tuple[int, int] | None:
        """The same of the positions that the mask is bound to."""
        if self.mask is None:
            return None
        q_positions, kv_positions = self.mask.q_positions, self.mask.kv_positions
        assert q_positions is not None and kv_positions is not None
        if q_positions is self.q_positions and kv_positions is self.kv_positions:
            return self.runs
        return self._runs_of("mask", q_positions, kv_positions)

    def _runs_of(
        self, whose: str, q_positions: Tensor, kv_positions: Tensor
    ) -> tuple[int, int] | None:
        if whose not in self._read:  # reading positions costs a pass over them
            q = run_start(q_positions)
            kv = q if kv_positions is q_positions else run_start(kv_positions)
            self._read[whose] = None if q is None or kv is None else (q, kv)
        return self._read[whose]

    @property
    def sees_no_later_position(self) -> bool:
        """Whether the mask is known to hide every pair of a negative distance."""
        mask = self.mask
        return (
            mask is not None
            and mask.causal
            and mask.q_positions is self.q_positions
            and mask.kv_positions is self.kv_positions
        )

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
        last = max(last, 1)
        return min(first, last - 1), last

    def clear(self, start: int, stop: int) -> tuple[int, int]:
        """first, last: keys first .. last are visible to all queries start .. stop, as far as is
        known without looking."""
        mask, runs = self.mask, self.mask_runs
        if mask is None:
            return 0, self.kv_len
        if runs is None or not mask.exact:
            return 0, 0
        first, last = 0, self.kv_len
        shift = runs[0] - runs[1]
        if mask.causal:
            last = min(last, start + shift + 1)
        if mask.window is not None:
            first = max(first, stop + shift - mask.window)
            last = min(last, start + shift + mask.window)
        return (first, last) if first < last else (0, 0)

    def keys(self, first: int, last: int) -> Call:
        """The same attention over keys first .. last alone."""
        if (first, last) == (0, self.kv_len):
            return self
        state = self.kv_state
        return replace(
            self,
            k=self.k[:, :, first:last],
            v=self.v[:, :, first:last],
            raw_k=None if self.raw_k is None else self.raw_k[:, :, first:last],
            kv_positions=_tokens(self.kv_positions, first, last, self.encoding),
            kv_state=None if state is None else state[:, :, first:last],
            first_key=self.first_key + first,
        )

    def widen(self, t: Tensor) -> Tensor:
        """t in at least float32; as it is under autocast, which would cast it back."""
        device = self.q.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        return t if autocast else t.to(at_least_float32(t.dtype))

    def score_mod(self, start: int, stop: int) -> ScoreMod | None:
        """Place 3 for queries start .. stop, counted from zero within the block."""
        return self.encoding.score_mod(
            self.raw_q[:, :, start:stop],
            self.raw_k,
            _tokens(self.q_positions, start, stop, self.encoding),
            self.kv_positions,
            None if self.q_state is None else self.q_state[:, :, start:stop],
            self.kv_state,
        )

    def scores(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Scaled scores with place 3 applied and not yet masked: (batch, num_heads, stop -
        start, kv_len). `out`, if given, is where the products are written."""
        q, k = self.widen(self.q[:, :, start:stop]), self.widen(self.k)
        scores = grouped_matmul(q * self.scale, k.mT, out)
        scores = scores.to(at_least_float32(scores.dtype))
        if not self.changes_scores:
            return scores
        batch, heads, rows, kv_len = scores.shape
        device = scores.device
        block = Rows(
            q=self.raw_q[:, :, start:stop],
            k=self.raw_k,
            q_positions=_tokens(self.q_positions, start, stop, self.encoding),
            kv_positions=self.kv_positions,
            batch=torch.arange(batch, device=device)[:, None, None, None],
            head=torch.arange(heads, device=device)[:, None, None],
            q_idx=torch.arange(rows, device=device)[:, None],
            kv_idx=torch.arange(kv_len, device=device),
        )
        mask = None if self.encoding.pointwise else self.visible(start, stop)
        return self.encoding.score_rows(scores, self.score_mod(start, stop), mask, block)

    def visible(self, start: int, stop: int) -> Tensor | None:
        """Booleans that broadcast to the scores of queries start .. stop; None where everything
        is visible."""
        if self.mask is None:
            return None
        batch, heads = self.q.shape[:2]
        return self.mask.rows(
            batch, heads, start, stop, self.kv_len, self.q.device, first_key=self.first_key
        )

    @property
    def every_row_sees_a_key(self) -> bool:
        """Known without reading anything: under an exact mask over one set of positions each
        token sees itself."""
        return self.mask is None or (
            self.mask.exact and self.mask.q_positions is self.mask.kv_positions
        )

    def combine(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """Place 4 for queries start .. stop, in the dtype of q."""
        positions = _tokens(self.q_positions, start, stop, self.encoding)
        v = self.widen(self.v)
        out = self.encoding.combine_values(weights, v, positions, self.kv_positions)
        return out.to(self.q.dtype)


def _tokens(positions: Tensor, start: int, stop: int, encoding: PositionEncoding) -> Tensor:
    if encoding.num_axes > 1:
        return positions[..., start:stop, :]
    return part(positions, start, stop)
