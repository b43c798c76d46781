"""Marks for tests that need a compiler."""

import os
import shutil

import pytest
import torch

needs_inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)


def traces_attributes() -> bool:
    """Return True if compiled code can read what attributes a module has, as encodings do."""

    def count(x: torch.Tensor) -> torch.Tensor:
        return x + len(vars(module).get("absent", ()))

    module = torch.nn.Identity()
    try:
        torch.compile(count, backend="eager", fullgraph=True)(torch.ones(1))
    except torch._dynamo.exc.Unsupported:
        return False
    return True


needs_whole_graphs = pytest.mark.skipif(
    "not __import__('tests.compilers', fromlist=['_']).traces_attributes()",
    reason="this torch compiles encodings in several graphs: docs/start/install.md",
)
compiles_models = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"),
    reason="transformers compiles no model with this torch: it asks torch.compiler.is_exporting",
)
