"""Check what the encodings of a comparison are in its model: whole patterns, and no twins."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from posenc.compare.plan.encodings import Compared
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.train import shape_of
from posenc.encodings import (
    Compose,
    PerLayer,
    PositionEncoding,
    Within,
    classes_and_arguments,
    create,
)


def check_in_model(trial: TrialConfig, compared: Sequence[Compared]) -> None:
    """Refuse encodings that this trial's model cannot tell from others.

    Raises: ValueError for a pattern of layers that is longer than the model, and for two encodings
    that differ in their text only.
    """
    encodings = [create(entry.text, shape_of(trial)) for entry in compared]
    pairs = list(zip(compared, encodings, strict=True))
    for entry, encoding in pairs:
        if isinstance(encoding, PerLayer):
            try:
                encoding.check_layers(entry.label, trial.layers)
            except ValueError as error:
                raise ValueError(f"{error} Here --layers {encoding.period} would do.") from None
    of_posenc = [(entry, encoding) for entry, encoding in pairs if not entry.code]
    for (one, a), (other, b) in itertools.combinations(of_posenc, 2):
        if twins(a, b, trial.layers):
            raise ValueError(
                f"{one.label!r} and {other.label!r} are the same encoding in this model of "
                f"{trial.layers} layers: leave one out."
            )


def twins(a: PositionEncoding, b: PositionEncoding, num_layers: int) -> bool:
    """Return True if two encodings of posenc are known to do the same in every layer.

    Compares classes and arguments, not results: a scaling by 1 is no twin of none.
    """
    if type(a) is type(b) is not PerLayer and classes_and_arguments(a) == classes_and_arguments(b):
        return True
    repeated = math.lcm(*(e.period if isinstance(e, PerLayer) else 1 for e in (a, b)))
    layers = range(min(num_layers, repeated))
    return _per_layer(a, layers) == _per_layer(b, layers)


def _per_layer(encoding: PositionEncoding, layers: Sequence[int]) -> list[Any]:
    """Describe what acts in each layer: its arguments, and the first layer that shares it."""
    first: dict[int, int] = {}
    layer_descriptions = []
    for index in layers:
        acting = _acting(encoding, index)
        described = [(first.setdefault(id(e), index), _described(e)) for e in acting]
        layer_descriptions.append(sorted(described, key=repr) if _commute(acting) else described)
    return layer_descriptions


def _described(encoding: PositionEncoding) -> Any:
    """Return class and arguments; of a mask, which has no comparable ones, the object itself."""
    return id(encoding) if isinstance(encoding, Within) else classes_and_arguments(encoding)


def _acting(encoding: PositionEncoding, index: int) -> list[PositionEncoding]:
    """Return the parts that act in a layer; embeddings are encoded once, in layer 0."""
    of_layer = encoding.acting_encoding(index) if isinstance(encoding, PerLayer) else encoding
    parts = of_layer.members if isinstance(of_layer, Compose) else (of_layer,)
    no_later = [e for e in parts if index == 0 or e.claims.places != (1,)]
    return [e for e in no_later if type(e) is not PositionEncoding]


def _commute(parts: Sequence[PositionEncoding]) -> bool:
    """Return True if the order of the parts changes nothing: they act at different places, or add
    to the same scores."""
    places = [place for e in parts for place in e.claims.places if place != 3]
    return len(places) == len(set(places)) and all(e.claims.additive for e in parts)
