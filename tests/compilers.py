"""Marks for tests that need a compiler, which a fresh machine may lack."""

import ctypes
import os
import shutil
from typing import Any

import pytest

needs_c_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here"
)
needs_inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)


def without_memory(name: str) -> Any:
    """A function of C, as `native.run` takes it, that finds no memory."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
    function = kind(lambda *_: 1)
    function.__name__ = name
    return function
