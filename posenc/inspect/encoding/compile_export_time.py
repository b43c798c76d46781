"""Measure if a layer with an encoding compiles and exports, and how long it takes."""

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from posenc import masks
from posenc.encodings import ModelShape, PositionEncoding
from posenc.testing.contract import export_layer
from posenc.testing.harness import (
    OneLayerModel,
    possible_length,
    random_embeddings,
    successive_positions,
)

COST_LENGTH = 512
"""Tokens of the timed layer; this number and those below are chosen, not derived."""
_LONGEST_EXPORT = 4096
"""Tokens up to which an exported program must serve."""
_TRACED_TOKENS, _CHECKED_TOKENS = 12, 31
"""Tokens of the call that is traced, and of a longer one by which its program is checked."""


def compile_outcome(encoding: PositionEncoding, shape: ModelShape) -> str:
    """Return "yes", or why torch.compile(fullgraph=True) does not trace a layer:
    "no: " and the error."""
    return _try_tracing(
        encoding, shape, lambda layer, *_: torch.compile(layer, fullgraph=True, backend="eager")
    )


def export_outcome(encoding: PositionEncoding, shape: ModelShape) -> str:
    """Return "yes" if torch.export makes a program for any length, by compiling the code or by
    running it on fake tensors; else why compiling it fails."""
    longest = possible_length(encoding, _LONGEST_EXPORT)
    compiled = _try_tracing(
        encoding, shape, lambda layer, x, at: export_layer(layer, x, at, longest, True)
    )
    if compiled == "yes":
        return "yes"
    run = _try_tracing(
        encoding, shape, lambda layer, x, at: export_layer(layer, x, at, longest, False)
    )
    return run if run == "yes" else compiled


def _try_tracing(encoding: PositionEncoding, shape: ModelShape, trace: Callable[..., Any]) -> str:
    """Return "yes" if the program that `trace` makes of a layer and short inputs computes the same
    as the layer for longer ones, else "no: " and why. trace: takes layer, hidden states and
    positions, and returns a function of the last two."""
    layer = OneLayerModel(copy.deepcopy(encoding), shape, impl="reference").eval()
    lengths = (
        possible_length(encoding, _TRACED_TOKENS),
        possible_length(encoding, _CHECKED_TOKENS),
    )
    short, long = (
        (random_embeddings(n, shape=shape).float(), successive_positions(encoding, n))
        for n in lengths
    )
    torch._dynamo.reset()  # else earlier graphs of the class count towards its limit of recompiles
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            is_equal = torch.allclose(trace(layer, *short)(*long), layer(*long), atol=1e-4)
            return "yes" if is_equal else "no: another result"
        except Exception as error:  # the tracers have classes of their own for what they lack
            return f"no: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"


TIMED_PAIRS = 21
"""Interleaved runs. The 6th to the 16th of their sorted ratios contain the median in 97 of 100
measurements."""


def relative_forward_time(
    encoding: PositionEncoding, shape: ModelShape
) -> tuple[float, float, float]:
    """Time a layer, and return its time divided by that of a layer without an encoding: low end of
    the confidence interval, median of interleaved runs, and high end."""
    length = possible_length(encoding, COST_LENGTH)
    x = random_embeddings(length, shape=shape).float()
    layers = [
        (OneLayerModel(e, shape).float().eval(), successive_positions(e, length))
        for e in (PositionEncoding(), copy.deepcopy(encoding))
    ]

    def seconds(layer_index: int) -> float:
        """Return the seconds of one call: 0 without an encoding, 1 with it."""
        layer, positions = layers[layer_index]
        start = time.perf_counter()
        layer(x, positions, masks.causal.bind(range(length), range(length)))
        return time.perf_counter() - start

    ratios = []
    with torch.no_grad():
        for turn in range(TIMED_PAIRS + 1):  # the first warms up
            order = (0, 1) if turn % 2 else (1, 0)  # neither is always the first
            times = {which: seconds(which) for which in order}
            if turn:
                ratios.append(times[1] / times[0])
    ratios.sort()
    return ratios[5], ratios[TIMED_PAIRS // 2], ratios[-6]  # 6th, median and 16th, see TIMED_PAIRS
