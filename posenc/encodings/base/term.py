"""Define terms, which change the scores or the values of an attention, and the tokens that they
get."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from posenc.positions.tokens import Positions, as_range, as_tensor, values_at


class Tokens:
    """Hold the queries or the keys of one attention. A slice selects tokens.

    Args:
        x: vectors (batch, heads, len, width), not yet transformed by the encoding. Vectors of keys
            that `term` gets have as many heads as those of queries; they are None unless the
            encoding claims needs_raw_k.
        positions: (len) or (batch, len), with a last axis of components where num_axes > 1; or a
            range.
        state: the encoding's `state` of these tokens, (batch, heads, len, ...), or None.
        num_axes: number of components of a position.
        true_positions: original positions, if `positions` come from a position map; otherwise None.
        device: device of the positions, if neither x nor positions is a tensor.

    The attribute `positions_or_range` has the positions as a range if they are known, without
    waiting for the device, to be consecutive; otherwise as a tensor.

    >>> import torch
    >>> keys = Tokens(torch.randn(1, 4, 10, 16), torch.arange(10))
    >>> keys[2:5].positions
    tensor([2, 3, 4])
    >>> keys[2:5].positions_or_range
    range(2, 5)
    """

    def __init__(
        self,
        x: Float[Tensor, "batch heads len width"] | None,
        positions: Positions,
        state: Shaped[Tensor, "batch state_heads len *state"] | None = None,
        num_axes: int = 1,
        true_positions: Positions | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.x = x
        self.state = state
        self.num_axes = num_axes
        self.true_positions = true_positions
        some_tensor = positions if isinstance(positions, Tensor) else x
        if device is None and some_tensor is not None:
            device = some_tensor.device
        self.device = device
        range_if_consecutive = as_range(positions) if num_axes == 1 else None
        if isinstance(positions, range) and range_if_consecutive is None:
            positions = as_tensor(positions, self.device)
        self._position_tensor = positions if isinstance(positions, Tensor) else None
        self.positions_or_range: Tensor | range = (
            positions if range_if_consecutive is None else range_if_consecutive
        )

    @property
    def positions(self) -> Shaped[Tensor, "..."]:
        """Return the positions as a tensor."""
        if self._position_tensor is None:
            self._position_tensor = as_tensor(self.positions_or_range, self.device)
        return self._position_tensor

    def __getitem__(self, span: slice) -> "Tokens":
        part = self._copy()
        if self.x is not None:
            part.x = self.x[:, :, span]
        part.positions_or_range = self._select_positions(self.positions_or_range, span)
        part._position_tensor = None
        if self._position_tensor is not None:
            part._position_tensor = self._select_positions(self._position_tensor, span)  # type: ignore[assignment]
        if self.state is not None:
            part.state = self.state[:, :, span]
        if self.true_positions is not None:
            part.true_positions = self._select_positions(self.true_positions, span)
        return part

    def __len__(self) -> int:
        if isinstance(
            self.positions_or_range, range
        ):  # torch.compile cannot trace len() of a range
            return self.positions_or_range.stop - self.positions_or_range.start
        return self.positions_or_range.shape[-1 if self.num_axes == 1 else -2]

    def _select_positions(self, positions: Tensor | range, span: slice) -> Tensor | range:
        """Return the part of `positions` that belongs to the tokens of a slice."""
        if isinstance(positions, range):
            return positions[span]
        return positions[..., span] if self.num_axes == 1 else positions[..., span, :]

    def with_vectors(self, x: Float[Tensor, "batch heads {len(self)} width"] | None) -> "Tokens":
        """Return the same tokens, at the same positions, with vectors x, or without any."""
        changed = self._copy()
        changed.x = x
        return changed

    def with_state(self, state: Shaped[Tensor, "batch state_heads len *state"] | None) -> "Tokens":
        """Return the same tokens with another state."""
        changed = self._copy()
        changed.state = state
        return changed

    def _copy(self) -> "Tokens":
        """Return a shallow copy."""
        # One by one: torch.compile traces neither copy.copy nor, up to torch 2.12, a __dict__.
        copied = object.__new__(Tokens)
        copied.x = self.x
        copied.state = self.state
        copied.num_axes = self.num_axes
        copied.true_positions = self.true_positions
        copied.device = self.device
        copied._position_tensor = self._position_tensor
        copied.positions_or_range = self.positions_or_range
        return copied

    def at(self, positions: Positions, *, mapped: bool = True) -> "Tokens":
        """Return the same tokens at other positions. If `mapped`, these come from a position map,
        and the original ones are kept as true_positions."""
        # A pass without a map gives this very tensor back. Tokens made anew of it could lose their
        # range, by which positions are known without waiting for the device.
        if mapped and positions is self._position_tensor:
            return self
        original_positions = None
        if mapped:
            original_positions = (
                self.positions_or_range if self.true_positions is None else self.true_positions
            )
        return Tokens(self.x, positions, self.state, self.num_axes, original_positions, self.device)

    def unmapped(self) -> "Tokens":
        """Return the same tokens at their original positions."""
        true_positions = self.true_positions
        return self if true_positions is None else self.at(true_positions, mapped=False)


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: (score, batch, head, q_idx, kv_idx) -> score; arguments broadcast."""

