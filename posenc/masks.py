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

import torch
from jaxtyping import Bool, Int, Real, Shaped
from torch import Tensor

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
class Mask:
    """True where a query may look at a key.

    Called like a mask_mod of FlexAttention: mask(batch, head, q_idx, kv_idx) -> bool tensor; the
    four broadcast. Masks compare positions, not indices; before `bind` has given the positions, a
    token's index is its position.

    causal: no query sees a key of a later position.
    window: no query sees a key at this distance or further.
    exact: causal and window describe the mask completely, so a kernel may use them and skip the
        predicate.

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
    _last: dict[tuple, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_position = _take(self.q_positions, batch, q_idx)
        kv_position = _take(self.kv_positions, batch, kv_idx)
        return self.predicate(Sight(batch, head, q_idx, kv_idx, q_position, kv_position))

    def __and__(self, other: Mask) -> Mask:
        _require_mask(other, "&")
        windows = [m.window for m in (self, other) if m.window is not None]
        return Mask(
            lambda sight: self.predicate(sight) & other.predicate(sight),
            causal=self.causal or other.causal,
            window=min(windows, default=None),
            exact=self.exact and other.exact,
        )._bound_like(self, other)

    def __or__(self, other: Mask) -> Mask:
        _require_mask(other, "|")
        windows = [m.window for m in (self, other) if m.window is not None]
        return Mask(
            lambda sight: self.predicate(sight) | other.predicate(sight),
            causal=self.causal and other.causal,
            window=max(windows) if len(windows) == 2 else None,
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
            and (a.q_positions is not b.q_positions or a.kv_positions is not b.kv_positions)
        ):
            raise ValueError(
                "Masks bound to different positions cannot be combined: combine, then bind."
            )
        owner = a if a.bound else b
        return replace(self, q_positions=owner.q_positions, kv_positions=owner.kv_positions)

    @property
    def bound(self) -> bool:
        return self.q_positions is not None

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
        key = (batch, num_heads, start, stop, kv_len, device, first_key)
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


def _take(positions: Tensor | None, batch: Tensor, index: Tensor) -> Tensor:
    if positions is None:
        return index
    return positions[index] if positions.ndim == 1 else positions[batch, index]


def _require_mask(other: object, operator: str) -> None:
    if not isinstance(other, Mask):
        raise TypeError(f"Mask {operator} needs another Mask, got {type(other).__name__}.")


full = Mask(lambda sight: torch.ones_like(sight.q_position >= sight.kv_position), exact=True)
"""Everyone may look at everyone."""

causal = Mask(lambda sight: sight.q_position >= sight.kv_position, causal=True, exact=True)
"""A query sees keys at its own and earlier positions, in any order in memory."""


def sliding_window(window_size: int) -> Mask:
    """Keys less than `window_size` positions away, on either side.

    `causal & sliding_window(w)` shows w keys counting the query itself, as Hugging Face and Gemma
    do. Without causal, Gemma shows 2w - 1 keys like this function, Hugging Face 2w + 1: w + 1 here.
    """
    if window_size < 1:
        raise ValueError(f"sliding_window: window_size must be at least 1, got {window_size}.")
    return Mask(
        lambda sight: (sight.q_position - sight.kv_position).abs() < window_size,
        window=window_size,
        exact=True,
    )


def padding(valid: Shaped[Tensor, "batch kv_len"]) -> Mask:
    """Only keys where `valid` (batch, kv_len) is True or nonzero: left, right or any padding."""
    if valid.ndim != 2:
        raise ValueError(
            f"padding: valid must have shape (batch, kv_len), got {tuple(valid.shape)}."
        )
    valid = valid.bool()
    return Mask(lambda sight: valid[sight.batch, sight.kv_idx])


def document(
    q_documents: Shaped[Tensor, "*batch q_len"],
    kv_documents: Shaped[Tensor, "*kv_batch kv_len"] | None = None,
) -> Mask:
    """Only keys of the query's own document; ids (len) or (batch, len), kv ids default to the
    query's."""
    kv_ids = q_documents if kv_documents is None else kv_documents
    return Mask(
        lambda sight: (
            _take(q_documents, sight.batch, sight.q_idx) == _take(kv_ids, sight.batch, sight.kv_idx)
        )
    )


def prefix(length: int | Int[Tensor, " batch"]) -> Mask:
    """Keys at positions below `length`, an integer or one for each batch row.

    `causal | prefix(n)` is the prefix language model: the first n tokens see one another.
    """
    if isinstance(length, int):
        if length < 0:
            raise ValueError(f"prefix: length must not be negative, got {length}.")
        return Mask(lambda sight: sight.kv_position < length)
    if length.ndim != 1:
        raise ValueError(f"prefix: length must have shape (batch,), got {tuple(length.shape)}.")
    return Mask(lambda sight: sight.kv_position < length[sight.batch])


def attention_sinks(num_sinks: int, window_size: int) -> Mask:
    """The past within a window, and always the first `num_sinks` positions (StreamingLLM).

    Source: Xiao et al. 2023, arXiv:2309.17453.
    """
    return causal & (sliding_window(window_size) | prefix(num_sinks))


def chunked(chunk_size: int) -> Mask:
    """Only keys of the query's own chunk of positions; `causal & chunked(n)` is Llama 4's."""
    if chunk_size < 1:
        raise ValueError(f"chunked: chunk_size must be at least 1, got {chunk_size}.")
    return Mask(
        lambda sight: sight.q_position // chunk_size == sight.kv_position // chunk_size,
        window=chunk_size,
    )


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

    def sees(sight: Sight) -> Tensor:
        own = _take(order, sight.batch, sight.q_idx)
        other = _take(order, sight.batch, sight.kv_idx)
        earlier = (other < own) | (other < 0)
        return earlier if stream == "query" else earlier | (sight.q_idx == sight.kv_idx)

    return Mask(sees)
