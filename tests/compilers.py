"""Marks for tests that need a compiler, which a fresh machine may lack."""

import os
import shutil

import pytest

needs_c_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here"
)
needs_inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)
