"""Marks for tests that need a compiler."""

import os
import shutil
from collections.abc import Callable
from typing import Any

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


def compiles_each_number() -> bool:
    """Return True if torch compiles anew for each value of a number that a module keeps; torch 2.6
    makes it a variable of one graph."""
    graphs = 0

    def count(module: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    class Keeps(torch.nn.Module):
        last = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] != self.last:
                self.last = int(x.shape[0])
            return x + torch.arange(self.last)

    torch._dynamo.reset()
    compiled = torch.compile(Keeps(), backend=count)
    lengths = (5, 6, 7, 8, 9)
    for length in lengths:
        compiled(torch.ones(length))
    torch._dynamo.reset()
    return graphs >= len(lengths)


needs_whole_graphs = pytest.mark.skipif(
    "not __import__('tests.compilers', fromlist=['_']).traces_attributes()",
    reason="this torch compiles encodings in several graphs: docs/start/install.md",
)
compiles_models = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"),
    reason="transformers compiles no model with this torch: it asks torch.compiler.is_exporting",
)
