"""Resize a learned table of position embeddings in one of four ways.

The table may begin with rows that have no position, which are kept as they are.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import check_count
from posenc.encodings.numerics.resize_grid import resize_rows_of_grid
from posenc.encodings.numerics.slopes_and_buckets import check_hierarchical, rows_to_interpolate


def interpolate(
    table: Float[Tensor, "rows dim"],
    num_positions: int,
    *,
    align_corners: bool,
    offset_rows: int = 0,
) -> Float[Tensor, "new_rows dim"]:
    """Lengthen the table by linear interpolation between its rows.

    With old and new for the numbers of positions before and after, new row p is the old table at
    row p * (old - 1) / (new - 1) if align_corners=True, so that both ends stay; and at (p + 0.5) *
    old / new - 0.5 if False, as in image resizing.

    Args:
        table: the learned rows.
        num_positions: number of positions wanted, without offset rows.
        align_corners: which of the two formulas; required, because models differ.
        offset_rows: number of leading rows without a position, which are kept (RoBERTa and OPT: 2).

    Returns: (offset_rows + num_positions, dim).
    Raises: ValueError if the table has no row for a position, or num_positions is below 1.
    Source: torch.nn.functional.interpolate(mode="linear").
    """
    kept_rows, rows = _kept_and_position_rows(table, num_positions, offset_rows)
    wide_rows = rows.to(_work_dtype(table))
    lower, upper, upper_weights = rows_to_interpolate(len(rows), num_positions, align_corners)
    lower_rows = wide_rows[torch.tensor(lower, device=table.device)]
    upper_rows = wide_rows[torch.tensor(upper, device=table.device)]
    upper_weight = torch.tensor(upper_weights, dtype=wide_rows.dtype, device=table.device)[:, None]
    new_rows = (1 - upper_weight) * lower_rows + upper_weight * upper_rows
    return torch.cat([kept_rows, new_rows.to(table.dtype)])


def tile(
    table: Float[Tensor, "rows dim"], num_positions: int, *, offset_rows: int = 0
) -> Float[Tensor, "new_rows dim"]:
    """Repeat the table: the row of position p is that of position p mod old, if the table had `old`
    positions. Used to train models with local windows.

    Args:
        table: the learned rows.
        num_positions: number of positions wanted, without offset rows.
        offset_rows: number of leading rows without a position, which are kept and not repeated.

    Returns: (offset_rows + num_positions, dim).
    Raises: ValueError if the table has no row for a position, or num_positions is below 1.
    Source: Beltagy et al. 2020, arXiv:2004.05150, section 5.
    """
    kept_rows, rows = _kept_and_position_rows(table, num_positions, offset_rows)
    index = torch.arange(num_positions, device=table.device) % len(rows)
    return torch.cat([kept_rows, rows[index]])


def hierarchical(
    table: Float[Tensor, "rows dim"],
    num_positions: int,
    *,
    alpha: float = 0.4,
    offset_rows: int = 0,
) -> Float[Tensor, "new_rows dim"]:
    """Lengthen a table p of n rows to at most n^2 rows q: a position is split into two digits in
    base n, and each digit gets a vector u of its own.

    q[i n + j] = alpha u[i] + (1 - alpha) u[j], u[i] = (p[i] - alpha p[0]) / (1 - alpha)

    The first n rows stay unchanged.

    Args:
        table: the learned rows.
        num_positions: number of positions wanted, without offset rows.
        alpha: weight of the higher digit, in (0, 1); not 0.5, which gives positions (i, j) and (j,
            i) the same row.
        offset_rows: number of leading rows without a position, which are kept.

    Returns: (offset_rows + num_positions, dim).
    Raises: ValueError for more than n^2 positions or a wrong alpha.
    Source: Su 2020, kexue.fm/archives/7947; github.com/bojone/bert4keras.
    """
    kept_rows, rows = _kept_and_position_rows(table, num_positions, offset_rows)
    check_hierarchical(len(rows), num_positions, alpha)
    wide_rows = rows.to(_work_dtype(table))
    digit_vectors = (wide_rows - alpha * wide_rows[:1]) / (1 - alpha)
    index = torch.arange(num_positions, device=table.device)
    new_rows = (
        alpha * digit_vectors[index // len(rows)] + (1 - alpha) * digit_vectors[index % len(rows)]
    )
    return torch.cat([kept_rows, new_rows.to(table.dtype)])


def interpolate_2d(
    table: Float[Tensor, "rows dim"],
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    mode: Literal["bicubic", "bilinear"] = "bicubic",
    align_corners: bool = False,
    antialias: bool = False,
    extra_rows: int = 0,
) -> Float[Tensor, "new_rows dim"]:
    """Resize a table of image patches, stored row by row, by interpolation between its cells.

    A checkpoint needs the options that it was trained with: bicubic in MAE, DeiT, ViT and DINOv2;
    bicubic with antialias in DINOv2 with registers; bilinear with antialias in SigLIP 2; bilinear
    with align_corners in Qwen3-VL.

    Args:
        table: the learned rows, extra rows first.
        old_grid, new_grid: (height, width) in patches; need not be square.
        mode: "bicubic" or "bilinear".
        align_corners: the centres of the corner cells keep their place; False: their corners do.
        antialias: to a smaller grid, average over all cells that a new one covers. Not together
            with align_corners, which antialiasing ignores.
        extra_rows: number of leading rows without a patch (class token, registers), which are kept.

    Returns: (extra_rows + height * width of new_grid, dim).
    Raises: ValueError if the table does not have extra_rows + height * width rows, for an unknown
    mode, or for align_corners with antialias; TypeError for a grid that is no pair of whole
    numbers.
    Source: He et al. 2022, arXiv:2111.06377, github.com/facebookresearch/mae util/pos_embed.py.
    """
    _check_grid_size("old_grid", old_grid)
    _check_grid_size("new_grid", new_grid)
    check_count("interpolate_2d", "extra_rows", extra_rows, 0)
    height, width = old_grid
    num_rows = extra_rows + height * width
    if table.ndim != 2 or len(table) != num_rows:
        raise ValueError(
            f"interpolate_2d: a table of a grid of {height} x {width} and {extra_rows} extra rows "
            f"has shape ({num_rows}, dim), got {tuple(table.shape)}."
        )
    kept_rows = table[:extra_rows]
    rows = table[extra_rows:]
    new_rows = resize_rows_of_grid(
        "interpolate_2d",
        rows,
        old_grid,
        new_grid,
        mode=mode,
        align_corners=align_corners,
        antialias=antialias,
    )
    return torch.cat([kept_rows, new_rows])


def _check_grid_size(name: str, size: tuple[int, int]) -> None:
    """Raise TypeError or ValueError unless `size`, the argument `name` of interpolate_2d, is
    (height, width), whole numbers from 1 on."""
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise TypeError(f"interpolate_2d: {name} must be (height, width), got {size!r}.")
    check_count("interpolate_2d", f"the height of {name}", size[0])
    check_count("interpolate_2d", f"the width of {name}", size[1])


def _kept_and_position_rows(
    table: Tensor, num_positions: int, offset_rows: int
) -> tuple[Tensor, Tensor]:
    """Return the first `offset_rows` rows of a table, which are kept, and the other rows, one for
    each position. Raise ValueError if there is no other row, or num_positions is below 1."""
    if table.ndim != 2 or not 0 <= offset_rows < len(table) or num_positions < 1:
        raise ValueError(
            f"The table must be (rows, dim) with more than offset_rows={offset_rows} rows, and "
            "num_positions at least 1; "
            f"got shape {tuple(table.shape)}, num_positions={num_positions}."
        )
    return table[:offset_rows], table[offset_rows:]


def _work_dtype(table: Tensor) -> torch.dtype:
    """Return the dtype in which new rows are computed: that of the table, at least float32."""
    return torch.promote_types(table.dtype, torch.float32)
