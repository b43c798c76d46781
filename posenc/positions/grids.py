"""Positions of the cells of a grid: rows and columns, time, and the tokens beside them."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Real
from torch import Tensor

from posenc.arguments import check_count, check_flag, explain_misfits


@explain_misfits
def grid(
    *sizes: int,
    centred: bool = False,
    class_tokens: int = 0,
    text_before: int = 0,
    text_after: int = 0,
    device: torch.device | None = None,
) -> Real[Tensor, "len {len(sizes)}"]:
    """Return (row, column) of each cell, row by row, or (time, row, column) frame by frame, counted
    from 0.

    Args:
        sizes: height and width of the grid, or time, height and width, in cells.
        centred: count rows and columns from -ceil(size / 2), so that 0 is in the middle; time is
            counted from 0. Qwen-Image does.
        class_tokens: number of tokens before all others that have no place, such as class and
            register tokens; encodings of rows and columns leave them as they are. Text that does
            not rotate (Flux, Hunyuan Video) has no place either.
        text_before, text_after: number of text tokens before and after the cells, numbered p, p +
            1, ... with the same number on each axis, from one past the last row and column on, as
            in Qwen-Image. mrope_positions is for text that counts on from what it follows.

    Shapes: (len, axes), int64, with len the sum of all tokens; with class_tokens float64, as their
    components are NaN, which no coordinate can be.
    Raises: TypeError for other than two or three sizes, or one that is no whole number; ValueError
    for a size below 1 or a negative number of tokens.

    >>> posenc.positions.grid(2, 2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    >>> posenc.positions.grid(1, 2, class_tokens=1).tolist()
    [[nan, nan], [0.0, 0.0], [0.0, 1.0]]
    >>> posenc.positions.grid(1, 1, 2, centred=True, text_after=2).tolist()
    [[0, -1, -1], [0, -1, 0], [1, 1, 1], [2, 2, 2]]
    """
    caller = "positions.grid"
    if len(sizes) not in (2, 3):
        raise TypeError(f"{caller}: give height and width, or time, height and width, got {sizes}.")
    _check_grid("grid", sizes, class_tokens)
    check_flag(caller, "centred", centred)
    check_count(caller, "text_before", text_before, 0)
    check_count(caller, "text_after", text_after, 0)
    coordinates_by_axis = [torch.arange(size, device=device) for size in sizes]
    text_start = max(sizes[-2:])
    if centred:
        for axis in (-2, -1):
            coordinates_by_axis[axis] -= (sizes[axis] + 1) // 2
        text_start = max(sizes[-2] // 2, sizes[-1] // 2)
    cells = torch.cartesian_prod(*coordinates_by_axis)
    text = torch.arange(text_start, text_start + text_before + text_after, device=device)
    text = text[:, None].expand(-1, len(sizes))
    return _after_class_tokens(
        class_tokens, torch.cat([text[:text_before], cells, text[text_before:]])
    )


@explain_misfits
def normalized_grid(
    height: int, width: int, *, class_tokens: int = 0, device: torch.device | None = None
) -> Float[Tensor, "{class_tokens+height*width} 2"]:
    """Return the centre of each cell, row by row, with -1 and 1 at the edges of both axes.

    component i of n cells = (2 i + 1) / n - 1

    These are DINOv3's coordinates, for AxialRoPE.dinov3. Args and errors: as `grid`.

    Shapes: (class_tokens + height * width, 2), float64.

    >>> posenc.positions.normalized_grid(1, 2).tolist()
    [[0.0, -0.5], [0.0, 0.5]]
    """
    _check_grid("normalized_grid", (height, width), class_tokens)
    cells_by_axis = torch.tensor([height, width], dtype=torch.float64, device=device)
    centres = (2 * grid(height, width, device=device) + 1) / cells_by_axis - 1
    return _after_class_tokens(class_tokens, centres)


def _check_grid(name: str, sizes: Sequence[int], class_tokens: int) -> None:
    """Raise TypeError or ValueError unless the sizes, (height, width) or (time, height, width), are
    whole numbers from 1 on, and class_tokens is one from 0 on. name: the function that got them,
    for the message."""
    names = ("time", "height", "width")[-len(sizes) :]
    for size_name, size in zip(names, sizes, strict=True):
        check_count(f"positions.{name}", size_name, size)
    check_count(f"positions.{name}", "class_tokens", class_tokens, 0)


def _after_class_tokens(num_class_tokens: int, cells: Tensor) -> Tensor:
    """Return positions (num_class_tokens + n, axes) in float64: as many tokens without a place
    (NaN) before the others (n, axes). For 0 class tokens return the others themselves."""
    if not num_class_tokens:
        return cells
    placeless = torch.full((num_class_tokens, cells.shape[-1]), math.nan, device=cells.device)
    return torch.cat([placeless.double(), cells.double()])
