"""Measure the spec sheet of an encoding: the places where it acts and what it does there, which
changes move its results and should not, whether it compiles, and how long it takes. Nothing is
taken from its claims."""

import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posenc import masks
from posenc.encodings import ModelShape, PositionEncoding, Term, Tokens, create
from posenc.inspect.encoding import precision, scores
from posenc.inspect.encoding.precision import Precision
from posenc.inspect.encoding.scores import Decay, Resolution
from posenc.report.report import json_value
from posenc.statistics.median_intervals import median_with_interval
from posenc.testing import CHECKS, maker, verdicts
from posenc.testing.contract import export_layer
from posenc.testing.harness import (
    OneLayerModel,
    add_parameter_noise,
    encoding_of_first_layer,
    possible_length,
    random_embeddings,
    split_heads,
    successive_positions,
)
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
"""For each change that should not matter, the function that yields pairs of results: with the
change, without it, and the change in words."""
EMBEDDINGS_PLACE, QUERIES_KEYS_PLACE, SCORES_PLACE, VALUES_PLACE = 1, 2, 3, 4
"""The places where an encoding may act, as numbered in its claims; values include the output."""
_FAR_OFFSET_IN_LENGTHS = 4
"""Training lengths after which large positions begin, at which an encoding is tried, too."""
_NUM_TRIED_TOKENS = 9
"""Tokens of the inputs with which the places are found."""
_NUM_NORM_TOKENS = 64
"""Tokens whose norms are compared."""
COST_LENGTH = 512
"""Tokens of the timed layer; this number and those below are chosen, not derived."""
_LONGEST_EXPORT = 4096
"""Tokens up to which an exported program must serve."""
_NUM_TRACED_TOKENS, _NUM_CHECKED_TOKENS = 12, 31
"""Tokens of the call that is traced, and of a longer one by which its program is checked."""
NUM_TIMED_PAIRS = 21
"""Interleaved runs. The interval of their ratios contains the median in 97 of 100 measurements."""


@dataclass(frozen=True)
class SpecSheet:
    """Properties of an encoding in a model of `shape`, measured on random inputs.

    places: where it acts, see `measure_places`. parameters: number of trainable numbers of one
        instance. per_layer: True if every layer has an instance of its own.
    norm_ratio: smallest and largest norm of a query or key after the encoding transforms it,
        relative to before.
    direction: see `scores.direction`.
    axis_length: positions along one axis in training: the training length, or the side of the
        smallest square grid with at least that many cells.
    unfinished_pairs: rotary pairs, of num_pairs and counted from 0, that complete no turn along
        their axis.
    scaling: the scaling of its frequencies with its numbers.
    wavelengths: of the pairs, in tokens; None for a pair that does not rotate.
    differences: by name, differences between results that should be the same, see
        `measure_differences`.
    compiles, exports: "yes", or why not, see `compile_outcome` and `export_outcome`.
    cost: time divided by that of a layer without an encoding: low, median and high over interleaved
        pairs; the interval contains the true median in 97 of 100 measurements.
    contract: for other encodings than posenc's, the failed checks of the contract, with their
        messages.
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
        holds = {name: gap < LARGEST_ROUNDING_DIFFERENCE for name, gap in self.differences.items()}
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
    noisy_layer = add_parameter_noise(copy.deepcopy(layer))  # initial zeros hide effects
    frequencies = precision.exact_frequencies_of(layer)
    wavelengths = [] if frequencies is None else _wavelengths(frequencies.inv_freq)
    measured: dict[str, Any] = {
        "decay": decay,
        "places": measure_places(noisy_layer, shape),
        "norm_ratio": norm_ratio_range(noisy_layer, shape),
        "direction": scores.direction(noisy_layer, shape),
    }
    tell("resolution and precision")
    measured["resolution"] = scores.resolution(noisy_layer, shape)
    measured["precision"] = precision.measure(layer)
    tell("padding, packing, batch and cache")
    measured["differences"] = measure_differences(layer, shape)
    tell("compiling and exporting")
    measured["compiles"] = compile_outcome(layer, shape)
    measured["exports"] = export_outcome(layer, shape)
    tell("cost")
    measured["cost"] = relative_forward_time(layer, shape)
    scaling = next((m.scaling for m in layer.modules() if getattr(m, "scaling", None)), None)
    axis_length = shape.train_length  # for three axes, too, where text counts along all at once
    if layer.claims.num_axes == 2:  # the side of a square grid
        axis_length = math.isqrt(axis_length - 1) + 1
    return SpecSheet(
        name=name,
        shape=shape,
        parameters=sum(p.numel() for p in layer.parameters()),
        per_layer=encoding.claims.scope == "layer",
        max_positions=encoding.claims.max_positions,
        num_pairs=len(wavelengths),
        axis_length=axis_length,
        scaling=None if scaling is None else str(scaling),
        unfinished_pairs=[
            pair for pair, wavelength in enumerate(wavelengths) if wavelength > axis_length
        ],
        wavelengths=[wavelength if wavelength < math.inf else None for wavelength in wavelengths],
        **measured,
    )


def _wavelengths(inv_freq: Iterable[Any]) -> list[float]:
    """Return the tokens of one turn for each frequency in radians per token, infinite for one of
    0."""
    wavelengths = []
    for frequency in map(float, inv_freq):
        wavelengths.append(2 * math.pi / abs(frequency) if frequency else math.inf)
    return wavelengths


@torch.no_grad()
def measure_differences(encoding: PositionEncoding, shape: ModelShape) -> dict[str, float]:
    """Return by name, for each of CHANGES, the largest difference that it makes to an output of a
    layer in float64, relative to the largest output; NaN if a result is NaN."""
    encoding = add_parameter_noise(copy.deepcopy(encoding)).double()
    layer = OneLayerModel(encoding, shape).double().eval()
    largest_gaps = {}
    for name, results_of_change in CHANGES.items():
        gaps = [
            _relative_gap(changed, plain) for changed, plain, _ in results_of_change(layer, shape)
        ]
        largest_gaps[name] = torch.stack(gaps).max().item()  # max() of Python could lose a NaN
    return largest_gaps


def _relative_gap(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest difference between a and b, relative to the largest number in b."""
    # The clamp keeps outputs of zeros from a division by 0.
    return (a - b).abs().max() / b.abs().max().clamp(min=1e-30)


