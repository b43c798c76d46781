"""Who may look at whom: masks in FlexAttention's signature that compose and know their own
structure.

>>> mask = posenc.masks.causal & posenc.masks.sliding_window(2)
>>> mask.rows(1, 1, 0, 4, 4, torch.device("cpu"))[0, 0].int()
tensor([[1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1]], dtype=torch.int32)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int, Real, Shaped
from torch import Tensor

from posenc.positions import one_row, same, version

Predicate = Callable[["Sight"], Tensor]


@dataclass(frozen=True)
class Sight:
    """What a predicate may look at: FlexAttention's four indices and the positions of the pair."""

    batch: Tensor
    head: Tensor
    q_idx: Tensor
    kv_idx: Tensor
    q_position: Tensor
    kv_position: Tensor


@dataclass(frozen=True, eq=False)
class Read:
    """A tensor that a predicate looks at, and what its axes count: "batch", "q_len", "kv_len"."""

    name: str
    tensor: Tensor
    axes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Mask:
    """True where a query may look at a key.

    Called like a mask_mod of FlexAttention: mask(batch, head, q_idx, kv_idx) -> bool tensor; the
    four broadcast. Masks compare positions, not indices; before `bind` has given the positions, a
    token's index is its position.

    causal: no query sees a key of a later position.
    window: no query sees a key at this distance or further.
    exact: causal and window describe the mask completely, so a kernel may use them and skip the
        predicate.
    reads: tensors that the predicate looks at, each with a name and the sizes that its axes must
        have, of "batch", "q_len" and "kv_len".

    >>> even = posenc.Mask(lambda sight: sight.kv_position % 2 == 0)
    >>> (even & posenc.masks.causal).rows(1, 1, 0, 3, 3, torch.device("cpu"))[0, 0].int()
    tensor([[1, 0, 0],
            [1, 0, 0],
            [1, 0, 1]], dtype=torch.int32)
    """

    predicate: Predicate
    causal: bool = False
    window: int | None = None
    exact: bool = False
    q_positions: Tensor | None = None
    kv_positions: Tensor | None = None
    reads: tuple[Read, ...] = ()
    _last: dict[tuple, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_position = _take(self.q_positions, batch, q_idx)
        kv_position = _take(self.kv_positions, batch, kv_idx)
        return self.predicate(Sight(batch, head, q_idx, kv_idx, q_position, kv_position))

    def __and__(self, other: Mask) -> Mask:
        _require_mask(other, "&")
        windows = [m.window for m in (self, other) if m.window is not None]
        return Mask(
            partial(_both, self.predicate, other.predicate),
            causal=self.causal or other.causal,
            window=min(windows, default=None),
            exact=self.exact and other.exact,
            reads=self.reads + other.reads,
        )._bound_like(self, other)

    def __or__(self, other: Mask) -> Mask:
        _require_mask(other, "|")
        windows = [m.window for m in (self, other) if m.window is not None]
        return Mask(
            partial(_either, self.predicate, other.predicate),
            causal=self.causal and other.causal,
            window=max(windows) if len(windows) == 2 else None,
            reads=self.reads + other.reads,
        )._bound_like(self, other)

    def bind(
        self,
        q_positions: Real[Tensor, "*q_batch q_len"],
        kv_positions: Real[Tensor, "*kv_batch kv_len"],
    ) -> Mask:
        """The same mask over these positions, (len) or (batch, len)."""
        return replace(self, q_positions=q_positions, kv_positions=kv_positions)

    def _bound_like(self, a: Mask, b: Mask) -> Mask:
        if not (a.bound or b.bound):
            return self
        if (
            a.bound
            and b.bound
            and not (
                same(a.q_positions, b.q_positions)  # type: ignore[arg-type]
                and same(a.kv_positions, b.kv_positions)  # type: ignore[arg-type]
            )
        ):
            raise ValueError(
                "Masks bound to different positions cannot be combined: combine, then bind."
            )
        owner = a if a.bound else b
        return replace(self, q_positions=owner.q_positions, kv_positions=owner.kv_positions)

    @property
    def bound(self) -> bool:
        return self.q_positions is not None

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        """All that an answer depends on."""
        positions = (self.q_positions, self.kv_positions)
        own = tuple(t for t in positions if t is not None)
        return own + tuple(read.tensor for read in self.reads)

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
        """Booleans for queries start .. stop and the kv_len keys from first_key on, that broadcast
        to (batch, num_heads, stop - start, kv_len).

        The last result is kept, because all layers of a model ask a bound mask for the same rows.
        """
        versions = tuple(version(t) for t in self._tensors)
        key = (batch, num_heads, start, stop, kv_len, device, first_key, versions)
        # A key hashes the sizes: a compiler would specialise the code to each length.
        keep = not torch.compiler.is_compiling()
        if keep and key in self._last:
            return self._last[key]
        seen = self(
            torch.arange(batch, device=device)[:, None, None, None],
            torch.arange(num_heads, device=device)[:, None, None],
            torch.arange(start, stop, device=device)[:, None],
            torch.arange(first_key, first_key + kv_len, device=device),
        )
        seen = seen.view((1,) * (4 - seen.ndim) + seen.shape)
        if keep:
            self._last.clear()
            self._last[key] = seen
        return seen


def check_mask(owner: str, mask: Any, batch: int, q_len: int, kv_len: int) -> None:
    """Raise unless `mask` is None or a Mask for queries and keys of these numbers: TypeError for
    anything else, ValueError for a mask of other sizes."""
    if mask is None:
        return
    if not isinstance(mask, Mask):
        raise TypeError(
            f"{owner}: mask must be a posenc.masks.Mask, got {_kind(mask)}. A tensor of real "
            "tokens becomes one by posenc.masks.padding(valid), a mask_mod by posenc.masks.Mask."
        )
    sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len}
    for read in mask.reads:
        for axis, (name, got) in enumerate(zip(read.axes, read.tensor.shape, strict=True)):
            if got != sizes[name]:
                raise ValueError(
                    f"{owner}: the mask's {read.name} has shape {tuple(read.tensor.shape)}, and "
                    f"axis {axis} must be {name} = {sizes[name]}."
                )
    for name, positions in (("q", mask.q_positions), ("kv", mask.kv_positions)):
        if positions is None:
            continue
        length, rows = positions.shape[-1], positions.shape[0] if positions.ndim == 2 else 1
        if length != sizes[f"{name}_len"] or rows not in (1, batch):
            raise ValueError(
                f"{owner}: the mask is bound to {name}_positions of shape "
                f"{tuple(positions.shape)}, and attention has {sizes[f'{name}_len']} tokens in "
                f"{batch} rows. Bind it to these, or hand it over unbound."
            )


