"""Define attention masks with FlexAttention's signature, and with what is known about their
structure."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int, Real, Shaped
from torch import Tensor

from posenc.arguments import explain_constructor_misfits
from posenc.positions.tokens import (
    FlatKeyPositions,
    FlatQueryPositions,
    are_known_equal,
    num_tokens,
    values_at,
)

Predicate = Callable[["QueryKeyPairs"], Tensor]


@dataclass(frozen=True)
class QueryKeyPairs:
    """Hold the argument of a mask's predicate: pairs of a query and a key, given by the four
    indices of FlexAttention's mask_mod and by the positions of both. The six tensors broadcast to
    one shape."""

    batch: Int[Tensor, "..."]
    head: Int[Tensor, "..."]
    q_idx: Int[Tensor, "..."]
    kv_idx: Int[Tensor, "..."]
    q_position: Real[Tensor, "..."]
    kv_position: Real[Tensor, "..."]


PADDING_NAME = "padding"
"""`CapturedTensor.name` of the tensor that `masks.padding` reads. Other code recognises a padding
mask by it."""


@dataclass(frozen=True, eq=False)
class CapturedTensor:
    """Hold a tensor that a predicate reads, with a name and its axes, so that its sizes can be
    checked."""

    name: str
    """Name for messages, such as PADDING_NAME."""
    tensor: Shaped[Tensor, "..."]
    axes: tuple[str, ...]
    """What each axis of the tensor counts: "batch", "q_len" or "kv_len"."""


@explain_constructor_misfits
@dataclass(frozen=True, eq=False)
class Mask:
    """Hide keys from queries by a predicate that is True for visible keys.

    Call it like a mask_mod of FlexAttention: mask(batch, head, q_idx, kv_idx) -> bool tensor; the
    four broadcast. Masks compare positions, not indices; without `bind` a token's index is its
    position. With positions of several components (M-RoPE, rows and columns) they compare the order
    in memory: queries are the last tokens.

    >>> even = posenc.Mask(lambda pairs: pairs.kv_position % 2 == 0)
    >>> (even & posenc.masks.causal).tensor(3).int()
    tensor([[1, 0, 0],
            [1, 0, 0],
            [1, 0, 1]], dtype=torch.int32)
    """

    predicate: Predicate
    """Function that returns True for visible pairs of a query and a key."""
    causal: bool = False
    """True if no query sees a key at a later position."""
    window: int | None = None
    """Distance in positions from which on no query sees a key; None if there is none."""
    exact: bool = False
    """True if `causal` and `window` describe the mask completely, so that a kernel can use them
    instead of the predicate."""
    q_positions: FlatQueryPositions | range | None = None
    """Positions of the queries, (q_len) or (batch, q_len); None before `bind`."""
    kv_positions: FlatKeyPositions | range | None = None
    """Positions of the keys, (kv_len) or (batch, kv_len); None before `bind`."""
    captured: tuple[CapturedTensor, ...] = ()
    """Tensors that the predicate reads."""
    separates_documents: bool | None = True
    """False if the mask compares positions, which documents packed into one row repeat. None if it
    compares neither positions nor documents, as `full` and `padding`. True if it may keep documents
    apart. Not used for a mask that combines others by &, | or ~."""
    operator: str = ""
    """"&", "|" or "~" if the mask combines others; otherwise ""."""
    parts: tuple["Mask", ...] = ()
    """The masks that this one combines by its operator."""

    def __call__(self, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self._visible_pairs(batch, head, q_idx, kv_idx)

    def _visible_pairs(self, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return True for visible pairs of a query and a key: `predicate` on their `QueryKeyPairs`.

        This is a method apart from __call__, because torch.compile of torch 2.6 evaluates
        bool(mask), which a Mask refuses, before it calls an object. It calls a method directly.
        """
        q_position = values_at(self.q_positions, batch, q_idx)
        kv_position = values_at(self.kv_positions, batch, kv_idx)
        return self.predicate(QueryKeyPairs(batch, head, q_idx, kv_idx, q_position, kv_position))

    def __and__(self, other: "Mask") -> "Mask":
        _require_mask(other, "&")
        windows = [m.window for m in (self, other) if m.window is not None]
        return Mask(
            partial(_both_show, self.predicate, other.predicate),
            causal=self.causal or other.causal,
            window=min(windows, default=None),
            exact=self.exact and other.exact,
            captured=self.captured + other.captured,
            operator="&",
            parts=(self, other),
        )._bind_like(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        _require_mask(other, "|")
        windows = [m.window for m in (self, other) if m.window is not None]
        return Mask(
            partial(_either_shows, self.predicate, other.predicate),
            causal=self.causal and other.causal,
            # A mask without a window shows keys at any distance, and so does the union.
            window=max(windows) if len(windows) == 2 else None,
            captured=self.captured + other.captured,
            operator="|",
            parts=(self, other),
        )._bind_like(self, other)

    def __invert__(self) -> "Mask":
        return Mask(
            partial(_does_not_show, self.predicate),
            q_positions=self.q_positions,
            kv_positions=self.kv_positions,
            captured=self.captured,
            operator="~",
            parts=(self,),
        )

    def bind(
        self, q_positions: FlatQueryPositions | range, kv_positions: FlatKeyPositions | range
    ) -> "Mask":
        """Return the mask for tokens at these positions, each (len), (batch, len) or a range.

        Positions of several components have no order that a mask could compare: bind to the order
        of the tokens in memory instead, range(len).

        Raises: TypeError for anything but numbers, ValueError for other shapes or batch sizes.
        """
        _check_bind_positions(q_positions, kv_positions)
        return replace(
            self,
            q_positions=_widen_integers(q_positions),
            kv_positions=_widen_integers(kv_positions),
        )

    def _bind_like(self, a: "Mask", b: "Mask") -> "Mask":
        """Return this mask, a combination of `a` and `b`, bound to the positions to which they are
        bound; unbound if neither is bound. Raise ValueError if both are bound, and their positions
        are not known to be equal."""
        if not (a.bound or b.bound):
            return self
        if a.bound and b.bound and not _have_same_positions(a, b):
            raise ValueError(
                "Masks that are not known to be bound to the same positions cannot be combined: "
                "combine, then bind, or bind both to the same tensors. Only tensors on the CPU are "
                "compared by their numbers, because reading others would wait for the device."
            )
        bound_mask = a if a.bound else b
        return replace(
            self, q_positions=bound_mask.q_positions, kv_positions=bound_mask.kv_positions
        )

    def __bool__(self) -> bool:
        raise TypeError(
            "Mask: a mask is neither true nor false. Join masks by &, | and ~ instead of and, or "
            "and not; ask `mask is None`."
        )

    @property
    def bound(self) -> bool:
        """Return True if the mask is bound to the positions of tokens, see `bind`."""
        return self.q_positions is not None

    def tensor(
        self, length: int | None = None, *, queries: int | None = None
    ) -> Bool[Tensor, "*batch q_len kv_len"]:
        """Return the mask as booleans, True where a query sees a key: (q_len, kv_len), or (batch,
        q_len, kv_len) if rows of the batch differ.

        Args:
            length: number of keys, at positions 0, 1, ...; None for a bound mask, which has
                positions.
            queries: number of queries, which are the last tokens; None for all.

        For a mask that differs between heads, the result is that of the first head. Raises:
        ValueError if the lengths do not fit the tensors that the mask reads, TypeError if they are
        no whole numbers.

        >>> (posenc.masks.causal & posenc.masks.sliding_window(2)).tensor(4, queries=2).int()
        tensor([[0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
        """
        if not self.bound:
            return self._bind_in_order(length, queries)._visible_at_positions()
        if length is not None or queries is not None:
            raise ValueError(
                "Mask.tensor: this mask is bound to positions, which say how many tokens there "
                "are: leave out length and queries."
            )
        return self._visible_at_positions()

    def _bind_in_order(self, length: int | None, queries: int | None) -> "Mask":
        """Return the mask bound to `length` keys at positions 0, 1, ..., and to the last `queries`
        of them as queries, or to all for None. Raise TypeError if length is None, because an
        unbound mask needs it."""
        kv_len = _checked_token_count("length", length)
        q_len = kv_len if queries is None else _checked_token_count("queries", queries)
        if q_len > kv_len:
            raise ValueError(
                f"Mask.tensor: queries are the last of the {kv_len} tokens, got {q_len}. For "
                "others bind the mask to positions: mask.bind(q_positions, kv_positions)."
            )
        return self.bind(range(kv_len - q_len, kv_len), range(kv_len))

    def _visible_at_positions(self) -> Tensor:
        """Return a bound mask as booleans, see `tensor`."""
        assert self.q_positions is not None and self.kv_positions is not None
        q_len = num_tokens(self.q_positions)
        kv_len = num_tokens(self.kv_positions)
        tensors = [captured.tensor for captured in self.captured]
        batch_sizes = [
            len(captured.tensor) for captured in self.captured if captured.axes[0] == "batch"
        ]
        for positions in (self.q_positions, self.kv_positions):
            if isinstance(positions, Tensor):
                tensors.append(positions)
                if positions.ndim == 2:
                    batch_sizes.append(len(positions))
        batch = max(batch_sizes, default=1)
        device = tensors[0].device if tensors else torch.device("cpu")
        check_mask("Mask.tensor", self, batch, q_len, kv_len)
        # A predicate need not differ between rows and queries, so its result may have size 1 there.
        visible_of_head_0 = self.rows(batch, 1, 0, q_len, kv_len, device)[:, 0]
        visible = visible_of_head_0.expand(-1, q_len, kv_len)
        return visible[0] if len(visible) == 1 else visible

    def rows(
        self,
        batch: int,
        num_heads: int,
        start: int,
        stop: int,
        kv_len: int,
        device: torch.device,
        *,
        first_key: int = 0,
    ) -> Bool[Tensor, "#{batch} #{num_heads} #{stop-start} #{kv_len}"]:
        """Return the mask of queries [start, stop) and of `kv_len` keys from index `first_key` on,
        True for visible keys. It broadcasts to (batch, num_heads, stop - start, kv_len). An
        unbound mask takes indices for positions."""
        visible = self._visible_pairs(
            torch.arange(batch, device=device)[:, None, None, None],
            torch.arange(num_heads, device=device)[:, None, None],
            torch.arange(start, stop, device=device)[:, None],
            torch.arange(first_key, first_key + kv_len, device=device),
        )
        return visible.view((1,) * (4 - visible.ndim) + visible.shape)


def check_mask(caller: str, mask: Any, batch: int, q_len: int, kv_len: int) -> None:
    """Raise TypeError unless `mask` is a Mask or None. Raise ValueError unless these sizes fit the
    tensors that it reads and the positions to which it is bound. caller: the name with which
    messages begin."""
    if mask is None:
        return
    if not isinstance(mask, Mask):
        raise TypeError(
            f"{caller}: mask must be a posenc.masks.Mask, got {_describe_argument(mask)}. Convert "
            "a tensor of valid tokens by posenc.masks.padding(valid), a mask_mod by "
            "posenc.masks.Mask."
        )
    sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len}
    for captured in mask.captured:
        shape = tuple(captured.tensor.shape)
        for axis, (name, size) in enumerate(zip(captured.axes, shape, strict=True)):
            if size != sizes[name]:
                raise ValueError(
                    f"{caller}: the mask's {captured.name} has shape {shape}, and "
                    f"axis {axis} must be {name} = {sizes[name]}."
                )
    _check_bound_sizes(caller, "q_positions", mask.q_positions, batch, q_len)
    _check_bound_sizes(caller, "kv_positions", mask.kv_positions, batch, kv_len)


