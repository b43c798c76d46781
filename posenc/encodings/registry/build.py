"""Build the encoding that a text names, such as "rope:rope_theta=500000+alibi"."""

import re
from dataclasses import replace
from typing import Any

from posenc.arguments import explain_misfits
from posenc.encodings.base.compose import Compose
from posenc.encodings.base.constructor_arguments import UnknownOption, are_alike
from posenc.encodings.base.per_layer import PerLayer
from posenc.encodings.base.position_encoding import ModelShape, PositionEncoding
from posenc.encodings.registry.grammar import Part, Spec, parse
from posenc.encodings.registry.lookup import class_of_part, entry


def encoding_class(text: str) -> type[PositionEncoding]:
    """Return the class that a text names: a registered name, module:Class or file.py:Class."""
    spec = parse(text)
    part, *others = spec.parts
    if others:
        raise ValueError(f"{text!r} names {len(spec.parts)} encodings; expected one class.")
    return class_of_part(spec, part)


@explain_misfits
def create(name: str, shape: ModelShape, **options: Any) -> PositionEncoding:
    """Build the encoding that a text names for a model of this shape.

    Args:
        name: a name of `posenc.names()`, module:Class or file.py:Class, with options after a colon.
            Join encodings of one attention with +, alternate encodings by layer with /. See
            `posenc.encodings.registry.grammar`.
        shape: sizes of the model.
        options: options of a single encoding; they override those of the text and the registry.

    Raises: ValueError with the column of the mistake; TypeError for anything but a text and a
    shape.

    >>> shape = posenc.ModelShape(embed_dim=64, num_heads=4, train_length=128)
    >>> posenc.create("yarn", shape, factor=8.0).scaling.factor
    8.0
    >>> posenc.create("rope:rope_theta=500000+alibi", shape).claims.places
    (2, 3)
    >>> mixed = posenc.create("rope/nope every 4", shape)
    >>> [mixed.for_layer(i).claims.places for i in range(4)]
    [(2,), (2,), (2,), ()]
    """
    if not isinstance(name, str):
        got = name.__name__ if isinstance(name, type) else repr(name)
        raise TypeError(
            f'create: name must be a text such as "rope" or "alibi" (posenc.names() lists them), '
            f"got {got}. A class is built by calling it."
        )
    if not isinstance(shape, ModelShape):
        raise TypeError(
            "create: shape must be a posenc.ModelShape, such as "
            f"posenc.ModelShape(embed_dim=64, num_heads=4), got {shape!r}."
        )
    spec = parse(name)
    if len(spec.parts) == 1:
        return _build_part(spec, spec.parts[0], shape, options)
    if options:
        raise ValueError(
            f"{name!r} names {len(spec.parts)} encodings: give {', '.join(options)} in the text, "
            "after the one that takes it, as in rope:rope_theta=500000+alibi."
        )
    layer_encodings = [_build_layer(spec, layer, shape) for layer in spec.layers]
    if len(layer_encodings) == 1:
        return layer_encodings[0]
    encoding_by_layer = dict(
        zip(spec.layers, layer_encodings, strict=True)
    )  # a layer that appears twice is shared
    try:
        return PerLayer([encoding_by_layer[layer] for layer in spec.pattern], repeat=True)
    except ValueError as error:
        raise spec.error(1, str(error)) from error


def build_if_named(
    caller: str, encoding: Any, shape: ModelShape, *, unknown_fields: tuple[str, ...]
) -> Any:
    """Return the encoding that a text names, built for a module of this shape. Return anything but
    a text unchanged.

    unknown_fields: names of fields of `shape` that `caller`, the module, does not know:
        "train_length", "causal".
    Raises: ValueError if the encoding depends on one of these fields.
    """
    if not isinstance(encoding, str):
        return encoding
    built_encoding = create(encoding, shape)
    # A field matters if the encoding for another value of it is another encoding.
    other_values = {"train_length": 3 * shape.train_length, "causal": not shape.causal}
    for field in unknown_fields:
        other_shape = replace(shape, **{field: other_values[field]})
        if not are_alike(built_encoding, create(encoding, other_shape)):
            raise ValueError(
                f"{caller}: {encoding!r} is built from {field}, which {caller} does not know. Pass "
                f"posenc.create({encoding!r}, posenc.ModelShape(..., {field}=...))."
            )
    return built_encoding


def _build_layer(spec: Spec, parts: tuple[Part, ...], shape: ModelShape) -> PositionEncoding:
    """Build the encoding of one layer: of its only part, or composed of several."""
    members = [_build_part(spec, part, shape, {}) for part in parts]
    if len(members) == 1:
        return members[0]
    try:
        return Compose(*members)
    except ValueError as error:
        raise spec.error(parts[0].column, str(error)) from error


def _build_part(
    spec: Spec, part: Part, shape: ModelShape, options: dict[str, Any]
) -> PositionEncoding:
    """Build one encoding. Of options with the same name, those in `options` come before those in
    the text, and these before the registry's."""
    cls = class_of_part(spec, part)
    defaults = {} if part.attribute else entry(part.name_or_module).defaults
    options_in_text = {option.key: option.value for option in part.options}
    try:
        return cls.from_shape(shape, **{**defaults, **options_in_text, **options})
    except UnknownOption as error:
        column_by_option = {option.key: option.column for option in part.options}
        if error.name not in column_by_option:
            raise
        raise spec.error(column_by_option[error.name], str(error)) from error
    except (ValueError, TypeError) as error:
        for option in part.options:  # the first that the message names
            if re.search(rf"\b{re.escape(option.key)}\b", str(error)):
                raise spec.error(option.column, str(error)) from error
        raise
