"""Measure how far a result moves under changes that should not matter: padding, packing, batch,
cache, shift.

Each function returns the largest difference of an output in float64, relative to the outputs'
size: below 1e-9 it is rounding.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from posenc.attend.cache import KVCache
from posenc.encodings import ModelShape, PositionEncoding
from posenc.testing.layer import Layer, hidden, moved, room, tokens
from posenc.testing.sequences import in_a_pack, next_to_padding

ROUNDING = 1e-9
FAR = 20_011
"""A shift that is not a multiple of a group, a chunk or a period."""


def measure(encoding: PositionEncoding, shape: ModelShape) -> dict[str, float]:
    """Measure every difference, by name."""
    encoding = moved(copy.deepcopy(encoding)).double()
    layer = Layer(encoding, shape).double().eval()
    checks: dict[str, Callable[[Layer, ModelShape], float]] = {
        "shift": shift,
        "padding": padding,
        "packing": packing,
        "batch": batch,
        "cache": cache,
    }
    with torch.no_grad():
        return {name: check(layer, shape) for name, check in checks.items()}


def shift(layer: Layer, shape: ModelShape) -> float:
    """Return how far results move when all positions are shifted by one number."""
    encoding = layer.encoding
    limit = encoding.claims.max_positions
    length = 41 if limit is None else max(1, min(41, limit // 2))
    by = FAR if limit is None else max(1, min(FAR, limit - length))
    x, positions = hidden(length, shape), tokens(encoding, length)
    if (
        limit is None and encoding.claims.num_axes == 1
    ):  # beyond the training length: maps act there
        positions = positions * -(-2 * shape.train_length // length)
    if limit is not None and encoding.claims.num_axes > 1:
        positions, by = positions % max(1, limit // 2), limit // 2
    return _gap(layer(x, positions), layer(x, positions + by))


def padding(layer: Layer, shape: ModelShape) -> float:
    """Return how far results move when sequences are padded on either side next to longer ones."""
    return max(_gap(padded, alone) for padded, alone, _ in next_to_padding(layer, shape))


def packing(layer: Layer, shape: ModelShape) -> float:
    """Return how far results move when documents are packed into one sequence."""
    return max(_gap(packed, alone) for packed, alone, _ in in_a_pack(layer, shape))


def batch(layer: Layer, shape: ModelShape) -> float:
    """Return how far a row's results move next to rows with other content at far positions."""
    encoding = layer.encoding
    length = room(encoding, 17)
    near = tokens(encoding, length)
    far = near + 5000 if encoding.claims.max_positions is None else near.flip(0)
    x = hidden(length, shape, batch=2)
    x[1] *= 7
    return _gap(layer(x, torch.stack([near, far]))[:1], layer(x[:1], near[None]))


def cache(layer: Layer, shape: ModelShape) -> float:
    """Return how far results move when tokens come one by one with a cache, each step knowing the
    length so far.

    The length passes the training length on the way, for methods whose frequencies follow it.
    """
    encoding = layer.encoding
    length = room(encoding, 41)
    x, positions = hidden(length, shape), tokens(encoding, length)
    kept, before = KVCache(), max(0, shape.train_length - length // 2)
    steps = [
        layer(x[:, t : t + 1], positions[t : t + 1], cache=kept, length=before + t + 1)
        for t in range(length)
    ]
    return _gap(layer(x, positions, length=before + length), torch.cat(steps, dim=1))


def _gap(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()
