"""Measure how far a result moves under changes that should not matter: padding, packing, batch,
cache, shift.

Each number is the largest difference of an output in float64, relative to the outputs' size: below
1e-9 it is rounding.
"""

import copy

import torch
from torch import Tensor

from posenc.encodings import ModelShape, PositionEncoding
from posenc.testing.harness import OneLayerModel, add_parameter_noise
from posenc.testing.sequences import (
    results_after_shift,
    results_among_other_rows,
    results_in_a_pack,
    results_in_steps,
    results_next_to_padding,
)

LARGEST_ROUNDING_DIFFERENCE = 1e-9
"""Smaller relative differences of outputs in float64 count as none."""
CHANGES = {
    "shift": results_after_shift,
    "padding": results_next_to_padding,
    "packing": results_in_a_pack,
    "batch": results_among_other_rows,
    "cache": results_in_steps,
}
"""For each change, the function that yields results with it and without."""


@torch.no_grad()
def measure(encoding: PositionEncoding, shape: ModelShape) -> dict[str, float]:
    """Return by name, for each of CHANGES, the largest relative difference that it makes; NaN if a
    result is NaN."""
    encoding = add_parameter_noise(copy.deepcopy(encoding)).double()
    layer = OneLayerModel(encoding, shape).double().eval()
    largest = {}
    for name, pairs in CHANGES.items():
        gaps = [_relative_gap(changed, plain) for changed, plain, _ in pairs(layer, shape)]
        largest[name] = torch.stack(gaps).max().item()  # max() of Python could lose a NaN
    return largest


def _relative_gap(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest difference between a and b, relative to the largest number in b."""
    # The clamp keeps outputs of zeros from a division by 0.
    return (a - b).abs().max() / b.abs().max().clamp(min=1e-30)
