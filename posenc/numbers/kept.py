"""The last result of a computation, given again while what it was computed from is the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from posenc.numbers.tracking import watched


class Kept:
    """A table that a module projects from its weights, kept from one call to the next.

    In inference the weights stay, and a table of a vector per distance costs as much as attention
    itself. Whether they stayed is seen in their bits: a copy of them is kept and compared, since a
    change through `.data` leaves no other trace. On the CPU alone, where comparing makes nobody
    wait, and never where autograd, a compiler or a transform may watch.

    >>> from posenc.numbers.kept import Kept
    >>> kept, weight = Kept(), torch.ones(2)
    >>> with torch.no_grad():
    ...     kept("x", lambda: weight * 3, weight) is kept("x", lambda: weight * 3, weight)
    True
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[list[Tensor], Tensor]] = {}

    def __call__(
        self, key: Hashable, compute: Callable[[], Tensor], *given: Tensor | None
    ) -> Tensor:
        """`compute()`, or what it gave the last time for this key if it was given the same; nobody
        may write into it."""
        known = [t for t in given if t is not None]
        plain = all(type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" for t in known)
        if watched() or not plain or torch.is_autocast_enabled("cpu"):
            return compute()
        last = self._last.get(key)
        if last is None or not _same(last[0], known):
            self._last[key] = last = [t.detach().clone() for t in known], compute()
        return last[1]

    def __deepcopy__(self, memo: dict) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple:
        return type(self), ()


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and bool((_bits(a) == _bits(b)).all())
        for a, b in zip(one, other, strict=True)
    )


def _bits(t: Tensor) -> np.ndarray:
    """The memory of a tensor as whole numbers, as few as can be; they are equal where NaN is."""
    flat = t.detach().reshape(-1).view(torch.uint8).numpy()
    return flat.view(np.int64) if len(flat) % 8 == 0 else flat
