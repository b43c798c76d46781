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

    scores[b, h, i, j] += compute_bias(q[rows], k[keys])[b, h, i, j]

    Args:
        compute_bias: function that gets the queries and the keys of a block, as Tokens, and returns
            its bias in logits, (num_heads, rows, keys) or (batch, num_heads, rows, keys).
        by_distance, row_and_key: as in Term.
    """

    additive = True
    block_is_new_memory = False
    """True if each call of `bias_of_block` returns a new tensor, which the caller may write to."""

    def __init__(
        self,
        q: Tokens,
        k: Tokens,
        compute_bias: Callable[[Tokens, Tokens], Tensor],
        *,
        by_distance: BiasOfDistances | None = None,
        row_and_key: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(q, k)
        self._compute_bias = compute_bias
        self.by_distance = by_distance
        self.row_and_key = row_and_key

    def bias_of_block(self, rows: slice, keys: slice) -> Float[Tensor, "batch num_heads rows keys"]:
        """Return the bias of a block in logits, (batch or 1, num_heads, rows, keys)."""
        bias = self._compute_bias(self.q_tokens[rows], self.k_tokens[keys])
        return bias if bias.ndim == 4 else bias[None]

    def add(self, scores: Scores, rows: slice, keys: slice, mask: VisiblePairs | None) -> Scores:
        return scores.add_(self.bias_of_block(rows, keys).to(scores.dtype))

    def make_score_mod(self) -> ScoreMod:  # type: ignore[override]
        formulas = [] if self.formulas is None else self.formulas()
        # A kernel would add the gradients of all pairs to one number per head, one by one.
        if formulas and not (formulas_need_gradient(formulas) and torch.is_grad_enabled()):
            return self._score_mod_by_formulas(formulas)
        bias = self.bias_of_block(slice(None), slice(None))
        if self.q_tokens.x is not None:
            # Triton loads numbers of 4 bytes asynchronously, ahead of their use. It does not do so
            # for numbers of 2 bytes, and reads them ten times as slowly.
            bias = bias.to(torch.promote_types(self.q_tokens.x.dtype, torch.float32))
        rows_share_bias = len(bias) == 1  # rows of the batch

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            batch = torch.zeros_like(batch) if rows_share_bias else batch
            return score + bias[batch, head, q_idx, kv_idx].to(score.dtype)

        return mod

    def _score_mod_by_formulas(self, formulas: list[Formula]) -> ScoreMod:
        """Return a score_mod that computes each bias from the two positions, in O(1) memory."""
        q_positions = self.q_tokens.positions
        kv_positions = self.k_tokens.positions

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            apart = values_at(q_positions, batch, q_idx) - values_at(kv_positions, batch, kv_idx)
            distance = apart.to(torch.float32)
            for compute, numbers_by_head, _ in formulas:
                score = score + compute(distance, *(number[head] for number in numbers_by_head))
            return score

        return mod