def _check_bound_sizes(
    caller: str, name: str, positions: Tensor | range | None, batch: int, length: int
) -> None:
    """Raise ValueError if a mask is bound to positions of other sizes than those of attention.

    caller, name: the function and its positions, for the message.
    positions: those to which the mask is bound; None if it is not bound.
    batch, length: the number of rows and of tokens that attention has.
    """
    if positions is None:
        return
    shape = (len(positions),) if isinstance(positions, range) else tuple(positions.shape)
    num_rows = shape[0] if len(shape) == 2 else 1
    if shape[-1] != length or num_rows not in (1, batch):
        raise ValueError(
            f"{caller}: the mask is bound to {name} of shape {shape}, and attention has {length} "
            f"tokens in {batch} rows. Bind it to these, or pass it unbound. "
            f"{_COMPONENTS_HAVE_NO_ORDER_MESSAGE}"
        )


def _describe_argument(mask: Any) -> str:
    """Return words for an argument that is no Mask, such as "a Tensor", for an error message."""
    if callable(mask) and not isinstance(mask, Tensor):
        return f"{getattr(mask, '__name__', type(mask).__name__)} (call it, or wrap it in Mask)"
    return f"a {type(mask).__name__}"


def _both_show(a: Predicate, b: Predicate, pairs: QueryKeyPairs) -> Tensor:
    """Return True where both predicates do. This is the predicate of a & b."""
    return a(pairs) & b(pairs)


