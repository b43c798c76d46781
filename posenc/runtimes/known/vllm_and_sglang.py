"""What vLLM and SGLang share: a limit on the length, and longrope's two lists."""

from collections.abc import Callable, Mapping
from typing import Any

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import (
    ComputedPositions,
    LayerRotation,
    NotReadError,
    RefusedError,
    Switch,
    first_changing_switch,
    require_factors,
    require_number,
)
from posenc.runtimes.config_model import Model

Parameters = Mapping[str, Any]
LENGTH_OPTIONS = {
    "vllm": ("max_model_len", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
    "sglang": ("context_length", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"),
}
"""What the length is called, and the variable that lifts its limit."""

FAMILIES_OF_PLAIN_LATENT = ("minicpm3",)
"""Families with latent attention whose file in both servers builds the usual rotation for it."""
TYPES_LOSING_SECTIONS = ("linear", "dynamic", "llama3", "longrope", "proportional", "ntk")
"""Types whose classes rotate by one position, so that mrope_section is lost; nobody has read what
comes of it."""


def compute_for_server(
    runtime: str,
    model: Model,
    resolved_dicts: Mapping[str, Parameters],
    length: int | None,
    longest_admitted: int,
    rotation: Callable[[Parameters, Model, int], LayerRotation],
    softmax_scale: Callable[[Model, Parameters], float],
    frequency_switch: Callable[[Parameters, Model], Switch],
) -> ComputedPositions:
    """Return what a server computes that was started for `length` tokens and admits
    `longest_admitted`.

    resolved_dicts: the loaded rope dict of each kind of layer. rotation, softmax_scale,
    frequency_switch: what the runtime makes of one of them.
    Raises: RefusedError for a longer length, or what the runtime's rotation refuses.
    """
    if length is not None and length > longest_admitted:
        length_option, environment_variable = LENGTH_OPTIONS[runtime]
        raise RefusedError(
            f"ValueError: User-specified {length_option} ({length}) is greater than the derived "
            f"{length_option} ({longest_admitted}); {environment_variable}=1 would allow it",
            longest_admitted,
        )
    try:
        rotations = {
            kind: rotation(p, model.with_sizes_of_kind(kind), length or model.max_positions)
            for kind, p in resolved_dicts.items()
        }
        scale_of_model = softmax_scale(model, next(iter(resolved_dicts.values())))
    except NotReadError:
        raise
    except RefusedError as refused:
        raise RefusedError(str(refused), longest_admitted) from refused
    return ComputedPositions(
        None,
        rotations,
        scale_of_model,
        first_changing_switch(frequency_switch(p, model) for p in resolved_dicts.values()),
        longest_admitted,
        model.without_rotation,
    )


def has_latent_rotation(model: Model) -> bool:
    """Return True if the server's model file builds the rotation of DeepSeek's latent attention: it
    does for every model with latent attention but those of FAMILIES_OF_PLAIN_LATENT."""
    return model.is_mla and model.model_type not in FAMILIES_OF_PLAIN_LATENT


def longrope_rotation(
    p: Parameters,
    model: Model,
    plain_inv_freq: tuple[float, ...],
    original_length: float,
    *,
    is_long: bool,
) -> LayerRotation:
    """Return a layer whose plain frequencies are divided by one of longrope's two lists, with its
    own multiplier or the one that follows from the two lengths.

    p: the rope dict. plain_inv_freq: frequencies without scaling, one a pair. original_length: the
    training length. is_long: take the list for texts beyond it.
    Raises: RefusedError for interleaved pairs or a list that does not fit.
    """
    if model.interleaved:
        raise RefusedError(
            "ValueError: `Phi3LongRoPEScaledRotaryEmbedding` only supports neox_style."
        )
    factors_by_name = {
        name: require_factors(p, f"{name}_factor", len(plain_inv_freq))
        for name in ("short", "long")
    }
    name_of_list = "long" if is_long else "short"
    stated_mscale = p.get(f"{name_of_list}_mscale")
    attention_factor = float64_formulas.longrope_attention_factor(
        model.max_positions / original_length, original_length
    )
    multiplier = (
        attention_factor
        if stated_mscale is None
        else require_number(stated_mscale, f"{name_of_list}_mscale")
    )
    return LayerRotation(
        float64_formulas.divide_each(plain_inv_freq, factors_by_name[name_of_list]), multiplier
    )
