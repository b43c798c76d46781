"""Attention masks in FlexAttention's signature, with what is known about their structure."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int, Real, Shaped
from torch import Tensor

from posenc.arguments import explain_constructor_misfits, explain_misfits
from posenc.positions import (
    FlatKeys,
    FlatQueries,
    are_known_equal,
    consecutive_positions,
    first_text_returns,
    last_positions_differ,
    num_tokens,
    positions_restart,
    values_at,
)

Predicate = Callable[["Sight"], Tensor]


@dataclass(frozen=True)
class Sight:
    """Hold what a predicate gets of pairs of a query and a key: FlexAttention's four indices, and
    the positions of the two. All six are tensors that broadcast to one shape."""

    batch: Int[Tensor, "..."]
    head: Int[Tensor, "..."]
    q_idx: Int[Tensor, "..."]
    kv_idx: Int[Tensor, "..."]
    q_position: Real[Tensor, "..."]
    kv_position: Real[Tensor, "..."]


@dataclass(frozen=True, eq=False)
class Read:
    """Name a tensor that a predicate reads, and its axes: "batch", "q_len" or "kv_len"."""

    name: str
    tensor: Shaped[Tensor, "..."]
    axes: tuple[str, ...]


@explain_constructor_misfits
@dataclass(frozen=True, eq=False)
class Mask:
    """Hide keys from queries by a predicate that is True for visible keys.

    Call it like a mask_mod of FlexAttention: mask(batch, head, q_idx, kv_idx) -> bool tensor; the
    four broadcast. Masks compare positions, not indices; without `bind` a token's index is its
    position. With positions of several components (M-RoPE, rows and columns) they compare the order
    in memory: queries are the last tokens.

    causal: no query sees a key at a later position.
    window: no query sees a key at this distance or further.
    exact: causal and window describe the mask completely, so a kernel can use them instead of the
        predicate.
    reads: the tensors that the predicate reads.
    separates: False if it compares positions, which documents packed into one row repeat; None if
        it compares neither positions nor documents, as `full` and `padding`; True if it may keep
        documents apart. Read of a mask without parts.
    operator, parts: "&", "|" or "~", and the masks that this one joins by it.

    >>> even = posenc.Mask(lambda sight: sight.kv_position % 2 == 0)
    >>> (even & posenc.masks.causal).tensor(3).int()
    tensor([[1, 0, 0],
            [1, 0, 0],
            [1, 0, 1]], dtype=torch.int32)
    """

    predicate: Predicate
    causal: bool = False
    window: int | None = None
    exact: bool = False
    q_positions: FlatQueries | range | None = None
    kv_positions: FlatKeys | range | None = None
    reads: tuple[Read, ...] = ()
    separates: bool | None = True
    operator: str = ""
    parts: tuple["Mask", ...] = ()

    def __call__(self, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self._visible_pairs(batch, head, q_idx, kv_idx)

    def _visible_pairs(self, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return True for visible pairs of a query and a key: `predicate` on their `Sight`.

        It is no part of __call__, because torch.compile of torch 2.6 first evaluates bool(mask)
        when it calls an object, which a Mask refuses; it calls a method directly.
        """
        q_position = values_at(self.q_positions, batch, q_idx)
        kv_position = values_at(self.kv_positions, batch, kv_idx)
        return self.predicate(Sight(batch, head, q_idx, kv_idx, q_position, kv_position))

    def __and__(self, other: "Mask") -> "Mask":
        _require_mask(other, "&")
        windows = [m.window for m in (self, other) if m.window is not None]
        return Mask(
            partial(_both_show, self.predicate, other.predicate),
            causal=self.causal or other.causal,
            window=min(windows, default=None),
            exact=self.exact and other.exact,
            reads=self.reads + other.reads,
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
            reads=self.reads + other.reads,
            operator="|",
            parts=(self, other),
        )._bind_like(self, other)

    def __invert__(self) -> "Mask":
        return Mask(
            partial(_does_not_show, self.predicate),
            q_positions=self.q_positions,
            kv_positions=self.kv_positions,
            reads=self.reads,
            operator="~",
            parts=(self,),
        )

    def bind(self, q_positions: FlatQueries | range, kv_positions: FlatKeys | range) -> "Mask":
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
        """Return this mask, which joins `a` and `b`, bound to the positions of those; unbound if
        both are. Raise ValueError if they are not known to be bound to the same ones."""
        if not (a.bound or b.bound):
            return self
        if a.bound and b.bound and not _have_same_positions(a, b):
            raise ValueError(
                "Masks that are not known to be bound to the same positions cannot be combined: "
                "combine, then bind, or bind both to the same tensors. Only tensors on the CPU are "
                "compared by their numbers, because reading others would wait for the device."
            )
        owner = a if a.bound else b
        return replace(self, q_positions=owner.q_positions, kv_positions=owner.kv_positions)

    def __bool__(self) -> bool:
        raise TypeError(
            "Mask: a mask is neither true nor false. Join masks by &, | and ~ instead of and, or "
            "and not; ask `mask is None`."
        )

    @property
    def bound(self) -> bool:
        """Return True if the mask knows the positions of the tokens, see `bind`."""
        return self.q_positions is not None

    def tensor(
        self, length: int | None = None, *, queries: int | None = None
    ) -> Bool[Tensor, "*batch q_len kv_len"]:
        """Return the mask as booleans, True where a query sees a key: (length, length), or (batch,
        length, length) if rows of the batch differ.

        Args:
            length: number of tokens, at positions 0, 1, ...; None for a bound mask, which has
                positions.
            queries: number of queries, which are the last tokens; None for all.

        A mask that differs between heads is that of the first head. Raises: ValueError if the
        lengths do not fit the tensors that the mask reads, TypeError if they are no whole numbers.

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
        of them, None for all. Raise TypeError for length None, which an unbound mask needs."""
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
        tensors = [read.tensor for read in self.reads]
        batches = [len(read.tensor) for read in self.reads if read.axes[0] == "batch"]
        for positions in (self.q_positions, self.kv_positions):
            if isinstance(positions, Tensor):
                tensors.append(positions)
                if positions.ndim == 2:
                    batches.append(len(positions))
        batch = max(batches, default=1)
        device = tensors[0].device if tensors else torch.device("cpu")
        check_mask("Mask.tensor", self, batch, q_len, kv_len)
        # A predicate need not differ between rows and queries, so its result may have size 1 there.
        of_head_0 = self.rows(batch, 1, 0, q_len, kv_len, device)[:, 0]
        visible = of_head_0.expand(-1, q_len, kv_len)
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
        """Return the mask of queries [start, stop) and kv_len keys from first_key on, True for
        visible keys. It broadcasts to (batch, num_heads, stop - start, kv_len)."""
        visible = self._visible_pairs(
            torch.arange(batch, device=device)[:, None, None, None],
            torch.arange(num_heads, device=device)[:, None, None],
            torch.arange(start, stop, device=device)[:, None],
            torch.arange(first_key, first_key + kv_len, device=device),
        )
        return visible.view((1,) * (4 - visible.ndim) + visible.shape)


