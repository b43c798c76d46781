"""Ask what this release of torch can do: the only file in which releases differ.

Each function asks for one ability and says what runs without it.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

DEVICE_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "meta")
"""Kinds of devices for which autocast is asked about when this module is imported."""
_KINDS_WITH_AUTOCAST = frozenset(
    kind for kind in DEVICE_KINDS if torch.amp.is_autocast_available(kind)
)
"""Kinds of devices with autocast, for compiled code: up to torch 2.12 it cannot ask."""


def autocast_enabled(kind: str) -> bool:
    """Return True if autocast is on for this kind of device, such as "cuda"."""
    compiling = torch.compiler.is_compiling()
    known = kind in _KINDS_WITH_AUTOCAST if compiling else torch.amp.is_autocast_available(kind)
    return known and torch.is_autocast_enabled(kind)


def compile_with_own_limit(
    function: Callable[..., Any], limit: int, **options: Any
) -> Callable[..., Any]:
    """Compile a function so that its recompilations, at most `limit`, are counted apart from those
    of other compilations of the same function.

    A torch that cannot count them apart counts them for each code object, of which every call here
    makes a new one. A torch without an own limit for one function has its general one, 8.
    """
    taken = inspect.signature(torch.compile).parameters
    if "recompile_limit" in taken:
        options["recompile_limit"] = limit
    if "isolate_recompiles" in taken:
        options["isolate_recompiles"] = True
        return torch.compile(function, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    own = types.FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)
    return torch.compile(own, **options)
