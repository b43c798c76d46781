"""Cache tables that a prepared encoding makes from its weights, once for all layers."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from posenc.positions import version

T = TypeVar("T")
MOST = 4
"""Maximum number of cached tables, the latest; a prepared encoding may be used for many calls."""


class Kept:
    """Cache results by key, and recompute a result if a tensor from which it was made has changed.

    Nothing is cached if gradients are tracked, because a backward pass frees its graph.

    >>> from posenc.encodings.numbers.kept import Kept
    >>> kept, weight = Kept(), torch.ones(2)
    >>> table = kept("x", lambda: weight * 3, weight)
    >>> kept("x", lambda: weight * 3, weight) is table
    True
    >>> _ = weight.mul_(2)  # as an optimizer writes
    >>> kept("x", lambda: weight * 3, weight)
    tensor([6., 6.])
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[tuple[Tensor, ...], tuple[int | None, ...], Any]] = {}

    def __call__(self, key: Hashable, compute: Callable[[], T], *given: Tensor | None) -> T:
        """Return `compute()`, or its cached result for this key and tensors. Do not write to it."""
        made_from = tuple(t for t in given if t is not None)
        followed = torch.is_grad_enabled() and any(t.requires_grad for t in made_from)
        if followed or torch.compiler.is_compiling():
            return compute()
        versions = tuple(version(t) for t in made_from)
        if None in versions:  # torch does not count writes to this tensor
            return compute()
        key = key, torch.is_inference_mode_enabled()
        before = self._last.get(key)
        if before is not None and before[1] == versions:
            if all(a is b for a, b in zip(before[0], made_from, strict=True)):
                return before[2]
        self._last.pop(key, None)
        if len(self._last) == MOST:
            del self._last[next(iter(self._last))]
        table = compute()
        self._last[key] = made_from, versions, table
        return table
