"""KERPLE: kernelized relative position biases."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Real
from torch import Tensor, nn

from posenc.encodings.base.distance_bias import DistanceBias
from posenc.encodings.base.term import Formula, PairwiseBias, Tokens
from posenc.encodings.numerics.precision import float_distance, per_head
from posenc.encodings.numerics.slopes_and_buckets import (
    KERPLE_INITIAL_MAX,
    KERPLE_MIN,
    KERPLE_POWER_MAX,
)


class Kerple(DistanceBias):
    """Add a learned kernel of the distance to the attention scores.

    form="log":   score[h, i, j] += -r1[h] * ln(1 + r2[h] * |position_i - position_j|)
    form="power": score[h, i, j] += -r1[h] * |position_i - position_j|^r2[h]

    power with r2 = 1 is ALiBi with learned slopes.

    Args:
        num_heads: number of query heads.
        form: "log", the paper's best, or "power".

    Shapes: q_positions (q_len), kv_positions (kv_len) -> (num_heads, q_len, kv_len); r1, r2
    (num_heads), shared by all layers as in the authors' code.
    Units: distances in tokens; the bias is in logits.
    Precision: float32. As in the authors' code r1 and r2 are clamped to at least 0.01, and r2 of
    "power" to at most 2; gradients ignore the clamps.
    Raises: ValueError for an unknown form.
    Source: Chi et al. 2022, arXiv:2205.09921, section 4; github.com/chijames/KERPLE.

    >>> kerple = posenc.Kerple(num_heads=8)
    >>> kerple(torch.arange(5), torch.arange(7)).shape
    torch.Size([8, 5, 7])
    """

    claims = replace(DistanceBias.claims, source="Chi et al. 2022, arXiv:2205.09921, section 4")
    bias_tensors = ("r1", "r2")

    def __init__(self, num_heads: int, *, form: Literal["log", "power"] = "log") -> None:
        super().__init__()
        if form not in ("log", "power"):
            raise ValueError(f"Kerple: form must be 'log' or 'power', got {form!r}.")
        self.form = form
        self.r1 = nn.Parameter(torch.empty(num_heads))
        self.r2 = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r1_high, r2_high = KERPLE_INITIAL_MAX[self.form]
        nn.init.uniform_(self.r1, 0, r1_high)
        nn.init.uniform_(self.r2, 0, r2_high)

    def bias(self, distance: Real[Tensor, "*where"]) -> Float[Tensor, "num_heads *where"]:
        distance = float_distance(distance).abs()
        r1 = _clamp_keeping_gradient(per_head(self.r1, distance))
        r2 = _clamp_keeping_gradient(per_head(self.r2, distance), self._r2_limit)
        if self.form == "log":
            return -r1 * (r2 * distance).log1p()
        return -r1 * distance**r2

    @property
    def _r2_limit(self) -> float:
        """Return the largest r2 that `bias` uses; larger parameters are clamped to it."""
        return torch.inf if self.form == "log" else KERPLE_POWER_MAX

    def term(self, q: Tokens, k: Tokens) -> PairwiseBias:
        term = super().term(q, k)
        # The formulas repeat the class's `bias`: for a subclass with another one they are wrong.
        if self.computes_bias_of(Kerple):
            term.formulas = self._formulas
        return term

    def _formulas(self) -> list[Formula]:
        """Return a list with `bias` as a Formula, which a kernel evaluates for each pair. The
        formula has log and exp2, which kernels compute faster than log1p and pow."""
        r1 = _clamp_keeping_gradient(self.r1.float())
        r2 = _clamp_keeping_gradient(self.r2.float(), self._r2_limit)
        return [
            Formula(
                _log_kernel if self.form == "log" else _power_kernel,
                (r1, r2),
                slower_than_table=True,
            )
        ]


def _log_kernel(distance: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    """Return -r1 ln(1 + r2 |distance|), the bias of form "log", for Formula.compute."""
    return -r1 * (1 + r2 * distance.abs()).log()


def _power_kernel(distance: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    """Return -r1 |distance|^r2, the bias of form "power", for Formula.compute."""
    # log2(0) is -inf, and exp2(-inf) is 0, as the bias at distance 0 is.
    return -r1 * (r2 * distance.abs().log2()).exp2()


def _clamp_keeping_gradient(parameter: Tensor, high: float = torch.inf) -> Tensor:
    """Return the parameter clamped to [KERPLE_MIN, high], with a gradient as if it were not
    clamped.

    A plain clamp has no gradient outside, so a parameter that starts there would never learn (1 %
    of initial r2). `parameter` must have the bias's dtype: 0.01 is not exact in 16 bits.
    """
    # The difference is a constant to autograd.
    return parameter + (parameter.clamp(KERPLE_MIN, high) - parameter).detach()
