"""Attention masks in FlexAttention's signature, with what is known about their structure."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int, Real, Shaped
from torch import Tensor

from posenc.arguments import answered_class
from posenc.positions import FlatKeys, FlatQueries, goes_back, same, take

Predicate = Callable[["Sight"], Tensor]


@dataclass(frozen=True)
class Sight:
    """Hold what a predicate gets: FlexAttention's four indices, positions of the pair."""

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


@answered_class
@dataclass(frozen=True, eq=False)
class Mask:
    """Hide keys from queries by a predicate that is True for visible keys.

    Call it like a mask_mod of FlexAttention: mask(batch, head, q_idx, kv_idx) -> bool tensor; the
    four broadcast. Masks compare positions, not indices; without `bind` a token's index is its
    position.

    causal: no query sees a key at a later position.
    window: no query sees a key at this distance or further.
    exact: causal and window describe the mask completely, so a kernel can use them instead of the
        predicate.
    reads: the tensors that the predicate reads.
    separates: False if it cannot separate packed documents, because it only compares positions.

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
    q_positions: FlatQueries | range | None = None
    kv_positions: FlatKeys | range | None = None
    reads: tuple[Read, ...] = ()
    separates: bool = True

    def __call__(self, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_position = take(self.q_positions, batch, q_idx)
        kv_position = take(self.kv_positions, batch, kv_idx)
        return self.predicate(Sight(batch, head, q_idx, kv_idx, q_position, kv_position))

    def __and__(self, other: "Mask") -> "Mask":
        _require_mask(other, "&")
        windows = [m.window for m in (self, other) if m.window is not None]
        return Mask(
            partial(_both, self.predicate, other.predicate),
            causal=self.causal or other.causal,
            window=min(windows, default=None),
            exact=self.exact and other.exact,
            reads=self.reads + other.reads,
            separates=self.separates or other.separates,
        )._bound_like(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        _require_mask(other, "|")
        windows = [m.window for m in (self, other) if m.window is not None]
        return Mask(
            partial(_either, self.predicate, other.predicate),
            causal=self.causal and other.causal,
            window=max(windows) if len(windows) == 2 else None,
            reads=self.reads + other.reads,
            separates=self.separates and other.separates,
        )._bound_like(self, other)

    def bind(self, q_positions: FlatQueries | range, kv_positions: FlatKeys | range) -> "Mask":
        """Return the mask for tokens at these positions, each (len), (batch, len) or a range."""
        q, k = (  # differences of small integers would wrap
            p if isinstance(p, range) or p.is_floating_point() else p.long()
            for p in (q_positions, kv_positions)
        )
        return replace(self, q_positions=q, kv_positions=k)

    def _bound_like(self, a: "Mask", b: "Mask") -> "Mask":
        if not (a.bound or b.bound):
            return self
        alike = zip((a.q_positions, a.kv_positions), (b.q_positions, b.kv_positions), strict=True)
        if a.bound and b.bound and not all(same(mine, other) for mine, other in alike):  # type: ignore[arg-type]
            raise ValueError(
                "Masks bound to different positions cannot be combined: combine, then bind."
            )
        owner = a if a.bound else b
        return replace(self, q_positions=owner.q_positions, kv_positions=owner.kv_positions)

    @property
    def bound(self) -> bool:
        return self.q_positions is not None

    def rows(
        self, batch: int, num_heads: int, start: int, stop: int, kv_len: int, device: torch.device,
        *, first_key: int = 0,
    ) -> Bool[Tensor, "#{batch} #{num_heads} #{stop-start} #{kv_len}"]:  # fmt: skip
        """Return the mask of queries [start, stop) and kv_len keys from first_key on, True for
        visible keys. It broadcasts to (batch, num_heads, stop - start, kv_len)."""
        seen = self(
            torch.arange(batch, device=device)[:, None, None, None],
            torch.arange(num_heads, device=device)[:, None, None],
            torch.arange(start, stop, device=device)[:, None],
            torch.arange(first_key, first_key + kv_len, device=device),
        )
        return seen.view((1,) * (4 - seen.ndim) + seen.shape)


_PACKED = (
    "attention: keys return to earlier positions of their row, as packed documents do, and a "
    "causal mask shows one document to another. Use mask & posenc.masks.document(ids), for example "
    "with ids = posenc.positions.documents_from_positions(positions), or increasing positions."
)


def check_documents(mask: Mask) -> None:
    """Raise ValueError if positions show packed documents that a bound mask does not separate."""
    if mask.causal and not mask.separates:
        assert mask.kv_positions is not None
        valid = [read.tensor for read in mask.reads if read.name == "padding"]
        if goes_back(mask.kv_positions, *valid):
            raise ValueError(_PACKED)


def check_mask(owner: str, mask: Any, batch: int, q_len: int, kv_len: int) -> None:
    """Raise TypeError unless `mask` is a Mask or None, ValueError unless it fits these sizes."""
    if mask is None:
        return
    if not isinstance(mask, Mask):
        raise TypeError(
            f"{owner}: mask must be a posenc.masks.Mask, got {_kind(mask)}. Convert a tensor of "
            "valid tokens by posenc.masks.padding(valid), a mask_mod by posenc.masks.Mask."
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
        shape = (len(positions),) if isinstance(positions, range) else tuple(positions.shape)
        length, rows = shape[-1], shape[0] if len(shape) == 2 else 1
        if length != sizes[f"{name}_len"] or rows not in (1, batch):
            raise ValueError(
                f"{owner}: the mask is bound to {name}_positions of shape "
                f"{shape}, and attention has {sizes[f'{name}_len']} tokens in "
                f"{batch} rows. Bind it to these, or pass it unbound."
            )


def _kind(mask: Any) -> str:
    if callable(mask) and not isinstance(mask, Tensor):
        return f"{getattr(mask, '__name__', type(mask).__name__)} (call it, or wrap it in Mask)"
    return f"a {type(mask).__name__}"


def _both(a: Predicate, b: Predicate, sight: Sight) -> Tensor:
    return a(sight) & b(sight)


def _either(a: Predicate, b: Predicate, sight: Sight) -> Tensor:
    return a(sight) | b(sight)


def _require_mask(other: object, operator: str) -> None:
    if not isinstance(other, Mask):
        raise TypeError(f"Mask {operator} needs another Mask, got {type(other).__name__}.")
