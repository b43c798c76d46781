"""Apply the terms of several encodings one after the other."""

from collections.abc import Sequence

from torch import Tensor

from posenc.encodings.terms.term import Formula, ScoreMod, Scores, Shown, Term
from posenc.encodings.terms.tokens import Tokens


class Chain(Term):
    """Apply terms in order. Term names cheaper forms that a term may have, such as
    `make_score_mod`; the chain has those that all its terms have.

    Raises: ValueError if two act on the values.
    """

    def __init__(self, q: Tokens, k: Tokens, terms: Sequence[Term]) -> None:
        super().__init__(q, k)
        self.terms = tuple(terms)
        self.additive = all(t.additive for t in terms)
        self.reads_mask = any(t.reads_mask for t in terms)
        combining = [t.sum_values for t in terms if t.sum_values is not None]
        if len(combining) > 1:
            raise ValueError("Two encodings act on the values (place 4); at most one may.")
        self.sum_values = combining[0] if combining else None
        if all(t.by_distance is not None for t in terms):
            self.by_distance = self._by_distance
        if all(t.formulas is not None for t in terms):
            self.formulas = self._formulas
        if all(t.row_and_key is not None for t in terms):
            self.row_and_key = self._row_and_key
        if all(t.make_score_mod is not None for t in terms):
            self.make_score_mod = self._make_score_mod

    def prepare_blocks(self, rows: int, causal: bool) -> "Chain":
        return Chain(self.q, self.k, [t.prepare_blocks(rows, causal) for t in self.terms])

    def extra_score_arrays(self, needs_grad: bool) -> float:
        return sum(term.extra_score_arrays(needs_grad) for term in self.terms)

    def add(self, scores: Scores, rows: slice, keys: slice, mask: Shown | None) -> Scores:
        for term in self.terms:
            scores = term.add(scores, rows, keys, mask)
        return scores

    # Term's optional forms for the whole chain. __init__ offers each only if all terms have it.

    def _by_distance(self, farthest: int, count: int, like: Tensor) -> Tensor:
        """Return the sum of the terms' biases of falling distances, (num_heads, count)."""
        return sum(t.by_distance(farthest, count, like) for t in self.terms)  # type: ignore[misc]

    def _formulas(self) -> list[Formula]:
        """Return the formulas of all terms, whose biases are added."""
        return [formula for t in self.terms for formula in t.formulas()]  # type: ignore[misc]

    def _row_and_key(self) -> tuple[Tensor, Tensor]:
        """Return the sums (row, key) of the terms' numbers per query and per key."""
        rows, keys = zip(*(t.row_and_key() for t in self.terms), strict=True)  # type: ignore[misc]
        return sum(rows), sum(keys)  # type: ignore[return-value]

    def _make_score_mod(self) -> ScoreMod:
        """Return a score_mod that applies those of all terms in order."""
        mods = [t.make_score_mod() for t in self.terms]  # type: ignore[misc]

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            for next_mod in mods:
                score = next_mod(score, batch, head, q_idx, kv_idx)
            return score

        return mod
