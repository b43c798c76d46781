"""Check the tensors, positions and encodings that users pass to attention and to layers.

In all functions `caller` is the name of the public function or class that checks, and `name` that
of the argument. Messages begin with both.
"""

import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from posenc.arguments import FARTHEST_POSITION
from posenc.encodings.base.constructor_arguments import are_alike
from posenc.encodings.base.position_encoding import PositionEncoding, require_encoding
from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.torch_modes import (
    autocast_enabled,
    extremes_if_readable,
    is_readable,
)
from posenc.positions.tokens import as_tensor, check_flat_positions, move_placeless_to_origin

_FIRST_INTEGER_WITH_GAPS = {torch.float32: 2**24, torch.float64: 2**53}
"""First whole number, by dtype, above which the dtype does not have all whole numbers, so that it
rounds neighbouring positions to one."""
_LAYOUT_HINT = ' Axis 1 has that length: layout="bthd" is (batch, len, heads, head_dim).'


def require_attention_encoding(caller: str, encoding: Any) -> PositionEncoding:
    """Return the encoding, or NoPE for None. Raise TypeError for anything but a PositionEncoding.
    Raise ValueError for an encoding that attention cannot use: one that acts at the embeddings, or
    whose parameters fully_shard has sharded apart from those of its layer."""
    encoding = require_encoding(caller, encoding)
    if 1 in encoding.claims.places:
        raise ValueError(
            f"{caller}: {type(encoding).__name__} acts at the embeddings, which attention does not "
            "see, so it would be ignored. Call x = encoding.embed(x, positions) before the first "
            "layer, and pass encoding.for_layer(i) to attention."
        )
    if hasattr(type(encoding), "unshard"):  # attention reads parameters without calling forward
        raise ValueError(
            f"{caller}: {type(encoding).__name__} is sharded on its own, and nothing gathers its "
            "parameters then. Shard the layer that contains it: fully_shard(layer)."
        )
    return encoding