def _either_shows(a: Predicate, b: Predicate, pairs: QueryKeyPairs) -> Tensor:
    """Return True where at least one of the predicates does. This is the predicate of a | b."""
    return a(pairs) | b(pairs)


def _does_not_show(a: Predicate, pairs: QueryKeyPairs) -> Tensor:
    """Return True where the predicate does not. This is the predicate of ~a."""
    return ~a(pairs)


def _checked_token_count(name: str, count: Any) -> int:
    """Return `count` as an int. Raise TypeError unless it is a whole number, ValueError if it is
    below 0. name: the argument's name, for the message."""
    if not hasattr(count, "__index__") or isinstance(count, bool):
        raise TypeError(f"Mask.tensor: {name} must be a whole number of tokens, got {count!r}.")
    if count < 0:
        raise ValueError(f"Mask.tensor: {name} must be at least 0, got {count}.")
    return int(count)


def _widen_integers(positions: Tensor | range) -> Tensor | range:
    """Return positions of integer dtypes narrower than int64 as int64, because differences of
    narrow integers wrap around. Return others unchanged."""
    if isinstance(positions, range) or positions.is_floating_point():
        return positions
    return positions.long()


def _have_same_positions(a: Mask, b: Mask) -> bool:
    """Return True if two bound masks are known to be bound to the same positions."""
    same_queries = are_known_equal(a.q_positions, b.q_positions)  # type: ignore[arg-type]
    return same_queries and are_known_equal(a.kv_positions, b.kv_positions)  # type: ignore[arg-type]


