"""Keep tensors that are computed once: constants per device, and tables of a prepared encoding."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from posenc.encodings.numerics.torch_modes import inside_functorch_transform, is_readable

T = TypeVar("T")
MAX_TABLES = 4
"""Maximum number of cached tables; a further one replaces the oldest. The number is chosen: a
prepared encoding may be used for many calls, and each may ask for tables of its own."""


class Constants:
    """Hold constant numbers of an encoding, and copy them to each device once.

    A buffer would be rounded by `.to(bfloat16)`. A tensor made in each call would have to wait for
    its copy to the device.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self.values = tuple(values)
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, other: Tensor) -> Tensor:
        """Return the numbers as a tensor (len,) in the dtype and on the device of `other`. Do not
        write to it: it is shared."""
        key = (other.device, other.dtype)
        is_subclass = type(other) not in (Tensor, nn.Parameter)  # such as a fake tensor
        if torch.compiler.is_compiling() or inside_functorch_transform() or is_subclass:
            # A tensor made while tracing must not be used after the trace or with fake tensors.
            return torch.tensor(self.values, dtype=other.dtype, device=other.device)
        if key not in self._copies:
            with torch.inference_mode(False):  # otherwise a later backward pass cannot save it
                copied = torch.tensor(self.values, dtype=other.dtype, device=other.device)
            if type(copied) is not Tensor:  # a mode such as FakeTensorMode made it, and ends soon
                return copied
            self._copies[key] = copied
        return self._copies[key]


class TableCache:
    """Cache results by key, and compute a result again if a tensor from which it was computed has
    changed.

    Tensors are compared by value with copies, so every change is noticed, whatever wrote it. That
    costs time in proportion to their size, and on an accelerator it would wait for the device. So
    nothing is cached there, nor while gradients are tracked, because a backward pass frees its
    graph.

    >>> from posenc.encodings.numerics.caches import TableCache
    >>> kept, weight = TableCache(), torch.ones(2)
    >>> table = kept("x", lambda: weight * 3, weight)
    >>> kept("x", lambda: weight * 3, weight) is table
    True
    >>> weight.data[0] = 5
    >>> kept("x", lambda: weight * 3, weight)
    tensor([15.,  3.])
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[tuple[Tensor, ...], Any]] = {}

    def __call__(self, key: Hashable, compute: Callable[[], T], *reads: Tensor | None) -> T:
        """Return `compute()`, or its cached result if it was called with this key and with tensors
        `reads` of the same values. Do not write to the result: it is shared."""
        inputs = tuple(t for t in reads if t is not None)
        is_tracked = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        if is_tracked or torch.compiler.is_compiling() or not all(map(is_readable, inputs)):
            return compute()
        # Tensors made in inference mode cannot be saved for a backward pass.
        key = key, torch.is_inference_mode_enabled()
        if key in self._entries:
            earlier_inputs, table = self._entries[key]
            if _same_tensors(earlier_inputs, inputs):
                return table
            del self._entries[key]
        if len(self._entries) == MAX_TABLES:
            oldest_key = next(iter(self._entries))
            del self._entries[oldest_key]
        table = compute()
        self._entries[key] = tuple(t.detach().clone() for t in inputs), table
        return table


def _same_tensors(before: tuple[Tensor, ...], now: tuple[Tensor, ...]) -> bool:
    """Return True if both have the same number of tensors, with the same dtypes, shapes and values.
    Tensors with NaN are never the same."""
    if len(before) != len(now):
        return False
    tensor_pairs = zip(before, now, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in tensor_pairs)