def check_dtype(caller: str, x: Tensor, weight: Any) -> None:
    """Raise TypeError if x has another dtype than `weight`, a weight of the layer, unless autocast
    casts both or the weight is quantised."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return
    if autocast_enabled(x.device.type):
        return
    if x.dtype != weight.dtype:
        raise TypeError(
            f"{caller}: x is {x.dtype} and the layer's weights are {weight.dtype}. Convert one of "
            "them, as in layer.to(x.dtype), or call it under torch.autocast."
        )


def check_vectors(caller: str, **tensors: Any) -> None:
    """Raise TypeError or ValueError unless all `tensors`, given by their names in messages, are
    floating-point tensors (batch, heads, len, head_dim) of one dtype on one device."""
    first_name, first_tensor = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{caller}: {name} must be a tensor (batch, heads, len, head_dim), "
                f"got {type(tensor).__name__}."
            )
        if tensor.ndim != 4:
            raise ValueError(
                f"{caller}: {name} must have shape (batch, heads, len, head_dim), "
                f"got {tuple(tensor.shape)}."
            )
        if tensor is first_tensor or tensor.dtype != first_tensor.dtype:
            _check_floating(caller, name, tensor)
        if tensor.dtype != first_tensor.dtype or tensor.device != first_tensor.device:
            raise TypeError(
                f"{caller}: {first_name} and {name} must have one dtype and one device, got "
                f"{first_tensor.dtype} on {first_tensor.device} and {tensor.dtype} on "
                f"{tensor.device}."
            )


def _check_floating(caller: str, name: str, t: Tensor) -> None:
    """Raise TypeError unless t has a floating-point dtype of at least 16 bits."""
    if not t.is_floating_point() or t.dtype.itemsize < 2:
        raise TypeError(
            f"{caller}: {name} must be floating-point numbers of 16, 32 or 64 bits, got {t.dtype}. "
            f"Convert it, for example {name}.float()."
        )


def validated_embedding_positions(
    caller: str,
    x: Any,
    positions: Any,
    embed_dim: int | None = None,
    num_axes: int = 1,
    *,
    name: str = "x",
) -> Tensor | range:
    """Return the checked positions of the tokens of x (..., len, embed_dim): a range, or a tensor
    that broadcasts to x.shape[:-1], with a last axis of components if num_axes > 1.

    name: the argument that x is, for messages.
    Raises: as validated_positions, and if x is no floating-point tensor of width embed_dim.
    """
    wanted_shape_in_words = f"(batch, len, {embed_dim or 'embed_dim'})"
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{caller}: {name} must be a tensor {wanted_shape_in_words}, got {type(x).__name__}."
        )
    if x.ndim < 2 or (embed_dim is not None and x.shape[-1] != embed_dim):
        raise ValueError(f"{caller}: {name} must be {wanted_shape_in_words}, got {tuple(x.shape)}.")
    _check_floating(caller, name, x)
    argument_name = "positions" if name == "x" else f"{name}_positions"
    return validated_positions_of(x.shape[:-1], x, caller, argument_name, positions, num_axes)


def query_and_key_tokens(
    caller: str, q: Any, k: Any, positions: Any, num_axes: int = 1
) -> tuple[Tokens, Tokens]:
    """Return q and k, (batch, heads, len, head_dim) each, as Tokens at the same positions. Raise
    TypeError or ValueError unless they have the same batch and length."""
    check_vectors(caller, q=q, k=k)
    checked_positions = validated_positions(caller, "positions", positions, q, num_axes)
    if k.shape[2] != q.shape[2] or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{caller}: q and k must have the same batch and length, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}. For a query against a longer past use posenc.attention, or rotate "
            "each with its own positions."
        )
    q_tokens = Tokens(q, checked_positions, num_axes=num_axes)
    k_tokens = Tokens(k, checked_positions, num_axes=num_axes)
    return q_tokens, k_tokens


def check_tokens(caller: str, tokens: Any, vocab_size: int, name: str = "tokens") -> None:
    """Raise TypeError or ValueError unless `tokens` (batch, len) are integers from 0 to vocab_size
    - 1. On other devices than the CPU ids outside of this range are not found."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"{caller}: {name} must be a tensor of int64 or int32, got {got}.")
    if tokens.ndim != 2:
        raise ValueError(f"{caller}: {name} must be (batch, len), got {tuple(tokens.shape)}.")
    low, high = extremes_if_readable(tokens) or (0, 0)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{caller}: {name} must be from 0 to {vocab_size - 1}, the vocabulary's last, "
            f"got {low if low < 0 else high}."
        )


