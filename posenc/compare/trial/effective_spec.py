"""The effective spec of an encoding: its settings as it ran, and a hash of its code."""

import dataclasses
import inspect
from typing import Any

from posenc.encodings import ModelShape, PositionEncoding, entry, parse

AXES = "components of a position"
"""Key in the spec of an encoding whose positions have several components."""


def effective_spec(name: str, encoding: PositionEncoding, shape: ModelShape) -> dict[str, str]:
    """Return the settings of an encoding as texts, for the report: name, class, every constructor
    argument, given or not, and its claims.

    name: the text that built it; for several encodings together it replaces the arguments.
    """
    spec = {"name": name, "class": type(encoding).__name__}
    parts = parse(name).parts
    spec |= _constructor_arguments(name, encoding, shape) if len(parts) == 1 else {"made of": name}
    limit = encoding.claims.max_positions
    axes = encoding.claims.num_axes
    if axes > 1:
        spec[AXES] = f"{axes}"
    return spec | {
        "places": ", ".join(map(str, encoding.claims.places)) or "none",
        "logits scaled by": f"{encoding.scale(shape.head_dim):.6g}",  # type: ignore[arg-type]
        "parameters shared by": "the layers"
        if encoding.claims.scope == "model"
        else "no other layer",
        "positions": "no limit" if limit is None else f"{limit}",
        "source": encoding.claims.source,
    }


def _constructor_arguments(
    name: str, encoding: PositionEncoding, shape: ModelShape
) -> dict[str, str]:
    """Return the constructor arguments of an encoding as text: its own attributes or, where it
    keeps none, what it was built with."""
    (part,) = parse(name).parts
    fields = {f.name: getattr(shape, f.name) for f in dataclasses.fields(shape)}
    defaults = {} if part.attribute else entry(part.name_or_module).defaults
    known = fields | defaults | {option.key: option.value for option in part.options}
    arguments = {}
    for argument, parameter in inspect.signature(type(encoding)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # the class has no constructor of its own
        value: Any = getattr(encoding, argument, known.get(argument, parameter.default))
        arguments[argument] = str(value)
    return arguments
