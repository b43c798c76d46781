"""Check what the encodings of a comparison are in its model: whole patterns, and no twins."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from posenc.compare.plan.encodings import ComparedEncoding, build_encoding
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.train import encoding_shape
from posenc.encodings import (
    Compose,
    PerLayer,
    PositionEncoding,
    Within,
    classes_and_arguments,
)


def check_in_model(trial: TrialConfig, compared: Sequence[ComparedEncoding]) -> None:
    """Raise ValueError for an encoding by layer whose pattern is longer than this trial's model,
    and for two of posenc's encodings that do the same in every layer of it."""
    encodings = [build_encoding(entry.text, encoding_shape(trial)) for entry in compared]
    pairs = list(zip(compared, encodings, strict=True))
    for entry, encoding in pairs:
        if isinstance(encoding, PerLayer):
            try:
                encoding.check_layers(entry.label, trial.layers)
            except ValueError as error:
                raise ValueError(f"{error} Here --layers {encoding.period} would do.") from None
    of_posenc = [(entry, encoding) for entry, encoding in pairs if not entry.code]
    for (one, a), (other, b) in itertools.combinations(of_posenc, 2):
        if are_twins(a, b, trial.layers):
            raise ValueError(
                f"{one.label!r} and {other.label!r} are the same encoding in this model of "
                f"{trial.layers} layers: leave one out."
            )


def are_twins(a: PositionEncoding, b: PositionEncoding, num_layers: int) -> bool:
    """Return True if two encodings of posenc are known to do the same in every layer.

    Compares classes and arguments, not results: a scaling by 1 and no scaling are no twins.
    """
    if type(a) is type(b) is not PerLayer and classes_and_arguments(a) == classes_and_arguments(b):
        return True
    # Both patterns begin again together after this many layers.
    common_period = math.lcm(*(e.period if isinstance(e, PerLayer) else 1 for e in (a, b)))
    layers = range(min(num_layers, common_period))
    return _describe_layers(a, layers) == _describe_layers(b, layers)


def _describe_layers(encoding: PositionEncoding, layers: Sequence[int]) -> list[Any]:
    """Return a description of each layer: for every part that acts in it, the first layer with the
    same object, and its class and arguments. Equal descriptions do the same."""
    first_layer: dict[int, int] = {}  # by the id of a part
    layer_descriptions = []
    for index in layers:
        acting = _parts_in_layer(encoding, index)
        parts = [(first_layer.setdefault(id(e), index), _class_and_arguments(e)) for e in acting]
        layer_descriptions.append(
            sorted(parts, key=repr) if _order_is_irrelevant(acting) else parts
        )
    return layer_descriptions


def _class_and_arguments(encoding: PositionEncoding) -> Any:
    """Return the class and arguments of an encoding, to compare; of one within a mask, which has no
    comparable ones, the id of the object."""
    return id(encoding) if isinstance(encoding, Within) else classes_and_arguments(encoding)


def _parts_in_layer(encoding: PositionEncoding, index: int) -> list[PositionEncoding]:
    """Return the parts that act in a layer; embeddings are encoded once, in layer 0."""
    in_layer = encoding.acting_encoding(index) if isinstance(encoding, PerLayer) else encoding
    parts = in_layer.members if isinstance(in_layer, Compose) else (in_layer,)
    acting = [e for e in parts if index == 0 or e.claims.places != (1,)]
    return [e for e in acting if type(e) is not PositionEncoding]  # the base class does nothing


def _order_is_irrelevant(parts: Sequence[PositionEncoding]) -> bool:
    """Return True if the order of the parts changes nothing: they act at different places, or add
    to the same scores."""
    places = [place for e in parts for place in e.claims.places if place != 3]  # 3: the scores
    return len(places) == len(set(places)) and all(e.claims.additive for e in parts)