def check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless batch, heads, lengths and head_dim of q, k and v fit together."""
    widths_are_equal = q.shape[-1] == k.shape[-1]
    batches_are_equal = q.shape[0] == k.shape[0]
    if not widths_are_equal or not batches_are_equal or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: "
            "k and v share heads and length, q and k share head_dim, all share the batch."
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: {k.shape[1]} key/value heads do not divide {q.shape[1]} query heads."
        )


def check_state(name: str, state: Any, x: Tensor) -> None:
    """Raise ValueError unless `state`, the argument `name` of attention, is None or has the batch
    and length of x: (batch, heads, len, ...)."""
    if state is None:
        return
    if not isinstance(state, Tensor) or state.ndim < 3:
        got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(
            f"attention: {name} must be what encoding.state(x, positions) gives, "
            f"(batch, heads, len, ...), got {got}."
        )
    if state.shape[0] != x.shape[0] or state.shape[2] != x.shape[2]:
        raise ValueError(
            f"attention: {name} must be of {x.shape[0]} rows and {x.shape[2]} tokens, "
            f"got {tuple(state.shape)}."
        )


def transposed_if_bthd(caller: str, layout: str, *tensors: Any) -> tuple[Any, ...]:
    """Return tensors with heads before tokens, (batch, heads, len, ...): unchanged for the layout
    "bhtd", with axes 1 and 2 swapped for "bthd". A second call swaps them back."""
    if layout not in ("bhtd", "bthd"):
        raise ValueError(f'{caller}: layout must be "bhtd" or "bthd", got {layout!r}.')
    if layout == "bhtd":
        return tensors
    return tuple(t.transpose(1, 2) if isinstance(t, Tensor) and t.ndim == 4 else t for t in tensors)


def check_scale(caller: str, scale: Any) -> None:
    """Raise TypeError or ValueError unless `scale` is None or a finite number above 0."""
    if scale is None:
        return
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"{caller}: scale must be a number or None, got {scale!r}.")
    number: Any = scale  # compared, because float() of a large whole number overflows
    if not 0 < number <= sys.float_info.max:
        raise ValueError(
            f"{caller}: scale must be a finite number above 0, got {scale}. It multiplies q . k; "
            "None means 1/sqrt(head_dim), or the encoding's own."
        )


def prepared_or_encoding(encoding: Any, prepared: Any) -> Any:
    """Return the encoding to use in attention: `prepared` unless it is None, otherwise `encoding`.

    Raises: TypeError for anything but an encoding, ValueError if `prepared` was made from another.
    """
    if prepared is None:
        return encoding
    prepared = require_encoding("attention: prepared", prepared)
    if encoding is None:
        return prepared
    encoding = require_encoding("attention", encoding)
    parameter_pairs = zip(encoding.parameters(), prepared.parameters(), strict=False)
    if not are_alike(prepared, encoding) or any(a is not b for a, b in parameter_pairs):
        raise ValueError(
            f"attention: prepared is a {prepared}, and encoding is a {encoding}. "
            "Pass encoding.prepare(positions) of the same encoding, with the same parameters."
        )
    return prepared


def validated_positions(
    caller: str, name: str, positions: Any, x: Tensor, num_axes: int = 1
) -> Tensor | range:
    """Return the checked positions of the tokens of x (batch, heads, len, width): a range, or an
    int64, float32 or float64 tensor (len) or (batch, len), with a last axis of components if
    num_axes > 1.

    Raises: TypeError for anything but positions. ValueError for a wrong shape and, on the CPU only,
    for numbers that are not finite or too large: real ones whose dtype lacks whole numbers there,
    and whole ones from 2^62 on, whose differences would overflow.
    """
    return validated_positions_of((x.shape[0], x.shape[2]), x, caller, name, positions, num_axes)


def validated_bias_positions(
    caller: str, q_positions: Any, kv_positions: Any, num_axes: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the checked positions of the queries and keys of a bias, each (len) or (batch, len),
    with a last axis of components if num_axes > 1.

    Raises: as validated_positions.
    """
    if isinstance(q_positions, range):
        q_positions = _range_as_tensor(caller, "q_positions", q_positions)
    if isinstance(kv_positions, range):
        kv_positions = _range_as_tensor(caller, "kv_positions", kv_positions)
    _check_position_dtype(caller, "q_positions", q_positions)
    _check_position_dtype(caller, "kv_positions", kv_positions)
    if num_axes == 1:
        check_flat_positions(q_positions, kv_positions)
    else:
        _check_components(caller, "q_positions", q_positions, num_axes)
        _check_components(caller, "kv_positions", kv_positions, num_axes)
    num_axes_without_batch = 1 + (num_axes > 1)
    batch_sizes = {
        t.shape[0] for t in (q_positions, kv_positions) if t.ndim > num_axes_without_batch
    } - {1}
    if len(batch_sizes) > 1:
        raise ValueError(
            f"{caller}: q_positions and kv_positions must have the same batch size, "
            f"got {tuple(q_positions.shape)} and {tuple(kv_positions.shape)}."
        )
    return (
        _as_int64_or_real(caller, "q_positions", q_positions, num_axes),
        _as_int64_or_real(caller, "kv_positions", kv_positions, num_axes),
    )