BiasOfDistances = Callable[[int, int, Tensor], Tensor]
"""Function (farthest, count, like) -> (num_heads, count): the bias of the distances farthest,
farthest - 1, ..., between positions, on the device of `like`, in its dtype or float32 if that is
wider."""


class Formula(NamedTuple):
    """Describe a bias by distance as arithmetic that a kernel can do for each pair.

    bias of a pair = compute(distance, *(number[head] for number in numbers_by_head))

    compute: function of a signed distance in float32, positive for the past, and one number for
        each of `numbers_by_head`; element by element, without control flow, and finite.
    numbers_by_head: tensors (num_heads,) in float32.
    slower_than_table: True if a kernel takes longer to compute the formula than to read the bias
        from a table by distance, as with logarithms and powers. The formula still needs no table of
        all pairs.
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

    Attention calls `prepare_blocks` once and then `add` for each block of the scores. The
    attributes below describe the term and offer faster ways to compute it, None where there is
    none; posenc/attend/choose.py reads them.

    additive: True if `add` adds a bias that depends on neither scores nor mask. A subclass that
        overrides `add` must set it again.
    reads_mask: True if `add` reads its argument `mask`.
    by_distance: function that returns the bias of distances, if only distance and head matter.
    formulas: function that returns the bias of `by_distance` as formulas, whose results are added,
        for kernels in which arithmetic is faster than reading a table.
    constant_from: distance from which on the bias of `by_distance` is one parameter per head.
    query_and_key_bias: function that returns (query_bias, key_bias), each (num_heads, len) or
        (batch, num_heads, len) in float64, if the term only adds query_bias[i] - key_bias[j] to the
        score of query i and every key j that is not later.
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
    query_and_key_bias: Callable[[], tuple[Tensor, Tensor]] | None = None
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

    def prepare_blocks(self, max_rows: int, causal: bool) -> "Term":
        """Return a term that has computed what all blocks of at most `max_rows` queries read, such
        as tables; by default the term itself. If `causal`, blocks read no distance below
        -max_rows."""
        return self

    def copy(self) -> Self:
        """Copy the term, sharing its attributes. In compiled code return the term itself: it is
        used for one call only, and up to torch 2.12 a copy cannot be traced."""
        if torch.compiler.is_compiling():
            return self
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def extra_score_arrays(self, needs_grad: bool) -> float:
        """Return how much memory `add` needs in addition to the scores, in multiples of their size:
        2.0 means two more arrays as large as the scores. Tensors that it saves for a backward pass
        count, too. `explain` reports the sum.

        The numbers of posenc's own terms count the arrays that are alive at the peak;
        tests/attend/test_explain.py compares them with what torch's allocator hands out. This class
        returns a number for terms that do not override the method.
        """
        return 2.5  # chosen: terms of users that do not define it are unknown

    def add(self, scores: Scores, rows: slice, keys: slice, mask: VisiblePairs | None) -> Scores:
        """Apply the term to scaled scores (batch, num_heads, rows, keys), possibly in place.

        `mask` is True for visible pairs; None if all are visible, or if reads_mask is False.
        """
        raise NotImplementedError(f"{type(self).__name__} must define add")


class Chain(Term):
    """Apply terms in order. Of the optional attributes of Term, the chain has `by_distance`,
    `formulas`, `query_and_key_bias` and `make_score_mod` if all of its terms have them, and
    `sum_values` if one has it. `constant_from`, `far_from`, `far_terms` and `attend_near` are None,
    whatever the terms: the bias of T5 is constant for far keys, that of T5 and ALiBi is not.

    q, k: queries and keys, as Tokens. terms: terms for these tokens.
    Raises: ValueError if two terms act on the values.
    """

    def __init__(self, q: Tokens, k: Tokens, terms: Sequence[Term]) -> None:
        super().__init__(q, k)
        self.terms = tuple(terms)
        self.additive = all(t.additive for t in terms)
        self.reads_mask = any(t.reads_mask for t in terms)
        functions_summing_values = [t.sum_values for t in terms if t.sum_values is not None]
        if len(functions_summing_values) > 1:
            raise ValueError("Two encodings act on the values (place 4); at most one may.")
        self.sum_values = functions_summing_values[0] if functions_summing_values else None
        if all(t.by_distance is not None for t in terms):
            self.by_distance = self._by_distance
        if all(t.formulas is not None for t in terms):
            self.formulas = self._formulas
        if all(t.query_and_key_bias is not None for t in terms):
            self.query_and_key_bias = self._query_and_key_bias
        if all(t.make_score_mod is not None for t in terms):
            self.make_score_mod = self._make_score_mod

    def prepare_blocks(self, max_rows: int, causal: bool) -> "Chain":
        return Chain(
            self.q_tokens, self.k_tokens, [t.prepare_blocks(max_rows, causal) for t in self.terms]
        )

    def extra_score_arrays(self, needs_grad: bool) -> float:
        return sum(term.extra_score_arrays(needs_grad) for term in self.terms)

    def add(self, scores: Scores, rows: slice, keys: slice, mask: VisiblePairs | None) -> Scores:
        for term in self.terms:
            scores = term.add(scores, rows, keys, mask)
        return scores

    # Term's optional forms for the whole chain. __init__ offers each only if all terms have it.

    def _by_distance(self, farthest: int, count: int, like: Tensor) -> Tensor:
        """Return the sum of the terms' biases of the distances farthest, farthest - 1, ...,
        (num_heads, count)."""
        return sum(t.by_distance(farthest, count, like) for t in self.terms)  # type: ignore[misc]

    def _formulas(self) -> list[Formula]:
        """Return the formulas of all terms, whose biases are added."""
        return [formula for t in self.terms for formula in t.formulas()]  # type: ignore[misc]

    def _query_and_key_bias(self) -> tuple[Tensor, Tensor]:
        """Return (query_bias, key_bias), each added up over the terms."""
        query_biases, key_biases = zip(*(t.query_and_key_bias() for t in self.terms), strict=True)  # type: ignore[misc]
        return sum(query_biases), sum(key_biases)  # type: ignore[return-value]

    def _make_score_mod(self) -> ScoreMod:
        """Return a score_mod that applies the score_mods of all terms in order."""
        score_mods = [t.make_score_mod() for t in self.terms]  # type: ignore[misc]

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            for next_mod in score_mods:
                score = next_mod(score, batch, head, q_idx, kv_idx)
            return score

        return mod


class PairwiseBias(Term):
    """Add one number per pair to the scores, computed block by block.

    scores[b, h, i, j] += compute_bias(q[rows], k[keys])[b, h, i, j]

    Args:
        compute_bias: function that gets the queries and the keys of a block, as Tokens, and returns
            its bias in logits, (num_heads, rows, keys) or (batch, num_heads, rows, keys).
        by_distance, query_and_key_bias: as in Term.
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
        query_and_key_bias: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(q, k)
        self._compute_bias = compute_bias
        self.by_distance = by_distance
        self.query_and_key_bias = query_and_key_bias

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
        """Return a score_mod that computes the bias of each pair from its two positions, in O(1)
        memory."""
        q_positions = self.q_tokens.positions
        kv_positions = self.k_tokens.positions

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            difference = values_at(q_positions, batch, q_idx) - values_at(
                kv_positions, batch, kv_idx
            )
            distance = difference.to(torch.float32)
            for compute, values_by_head, _ in formulas:
                values_of_head = [values[head] for values in values_by_head]
                score = score + compute(distance, *values_of_head)
            return score

        return mod
