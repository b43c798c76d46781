"""Check torch.compile and torch.export."""

from collections.abc import Callable

import torch
from torch import Tensor

from posenc.testing.harness import (
    Make,
    OneLayerModel,
    assert_same,
    build_example,
    build_layer,
    possible_length,
    random_embeddings,
    successive_positions,
)


def assert_compiles_without_recompiling_per_length(make: Make) -> None:
    """Check that one graph, and one more when the length first changes, fit all lengths."""
    from torch._dynamo.testing import CompileCounter  # takes seconds, which commands need not pay

    model = build_layer(make)
    encoding = model.encoding
    lengths = sorted({possible_length(encoding, n) for n in (7, 12, 19, 31)})
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in lengths:
        x = random_embeddings(length)
        positions = successive_positions(encoding, length)
        assert_same(compiled(x, positions), model(x, positions), f"length {length}")
    assert counter.frame_count <= 2, f"{counter.frame_count} graphs for lengths {lengths}"


def export_layer(
    model: OneLayerModel, x: Tensor, positions: Tensor, max_length: int, strict: bool
) -> Callable[..., Tensor]:
    """Export a layer for 2 to `max_length` tokens. Return the program, which takes x and positions.

    model: a layer with a fixed implementation of attention, because "auto" would specialise the
        program to one length.
    x, positions: an example of its inputs.
    strict: compile the layer's code, instead of running it on fake tensors.
    """
    any_length = torch.export.Dim("length", min=2, max=max_length)
    shapes = ({1: any_length}, {0: any_length})
    program = torch.export.export(model, (x, positions), dynamic_shapes=shapes, strict=strict)
    return program.module()


def assert_exports_with_any_length(make: Make, strict: bool | None = None) -> None:
    """Check that an exported program is right for fewer and for more tokens than it was made of.

    strict: as in `export_layer`; None: False where this torch cannot compile the code.
    """
    from torch._dynamo.exc import Unsupported  # takes seconds, which commands need not pay

    model, x, positions = build_example(make, 12)
    encoding = model.encoding
    model.attention.impl = "reference"
    # 4096 is any number above the lengths that are tried.
    to_export = model.eval(), x, positions, possible_length(encoding, 4096)
    try:
        program = export_layer(*to_export, strict=strict is not False)
    except Unsupported:
        if strict:
            raise
        program = export_layer(*to_export, strict=False)
    for n in (possible_length(encoding, 5), possible_length(encoding, 31)):
        x = random_embeddings(n)
        positions = successive_positions(encoding, n)
        assert_same(program(x, positions), model(x, positions), f"length {n}")