def measure_places(encoding: PositionEncoding, shape: ModelShape) -> list[int]:
    """Return the places where the encoding acts, by trial at small and at large positions.

    1: embeddings; 2: q and k; 3: scores; 4: values or output.
    """
    offsets = (
        [0]
        if encoding.claims.max_positions is not None
        else [0, _FAR_OFFSET_IN_LENGTHS * shape.train_length]
    )
    acting_places: set[int] = set()
    for offset in offsets:
        acting_places |= _places_acting_from(encoding, shape, offset)
    return sorted(acting_places)


def _places_acting_from(encoding: PositionEncoding, shape: ModelShape, offset: int) -> set[int]:
    """Return the places, numbered as in claims, where the encoding changes tensors at the first few
    positions from `offset` on."""
    encoding = copy.deepcopy(encoding).double()
    length = possible_length(encoding, _NUM_TRIED_TOKENS)
    positions = successive_positions(encoding, length, offset)
    x = random_embeddings(length, shape=shape)
    q = split_heads(x, shape)
    k = split_heads(
        random_embeddings(length, shape=shape, seed=3), shape
    )  # keys unlike the queries
    acting_places = set()
    embedded = encoding.embed(x, positions)
    if not _are_equal_to_rounding(embedded, x):
        acting_places.add(EMBEDDINGS_PLACE)
    encoding = encoding.for_layer(0)
    num_axes = encoding.claims.num_axes
    state = encoding.state(x, positions)
    q_side = Tokens(q, positions, state, num_axes)
    k_side = Tokens(k, positions, state, num_axes)
    new_q, new_k = encoding.transform(q_side, k_side)
    if (
        not (_are_equal_to_rounding(new_q, q) and _are_equal_to_rounding(new_k, k))
        or len(encoding.passes(positions, positions)) > 1
    ):
        acting_places.add(QUERIES_KEYS_PLACE)
    new_values = encoding.transform_values(k_side)
    if not (
        _are_equal_to_rounding(new_values, k)
        and _are_equal_to_rounding(encoding.transform_output(q_side), q)
    ):
        acting_places.add(VALUES_PLACE)
    term = encoding.term(q_side, k_side)
    if term is not None:
        acting_places |= _places_of_term(term.prepare_blocks(length, False), q, k)
    return acting_places


def _places_of_term(term: Term, q: Tensor, k: Tensor) -> set[int]:
    """Return the places where a term of the scores acts: SCORES_PLACE if it changes the scores of q
    and k, VALUES_PLACE if it does anything but multiply the weights with the values.

    q, k: (batch, heads, len, head_dim); k also serves as values.
    """
    acting_places = set()
    all_tokens = slice(0, q.shape[-2])
    scores = q @ k.mT
    if not _are_equal_to_rounding(term.add(scores.clone(), all_tokens, all_tokens, None), scores):
        acting_places.add(SCORES_PLACE)
    if term.sum_values is not None:
        weights = scores.softmax(-1)
        if not _are_equal_to_rounding(
            term.sum_values(weights, k, all_tokens, all_tokens), weights @ k
        ):
            acting_places.add(VALUES_PLACE)
    return acting_places


