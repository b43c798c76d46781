"""Marks for tests that need a compiler."""

import os
import shutil

import pytest

needs_inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)
