"""What tests of compiled code share: marks where a compiler may lack, and hard cases for C."""

import ctypes
import os
import shutil
from typing import Any

import pytest
import torch

needs_c_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here"
)
needs_inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)


def kept_apart() -> torch.autograd.graph.saved_tensors_hooks:
    """Whoever keeps tensors for the backward pass, and gives them back with other strides."""

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t.mT.contiguous().mT if t.ndim > 1 else t

    return torch.autograd.graph.saved_tensors_hooks(turned, lambda t: t)


def without_memory(name: str) -> Any:
    """A function of C, as `native.run` takes it, that finds no memory."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
    function = kind(lambda *_: 1)
    function.__name__ = name
    return function
