"""SwinV2's bias: a network of the logarithm of the rows and columns between two cells."""

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import check_count
from posenc.encodings.base.cell_bias import NUM_CLASS_ROWS, CellBias
from posenc.encodings.numerics.precision import at_least_float32, read_linear, without_autocast

_LARGEST_BIAS = 16
"""Factor of the sigmoid, in logits."""
_LARGEST_COORDINATE = 8
"""Coordinate of the farthest offset of the trained window, before the logarithm."""


class SwinV2Bias(CellBias):
    """Add the bias that a small network computes from the logarithm of each offset to the scores.

    score[h, i, j] += 16 sigmoid(out(relu(hidden([s(dr), s(dc)])))[h]),
    s(d) = sign(d) log2(1 + 8 |d| / (trained size - 1)) / 3,  (dr, dc) = cell_i - cell_j

    The network serves windows of any size: for a larger one build it with the window of the weights
    as trained_height and trained_width, and load them. SwinV2's attention scales the cosine of q
    and k instead of q . k; that is left to the model.

    Args:
        num_heads: number of query heads.
        height, width: cells of the window; rows and columns of two tokens differ by less.
        trained_height, trained_width: the window in training, SwinV2's pretrained_window_size;
            None: height and width.
        mlp_width: hidden units.
        init_std: standard deviation of the network's initial weights (normal, truncated at two
            deviations).

    Shapes: positions (len, 2) or (batch, len, 2) of (row, column), whole numbers or NaN; bias
    (num_heads, q_len, kv_len). hidden: Linear(2, mlp_width); out: Linear(mlp_width, num_heads)
    without a bias. Pairs with a token whose row and column are NaN have the bias 0.
    Units: the bias is in logits, from 0 to 16. Precision: float32 or better, also under autocast.
    Raises: ValueError for tokens that are too far apart for the window (checked on the CPU; CUDA
    asserts) or between two cells.
    Source: Liu et al. 2022, arXiv:2111.09883, section 3.3; github.com/microsoft/Swin-Transformer.

    >>> small = posenc.SwinV2Bias(num_heads=3, height=8, width=8)
    >>> large = posenc.SwinV2Bias(3, 16, 16, trained_height=8, trained_width=8)
    >>> large.load_state_dict(small.state_dict())
    <All keys matched successfully>
    """

    claims = replace(CellBias.claims, source="Liu et al. 2022, arXiv:2111.09883, section 3.3")

    def __init__(
        self,
        num_heads: int,
        height: int,
        width: int,
        *,
        trained_height: int | None = None,
        trained_width: int | None = None,
        mlp_width: int = 512,
        init_std: float = 0.02,
    ) -> None:
        super().__init__(num_heads, height, width)
        self.trained_height = height if trained_height is None else trained_height
        self.trained_width = width if trained_width is None else trained_width
        check_count("SwinV2Bias", "trained_height", self.trained_height)
        check_count("SwinV2Bias", "trained_width", self.trained_width)
        self.init_std = init_std
        self.hidden = nn.Linear(2, mlp_width)
        self.out = nn.Linear(mlp_width, num_heads, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        std = self.init_std
        for layer in (self.hidden, self.out):
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(self.hidden.bias)

    def table(self, dtype: torch.dtype) -> Float[Tensor, "{self.num_offsets}+3 {self.num_heads}"]:
        device = self.hidden.weight.device
        dtype = torch.promote_types(at_least_float32(dtype), self.hidden.weight.dtype)
        row = _log_spaced(self.height, self.trained_height, dtype, device)
        column = _log_spaced(self.width, self.trained_width, dtype, device)
        offsets = torch.cartesian_prod(row, column)
        hidden_layer = read_linear(self.hidden, dtype)
        output_layer = read_linear(self.out, dtype)
        with without_autocast(device):
            units = F.linear(offsets, hidden_layer.weight, hidden_layer.bias).relu()
            table = _LARGEST_BIAS * F.linear(units, output_layer.weight).sigmoid()
        return F.pad(table, (0, 0, 0, NUM_CLASS_ROWS))


def _log_spaced(
    size: int, trained_size: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, " {2*size-1}"]:
    """Return the network's input for the offsets 1 - size .. size - 1 along one axis."""
    offset = torch.arange(1 - size, size, device=device).to(dtype)
    # A window of one cell has only the offset 0.
    coordinate = offset * (_LARGEST_COORDINATE / max(trained_size - 1, 1))
    return coordinate.sign() * coordinate.abs().log1p() / math.log(_LARGEST_COORDINATE)
