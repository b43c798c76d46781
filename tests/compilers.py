"""Marks for tests that need a compiler."""

import os
import shutil

import pytest

from posenc.encodings.numbers.torch_abilities import traces_attributes as traces_attributes

needs_inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)

needs_whole_graphs = pytest.mark.skipif(
    "not __import__('tests.compilers', fromlist=['_']).traces_attributes()",
    reason="this torch compiles encodings in several graphs: docs/start/install.md",
)