def _check_components(caller: str, name: str, positions: Tensor, num_axes: int) -> None:
    """Raise ValueError unless positions are (len, num_axes) or (batch, len, num_axes)."""
    if positions.ndim not in (2, 3) or positions.shape[-1] != num_axes:
        raise ValueError(
            f"{caller}: {name} must have shape (len, {num_axes}) or (batch, len, {num_axes}), as "
            f"posenc.positions.grid returns, got {tuple(positions.shape)}."
        )


def whole_cells(caller: str, positions: Tensor) -> Tensor:
    """Return positions (..., 2) of rows and columns as integers, with 0 for NaN. Raise ValueError
    for a position between two cells; positions that are not on the CPU are not checked."""
    if not positions.is_floating_point():
        return positions
    cells = move_placeless_to_origin(positions)
    rounded_cells = cells.floor()
    _, largest_fraction = extremes_if_readable(cells - rounded_cells) or (0, 0)
    if not largest_fraction == 0:
        raise ValueError(
            f"{caller}: positions must be whole rows and columns, as posenc.positions.grid "
            "returns, or NaN for class tokens; got one between two cells. Use resize for another "
            "grid, or SinCos2D for real coordinates."
        )
    return rounded_cells.long()


def require_integers(encoding_name: str, *positions: Tensor) -> None:
    """Raise TypeError if positions are real numbers, for encodings with a table of distances.
    encoding_name: for the message."""
    for p in positions:
        if p.is_floating_point():
            raise TypeError(
                f"{encoding_name}: positions must be integers, because its table has a row per "
                f"whole distance; got {p.dtype}. Round them, or use a method that takes real "
                "positions."
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
        has_one_each = positions.step == 1 and positions.stop - positions.start == batch_and_len[-1]
        if num_axes == 1 and has_one_each:
            _check_position_range(caller, name, positions)
            return positions
        positions = _range_as_tensor(caller, name, positions, x.device)
    _check_position_dtype(caller, name, positions)
    if positions.device != x.device:
        positions = positions.to(x.device)
    shape_without_components = positions.shape if num_axes == 1 else positions.shape[:-1]
    has_components = num_axes == 1 or (positions.ndim > 1 and positions.shape[-1] == num_axes)
    if not has_components or not _has_one_for_each_token(shape_without_components, batch_and_len):
        layout_hint = ""
        if x.ndim == 4 and shape_without_components and shape_without_components[-1] == x.shape[1]:
            layout_hint = _LAYOUT_HINT
        wanted_shapes_in_words = _wanted_shapes_in_words(batch_and_len, num_axes)
        raise ValueError(
            f"{caller}: {name} must have shape {wanted_shapes_in_words}one for each token of a "
            f"tensor of shape {tuple(x.shape)}; got {tuple(positions.shape)}."
            f"{layout_hint}"
        )
    positions = _as_int64_or_real(caller, name, positions, num_axes)
    has_one_row = len(shape_without_components) == 2 and shape_without_components[0] == 1
    return positions[0] if has_one_row else positions


def _has_one_for_each_token(shape: Sequence[int], batch_and_len: Sequence[int]) -> bool:
    """Return True if positions of this shape are (len), (1, len) or (batch, len), where
    `batch_and_len` has the sizes: (batch, len) or (len)."""
    # Compared one by one: a set would hash the sizes, and torch.compile would recompile for each.
    if not 1 <= len(shape) <= len(batch_and_len) or shape[-1] != batch_and_len[-1]:
        return False
    fits = True
    for axis in range(2, len(shape) + 1):  # torch 2.6 traces no zip of different lengths
        fits = fits and (shape[-axis] == 1 or shape[-axis] == batch_and_len[-axis])
    return fits


def _wanted_shapes_in_words(batch_and_len: Sequence[int], num_axes: int) -> str:
    """Return words for the shapes that positions may have, with a space at the end, so that an
    error message can go on: "(5,) or (2, 5), "."""
    *batch, length = batch_and_len
    components_in_words = f", {num_axes}" if num_axes > 1 else ""
    # A tuple of one number has a comma.
    shape_without_batch = f"({length}{components_in_words or ','}) "
    if not batch:
        return shape_without_batch
    batch_in_words = "".join(f"{size}, " for size in batch)
    return f"{shape_without_batch}or ({batch_in_words}{length}{components_in_words}), "


def _as_int64_or_real(caller: str, name: str, positions: Tensor, num_axes: int) -> Tensor:
    """Return integer positions as int64, and real ones unchanged. Raise ValueError for numbers that
    are not finite or too large. If num_axes > 1, NaN is allowed: it marks a token without a place
    on a grid, such as a class token, before or after the cells of the grid."""
    if positions.is_floating_point():
        places = positions
        if num_axes > 1:
            _check_placeless_tokens(caller, name, positions)
            places = move_placeless_to_origin(positions)
        _check_real_positions(caller, name, places)
        return positions
    int64_positions = positions if positions.dtype == torch.int64 else positions.long()
    low, high = extremes_if_readable(int64_positions) or (0, 0)
    if positions.dtype == torch.uint64 and low < 0:  # int64 has no such number
        high = low + 2**64
    _check_position_span(caller, name, low, high)
    return int64_positions


def _range_as_tensor(
    caller: str, name: str, positions: range, device: torch.device | None = None
) -> Tensor:
    """Return a range of positions as an int64 tensor (len). Raise ValueError if it reaches 2^62."""
    _check_position_range(caller, name, positions)
    return as_tensor(positions, device)


def check_span_of_integers(caller: str, name: str, positions: Tensor | range) -> None:
    """Raise ValueError for whole positions from 2^62 on, whose differences could overflow int64.
    The numbers of a tensor are checked on the CPU only."""
    if isinstance(positions, range):
        _check_position_range(caller, name, positions)
    elif not positions.is_floating_point():
        _check_position_span(caller, name, *(extremes_if_readable(positions) or (0, 0)))


def _check_position_range(caller: str, name: str, positions: range) -> None:
    """Raise ValueError if a range of positions reaches 2^62, by its first and its last position."""
    # A range may have a symbolic end in a graph, which reading its last position would fix.
    if torch.compiler.is_compiling() or not positions:
        return
    _check_position_span(caller, name, positions[0], positions[-1])


def _check_position_span(caller: str, name: str, low: float, high: float) -> None:
    """Raise ValueError if whole positions, from `low` to `high`, reach 2^62, so that differences
    could overflow int64."""
    if torch.compiler.is_compiling():
        return
    furthest = max(low, high, key=abs)
    if abs(furthest) >= FARTHEST_POSITION:
        raise ValueError(
            f"{caller}: {name} reach {furthest}, and differences of positions fit int64 only below "
            "2^62. Subtract an offset from all of them."
        )


def _check_position_dtype(caller: str, name: str, positions: Any) -> None:
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
    problem = f"{caller}: {name} must be integers, float32 or float64, got {positions.dtype}"
    if positions.is_complex():
        raise TypeError(f"{problem}: positions are real numbers.")
    if positions.is_floating_point() and positions.dtype not in _FIRST_INTEGER_WITH_GAPS:
        raise TypeError(f"{problem}, which rounds neighbouring positions to one.")


def _check_placeless_tokens(caller: str, name: str, positions: Tensor) -> None:
    """Raise ValueError if only some components of a token are NaN, or if a token without a place
    stands between two cells of one grid; checked on the CPU only.

    positions: (..., len, axes). A row may have several pictures or frames, each with tokens without
    a place before it: there the cells do not go on, but start again.
    """
    if not is_readable(positions):
        return
    is_nan = positions.isnan()
    if not is_nan.any():
        return
    no_place = is_nan.any(-1)
    if not torch.equal(no_place, is_nan.all(-1)):
        raise ValueError(
            f"{caller}: {name} are NaN in some components of a token and not in all. A token "
            "without a place, such as a class token, is NaN in all; otherwise look for 0/0."
        )
    for row in positions.reshape(-1, *positions.shape[-2:]):
        index_of_cell = (~row.isnan().any(-1)).nonzero()[:, 0]
        is_split = _is_followed_inside_a_grid(row[index_of_cell], index_of_cell.diff())
        if is_split.any():
            last_cell = int(index_of_cell[:-1][is_split][0])
            raise ValueError(
                f"{caller}: {name} have a token without a place, of index {last_cell + 1}, in the "
                "middle of a grid. Put class tokens before its cells, as "
                "posenc.positions.grid(class_tokens=) does, or after them."
            )


def _is_followed_inside_a_grid(cells: Tensor, index_steps: Tensor) -> Tensor:
    """Return booleans (cells - 1), True for each cell that tokens without a place follow, before
    the next cell of the same grid: the one after it or, if they take the places of cells, the one
    after these.

    cells: (cells, axes); rows and columns are the last two axes. index_steps: from each cell to the
    next one, in tokens, (cells - 1).
    """
    if not len(cells):
        return torch.zeros(0, dtype=torch.bool)
    index_of_row, index_of_column = (
        cells[:, axis].unique(return_inverse=True)[1] for axis in (-2, -1)
    )
    row_steps, column_steps = index_of_row.diff(), index_of_column.diff()
    # Steps from cell to cell, where these are counted row by row.
    number_steps = row_steps * (index_of_column.max() + 1) + column_steps
    # Of cells that were drawn, as a training that drops patches has them, nothing is known: the
    # first one of a picture may happen to come after the last one of the picture before.
    leaves_columns_out = (row_steps == 0) & (column_steps > 1)
    begins_no_row = (row_steps == 1) & (column_steps > 0)
    leaves_cells_out = (row_steps > 1) | leaves_columns_out | begins_no_row
    are_drawn = (leaves_cells_out & (index_steps == 1)).any()
    takes_places = (row_steps == 0) & (column_steps == index_steps)
    return (index_steps > 1) & ((number_steps == 1) | takes_places) & ~are_drawn


def _check_real_positions(caller: str, name: str, positions: Tensor) -> None:
    """Raise ValueError for real positions that are not finite, or so large that their dtype lacks
    whole numbers; checked on the CPU only."""
    low, high = extremes_if_readable(positions) or (0, 0)
    largest = max(-low, high)
    if not largest < float("inf"):
        raise ValueError(f"{caller}: {name} must be finite, got {largest}.")
    bound = _FIRST_INTEGER_WITH_GAPS[positions.dtype]
    if largest >= bound:
        raise ValueError(
            f"{caller}: {name} reach {largest:.0f}, and {str(positions.dtype)[6:]} rounds them "
            f"from {bound} on. Use integers{' or float64' if bound == 2**24 else ''}."
        )


def refuse_table_of_other_grid(
    encoding: Any, state_dict: Mapping[str, Tensor], prefix: str, *_others: Any
) -> None:
    """Raise ValueError if the `weight` to load is the table of another grid than the encoding's,
    whose `resize` would make one of the other. A hook of torch's load_state_dict."""
    table = state_dict.get(f"{prefix}weight")
    if table is None or len(table) == len(encoding.weight):
        return
    grid = f"{encoding.height}, {encoding.width}"
    raise ValueError(
        f"{type(encoding).__name__}: this table has {len(table)} rows, and that of a grid of "
        f"{encoding.height} x {encoding.width} cells has {len(encoding.weight)}: build it with the "
        f"checkpoint's height and width, load the table and take resize({grid})."
    )
