"""The effective spec of an encoding: what ran, in words and numbers, and of which code."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from posenc.encodings.base.base import PositionEncoding
from posenc.encodings.base.shape import ModelShape
from posenc.encodings.registry import entry, parse
from posenc.encodings.registry.build import class_of_part
from posenc.encodings.registry.content import hash_of

AXES = "components of a position"
"""A key of the spec of an encoding that has several."""


def code_of(text: str) -> str:
    """Hash the files behind an encoding that are not posenc's, as they are now; "" without any."""
    spec = parse(text)
    return hash_of([class_of_part(spec, part) for part in spec.parts])


def effective_spec(name: str, encoding: PositionEncoding, shape: ModelShape) -> dict[str, str]:
    """Every constructor argument of `encoding`, given or not, and what it claims; of several that
    make one, the text `name` that made them."""
    spec = {"name": name, "class": type(encoding).__name__}
    parts = parse(name).parts
    spec |= _arguments(name, encoding, shape) if len(parts) == 1 else {"made of": name}
    limit, axes = encoding.claims.max_positions, encoding.claims.num_axes
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


def _arguments(name: str, encoding: PositionEncoding, shape: ModelShape) -> dict[str, str]:
    (part,) = parse(name).parts
    fields = {f.name: getattr(shape, f.name) for f in dataclasses.fields(shape)}
    defaults = {} if part.attribute else entry(part.where).defaults
    known = fields | defaults | {option.key: option.value for option in part.options}
    found = {}
    for argument, parameter in inspect.signature(type(encoding)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # of a class without a constructor of its own
        value: Any = getattr(encoding, argument, known.get(argument, parameter.default))
        found[argument] = str(value)
    return found
