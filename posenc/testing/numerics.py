"""Check numbers: dtypes, precision, gradients, far positions."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posenc import masks
from posenc.attend.attention import attention
from posenc.encodings import ModelShape, PositionEncoding, XPos
from posenc.testing.harness import (
    LENGTH,
    SHAPE,
    Make,
    build_encoding,
    build_example,
    possible_length,
    random_embeddings,
    random_qkv,
    successive_positions,
)

ALLOWED_ROUNDINGS = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}
"""Maximum error in units of the dtype's epsilon times the largest value. Four in 16 bits, because
transformed q and k are rounded, and so is the output. More in float32, because of sums over
channels and keys, and the softmax of scores near 10."""


def encoding_outputs(
    encoding: PositionEncoding,
    dtype: torch.dtype,
    input_dtype: torch.dtype,
    length: int,
    offset: int,
    shape: ModelShape = SHAPE,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the embeddings that the encoding returns (1, length, embed_dim), and the output of an
    attention with its layer 0 (1, num_heads, length, head_dim), both in `dtype`, for random inputs
    at positions offset, offset + 1, ...

    input_dtype: dtype to which the inputs are rounded before they are converted to `dtype`, so that
    two dtypes can get the same numbers.
    is_causal: attend under a causal mask; if False, without a mask.
    """
    positions = successive_positions(encoding, length, offset)
    x = random_embeddings(length, shape=shape, dtype=input_dtype).to(dtype)
    q, k, v = (t.to(dtype) for t in random_qkv(length, shape=shape, dtype=input_dtype))
    layer_encoding = encoding.for_layer(0)
    state = layer_encoding.state(x, positions)
    same_positions: dict[str, Any] = {"q_positions": positions, "kv_positions": positions}
    mask = masks.causal if is_causal else None
    out = attention(
        q, k, v, layer_encoding, q_state=state, kv_state=state, mask=mask, **same_positions
    )
    assert isinstance(out, Tensor)
    return encoding.embed(x, positions), out


def check_precision(
    make: Make, dtype: torch.dtype, length: int = LENGTH, offset: int = 0, shape: ModelShape = SHAPE
) -> None:
    """Assert that results in `dtype` are as near to those in float64 as ALLOWED_ROUNDINGS says, for
    the same inputs and parameters.

    length, offset: number of tokens, and position of the first one; both less for an encoding with
        fewer positions.
    """
    encoding = build_encoding(make, shape, dtype)
    length = possible_length(encoding, length)
    limit = encoding.claims.max_positions
    if isinstance(encoding, XPos):  # its limit is lower in float16 than the claim for float32
        limit = min(limit or 0, encoding.reach(dtype))
    if limit is not None:
        offset = 0 if encoding.claims.num_axes > 1 else min(offset, limit - length)
    is_causal = shape.causal or encoding.claims.causal_only
    results = encoding_outputs(encoding, dtype, dtype, length, offset, shape, is_causal)
    exact_encoding = copy.deepcopy(encoding).double()
    exact_results = encoding_outputs(
        exact_encoding, torch.float64, dtype, length, offset, shape, is_causal
    )
    for name, result, exact in zip(("embed", "attention"), results, exact_results, strict=True):
        assert result.shape == exact.shape, (
            f"{name}: shape {tuple(result.shape)}, expected {tuple(exact.shape)}"
        )
        assert result.dtype == dtype, f"{name}: {dtype} became {result.dtype}"
        largest_number = max(1.0, exact.abs().max().item())
        bound = ALLOWED_ROUNDINGS[dtype] * torch.finfo(dtype).eps * largest_number
        error = (result.double() - exact).abs().max().item()
        assert error <= bound, f"{name} in {dtype} at {offset}: off by {error:.3g} > {bound:.3g}"


def assert_inputs_are_not_written_to(make: Make) -> None:
    """Check that no method changes the values of its inputs."""
    encoding = build_encoding(make, dtype=torch.float64)
    length = possible_length(encoding, 9)
    x, positions, (q, k, v) = (
        random_embeddings(length),
        successive_positions(encoding, length),
        random_qkv(length),
    )
    inputs = {"x": x, "positions": positions, "q": q, "k": k, "v": v}
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    encoding.embed(x, positions)
    layer_encoding = encoding.for_layer(0)
    state = layer_encoding.state(x, positions)
    same_positions: dict[str, Any] = {"q_positions": positions, "kv_positions": positions}
    attention(
        q, k, v, layer_encoding, q_state=state, kv_state=state, mask=masks.causal, **same_positions
    )
    for name, tensor in inputs.items():
        assert torch.equal(tensor, copies[name]), f"{name} has other values after a call"


def assert_float32_is_precise(make: Make) -> None:
    """Check that results in float32 are near those in float64, at positions from 0 and from 5,000
    on."""
    check_precision(make, torch.float32)
    check_precision(make, torch.float32, offset=5000)