_PACKED_DOCUMENTS_MESSAGE = (
    "attention: keys return to earlier positions of their row, as packed documents do, and this "
    "mask, which compares positions, shows one document to another. Use "
    "mask & posenc.masks.document(ids), for example with "
    "ids = posenc.positions.documents_from_positions(positions), or increasing positions."
)

_PACKED_TEXT_MESSAGE = (
    "attention: keys return to the text that begins their row, as packed documents do, and this "
    "mask, which compares the order in memory, shows one document to another. Use "
    "mask & posenc.masks.document(ids), with the number of each token's document."
)


def check_documents(mask: Mask) -> None:
    """Raise ValueError if positions show packed documents that a bound mask does not separate."""
    if _possible_leak(mask) is not _OtherDocuments.BY_POSITION:
        return
    assert mask.kv_positions is not None
    if positions_restart(mask.kv_positions, _keys_without_padding(mask)):
        raise ValueError(_PACKED_DOCUMENTS_MESSAGE)


@explain_misfits
def bind_to_memory_order(
    mask: Mask,
    q_positions: Real[Tensor, "*#q_batch q_len axes"],
    kv_positions: Real[Tensor, "*#kv_batch kv_len axes"],
) -> Mask:
    """Return a mask bound to the order in memory, for positions of several components: queries are
    the last tokens. With more queries than keys, the first queries precede all keys.

    Raises: ValueError for a mask that compares positions, if these (read on the CPU only, and not
    while tracing) show one of two things:

    - the order in memory is not meant: the last queries are elsewhere than the last keys;
    - the row returns to its first text, and the mask does not separate the two.
    """
    if _compares_positions(mask) and last_positions_differ(q_positions, kv_positions):
        raise ValueError(_OTHER_PLACES_MESSAGE)
    by_position = _possible_leak(mask) is _OtherDocuments.BY_POSITION
    if by_position and first_text_returns(kv_positions, _keys_without_padding(mask)):
        raise ValueError(_PACKED_TEXT_MESSAGE)
    q_len = q_positions.shape[-2]
    kv_len = kv_positions.shape[-2]
    device = kv_positions.device
    return mask.bind(
        consecutive_positions(kv_len - q_len, q_len, device),
        consecutive_positions(0, kv_len, device),
    )


