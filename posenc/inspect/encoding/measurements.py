"""Measure the spec sheet of an encoding; no line is taken from its claims."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from posenc.encodings import ModelShape, PositionEncoding, create
from posenc.inspect.encoding import compile_export_time, invariance, places, precision, scores
from posenc.inspect.encoding.precision import Precision
from posenc.inspect.encoding.scores import Decay, Resolution
from posenc.report.report import json_value
from posenc.testing import CHECKS, maker, verdicts
from posenc.testing.harness import add_parameter_noise, encoding_of_first_layer


@dataclass(frozen=True)
class SpecSheet:
    """Properties of an encoding in a model of `shape`, measured on random inputs.

    parameters: trainable numbers of one instance.
    norm_ratio: smallest and largest norm of a query or key after place 2, relative to before.
    axis_length: positions along one axis in training: the training length, or the side of the
        smallest square grid with at least that many cells.
    unfinished_pairs: frequency pairs, of num_pairs and counted from 0, that complete no period
        along their axis.
    scaling: the scaling of its frequencies with its numbers, None without one.
    wavelengths: of the pairs, in tokens; None for a pair that does not rotate.
    differences: between results that should be the same, see posenc.inspect.encoding.invariance.
    cost: time divided by that of a layer without an encoding: low, median and high over interleaved
        pairs; the interval contains the true median in 97 of 100 measurements.
    contract: for other encodings than posenc's, the failed checks of the contract.
    None: does not apply to this encoding.
    """

    name: str
    shape: ModelShape
    places: list[int]
    parameters: int
    per_layer: bool
    max_positions: int | None
    norm_ratio: tuple[float, float] | None
    direction: str
    resolution: dict[str, Resolution] | None
    precision: Precision | None
    axis_length: int
    scaling: str | None
    num_pairs: int
    unfinished_pairs: list[int]
    wavelengths: list[float | None]
    decay: Decay
    differences: dict[str, float]
    compiles: str
    exports: str
    cost: tuple[float, float, float]
    contract: dict[str, str] | None = None
    holds: dict[str, bool] = field(init=False)
    """For each name in `differences`, True if that difference is only rounding."""

    def __post_init__(self) -> None:
        holds = {
            name: gap < invariance.LARGEST_ROUNDING_DIFFERENCE
            for name, gap in self.differences.items()
        }
        object.__setattr__(self, "holds", holds)

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts; None for NaN and infinite numbers."""
        return json_value(self)


def measure(
    name: str, shape: ModelShape, tell: Callable[[str], None] = lambda step: None
) -> SpecSheet:
    """Return the spec sheet of the registered encoding `name`, with random parameters of a fixed
    seed.

    tell: is called with the name of each step as it begins.
    """
    torch.manual_seed(0)
    encoding = create(name, shape).eval()
    sheet = measure_encoding(name, encoding, shape, tell)
    # The contract is run for encodings that posenc does not test itself.
    parts = [m for m in encoding.modules() if isinstance(m, PositionEncoding)]
    if all(type(m).__module__.startswith("posenc.") for m in parts):
        return sheet
    tell("contract")
    failures = {v.check: v.failure for v in verdicts(maker(name), CHECKS) if v.failure is not None}
    return dataclasses.replace(sheet, contract=failures)


@torch.no_grad()
def measure_encoding(
    name: str,
    encoding: PositionEncoding,
    shape: ModelShape,
    tell: Callable[[str], None] = lambda step: None,
) -> SpecSheet:
    """Return the spec sheet of layer 0 of an encoding with its present parameters.

    tell: is called with the name of each step as it begins.

    Raises: ValueError for scores of NaN or +inf.
    """
    layer = encoding_of_first_layer(encoding)
    tell("decay")
    decay = scores.decay(layer, shape)  # first: it refuses scores that say nothing
    tell("places and norms")
    with_noise = add_parameter_noise(copy.deepcopy(layer))  # initial zeros hide effects
    angles = precision.exact_frequencies_of(layer)
    waves = [] if angles is None else _wavelengths(angles.inv_freq)
    measured: dict[str, Any] = {
        "decay": decay,
        "places": places.measure_places(with_noise, shape),
        "norm_ratio": places.norm_ratio_range(with_noise, shape),
        "direction": scores.direction(with_noise, shape),
    }
    tell("resolution and precision")
    measured["resolution"] = scores.resolution(with_noise, shape)
    measured["precision"] = precision.measure(layer)
    tell("padding, packing, batch and cache")
    measured["differences"] = invariance.measure(layer, shape)
    tell("compiling and exporting")
    measured["compiles"] = compile_export_time.compile_outcome(layer, shape)
    measured["exports"] = compile_export_time.export_outcome(layer, shape)
    tell("cost")
    measured["cost"] = compile_export_time.relative_forward_time(layer, shape)
    scaling = next((m.scaling for m in layer.modules() if getattr(m, "scaling", None)), None)
    axis = shape.train_length  # for three axes, too, where text counts along all at once
    if layer.claims.num_axes == 2:  # the side of a square grid
        axis = math.isqrt(axis - 1) + 1
    return SpecSheet(
        name=name,
        shape=shape,
        parameters=sum(p.numel() for p in layer.parameters()),
        per_layer=encoding.claims.scope == "layer",
        max_positions=encoding.claims.max_positions,
        num_pairs=len(waves),
        axis_length=axis,
        scaling=None if scaling is None else str(scaling),
        unfinished_pairs=[t for t, wave in enumerate(waves) if wave > axis],
        wavelengths=[wave if wave < math.inf else None for wave in waves],
        **measured,
    )


def _wavelengths(inv_freq: Iterable[Any]) -> list[float]:
    """Return the tokens of one turn for each frequency in radians per token, infinite for one of
    0."""
    waves = []
    for frequency in map(float, inv_freq):
        waves.append(2 * math.pi / abs(frequency) if frequency else math.inf)
    return waves
