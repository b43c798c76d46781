"""What an encoding makes of the scores and the values of one attention (places 3 and 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from jaxtyping import Bool, Float
from torch import Tensor

from posenc.encodings.terms.tokens import Tokens

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: (score, batch, head, q_idx, kv_idx) -> score, from operations that
broadcast."""

ByDistance = Callable[[int, int, Tensor], Tensor]
"""(farthest, count, like) -> (num_heads, count), of the distances farthest, farthest - 1, ..., on
the device of `like` and in at least float32, in float64 where that is."""


Scores = Float[Tensor, "batch num_heads rows keys"]
Shown = Bool[Tensor, "#batch #num_heads #rows #keys"]
"""Where the mask shows a key to a query."""


class Term:
    """What an encoding makes of the scores of one attention; it knows the queries and the keys.

    Attention calls `ready` once, and then `add` for one block of the scores after the other. Each
    other member is None if the term has no such form; posenc/attend/choose.py looks at them.

    additive: `add` adds the same numbers to any scores, whatever the mask, so that they can be
        asked for on their own; a subclass with an `add` of its own says it anew.
    reads_mask: `add` needs to know which keys are visible.
    by_distance: the term by falling distance, if it depends only on the distance and the head.
    per_key: returns (row, key), each (num_heads, len) or (batch, num_heads, len): where the key is
        not later than the query, row[i] - key[j] is added to the score and nothing else.
    pair: makes a FlexAttention score_mod that only looks up single numbers and computes with them;
        the tables it reads are computed when `pair` is called.
    combine: place 4, from weights (batch, num_heads, rows, keys), v (batch, num_kv_heads, keys,
        v_dim), the rows and the keys to (batch, num_heads, rows, v_dim).

    >>> tokens = posenc.Tokens(torch.randn(1, 2, 3, 16), torch.arange(3))
    >>> term = posenc.ALiBi(num_heads=2).term(tokens, tokens).ready(3, causal=True)
    >>> term.add(torch.zeros(1, 2, 3, 3), slice(0, 3), slice(0, 3), None)[0, 0]
    tensor([[ 0.0000, -0.0625, -0.1250],
            [-0.0625,  0.0000, -0.0625],
            [-0.1250, -0.0625,  0.0000]])
    """

    additive: bool = False
    reads_mask: bool = False
    by_distance: ByDistance | None = None
    per_key: Callable[[], tuple[Tensor, Tensor]] | None = None
    pair: Callable[[], ScoreMod] | None = None
    combine: Callable[[Tensor, Tensor, slice, slice], Tensor] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "add" in vars(cls) and "additive" not in vars(cls):
            cls.additive = False

    def __init__(self, q: Tokens, k: Tokens) -> None:
        self.q, self.k = q, k

    def ready(self, rows: int, causal: bool) -> Term:
        """The term with everything computed that blocks of at most `rows` queries share.

        If `causal`, the blocks ask for no distance below -rows.
        """
        return self

    def copy(self) -> Self:
        """A second object with the same members, for `ready`; torch.compile cannot trace
        copy.copy."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def held(self, needs_grad: bool) -> float:
        """How many arrays of the scores' size `add` holds at most beside them, with what it keeps
        for a backward pass: what `explain` says of memory is made of it."""
        return 2.5

    def add(self, scores: Scores, rows: slice, keys: slice, mask: Shown | None) -> Scores:
        """Scaled scores (batch, num_heads, rows, keys) with the term applied; it may write into
        them.

        `mask` is True where a query may look, and None where it may look anywhere or the term
        does not read it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define add")
