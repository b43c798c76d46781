"""Interpolate between the cells of a learned table of a grid."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def resize_rows_of_grid(
    caller: str,
    rows: Float[Tensor, "cells dim"],
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    mode: Literal["bicubic", "bilinear"],
    align_corners: bool = False,
    antialias: bool = False,
) -> Float[Tensor, "new_cells dim"]:
    """Return the rows of a grid, stored row by row, interpolated to another grid, in their dtype;
    computed in at least float32.

    caller: the public function, for messages. old_grid, new_grid: (height, width).
    Raises: ValueError for an unknown mode, or for align_corners with antialias.
    """
    if mode not in ("bicubic", "bilinear"):
        raise ValueError(f"{caller}: mode must be 'bicubic' or 'bilinear', got {mode!r}.")
    if align_corners and antialias:
        raise ValueError(
            f"{caller}: give align_corners or antialias, not both: antialiasing aligns edges."
        )
    work_dtype = torch.promote_types(rows.dtype, torch.float32)
    image = rows.to(work_dtype).unflatten(0, old_grid).permute(2, 0, 1)[None]
    # Give the size, because a rounded scale factor would lose a row or a column.
    new_image = F.interpolate(
        image, size=new_grid, mode=mode, align_corners=align_corners, antialias=antialias
    )
    return new_image[0].permute(1, 2, 0).flatten(0, 1).to(rows.dtype)