def _check_bind_positions(q_positions: Any, kv_positions: Any) -> None:
    """Raise TypeError or ValueError unless both are positions that a mask can compare, with batch
    sizes that fit each other; see `Mask.bind`."""
    _check_flat_positions("q_positions", q_positions)
    _check_flat_positions("kv_positions", kv_positions)
    if isinstance(q_positions, range) or isinstance(kv_positions, range):
        return
    both_have_rows = q_positions.ndim == kv_positions.ndim == 2
    batch_sizes = (q_positions.shape[0], kv_positions.shape[0])
    if both_have_rows and batch_sizes[0] != batch_sizes[1] and 1 not in batch_sizes:
        raise ValueError(
            f"Mask.bind: q_positions and kv_positions must have the same batch size, got shapes "
            f"{tuple(q_positions.shape)} and {tuple(kv_positions.shape)}. "
            f"{_COMPONENTS_HAVE_NO_ORDER_MESSAGE}"
        )


def _check_flat_positions(name: str, positions: Any) -> None:
    """Raise TypeError unless `positions` are numbers or a range, ValueError unless they have one
    component: (len) or (batch, len). name: the argument's name, for the message."""
    if isinstance(positions, range):
        return
    if not isinstance(positions, Tensor) or positions.dtype == torch.bool:
        got = "booleans" if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"Mask.bind: {name} must be a tensor of positions or a range, got {got}.")
    if positions.ndim not in (1, 2):
        raise ValueError(
            f"Mask.bind: {name} must have shape (len) or (batch, len), got "
            f"{tuple(positions.shape)}. {_COMPONENTS_HAVE_NO_ORDER_MESSAGE}"
        )


_COMPONENTS_HAVE_NO_ORDER_MESSAGE = (
    "Positions of several components have no order: bind the mask to that in memory, range(len)."
)


def _require_mask(other: object, operator: str) -> None:
    """Raise TypeError unless `other`, the right side of an operator, is a Mask."""
    if not isinstance(other, Mask):
        raise TypeError(f"Mask {operator} needs another Mask, got {type(other).__name__}.")
