"""Swin's and BEiT's table of biases by the rows and columns between two cells."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import explain_misfits
from posenc.encodings.base.cell_bias import NUM_CLASS_ROWS, CellBias, check_window
from posenc.encodings.base.check_inputs import refuse_table_of_other_grid
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.numerics.resize_grid import resize_rows_of_grid


class RelativeBias2D(CellBias):
    """Add a learned bias per head for each offset in rows and columns to the scores.

    score[h, i, j] += weight[(dr + height - 1) * (2 width - 1) + dc + width - 1, h],
    (dr, dc) = cell_i - cell_j

    The table has the layout of Swin's and BEiT's relative_position_bias_table, so that their
    weights load as they are. posenc.masks.windows keeps Swin's windows apart.

    Args:
        num_heads: number of query heads.
        height, width: cells of the grid or window; rows and columns of two tokens differ by less.
        class_token: the table has three more rows, as in BEiT, for pairs with tokens whose row or
            column is NaN (class tokens, see posenc.positions.grid). False: their bias is 0.
        init_std: standard deviation of the initial values (normal, truncated at two deviations);
            Swin has 0.02, BEiT 0.

    Shapes: positions (len, 2) or (batch, len, 2) of (row, column), whole numbers or NaN; bias
    (num_heads, q_len, kv_len); weight ((2 height - 1) * (2 width - 1), num_heads), with class_token
    three rows more.
    Units: the bias is in logits. Precision: float32 or better.
    Raises: ValueError for tokens that are too far apart for the table (checked on the CPU; CUDA
    asserts) or between two cells.
    Source: Liu et al. 2021, arXiv:2103.14030, section 3.2; Bao et al. 2022, arXiv:2106.08254.

    >>> swin = posenc.RelativeBias2D(num_heads=3, height=7, width=7)
    >>> cells = posenc.positions.grid(7, 7)
    >>> swin(cells, cells).shape, swin.weight.shape
    (torch.Size([3, 49, 49]), torch.Size([169, 3]))
    >>> swin.resize(12, 12).weight.shape
    torch.Size([529, 3])
    """

    claims = replace(
        CellBias.claims,
        source="Liu et al. 2021, arXiv:2103.14030, section 3.2; Bao et al. 2022, arXiv:2106.08254",
    )

    def __init__(
        self,
        num_heads: int,
        height: int,
        width: int,
        *,
        class_token: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__(num_heads, height, width)
        self.class_token = class_token
        self.init_std = init_std
        num_rows = self.num_offsets + NUM_CLASS_ROWS * class_token
        self.weight = nn.Parameter(torch.empty(num_rows, num_heads))
        self.register_load_state_dict_pre_hook(refuse_table_of_other_grid)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        std = self.init_std
        if std:
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
        else:
            nn.init.zeros_(self.weight)

    @explain_misfits
    def resize(
        self, height: int, width: int, *, mode: Literal["bicubic", "bilinear"] = "bicubic"
    ) -> "RelativeBias2D":
        """Return a new RelativeBias2D for a grid of `height` x `width`, whose table is interpolated
        between the offsets of this one; rows for class tokens are kept. Swin's code is bicubic,
        BEiT's in transformers bilinear."""
        check_window("RelativeBias2D.resize", height, width)
        table = self.weight.detach()
        resized_offsets = resize_rows_of_grid(
            "RelativeBias2D.resize",
            table[: self.num_offsets],
            (2 * self.height - 1, 2 * self.width - 1),
            (2 * height - 1, 2 * width - 1),
            mode=mode,
        )
        resized = RelativeBias2D(
            self.num_heads, height, width, class_token=self.class_token, init_std=self.init_std
        ).to(table)
        with torch.no_grad():
            resized.weight.copy_(torch.cat([resized_offsets, table[self.num_offsets :]]))
        return resized

    def table(self, dtype: torch.dtype) -> Float[Tensor, "{self.num_offsets}+3 {self.num_heads}"]:
        dtype = torch.promote_types(at_least_float32(dtype), self.weight.dtype)
        table = self.weight.to(dtype)
        return table if self.class_token else F.pad(table, (0, 0, 0, NUM_CLASS_ROWS))
