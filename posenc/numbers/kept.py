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

    def __init__(self, most: int | None = None) -> None:
        """`most`: keys whose results are kept, the latest ones; None for all."""
        self.most = most
        self._last: dict[Hashable, tuple[list[_Held], Tensor]] = {}

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
        if last is None or not _same(known, last[0]):
            self._last.pop(key, None)
            if len(self._last) == self.most:
                del self._last[next(iter(self._last))]
            self._last[key] = last = [_held(t) for t in known], compute()
        return last[1]

    def __deepcopy__(self, memo: dict) -> Self:
        return type(self)(self.most)

    def __reduce__(self) -> tuple:
        return type(self), (self.most,)


_Held = tuple[torch.dtype, torch.Size, np.ndarray]
_INTS = {
    1: (torch.int8, np.int8),
    2: (torch.int16, np.int16),
    4: (None, np.int32),
    8: (None, np.int64),
}
"""By the size of a number: what torch shows it as where numpy may not know it, and numpy then."""


def _held(t: Tensor) -> _Held:
    return t.dtype, t.shape, _bits(t).copy()


def _same(given: list[Tensor], held: list[_Held]) -> bool:
    return len(given) == len(held) and all(
        t.dtype == dtype and t.shape == shape and not np.count_nonzero(_bits(t) != bits)
        for t, (dtype, shape, bits) in zip(given, held, strict=True)
    )


def _bits(t: Tensor) -> np.ndarray:
    """The memory of a tensor as whole numbers; they are equal where NaN is."""
    shown, whole = _INTS[t.dtype.itemsize]
    t = t.detach() if shown is None else t.detach().view(shown)
    return t.numpy().view(whole)