_MEMORY_ORDER_MESSAGE = (
    "attention: with positions of several components a mask compares the order in memory, in which "
    "the queries are the last tokens"
)
_OTHER_PLACES_MESSAGE = (
    f"{_MEMORY_ORDER_MESSAGE}, but q_positions are not those of the last keys. Bind the mask to "
    "the places of the tokens in memory, such as mask.bind(range(2, 4), range(6)) for queries 2 "
    "and 3 of 6 keys."
)


def _compares_positions(mask: Mask) -> bool:
    """Return True if a part of the mask compares positions, or may do so: one that the user made
    and that names no tensor."""
    if mask.parts:
        return any(map(_compares_positions, mask.parts))
    return mask.separates is False or (mask.separates is True and not mask.reads)


class _OtherDocuments(IntEnum):
    """Which keys of other documents in its row a query may see by mistake, because the caller has
    not named documents."""

    NONE = 0
    """None: the mask names documents. So does ~document(ids), which shows the others on purpose."""
    ANY = 1
    """Keys that the caller named otherwise than by positions: all of them, or those that are no
    padding."""
    BY_POSITION = 2
    """Keys at the positions of its own document, which the other documents repeat."""


def _possible_leak(mask: Mask, inverted: bool = False) -> _OtherDocuments:
    """Return the keys of other documents that a mask, or if `inverted` its inverse, may show by
    mistake."""
    if mask.operator == "~":
        return _possible_leak(mask.parts[0], not inverted)
    if not mask.parts:
        # What a mask reads does not change with `inverted`: ~causal compares positions, as causal
        # does, and ~document names documents.
        kinds = {
            True: _OtherDocuments.NONE,
            None: _OtherDocuments.ANY,
            False: _OtherDocuments.BY_POSITION,
        }
        return kinds[mask.separates]
    of_parts = [_possible_leak(part, inverted) for part in mask.parts]
    if _needs_all_parts(mask, inverted) and _OtherDocuments.NONE in of_parts:
        return _OtherDocuments.NONE
    return max(of_parts)


def _keys_without_padding(mask: Mask, inverted: bool = False) -> Tensor | None:
    """Return the keys that padding does not hide from all queries, (batch, kv_len); None for all of
    them."""
    if mask.operator == "~":
        return _keys_without_padding(mask.parts[0], not inverted)
    if not mask.parts:
        padding = _padding_tensor(mask)
        return ~padding if inverted and padding is not None else padding
    of_parts = [_keys_without_padding(part, inverted) for part in mask.parts]
    known = [valid for valid in of_parts if valid is not None]
    if _needs_all_parts(mask, inverted):
        return torch.stack(known).all(0) if known else None
    return torch.stack(known).any(0) if len(known) == len(of_parts) else None


def _padding_tensor(mask: Mask) -> Tensor | None:
    """Return the tensor (batch, kv_len) of masks.padding, True for tokens that are no padding, of a
    mask without parts; None for a mask of another kind."""
    for read in mask.reads:
        if read.name == "padding":
            return read.tensor
    return None


def _needs_all_parts(mask: Mask, inverted: bool) -> bool:
    """Return True if a key must be shown by all parts of a mask, or of its inverse: the inverse of
    a & b is ~a | ~b."""
    return (mask.operator == "&") != inverted


