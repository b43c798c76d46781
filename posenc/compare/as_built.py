"""The effective spec of an encoding: what ran, in words and numbers."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from posenc.encoding.base import PositionEncoding
from posenc.encoding.shape import ModelShape
from posenc.registry import entry


def effective_spec(name: str, encoding: PositionEncoding, shape: ModelShape) -> dict[str, str]:
    """Every constructor argument of `encoding`, given or not, and what it claims."""
    spec = {"name": name, "class": type(encoding).__name__}
    fields = {f.name: getattr(shape, f.name) for f in dataclasses.fields(shape)}
    known = fields | entry(name).defaults
    for argument, parameter in inspect.signature(type(encoding)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # of a class without a constructor of its own
        value: Any = getattr(encoding, argument, known.get(argument, parameter.default))
        spec[argument] = str(value)
    limit = encoding.claims.max_positions
    return spec | {
        "places": ", ".join(map(str, encoding.claims.places)) or "none",
        "logits scaled by": f"{encoding.scale(shape.head_dim):.6g}",  # type: ignore[arg-type]
        "parameters shared by": "the layers"
        if encoding.claims.scope == "model"
        else "no other layer",
        "positions": "no limit" if limit is None else f"{limit}",
        "source": encoding.claims.source,
    }
