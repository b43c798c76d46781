"""Bring what a runtime answered into the words of what posenc knows of it."""

from dataclasses import replace

from posenc.dialects.ask.asking import Asked, Rotation
from posenc.dialects.computed import ComputedPositions, LayerRotation, RefusedError

EVERY_KIND = "all"
FULL = "full_attention"


def runtime_name_of(asked: Asked) -> str:
    """Return posenc's name for the runtime that answered, a key of RUNTIMES: "transformers-4" or
    "transformers-5" for transformers."""
    if asked.runtime != "transformers":
        return asked.runtime
    return f"transformers-{4 if asked.version.startswith('4.') else 5}"


def as_computed(asked: Asked, known: ComputedPositions) -> ComputedPositions:
    """Return an installed runtime's answer in the form of an emulator's.

    known: what posenc knows of the runtime. Which layers rotate, and the softmax scale, are taken
    from it where the modules do not tell them, and posenc knows them.
    """
    answer = ComputedPositions(version=asked.version, asked=True)
    if asked.refuses:
        return replace(answer, error=asked.refuses)
    if asked.unmeasured:
        return replace(answer, error=asked.unmeasured, known="unknown")
    try:
        layers = _rotations_by_kind(asked.rotations)
    except RefusedError as nothing:
        return replace(answer, error=str(nothing), known="unknown")
    without_rotation, scale = asked.without_rotation, None
    if without_rotation is None:
        without_rotation = known.without_rotation
    if len(asked.softmax_scales) == 1:
        (scale,) = asked.softmax_scales
    elif known.is_known:
        scale = known.softmax_scale
    return replace(
        answer,
        layers=layers,
        softmax_scale=scale,
        switch="length" if asked.changes else "static",
        without_rotation=without_rotation,
        stops=asked.stops,
    )


def _rotations_by_kind(rotations: tuple[Rotation, ...]) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer.

    Raises: RefusedError where two rotations are of one kind, so that nothing tells which layers use
    which.
    """
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
