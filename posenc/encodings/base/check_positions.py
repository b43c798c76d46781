"""Check the positions that users pass in.

In all functions `caller` is the name of the public function or class that checks, and `name` that
of the argument. Messages begin with both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posenc.arguments import FARTHEST_POSITION
from posenc.encodings.numerics.torch_modes import extremes_if_readable
from posenc.positions import as_tensor, check_flat_positions, move_placeless_to_origin

_FIRST_WITH_GAPS = {torch.float32: 2**24, torch.float64: 2**53}
"""The whole number from which on a dtype lacks some: it rounds neighbouring positions to one."""


def validated_positions(
    caller: str, name: str, positions: Any, x: Tensor, num_axes: int = 1
) -> Tensor | range:
    """Return the checked positions of the tokens of x (batch, heads, len, width), as an int64,
    float32 or float64 tensor (len) or (batch, len), with a last axis of components if num_axes > 1,
    or as a range.

    Raises: TypeError for anything but positions. ValueError for a wrong shape and, found on the CPU
    only, for numbers that are not finite, so large that their dtype lacks whole numbers, or whole
    numbers from 2^62 on, whose differences would overflow.
    """
    return validated_positions_of((x.shape[0], x.shape[2]), x, caller, name, positions, num_axes)


def validated_bias_positions(
    caller: str, q_positions: Any, kv_positions: Any
) -> tuple[Tensor, Tensor]:
    """Return the checked positions of the queries and keys of a bias, each (len) or (batch, len).

    Raises: as validated_positions.
    """
    if isinstance(q_positions, range):
        q_positions = _range_as_tensor(caller, "q_positions", q_positions)
    if isinstance(kv_positions, range):
        kv_positions = _range_as_tensor(caller, "kv_positions", kv_positions)
    _check_dtype(caller, "q_positions", q_positions)
    _check_dtype(caller, "kv_positions", kv_positions)
    check_flat_positions(q_positions, kv_positions)
    batch_sizes = {t.shape[0] for t in (q_positions, kv_positions) if t.ndim == 2} - {1}
    if len(batch_sizes) > 1:
        raise ValueError(
            f"{caller}: q_positions and kv_positions must have the same batch size, "
            f"got {tuple(q_positions.shape)} and {tuple(kv_positions.shape)}."
        )
    return (
        _as_int64_or_real(caller, "q_positions", q_positions, 1),
        _as_int64_or_real(caller, "kv_positions", kv_positions, 1),
    )


_LAYOUT_HINT = ' Axis 1 has that length: layout="bthd" is (batch, len, heads, head_dim).'


def require_integers(name: str, *positions: Tensor) -> None:
    """Raise TypeError if positions are real numbers, for encodings with a table of distances."""
    for p in positions:
        if p.is_floating_point():
            raise TypeError(
                f"{name}: positions must be integers, because its table has a row per whole "
                f"distance; got {p.dtype}. Round them, or use a method that takes real positions."
            )


def validated_positions_of(
    batch_and_len: Sequence[int], x: Tensor, caller: str, name: str, positions: Any, num_axes: int
) -> Tensor | range:
    """Return the checked positions of the tokens of x: a tensor, or a range of steps of 1.

    batch_and_len: sizes of the axes of x that count tokens, (len) or (batch, len).
    Raises: as validated_positions.
    """
    if isinstance(positions, range):
        # step and stop instead of len(): torch.compile cannot trace len() of a range.
        one_each = positions.step == 1 and positions.stop - positions.start == batch_and_len[-1]
        if num_axes == 1 and one_each:
            _check_span(caller, name, positions.start, positions.stop)
            return positions
        positions = _range_as_tensor(caller, name, positions, x.device)
    _check_dtype(caller, name, positions)
    if positions.device != x.device:
        positions = positions.to(x.device)
    shape = positions.shape if num_axes == 1 else positions.shape[:-1]
    has_components = num_axes == 1 or (positions.ndim > 1 and positions.shape[-1] == num_axes)
    if not has_components or not _has_one_for_each_token(shape, batch_and_len):
        wanted = _wanted_shapes(batch_and_len, num_axes)
        raise ValueError(
            f"{caller}: {name} must have shape {wanted}one for each token of a tensor of shape "
            f"{tuple(x.shape)}; got {tuple(positions.shape)}."
            + (_LAYOUT_HINT if x.ndim == 4 and shape and shape[-1] == x.shape[1] else "")
        )
    positions = _as_int64_or_real(caller, name, positions, num_axes)
    one_row = len(shape) == 2 and shape[0] == 1
    return positions[0] if one_row else positions


def _has_one_for_each_token(shape: Sequence[int], batch_and_len: Sequence[int]) -> bool:
    """Return True if positions of this shape broadcast to the batch and length `batch_and_len`, and
    have its length: (len), (1, len) or (batch, len)."""
    # Compared one by one: a set would hash the sizes, and torch.compile would recompile for each.
    if not 1 <= len(shape) <= len(batch_and_len) or shape[-1] != batch_and_len[-1]:
        return False
    fits = True
    for axis in range(2, len(shape) + 1):  # torch 2.6 traces no zip of different lengths
        fits = fits and (shape[-axis] == 1 or shape[-axis] == batch_and_len[-axis])
    return fits


def _wanted_shapes(batch_and_len: Sequence[int], num_axes: int) -> str:
    """Return the shapes that positions may have, for an error: "(5,) or (2, 5), "."""
    *batch, length = batch_and_len
    axis = f", {num_axes}" if num_axes > 1 else ""
    flat = f"({length}{axis or ','}) "
    if not batch:
        return flat
    rows = "".join(f"{size}, " for size in batch)
    return f"{flat}or ({rows}{length}{axis}), "


def _as_int64_or_real(caller: str, name: str, positions: Tensor, num_axes: int) -> Tensor:
    """Return integer positions as int64, and real ones unchanged. Raise ValueError for numbers that
    are not finite or too large. On several axes NaN is allowed: a token without a place."""
    if positions.is_floating_point():
        _check_floats(
            caller, name, positions if num_axes == 1 else move_placeless_to_origin(positions)
        )
        return positions
    whole = positions if positions.dtype == torch.int64 else positions.long()
    low, high = extremes_if_readable(whole) or (0, 0)
    if positions.dtype == torch.uint64 and low < 0:  # int64 has no such number
        high = low + 2**64
    _check_span(caller, name, low, high)
    return whole


def _range_as_tensor(
    caller: str, name: str, positions: range, device: torch.device | None = None
) -> Tensor:
    """Return a range of positions as an int64 tensor (len). Raise ValueError if it reaches 2^62."""
    _check_span(caller, name, positions.start, positions.stop)
    return as_tensor(positions, device)


def check_span_of_integers(caller: str, name: str, positions: Tensor | range) -> None:
    """Raise ValueError for whole positions whose differences could overflow int64. Those of a
    tensor are read on the CPU only."""
    if isinstance(positions, range):
        _check_span(caller, name, positions.start, positions.stop)
    elif not positions.is_floating_point():
        _check_span(caller, name, *(extremes_if_readable(positions) or (0, 0)))


def _check_span(caller: str, name: str, low: float, high: float) -> None:
    """Raise ValueError for whole positions whose differences could overflow int64."""
    if torch.compiler.is_compiling():
        return
    furthest = max(low, high, key=abs)
    if abs(furthest) >= FARTHEST_POSITION:
        raise ValueError(
            f"{caller}: {name} reach {furthest}, and differences of positions fit int64 only below "
            "2^62. Subtract an offset from all of them."
        )


def _check_dtype(caller: str, name: str, positions: Any) -> None:
    """Raise TypeError unless positions are a tensor of integers, float32 or float64."""
    if not isinstance(positions, Tensor):
        raise TypeError(
            f"{caller}: {name} must be a tensor of positions or a range, got "
            f"{type(positions).__name__}. range(length) makes 0, 1, 2, ..."
        )
    if positions.dtype == torch.bool:
        raise TypeError(
            f"{caller}: {name} must be numbers, got booleans. For a mask of real tokens use "
            "posenc.positions.positions_from_mask(mask)."
        )
    expected = f"{caller}: {name} must be integers, float32 or float64, got {positions.dtype}"
    if positions.is_complex():
        raise TypeError(f"{expected}: positions are real numbers.")
    if positions.is_floating_point() and positions.dtype not in _FIRST_WITH_GAPS:
        raise TypeError(f"{expected}, which rounds neighbouring positions to one.")


def _check_floats(caller: str, name: str, positions: Tensor) -> None:
    """Raise ValueError for real positions that are not finite, or so large that their dtype lacks
    whole numbers; checked on the CPU only."""
    low, high = extremes_if_readable(positions) or (0, 0)
    largest = max(-low, high)
    if not largest < float("inf"):
        raise ValueError(f"{caller}: {name} must be finite, got {largest}.")
    bound = _FIRST_WITH_GAPS[positions.dtype]
    if largest >= bound:
        raise ValueError(
            f"{caller}: {name} reach {largest:.0f}, and {str(positions.dtype)[6:]} rounds them "
            f"from {bound} on. Use integers{' or float64' if bound == 2**24 else ''}."
        )