def _kind(mask: Any) -> str:
    if callable(mask) and not isinstance(mask, Tensor):
        return f"{getattr(mask, '__name__', type(mask).__name__)} (call it, or wrap it in Mask)"
    return f"a {type(mask).__name__}"


def _both(a: Predicate, b: Predicate, sight: Sight) -> Tensor:
    return a(sight) & b(sight)


def _either(a: Predicate, b: Predicate, sight: Sight) -> Tensor:
    return a(sight) | b(sight)


def _take(positions: Tensor | None, batch: Tensor, index: Tensor) -> Tensor:
    if positions is None:
        return index
    if positions.ndim == 2 and positions.shape[0] == 1:
        positions = positions[0]
    return positions[index] if positions.ndim == 1 else positions[batch, index]


def _require_mask(other: object, operator: str) -> None:
    if not isinstance(other, Mask):
        raise TypeError(f"Mask {operator} needs another Mask, got {type(other).__name__}.")


def _everyone(sight: Sight) -> Tensor:
    return torch.ones_like(sight.q_position >= sight.kv_position)


def _not_later(sight: Sight) -> Tensor:
    return sight.q_position >= sight.kv_position


full = Mask(_everyone, exact=True)
"""Everyone may look at everyone."""

causal = Mask(_not_later, causal=True, exact=True)
"""A query sees keys at its own and earlier positions, in any order in memory."""


def sliding_window(window_size: int) -> Mask:
    """Keys less than `window_size` positions away, on either side.

    `causal & sliding_window(w)` shows w keys counting the query itself, as Hugging Face and Gemma
    do. Without causal, Gemma shows 2w - 1 keys like this function, Hugging Face 2w + 1: w + 1 here.
    """
    if window_size < 1:
        raise ValueError(f"sliding_window: window_size must be at least 1, got {window_size}.")
    return Mask(partial(_near, window_size), window=window_size, exact=True)


def _near(window_size: int, sight: Sight) -> Tensor:
    return (sight.q_position - sight.kv_position).abs() < window_size


