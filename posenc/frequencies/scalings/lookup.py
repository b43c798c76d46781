"""Look scalings up: by name, and by what transformers calls them."""

from collections.abc import Mapping
from typing import Any

from posenc.frequencies.scalings import registry
from posenc.frequencies.scalings.scaling import RopeType, Scaling

SCALINGS: dict[str, type[Scaling]] = {
    scaling.name: scaling for scaling in vars(registry).values() if isinstance(scaling, type)
}
"""The class of each scaling by its name, which posenc's registry and commands use."""
ROPE_TYPES: dict[str, RopeType] = {
    scaling.rope_type.name: scaling.rope_type
    for scaling in SCALINGS.values()
    if scaling.rope_type is not None
}
"""The rope_type of each scaling that transformers has, by the name that transformers gives it."""


def scaling_of(
    parameters: Mapping[str, Any],
    training_length: int,
    max_length: int,
    attention_factor: float | None,
) -> Scaling | None:
    """Return the scaling that the rope_parameters of a config describe, in the spelling of
    transformers 5. Return None if their rope_type is "default", which scales nothing.

    training_length, max_length: lengths in tokens, the training length and max_position_embeddings.
    attention_factor: the config's factor of cos and sin; see `Scaling.from_rope_parameters`.

    Raises: ValueError for a rope_type that posenc does not know.
    """
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        return None
    for scaling in SCALINGS.values():
        if scaling.rope_type is not None and scaling.rope_type.name == rope_type:
            return scaling.from_rope_parameters(
                parameters, training_length, max_length, attention_factor
            )
    raise ValueError(
        f"rope_type {rope_type!r} is not one that posenc knows; nothing is assumed about it."
    )
