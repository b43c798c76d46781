"""Base class of terms, which change the scores or the values of an attention."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.encodings.terms.tokens import Tokens

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: (score, batch, head, q_idx, kv_idx) -> score; arguments broadcast."""

BiasOfDistances = Callable[[int, int, Tensor], Tensor]
"""Function (farthest, count, like) -> (num_heads, count): the bias of the positional distances
farthest, farthest - 1, ..., on the device of `like`, in its dtype or float32 if that is wider."""


class Formula(NamedTuple):
    """Describe a bias by distance as arithmetic that a kernel can do for each pair.

    bias of a pair = compute(distance, *(number[head] for number in numbers_by_head))

    compute: function of a signed distance in float32, positive for the past, and one number for
        each of `numbers_by_head`; element by element, without control flow, and finite.
    numbers_by_head: tensors (num_heads,) in float32.
    slower_than_table: computing it takes a kernel longer than reading a table by distance, as with
        logarithms and powers. It still needs no table of all pairs.
    """

    compute: Callable[..., Tensor]
    numbers_by_head: tuple[Tensor, ...]
    slower_than_table: bool = False


def formulas_need_gradient(formulas: list[Formula]) -> bool:
    """Return True if one of the numbers in the formulas, such as a learned slope, needs a
    gradient."""
    return any(number.requires_grad for formula in formulas for number in formula.numbers_by_head)


Scores = Float[Tensor, "batch num_heads rows keys"]
VisiblePairs = Bool[Tensor, "#batch #num_heads #rows #keys"]
"""True where a query sees a key."""


class Term:
    """Change the scores, or the sum of values, of one attention with known queries and keys.

    q_tokens, k_tokens: the queries and the keys, as Tokens.

    Attention calls `prepare_blocks` once and then `add` for each block of the scores. The other
    members are optional cheaper forms, None if the term has none; posenc/attend/choose.py reads
    them.

    additive: `add` adds a bias that depends on neither scores nor mask. A subclass that overrides
        `add` must set it again.
    reads_mask: `add` reads its argument `mask`.
    by_distance: function that returns the bias of distances, if only distance and head matter.
    formulas: function that returns the bias that by_distance returns as a sum of formulas, for
        kernels in which arithmetic is faster than reading a table.
    constant_from: distance from which on by_distance returns one parameter per head.
    row_and_key: function that returns (row, key), each (num_heads, len) or (batch, num_heads,
        len), in float64, if the term only adds row[i] - key[j] for keys not later than the query.
    make_score_mod: function that computes tables and returns a score_mod for FlexAttention, which
        only reads and combines elements of them.
    far_from: distance from which on the term adds one vector to all keys, and one to all values.
    far_terms: function of q. It returns what these two vectors add: to the scores of all far keys,
        (batch, num_heads, q_len), and to their values, (v_dim,) or one number.
    attend_near: function of q, and of k and v up to the last query. It attends causally to keys
        nearer than far_from, and returns output and log-sum-exp.
    sum_values: function in place of weights @ v. It gets weights (batch, num_heads, rows, keys), v
        (batch, num_kv_heads, keys, v_dim), and the slices of rows and of keys, and returns (batch,
        num_heads, rows, v_dim).

    >>> tokens = posenc.Tokens(torch.randn(1, 2, 3, 16), torch.arange(3))
    >>> term = posenc.ALiBi(num_heads=2).term(tokens, tokens)
    >>> term = term.prepare_blocks(3, causal=True)
    >>> term.add(torch.zeros(1, 2, 3, 3), slice(0, 3), slice(0, 3), None)[0, 0]
    tensor([[ 0.0000, -0.0625, -0.1250],
            [-0.0625,  0.0000, -0.0625],
            [-0.1250, -0.0625,  0.0000]])
    """

    additive: bool = False
    reads_mask: bool = False
    by_distance: BiasOfDistances | None = None
    formulas: Callable[[], list[Formula]] | None = None
    constant_from: int | None = None
    row_and_key: Callable[[], tuple[Tensor, Tensor]] | None = None
    far_from: int | None = None
    attend_near: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    far_terms: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    make_score_mod: Callable[[], ScoreMod] | None = None
    sum_values: Callable[[Tensor, Tensor, slice, slice], Tensor] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "add" in vars(cls) and "additive" not in vars(cls):
            cls.additive = False

    def __init__(self, q: Tokens, k: Tokens) -> None:
        self.q_tokens = q
        self.k_tokens = k

    def prepare_blocks(self, rows: int, causal: bool) -> "Term":
        """Return a term that has computed what blocks of at most `rows` queries have in common; by
        default the term itself. If `causal`, blocks need no distance below -rows."""
        return self

    def copy(self) -> Self:
        """Copy the term, sharing its attributes. Return the term itself in compiled code, where it
        lives for one call, and which up to torch 2.12 can trace no copy."""
        if torch.compiler.is_compiling():
            return self
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def extra_score_arrays(self, needs_grad: bool) -> float:
        """Return how much memory `add` needs beyond the scores, in multiples of their size: 2.0 for
        two more arrays as large as they are. What it saves for a backward pass counts, too.
        `explain` reports it.

        The numbers of the library's terms count the arrays that are alive at the peak.
        tests/attend/test_explain.py compares the sum with what torch's allocator holds. This one is
        for terms that do not say.
        """
        return 2.5  # chosen: terms of users that do not define it are unknown

    def add(self, scores: Scores, rows: slice, keys: slice, mask: VisiblePairs | None) -> Scores:
        """Apply the term to scaled scores (batch, num_heads, rows, keys), possibly in place.

        `mask` is True for visible pairs; None if all are visible, or if reads_mask is False.
        """
        raise NotImplementedError(f"{type(self).__name__} must define add")


class Chain(Term):
    """Apply terms in order. Of the cheaper forms that Term lists, such as `make_score_mod`, the
    chain has those that all its terms have.

    q, k: queries and keys, as Tokens. terms: for the same tokens.
    Raises: ValueError if two terms act on the values.
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
        return Chain(
            self.q_tokens, self.k_tokens, [t.prepare_blocks(rows, causal) for t in self.terms]
        )

    def extra_score_arrays(self, needs_grad: bool) -> float:
        return sum(term.extra_score_arrays(needs_grad) for term in self.terms)

    def add(self, scores: Scores, rows: slice, keys: slice, mask: VisiblePairs | None) -> Scores:
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