def check_mask(owner: str, mask: Any, batch: int, q_len: int, kv_len: int) -> None:
    """Raise TypeError unless `mask` is a Mask or None, ValueError unless the tensors that it reads
    and the positions to which it is bound fit these sizes. owner: the function, for the message."""
    if mask is None:
        return
    if not isinstance(mask, Mask):
        raise TypeError(
            f"{owner}: mask must be a posenc.masks.Mask, got {_describe_argument(mask)}. Convert "
            "a tensor of valid tokens by posenc.masks.padding(valid), a mask_mod by "
            "posenc.masks.Mask."
        )
    sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len}
    for read in mask.reads:
        for axis, (name, got) in enumerate(zip(read.axes, read.tensor.shape, strict=True)):
            if got != sizes[name]:
                raise ValueError(
                    f"{owner}: the mask's {read.name} has shape {tuple(read.tensor.shape)}, and "
                    f"axis {axis} must be {name} = {sizes[name]}."
                )
    _check_bound_sizes(owner, "q_positions", mask.q_positions, batch, q_len)
    _check_bound_sizes(owner, "kv_positions", mask.kv_positions, batch, kv_len)


def _check_bound_sizes(
    owner: str, name: str, positions: Tensor | range | None, batch: int, length: int
) -> None:
    """Raise ValueError if a mask is bound to positions of other sizes than those of attention.

    owner, name: the function and the positions, for the message. positions: None if the mask is
    not bound. batch, length: the sizes that attention has.
    """
    if positions is None:
        return
    shape = (len(positions),) if isinstance(positions, range) else tuple(positions.shape)
    rows = shape[0] if len(shape) == 2 else 1
    if shape[-1] != length or rows not in (1, batch):
        raise ValueError(
            f"{owner}: the mask is bound to {name} of shape {shape}, and attention has {length} "
            f"tokens in {batch} rows. Bind it to these, or pass it unbound. "
            f"{_COMPONENTS_HAVE_NO_ORDER_MESSAGE}"
        )


def _describe_argument(mask: Any) -> str:
    """Return words for an argument that is no Mask, such as "a Tensor", for an error message."""
    if callable(mask) and not isinstance(mask, Tensor):
        return f"{getattr(mask, '__name__', type(mask).__name__)} (call it, or wrap it in Mask)"
    return f"a {type(mask).__name__}"


def _both_show(a: Predicate, b: Predicate, sight: Sight) -> Tensor:
    """Return True where both predicates do: the predicate of a & b."""
    return a(sight) & b(sight)


def _either_shows(a: Predicate, b: Predicate, sight: Sight) -> Tensor:
    """Return True where at least one of the predicates does: the predicate of a | b."""
    return a(sight) | b(sight)


def _does_not_show(a: Predicate, sight: Sight) -> Tensor:
    """Return True where the predicate does not: the predicate of ~a."""
    return ~a(sight)


def _checked_token_count(name: str, count: Any) -> int:
    """Return `count` as an int. Raise TypeError unless it is a whole number, ValueError if it is
    below 0; `name`: the argument, for the message."""
    if not hasattr(count, "__index__") or isinstance(count, bool):
        raise TypeError(f"Mask.tensor: {name} must be a whole number of tokens, got {count!r}.")
    if count < 0:
        raise ValueError(f"Mask.tensor: {name} must be at least 0, got {count}.")
    return int(count)


def _widen_integers(positions: Tensor | range) -> Tensor | range:
    """Return positions in numbers whose differences do not wrap, as those of small integers do."""
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
    rows = (q_positions.shape[0], kv_positions.shape[0])
    if both_have_rows and rows[0] != rows[1] and 1 not in rows:
        raise ValueError(
            f"Mask.bind: q_positions and kv_positions must have the same batch size, got shapes "
            f"{tuple(q_positions.shape)} and {tuple(kv_positions.shape)}. "
            f"{_COMPONENTS_HAVE_NO_ORDER_MESSAGE}"
        )


def _check_flat_positions(name: str, positions: Any) -> None:
    """Raise TypeError unless `positions` are numbers or a range, ValueError unless they have one
    component: (len) or (batch, len). `name`: the argument, for the message."""
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