def norm_ratio_range(encoding: PositionEncoding, shape: ModelShape) -> tuple[float, float] | None:
    """Return the smallest and the largest ratio of a vector's norm after the transformation of
    queries and keys (place 2) to its norm before it; None if the encoding does not transform
    them."""
    encoding = copy.deepcopy(encoding).double().for_layer(0)
    length = possible_length(encoding, _NUM_NORM_TOKENS)
    q = split_heads(random_embeddings(length, shape=shape), shape)
    offsets = [0] if encoding.claims.max_positions is not None else [0, shape.train_length]
    ratios = []
    for offset in offsets:
        positions = successive_positions(encoding, length, offset)
        side = Tokens(q, positions, num_axes=encoding.claims.num_axes)
        transformed = encoding.transform(side, side)
        if all(_are_equal_to_rounding(t, q) for t in transformed):
            continue  # it changes nothing at these positions, so there is no ratio to report
        ratios += [t.norm(dim=-1) / q.norm(dim=-1) for t in transformed]
    if not ratios:
        return None
    all_ratios = torch.cat([r.flatten() for r in ratios])
    return all_ratios.min().item(), all_ratios.max().item()


def _are_equal_to_rounding(a: Tensor, b: Tensor) -> bool:
    """Return True if float64 tensors differ by rounding at most, 1e-12 in each element."""
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-12).all())


def compile_outcome(encoding: PositionEncoding, shape: ModelShape) -> str:
    """Return "yes", or why torch.compile(fullgraph=True) does not trace a layer:
    "no: " and the error."""
    return _try_tracing(
        encoding, shape, lambda layer, *_: torch.compile(layer, fullgraph=True, backend="eager")
    )


def export_outcome(encoding: PositionEncoding, shape: ModelShape) -> str:
    """Return "yes" if torch.export makes a program for any length, by compiling the code or by
    running it on fake tensors; else why compiling it fails."""
    max_length = possible_length(encoding, _LONGEST_EXPORT)
    compiling_outcome = _try_tracing(
        encoding,
        shape,
        lambda layer, x, positions: export_layer(layer, x, positions, max_length, True),
    )
    if compiling_outcome == "yes":
        return "yes"
    running_outcome = _try_tracing(
        encoding,
        shape,
        lambda layer, x, positions: export_layer(layer, x, positions, max_length, False),
    )
    return running_outcome if running_outcome == "yes" else compiling_outcome


def _try_tracing(encoding: PositionEncoding, shape: ModelShape, trace: Callable[..., Any]) -> str:
    """Return "yes" if the program that `trace` makes of a layer and short inputs computes the same
    as the layer for longer ones, else "no: " and why. trace: takes layer, hidden states and
    positions, and returns a function of the last two."""
    layer = OneLayerModel(copy.deepcopy(encoding), shape, impl="reference").eval()
    lengths = (
        possible_length(encoding, _NUM_TRACED_TOKENS),
        possible_length(encoding, _NUM_CHECKED_TOKENS),
    )
    short_inputs, long_inputs = (
        (random_embeddings(n, shape=shape).float(), successive_positions(encoding, n))
        for n in lengths
    )
    torch.compiler.reset()  # else earlier graphs of the class count towards its limit of recompiles
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            is_equal = torch.allclose(
                trace(layer, *short_inputs)(*long_inputs), layer(*long_inputs), atol=1e-4
            )
            return "yes" if is_equal else "no: another result"
        except Exception as error:  # the tracers have classes of their own for what they lack
            return f"no: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"


def relative_forward_time(
    encoding: PositionEncoding, shape: ModelShape
) -> tuple[float, float, float]:
    """Time a layer, and return its time divided by that of a layer without an encoding: low end of
    the confidence interval, median of interleaved runs, and high end."""
    length = possible_length(encoding, COST_LENGTH)
    x = random_embeddings(length, shape=shape).float()
    layers_and_positions = [
        (OneLayerModel(e, shape).float().eval(), successive_positions(e, length))
        for e in (PositionEncoding(), copy.deepcopy(encoding))
    ]

    def measure_seconds(layer_index: int) -> float:
        """Return the seconds of one call: 0 without an encoding, 1 with it."""
        layer, positions = layers_and_positions[layer_index]
        start = time.perf_counter()
        layer(x, positions, masks.causal.bind(range(length), range(length)))
        return time.perf_counter() - start

    ratios = []
    with torch.no_grad():
        for run_index in range(NUM_TIMED_PAIRS + 1):  # the first warms up
            order = (0, 1) if run_index % 2 else (1, 0)  # neither is always the first
            seconds_by_layer = {layer_index: measure_seconds(layer_index) for layer_index in order}
            if run_index:
                ratios.append(seconds_by_layer[1] / seconds_by_layer[0])
    ratio = median_with_interval(ratios)
    return ratio.low, ratio.median, ratio.high
