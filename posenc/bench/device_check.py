"""Check every encoding on a device against float64 on the CPU, forward and backward."""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posenc import masks
from posenc.attend.attention_layer import Attention
from posenc.encodings import ModelShape, PositionEncoding, create, names

LENGTHS = (1, 17, 127, 129, 1000, 8193)
"""Lengths to check: one token, some that fill no block, and those just below and above multiples of
128, the size of FlexAttention's blocks."""
SHAPE = ModelShape(64, 2, 1, 32)
"""Small sizes, with query heads that share keys: chosen."""
ERROR_BOUNDS = {"float32": 5e-3, "float16": 0.02, "bfloat16": 0.05}
"""Maximum error of outputs and gradients, relative to the largest number of each; in 16 bits those
of parameters relative to the largest of all, because small ones are differences of large ones. The
gradient of a bias that all scores of a row share (FIRE's last, DeBERTa's of keys) is even 0.

Rounding q, k and v to bfloat16 alone changes gradients of CoPE, which sums a gate for each key, by
up to 0.26 at 300 tokens. So a larger error counts if it is one from float64 with that rounding too:
the CPU, in all encodings at 17 to 300 tokens, is at most 0.016 from that."""


def rows_of_checks(
    device: str,
    lengths: Sequence[int],
    dtypes: Sequence[str],
    max_seconds: float,
    encodings: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each encoding, length, dtype and implementation.

    A row has `check` (the encoding's name), `length`, and one of two sets of keys. What ran has
    `ok`, and as `error` the largest relative error, or what was raised as text. What did not run
    has as `left_out` the reason. `dtype` and `impl` are missing where the reason holds for all.

    dtypes: names such as "float32".
    max_seconds: time after which no further check begins, and all that remains is left out.
    encodings: names of encodings; None for all that are registered.
    """
    start_time = time.perf_counter()
    for length in lengths:
        for name in names() if encodings is None else encodings:
            row: dict[str, Any] = {"check": name, "length": length}
            if time.perf_counter() - start_time > max_seconds:
                yield row | {"left_out": "out of time"}
                continue
            torch.manual_seed(0)
            encoding = create(name, SHAPE)
            max_positions = encoding.claims.max_positions
            if max_positions is not None and length > max_positions:
                yield row | {"left_out": f"at most {max_positions} positions"}
                continue
            exact_layer = _build_exact_layer(encoding, length)
            for dtype in dtypes:
                for columns in _rows_of_dtype(exact_layer, device, dtype):
                    yield row | {"dtype": dtype} | columns


@dataclass(frozen=True)
class _ExactLayer:
    """A layer with an encoding, its inputs, and its exact results."""

    model: "_Layer"
    """The layer, with weights in bfloat16 on the CPU."""
    x: Tensor
    """Its input, (1, length, embed_dim) in bfloat16."""
    grad: Tensor
    """The gradient of its output, of the same shape."""
    positions: Any
    """A range, or a tensor (length, axes)."""
    results: Sequence[Any]
    """What `_output_and_gradients` returned for the same numbers in float64."""


def _build_exact_layer(encoding: PositionEncoding, length: int) -> _ExactLayer:
    """Build a layer with this encoding and compute its exact results."""
    positions: Any = range(length)
    if encoding.claims.num_axes > 1:
        positions = torch.arange(length)[:, None].expand(-1, encoding.claims.num_axes)
    # Rounded to bfloat16, so that all dtypes compute from the same numbers.
    model = _Layer(encoding).bfloat16()
    x, grad = (torch.randn(1, length, SHAPE.embed_dim).bfloat16() for _ in range(2))
    results = _output_and_gradients(
        copy.deepcopy(model).double(), x.double(), positions, grad, "auto"
    )
    return _ExactLayer(model, x, grad, positions, results)


def _rows_of_dtype(exact_layer: _ExactLayer, device: str, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield for each implementation what its row says besides encoding, length and dtype. Yield
    one row for all of them if the dtype cannot hold the exact results."""
    torch_dtype = getattr(torch, dtype)
    if overflow_reason := _overflow_reason(exact_layer.results, torch_dtype):
        yield {"left_out": overflow_reason}
        return
    layer = copy.deepcopy(exact_layer.model).to(device, torch_dtype)
    for impl in ("auto", "flex", "blocks"):
        yield {"impl": impl} | _columns_of_implementation(exact_layer, layer, device, dtype, impl)


def _columns_of_implementation(
    exact_layer: _ExactLayer, layer: "_Layer", device: str, dtype: str, impl: str
) -> dict[str, Any]:
    """Return `error` and `ok` of one implementation, or `left_out` if it cannot run, as in the rows
    of `rows_of_checks`."""
    positions = exact_layer.positions
    if not isinstance(positions, range):
        positions = positions.to(device)
    try:
        x = exact_layer.x.to(device, getattr(torch, dtype))
        results = _output_and_gradients(layer, x, positions, exact_layer.grad, impl)
    except Exception as raised:  # by this case; the others are checked all the same
        if isinstance(raised, ValueError) and "cannot run" in str(raised):
            return {"left_out": type_and_first_line(raised)}
        return {"error": type_and_first_line(raised), "ok": False}
    error = _largest_error(results, exact_layer.results, by_largest_of_all=dtype != "float32")
    if dtype == "bfloat16" and not error <= ERROR_BOUNDS[dtype]:  # see ERROR_BOUNDS
        rounding_layer = _round_projections(copy.deepcopy(exact_layer.model).double())
        expected = _output_and_gradients(
            rounding_layer, exact_layer.x.double(), exact_layer.positions, exact_layer.grad, "auto"
        )
        error = _largest_error(results, expected, by_largest_of_all=True)
    return {"error": round(error, 6), "ok": error <= ERROR_BOUNDS[dtype]}


def _overflow_reason(exact_results: Sequence[Any], dtype: torch.dtype) -> str | None:
    """Return why this dtype cannot hold the exact results; None if it can."""
    largest_result = max(t.abs().max().item() for t in exact_results if t is not None)
    largest_of_dtype = torch.finfo(dtype).max
    # A quarter, chosen: sums of which a result is the end may be larger on the way.
    if largest_result < largest_of_dtype / 4:
        return None
    return (
        f"results reach {largest_result:,.0f}, and the largest number of {dtype} is "
        f"{largest_of_dtype:,.0f}"
    )


class _Layer(nn.Module):
    """Apply all of an encoding: at the embeddings and in one attention layer."""

    def __init__(self, encoding: nn.Module) -> None:
        super().__init__()
        self.encoding = encoding
        self.attention = Attention(
            SHAPE.embed_dim, SHAPE.num_heads, SHAPE.num_kv_heads, head_dim=SHAPE.head_dim
        )
        with torch.no_grad():  # initial values can hide an effect
            for p in encoding.parameters():
                p += 0.2 * torch.randn_like(p)
            for p in self.attention.parameters():  # scores of about 2, as in trained models
                p *= 2.5


def _round_projections(layer: _Layer) -> _Layer:
    """Make all projections of the layer round their results to bfloat16, and return the layer."""
    for module in layer.attention.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, args, out: out.bfloat16().to(out.dtype))
    return layer


def _output_and_gradients(
    layer: Any, x: Tensor, positions: Any, grad: Tensor, impl: str
) -> list[Any]:
    """Return the layer's output, then the gradient of its input, then those of its parameters; None
    for a parameter that takes no part.

    x: (1, length, embed_dim). positions: a range, or a tensor (length, axes). grad: the gradient of
    the output. impl: the implementation of attention.
    """
    leaves = [x.requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    encoding = layer.encoding.prepare(positions, x.shape[1])
    layer.attention.impl = impl
    embedded_positions = positions
    if isinstance(positions, range):
        embedded_positions = torch.arange(x.shape[1], device=x.device)
    x = encoding.embed(x, embedded_positions)
    output = layer.attention(x, positions, mask=masks.causal, encoding=encoding.for_layer(0))
    return [output, *torch.autograd.grad(output, leaves, grad.to(output), allow_unused=True)]


def _largest_error(
    results: Sequence[Any], expected: Sequence[Any], by_largest_of_all: bool
) -> float:
    """Return the largest relative error of any tensor. Return infinity if a number is not finite,
    or if a tensor is None where the other is not.

    results, expected: what `_output_and_gradients` returns.
    by_largest_of_all: divide the errors of parameters' gradients by the largest number of all these
        gradients. If False, divide by the largest number of each, as those of the first two tensors
        are in any case: the output and the gradient of the input.
    """
    magnitudes = [0.0 if t is None else t.abs().max().item() for t in expected]
    largest_error = 0.0
    for i, (tensor, expected_tensor) in enumerate(zip(results, expected, strict=True)):
        if tensor is None and expected_tensor is None:
            continue
        if tensor is None or expected_tensor is None:
            return math.inf
        compared_magnitudes = magnitudes[2:] if by_largest_of_all and i > 1 else [magnitudes[i]]
        error = (tensor.detach().double().cpu() - expected_tensor).abs().max().item()
        # At least 0.01, chosen: relative to a tensor of zeros any rounding would be infinite.
        error /= max(1e-2, *compared_magnitudes)
        if not math.isfinite(error):
            return math.inf
        largest_error = max(largest_error, error)
    return largest_error


def type_and_first_line(error: Exception) -> str:
    """Return the error's type and the first line of its message: "ValueError: no such device"."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
