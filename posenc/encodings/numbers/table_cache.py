"""Cache tables that a prepared encoding computes from its weights, once for all layers."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from posenc.encodings.numbers.readable import is_readable

T = TypeVar("T")
MAX_TABLES = 4
"""Maximum number of cached tables; the oldest goes first. A number chosen: a prepared encoding may
be used for many calls, and each may ask for tables of its own."""


class TableCache:
    """Cache results by key, and recompute a result if a tensor from which it was made has changed.

    Tensors are compared by value with copies, so every change is seen, whoever wrote it. That costs
    time in proportion to their size, and on an accelerator it would wait for the device: nothing is
    cached there, nor while gradients are tracked, because a backward pass frees its graph.

    >>> from posenc.encodings.numbers.table_cache import TableCache
    >>> kept, weight = TableCache(), torch.ones(2)
    >>> table = kept("x", lambda: weight * 3, weight)
    >>> kept("x", lambda: weight * 3, weight) is table
    True
    >>> weight.data[0] = 5
    >>> kept("x", lambda: weight * 3, weight)
    tensor([15.,  3.])
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[tuple[Tensor, ...], Any]] = {}

    def __call__(self, key: Hashable, compute: Callable[[], T], *reads: Tensor | None) -> T:
        """Return `compute()`, or its cached result for this key and equal tensors. Do not write to
        it."""
        made_from = tuple(t for t in reads if t is not None)
        tracked = torch.is_grad_enabled() and any(t.requires_grad for t in made_from)
        if tracked or torch.compiler.is_compiling() or not all(map(is_readable, made_from)):
            return compute()
        # Tensors made in inference mode cannot be saved for a backward pass.
        key = key, torch.is_inference_mode_enabled()
        if key in self._last:
            made_from_before, table = self._last[key]
            if _same_tensors(made_from_before, made_from):
                return table
            del self._last[key]
        if len(self._last) == MAX_TABLES:
            oldest = next(iter(self._last))
            del self._last[oldest]
        table = compute()
        self._last[key] = tuple(t.detach().clone() for t in made_from), table
        return table


def _same_tensors(before: tuple[Tensor, ...], now: tuple[Tensor, ...]) -> bool:
    """Return True if both are as many tensors, with the same dtypes, shapes and numbers. NaN equals
    nothing."""
    if len(before) != len(now):
        return False
    pairs = zip(before, now, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
