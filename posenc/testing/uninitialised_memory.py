"""Check that results do not depend on uninitialised memory, which is filled with NaN or large
numbers. Each implementation is compared with the reference, with and without gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from posenc.attend.cache import KVCache
from posenc.attend.choose import WAYS
from posenc.testing.harness import (
    SHAPE,
    Make,
    OneLayerModel,
    build_encoding,
    possible_length,
    random_embeddings,
    successive_positions,
)

LENGTH = 130
"""Tokens: enough for several blocks of queries and for tables by distance."""
BATCH = 4
"""Rows of the batch."""
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Maximum errors, relative to the largest number. Implementations are selected by name in float64
only, which FlexAttention refuses, because it would compile for seconds."""

RunInSetting = Callable[[OneLayerModel, Tensor], list[Tensor]]
"""Function that returns outputs of a layer, and possibly gradients of the encoding's parameters."""


def assert_frozen_parameters_change_nothing(make: Make) -> None:
    """Check that results in grad mode are the same if no parameter needs gradients."""
    _assert_unchanged_in(
        make, lambda model, x: _whole_and_decoded_outputs(model.requires_grad_(False), x)
    )


def assert_inference_mode_changes_nothing(make: Make) -> None:
    """Check that results in torch.inference_mode are those with gradients."""

    def infer(model: OneLayerModel, x: Tensor) -> list[Tensor]:
        """Return the layer's outputs in torch.inference_mode."""
        with torch.inference_mode():
            return _whole_and_decoded_outputs(model, x)

    _assert_unchanged_in(make, infer)


def assert_inputs_need_no_gradient(make: Make) -> None:
    """Check that results are the same if the encoding's parameters need gradients, but q, k and v
    do not."""

    def train(model: OneLayerModel, x: Tensor) -> list[Tensor]:
        """Return outputs and gradients where only the encoding's parameters need gradients."""
        model.attention.requires_grad_(False)
        return _outputs_and_gradients(model, x)

    _assert_unchanged_in(make, train)


def _assert_unchanged_in(make: Make, setting: RunInSetting) -> None:
    """Assert that outputs and gradients in a setting are those of a layer in which everything needs
    gradients, in each dtype and implementation, also if new memory is full of NaN or large numbers.
    """
    for dtype, bound in BOUNDS.items():
        encoding = build_encoding(make, dtype=dtype)
        model = OneLayerModel(encoding, SHAPE, "reference").to(dtype)
        x = random_embeddings(possible_length(encoding, LENGTH), batch=BATCH, dtype=dtype)
        wanted = _outputs_and_gradients(model, x.clone().requires_grad_())
        for impl in ("auto", *(WAYS if dtype == torch.float64 else ())):
            model.attention.impl = impl
            for spoil in (_fill_new_memory_with_nan, _fill_freed_memory_with_large_numbers):
                try:
                    with spoil():
                        results = setting(model, x)
                except ValueError as refusal:
                    if "cannot run" not in str(refusal):
                        raise
                    continue
                # A setting without gradients returns outputs only, which come first.
                for got, want in zip(results, wanted, strict=False):
                    most = bound * max(1.0, want.abs().max().item())
                    off = (got - want).abs().max().item()
                    assert off <= most, f"{impl} in {dtype}: off by {off:.3g} > {most:.3g}"


def _whole_and_decoded_outputs(model: OneLayerModel, x: Tensor) -> list[Tensor]:
    """Return the outputs of a whole sequence, and of its last token decoded with a cache."""
    length = x.shape[1]
    positions = successive_positions(model.encoding, length)
    cache = KVCache()
    model(x[:, :-1], positions[:-1], cache=cache, length=length)
    decoded = model(x[:, -1:], positions[-1:], cache=cache, length=length)
    return [model(x, positions, length=length), decoded]


def _outputs_and_gradients(model: OneLayerModel, x: Tensor) -> list[Tensor]:
    """Return the outputs, and the gradients of the encoding's parameters, 0 for unused ones."""
    outputs = _whole_and_decoded_outputs(model, x)
    parameters = [p for p in model.encoding.parameters() if p.requires_grad]
    if not parameters:
        return outputs
    loss = torch.stack([out.square().sum() for out in outputs]).sum()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return outputs + [
        p.new_zeros(()) if gradient is None else gradient
        for p, gradient in zip(parameters, gradients, strict=True)
    ]


@contextmanager
def _fill_new_memory_with_nan() -> Iterator[None]:
    """Fill new memory with NaN inside the block, as torch does with deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


@contextmanager
def _fill_freed_memory_with_large_numbers() -> Iterator[None]:
    """Fill freed memory of many sizes with large numbers before the block."""
    # Blocks of 128 to 393,216 numbers, in steps of 1.5 or less: the allocator gives them again.
    held = [torch.full((count << size,), 1e30) for size in range(6, 18) for count in (2, 3)]
    del held
    yield
