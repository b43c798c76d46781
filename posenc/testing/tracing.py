"""Check torch.compile and torch.export."""

import torch
from torch import Tensor, nn

from posenc.testing.harness import Layer, Make, assert_same, hidden, layer, room, tokens


def assert_compiles_without_recompiling_per_length(make: Make) -> None:
    """Check that one graph, and one more when the length first changes, fit all lengths."""
    from torch._dynamo.testing import CompileCounter  # takes seconds, which commands need not pay

    model = layer(make)
    encoding = model.encoding
    lengths = sorted({room(encoding, n) for n in (7, 12, 19, 31)})
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in lengths:
        x, positions = hidden(length), tokens(encoding, length)
        assert_same(compiled(x, positions), model(x, positions), f"length {length}")
    assert counter.frame_count <= 2, f"{counter.frame_count} graphs for lengths {lengths}"


class Causal(nn.Module):
    """Wrap a layer so that its only inputs are tensors, as torch.export needs.

    The implementation is fixed, because "auto" would specialise the program to one length.
    """

    def __init__(self, model: Layer) -> None:
        super().__init__()
        self.model = model
        model.attention.impl = "reference"

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.model(x, positions)


def assert_exports_with_any_length(make: Make) -> None:
    model = Causal(layer(make)).eval()
    encoding = model.model.encoding
    length = room(encoding, 12)
    any_length = torch.export.Dim("length", min=2, max=room(encoding, 4096))
    program = torch.export.export(
        model,
        (hidden(length), tokens(encoding, length)),
        dynamic_shapes=({1: any_length}, {0: any_length}),
        strict=True,
    )
    for n in (room(encoding, 5), room(encoding, 31)):
        x, positions = hidden(n), tokens(encoding, n)
        assert_same(program.module()(x, positions), model(x, positions), f"length {n}")