def assert_bfloat16_is_precise_far_out(make: Make) -> None:
    """Check that results in bfloat16 are near those in float64, at positions from 0 and from 8,192
    on. bfloat16 rounds 8,193 to 8,192, so positions must not be kept in it."""
    check_precision(make, torch.bfloat16)
    check_precision(make, torch.bfloat16, offset=8192)


def assert_bfloat16_is_precise_at_far_distances(make: Make) -> None:
    """Check that results in bfloat16 are near those in float64, for queries that see only keys at
    least 8,192 positions before them, or as far as the encoding's max_positions allows."""
    model, x, positions = build_example(make, dtype=torch.bfloat16)
    length = len(positions)
    first_far_query = length // 2
    limit = model.encoding.claims.max_positions
    far_distance = 8192 if limit is None else max(0, min(8192, limit - length))
    positions[first_far_query:] += far_distance
    far_keys_only = masks.Mask(
        lambda pairs: (pairs.q_idx >= first_far_query) & (pairs.kv_idx < first_far_query)
    )
    result = model(x, positions, far_keys_only).double()
    expected = copy.deepcopy(model).double()(x.double(), positions, far_keys_only)
    # The layer also rounds its projections, once each.
    bound = 2 * torch.finfo(torch.bfloat16).eps * max(1.0, expected.abs().max().item())
    error = (result - expected).abs().max().item()
    assert error <= bound, f"across {far_distance:,} positions: off by {error:.3g} > {bound:.3g}"


class _ForbidHalfPrecision(TorchDispatchMode):
    """Raise AssertionError at the first operation that returns bfloat16 or float16."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            is_half = isinstance(tensor, Tensor) and tensor.dtype in (torch.bfloat16, torch.float16)
            assert not is_half, f"{func} makes {tensor.dtype} of float32 inputs"
        return out


def assert_float32_is_never_halved(make: Make) -> None:
    """Check that no operation on float32 returns 16 bits. Comparisons of dtypes miss a rounding
    that all of them have."""
    model, x, positions = build_example(make, dtype=torch.float32)
    with _ForbidHalfPrecision():
        model(x, positions)


def assert_float16_is_precise(make: Make) -> None:
    """Check that results in float16 are near those in float64, at positions from 500 on."""
    check_precision(make, torch.float16, offset=500)


def assert_float64_is_kept(make: Make) -> None:
    """Check that the encoding returns float64 for float64 inputs, in every method."""
    encoding = build_encoding(make, dtype=torch.float64)
    for out in encoding_outputs(encoding, torch.float64, torch.float64, 7, 0):
        assert out.dtype == torch.float64


def assert_works_or_refuses_beyond_training(make: Make) -> None:
    """Check that far positions give finite outputs. If the encoding claims max_positions, check
    that the first position beyond that raises a ValueError that names it."""
    model, x, positions = build_example(make, 3, torch.float32)
    # Four times the training length: any number beyond it would do.
    limit = model.encoding.claims.max_positions
    far_offset = 4 * SHAPE.train_length
    if limit is None:
        assert model(x, positions + far_offset).isfinite().all(), (
            f"not finite at position {far_offset}"
        )
        return
    positions[-1] = limit
    try:
        model(x, positions)
    except ValueError as error:
        assert str(limit) in str(error), f"refuses position {limit} without naming it: {error}"
    else:
        raise AssertionError(f"max_positions is {limit}, but position {limit} is accepted")


def assert_outputs_are_finite(make: Make) -> None:
    """Check that outputs are finite in sequences within and beyond the training length."""
    for wanted_length in (9, LENGTH):
        model, x, positions = build_example(make, wanted_length, torch.float32)
        is_finite = model(x, positions).isfinite().all()
        assert is_finite, f"not finite in a sequence of {len(positions)} tokens"


def assert_gradients_are_right(make: Make) -> None:
    """Check gradients of inputs and parameters against finite differences."""
    model, x, positions = build_example(make, 5)
    parameter_names = [name for name, _ in model.encoding.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in model.encoding.parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        """Return the layer's output for x, with these values of the encoding's parameters."""
        state = {f"encoding.{n}": v for n, v in zip(parameter_names, values, strict=True)}
        return torch.func.functional_call(model, state, (x, positions))

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *values), fast_mode=True, atol=1e-4)


def assert_gradients_are_finite(make: Make) -> None:
    """Check that gradients of inputs and parameters have no NaN or infinity, in float32 and
    bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        model, x, positions = build_example(make, dtype=dtype)
        model(x.requires_grad_(), positions).float().square().sum().backward()
        for name, parameter in (("x", x), *model.encoding.named_parameters()):
            if parameter.grad is not None:
                assert parameter.grad.isfinite().all(), f"gradient of {name} in {dtype}"
