"""Bring what a runtime answered into the words of what posenc knows of it."""

from dataclasses import replace

from posenc.dialects.ask.asking import Asked, Rotation
from posenc.dialects.computed import ComputedPositions, LayerRotation, RefusedError, Switch
from posenc.dialects.model import Model

EVERY_KIND = "all"
FULL = "full_attention"
SERVERS = ("vllm", "sglang")
"""Runtimes that admit no text beyond a length."""
CHANGES: dict[str, Switch] = {"vllm": "start", "sglang": "batch"}
"""When the frequencies of a runtime change, if they do; "length" of the others."""


def runtime_name_of(asked: Asked) -> str:
    """Return posenc's name for the runtime that answered, a key of RUNTIMES: "transformers-4" or
    "transformers-5" for transformers."""
    if asked.runtime != "transformers":
        return asked.runtime
    return f"transformers-{4 if asked.version.startswith('4.') else 5}"


def as_computed(
    asked: Asked, known: ComputedPositions, model: Model | None = None
) -> ComputedPositions:
    """Return an installed runtime's answer in the form of an emulator's.

    known: what posenc knows of the runtime. Which layers rotate, and the softmax scale, are taken
    from it where the modules do not tell them, and posenc knows them. model: the language model of
    the config, for the kinds of its layers where a runtime tells layers only.
    """
    answer = ComputedPositions(version=asked.version, asked=True)
    if asked.no_model:
        return replace(answer, error=asked.refuses, known="no model")
    if asked.refuses:
        longest = asked.admits if asked.runtime in SERVERS else None
        return replace(answer, error=asked.refuses, max_length=longest)
    if asked.unmeasured:
        return replace(answer, error=asked.unmeasured, known="unknown")
    try:
        layers = _rotations_by_kind(asked.rotations, model)
    except RefusedError as nothing:
        return replace(answer, error=str(nothing), known="unknown")
    without_rotation, scale = asked.without_rotation, None
    if without_rotation is None:
        without_rotation = known.without_rotation
    elif not layers and model is not None:  # nor do layers without attention
        without_rotation = tuple(range(model.num_layers))
    if len(asked.softmax_scales) == 1:
        (scale,) = asked.softmax_scales
    elif known.is_known:
        scale = known.softmax_scale
    return replace(
        answer,
        layers=layers,
        softmax_scale=scale,
        switch=CHANGES.get(asked.runtime, "length") if asked.changes else "static",
        without_rotation=without_rotation,
        max_length=asked.admits if asked.runtime in SERVERS else None,
        stops=asked.stops,
    )


def _rotations_by_kind(
    rotations: tuple[Rotation, ...], model: Model | None
) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer.

    Raises: RefusedError where two rotations are of one kind, so that nothing tells which layers use
    which.
    """
    if len(rotations) > 1 and all(rotation.layers is not None for rotation in rotations):
        return _rotations_by_layers(rotations, model)
    kinds = [rotation.kind for rotation in rotations]
    if len(set(kinds)) < len(kinds):
        named = ", ".join(rotation.module for rotation in rotations)
        raise RefusedError(f"nothing tells which layers use which of {named}")
    # Where one kind has a module of its own, the unnamed module serves the others.
    unnamed = EVERY_KIND if len(kinds) == 1 else FULL
    return {
        rotation.kind or unnamed: LayerRotation(rotation.inv_freq, rotation.multiplier)
        for rotation in rotations
    }


def _rotations_by_layers(
    rotations: tuple[Rotation, ...], model: Model | None
) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer, of several that name their layers.

    A kind whose layers rotate differently has one entry for those of its first layer, and one for
    each other rotation, named by its first layer. Without a model, all layers are of one kind.
    """
    by_layer = {index: rotation for rotation in rotations for index in rotation.layers or ()}
    kinds = {EVERY_KIND: tuple(sorted(by_layer))}
    if model is not None and model.is_known and model.has_rope_dict_per_kind:
        kinds = {kind: model.layers_of_kind(kind) for kind in model.layer_kinds}
    layers: dict[str, LayerRotation] = {}
    for kind, indices in kinds.items():
        of_kind: list[LayerRotation] = []
        for index in indices:
            if index not in by_layer:
                continue
            rotation = LayerRotation(by_layer[index].inv_freq, by_layer[index].multiplier)
            if rotation not in of_kind:
                name = f"{kind} (layer {index} and others)" if of_kind else kind
                layers[name] = rotation
                of_kind.append(rotation)
    return layers