def padding(valid: Shaped[Tensor, "batch kv_len"]) -> Mask:
    """Only keys where `valid` (batch, kv_len) is True or nonzero: left, right or any padding."""
    if valid.ndim != 2:
        raise ValueError(
            f"padding: valid must have shape (batch, kv_len), got {tuple(valid.shape)}."
        )
    valid = valid.bool()
    return Mask(partial(_valid, valid), reads=(Read("padding", valid, ("batch", "kv_len")),))


def _valid(valid: Tensor, sight: Sight) -> Tensor:
    return valid[sight.batch, sight.kv_idx]


def document(
    q_documents: Shaped[Tensor, "*batch q_len"],
    kv_documents: Shaped[Tensor, "*kv_batch kv_len"] | None = None,
) -> Mask:
    """Only keys of the query's own document; ids (len) or (batch, len), kv ids default to the
    query's."""
    q_ids, kv_ids = (
        one_row(ids) if ids.ndim == 2 and ids.shape[0] == 1 else ids
        for ids in (q_documents, q_documents if kv_documents is None else kv_documents)
    )
    return Mask(
        partial(_same_document, q_ids, kv_ids),
        reads=(
            Read("documents of queries", q_ids, ("batch", "q_len")[-q_ids.ndim :]),
            Read("documents of keys", kv_ids, ("batch", "kv_len")[-kv_ids.ndim :]),
        ),
    )


def _same_document(q_ids: Tensor, kv_ids: Tensor, sight: Sight) -> Tensor:
    mine, other = _take(q_ids, sight.batch, sight.q_idx), _take(kv_ids, sight.batch, sight.kv_idx)
    return mine == other


def prefix(length: int | Int[Tensor, " batch"]) -> Mask:
    """Keys at positions below `length`, an integer or one for each batch row.

    `causal | prefix(n)` is the prefix language model: the first n tokens see one another.
    """
    if isinstance(length, int):
        if length < 0:
            raise ValueError(f"prefix: length must not be negative, got {length}.")
        return Mask(partial(_below, length))
    if length.ndim != 1:
        raise ValueError(f"prefix: length must have shape (batch,), got {tuple(length.shape)}.")
    return Mask(partial(_below_own, length), reads=(Read("prefix", length, ("batch",)),))


def _below(length: int, sight: Sight) -> Tensor:
    return sight.kv_position < length


def _below_own(length: Tensor, sight: Sight) -> Tensor:
    return sight.kv_position < length[sight.batch]


def attention_sinks(num_sinks: int, window_size: int) -> Mask:
    """The past within a window, and always the first `num_sinks` positions (StreamingLLM).

    Source: Xiao et al. 2023, arXiv:2309.17453.
    """
    return causal & (sliding_window(window_size) | prefix(num_sinks))


def chunked(chunk_size: int) -> Mask:
    """Only keys of the query's own chunk of positions; `causal & chunked(n)` is Llama 4's."""
    if chunk_size < 1:
        raise ValueError(f"chunked: chunk_size must be at least 1, got {chunk_size}.")
    return Mask(partial(_own_chunk, chunk_size), window=chunk_size)


def _own_chunk(chunk_size: int, sight: Sight) -> Tensor:
    return sight.q_position // chunk_size == sight.kv_position // chunk_size


def permutation(order: Int[Tensor, "*batch len"], *, stream: str) -> Mask:
    """Keys that come earlier in a factorisation order (XLNet).

    Args:
        order: each token's place in the order, (len) or (batch, len). A negative place is context
            that is given and not predicted: every query sees it.
        stream: "content": a token also sees itself; "query": it does not, so that it can be
            predicted.

    Source: Yang et al. 2019, arXiv:1906.08237, section 2.3.
    """
    if stream not in ("content", "query"):
        raise ValueError(f'permutation: stream must be "content" or "query", got {stream!r}.')

    return Mask(
        partial(_earlier, order, stream == "content"),
        reads=(Read("order", order, ("batch", "kv_len")[-order.ndim :]),),
    )


def _earlier(order: Tensor, and_itself: bool, sight: Sight) -> Tensor:
    own = _take(order, sight.batch, sight.q_idx)
    other = _take(order, sight.batch, sight.kv_idx)
    earlier = (other < own) | (other < 0)
    return earlier | (sight.q_idx == sight.kv_idx) if and_itself else earlier
