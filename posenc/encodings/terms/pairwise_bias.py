"""Add one number to the score of each pair of a query and a key."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.terms.term import (
    BiasOfDistances,
    Formula,
    ScoreMod,
    Scores,
    Term,
    VisiblePairs,
    formulas_need_gradient,
)
from posenc.encodings.terms.tokens import Tokens
from posenc.positions import values_at


class PairwiseBias(Term):
    """Add one number per pair to the scores, computed block by block.

    scores[b, h, i, j] += values(q[rows], k[keys])[b, h, i, j]

    Args:
        values: function from the tokens of a block to (num_heads, rows, keys) or (batch, num_heads,
            rows, keys).
        by_distance, row_and_key: as in Term.
    """

    additive = True
    values_are_new_memory = False
    """True if each call of `values` returns a new tensor, which the caller may write to."""

    def __init__(
        self,
        q: Tokens,
        k: Tokens,
        values: Callable[[Tokens, Tokens], Tensor],
        *,
        by_distance: BiasOfDistances | None = None,
        row_and_key: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(q, k)
        self._values = values
        self.by_distance = by_distance
        self.row_and_key = row_and_key

    def values(self, rows: slice, keys: slice) -> Float[Tensor, "batch num_heads rows keys"]:
        """Return the numbers to add for a block, (batch or 1, num_heads, rows, keys)."""
        values = self._values(self.q[rows], self.k[keys])
        return values if values.ndim == 4 else values[None]

    def add(self, scores: Scores, rows: slice, keys: slice, mask: VisiblePairs | None) -> Scores:
        return scores.add_(self.values(rows, keys).to(scores.dtype))

    def make_score_mod(self) -> ScoreMod:  # type: ignore[override]
        formulas = [] if self.formulas is None else self.formulas()
        # A kernel would add the gradients of all pairs to one number per head, one by one.
        if formulas and not (formulas_need_gradient(formulas) and torch.is_grad_enabled()):
            return self._score_mod_by_formulas(formulas)
        values = self.values(slice(None), slice(None))
        if self.q.x is not None:
            # Triton loads numbers of 4 bytes asynchronously, ahead of their use. It does not do so
            # for numbers of 2 bytes, and reads them ten times as slowly.
            values = values.to(torch.promote_types(self.q.x.dtype, torch.float32))
        one_row = len(values) == 1

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            batch = torch.zeros_like(batch) if one_row else batch
            return score + values[batch, head, q_idx, kv_idx].to(score.dtype)

        return mod

    def _score_mod_by_formulas(self, formulas: list[Formula]) -> ScoreMod:
        """Return a score_mod that computes each bias from the two positions, in O(1) memory."""
        q_positions = self.q.positions
        kv_positions = self.k.positions

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            apart = values_at(q_positions, batch, q_idx) - values_at(kv_positions, batch, kv_idx)
            distance = apart.to(torch.float32)
            for compute, numbers_by_head, _ in formulas:
                score = score + compute(distance, *(number[head] for number in numbers_by_head))
            return score

        return mod
