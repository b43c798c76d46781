"""Ask in which mode torch runs an encoding: tracing, export, transforms, autocast, inference.

Each function asks for one mode, or for one ability of this release of torch, and says what runs
without it. No other file asks for the release.
"""

import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

DEVICE_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "meta")
"""Kinds of devices; when this module is imported, torch is asked which of them have autocast."""
_KINDS_WITH_AUTOCAST = frozenset(
    kind for kind in DEVICE_KINDS if torch.amp.is_autocast_available(kind)
)
"""Kinds of devices with autocast, for compiled code: up to torch 2.12 it cannot ask."""


def autocast_enabled(device_kind: str) -> bool:
    """Return True if autocast is on for this kind of device, such as "cuda"."""
    is_compiling = torch.compiler.is_compiling()
    is_available = (
        device_kind in _KINDS_WITH_AUTOCAST
        if is_compiling
        else torch.amp.is_autocast_available(device_kind)
    )
    return is_available and torch.is_autocast_enabled(device_kind)


def compile_with_separate_limit(
    function: Callable[..., Any], limit: int, **options: Any
) -> Callable[..., Any]:
    """Compile a function by torch.compile with `options`, and allow `limit` recompilations, which
    are counted apart from those of other compilations of the same function.

    Releases of torch that cannot count them apart count them for each code object, so each call
    here makes a new code object. Releases that take no limit for one function use their general
    limit, 8.
    """
    parameters_of_compile = inspect.signature(torch.compile).parameters
    if "recompile_limit" in parameters_of_compile:
        options["recompile_limit"] = limit
    if "isolate_recompiles" in parameters_of_compile:
        options["isolate_recompiles"] = True
        return torch.compile(function, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = call.__code__.replace()  # a copy, and so another code object
    copied_call = types.FunctionType(code, globals(), "call", None, call.__closure__)
    return torch.compile(copied_call, **options)


def inside_functorch_transform() -> bool:
    """Return True inside a transform of torch.func, such as grad, jvp or vmap, where the numbers of
    tensors cannot be read."""
    return torch._C._are_functorch_transforms_active()  # torch has no public function for this


def inside_python_export() -> bool:
    """Return True inside torch.export with strict=False, which runs Python code on fake tensors."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def is_readable(t: Tensor) -> bool:
    """Return True if the numbers of t can be read at once: t is on the CPU, is no fake tensor, and
    is neither traced nor inside a transform of torch.func."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or inside_functorch_transform():  # type: ignore
        return False
    return type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu"


def outside_inference_mode() -> AbstractContextManager:
    """Return a context manager in which new tensors can be saved for a later backward pass, even
    within inference mode."""
    is_inside = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if is_inside else nullcontext()


def extremes_if_readable(t: Tensor) -> tuple[float, float] | None:
    """Return the minimum and maximum of a tensor; None if it is empty, or if its numbers cannot be
    read without waiting for an accelerator or breaking a trace."""
    if not is_readable(t) or not t.numel():
        return None
    low, high = t.detach().aminmax()
    return low.item(), high.item()
