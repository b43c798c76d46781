"""Write rotary settings into a transformers config, so that stock tools compute the same
frequencies."""

import math
from typing import Any

from posenc.frequencies.float64_formulas import ntk_theta
from posenc.frequencies.scalings.registry import NTK, Linear, LongRoPE, Proportional, YaRN
from posenc.frequencies.scalings.scaling import Scaling, rope_frequencies
from posenc.hf.rope.settings import RopeSetting, head_dim_of

FAMILIES_WITH_ONLY_LONGROPE = ("phi3", "phi4_multimodal")
"""Families whose config accepts only the rope types "default" and "longrope"."""
MROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""Keys that assign pairs to the components of positions in images; extending leaves them as they
are."""
NO_ROTATION_DIVISOR = 1e30
"""Divisor of a frequency after which float32 shows no rotation at any position."""


def write_settings(config: Any, settings: tuple[RopeSetting, ...], max_positions: int) -> None:
    """Write settings and the new maximum length into a transformers config, in place."""
    only_longrope = config.model_type in FAMILIES_WITH_ONLY_LONGROPE
    all_before = config.rope_parameters
    written = {}
    for setting in settings:
        before = all_before[setting.layer_type] if setting.layer_type else all_before
        is_proportional = before["rope_type"] == "proportional"
        head_dim = head_dim_of(config, setting.layer_type)
        sections = {key: before[key] for key in MROPE_KEYS if key in before}
        parameters = rope_parameters(
            setting, head_dim, only_longrope, is_proportional=is_proportional
        )
        written[setting.layer_type] = {**parameters, **sections}
    if None in written and "partial_rotary_factor" in all_before:
        # Phi-3 needs the key even if all channels are rotated.
        rotated_fraction = settings[0].rotary_dim / head_dim_of(config)
        written[None].setdefault("partial_rotary_factor", rotated_fraction)
    if None in written:
        config.rope_parameters = written[None]
    else:  # keep the entries of layers that do not rotate, None
        config.rope_parameters = {**all_before, **written}
    config.max_position_embeddings = max_positions
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = settings[0].original_length


def rope_parameters(
    setting: RopeSetting,
    head_dim: int,
    only_longrope: bool = False,
    *,
    is_proportional: bool = False,
) -> dict[str, Any]:
    """Return rope_parameters with which stock transformers computes the setting's frequencies.

    If transformers, or a family with few rope types (only_longrope), has no type for the
    frequencies, they are written as longrope with equal short and long factors. is_proportional:
    the model's type is proportional already; other models would apply its fraction to attention
    too, and rotate fewer channels.

    Raises: ValueError if no type can express the setting.
    """
    common: dict[str, Any] = {"rope_theta": setting.rope_theta}
    if setting.rotary_dim != head_dim:
        common["partial_rotary_factor"] = setting.rotary_dim / head_dim
    return {**common, **_scaling_keys(setting, only_longrope, is_proportional)}


def _scaling_keys(
    setting: RopeSetting, only_longrope: bool, is_proportional: bool
) -> dict[str, Any]:
    """Return the rope type and the keys that belong to it: rope_parameters without the fraction of
    rotated channels. The arguments are those of `rope_parameters`."""
    scaling = setting.scaling
    compressed = setting.compression != 1.0

    # Every family has the types longrope and default.
    if isinstance(scaling, LongRoPE):
        return _longrope_keys(setting, scaling)
    if scaling is None and not compressed:
        return {"rope_type": "default"}
    if isinstance(scaling, NTK) and not compressed:
        base = ntk_theta(setting.rope_theta, scaling.factor, setting.rotary_dim)
        return {"rope_type": "default", "rope_theta": base}
    if only_longrope:
        return _fixed_frequencies_as_longrope(setting)

    # The compression is a linear scaling, and two of them are one by their product.
    if scaling is None:
        return {"rope_type": "linear", "factor": setting.compression}
    if isinstance(scaling, Linear):
        return {"rope_type": "linear", "factor": scaling.factor * setting.compression}
    if compressed:  # no rope type has the rest on top of a linear scaling
        return _fixed_frequencies_as_longrope(setting)
    return _stock_type_keys(setting, is_proportional)


def _longrope_keys(setting: RopeSetting, scaling: LongRoPE) -> dict[str, Any]:
    """Return the keys of LongRoPE, which divides frequencies by a factor for each pair."""
    keys = _type_and_keys(setting, scaling)
    for name in ("short_factor", "long_factor"):
        keys[name] = [factor * setting.compression for factor in keys[name]]
    return keys


def _type_and_keys(setting: RopeSetting, scaling: Scaling) -> dict[str, Any]:
    """Return the type that transformers has for a scaling, the length of the training, if the type
    has it, and the keys of the scaling itself."""
    assert scaling.rope_type is not None
    keys: dict[str, Any] = {"rope_type": scaling.rope_type.name}
    if scaling.rope_type.has_original_length:
        keys["original_max_position_embeddings"] = setting.original_length
    return {**keys, **scaling.rope_parameters(setting.rotary_dim)}


def _stock_type_keys(setting: RopeSetting, is_proportional: bool) -> dict[str, Any]:
    """Return the keys of the type that transformers has for this scaling, or longrope's.

    is_proportional: whether the type may be proportional, see `rope_parameters`.
    """
    scaling = setting.scaling
    assert scaling is not None
    if scaling.rope_type is None or (isinstance(scaling, Proportional) and not is_proportional):
        return _fixed_frequencies_as_longrope(setting)
    keys = _type_and_keys(setting, scaling)
    if isinstance(scaling, YaRN):
        del keys["attention_factor"]
        keys.update(_temperature_keys(setting, scaling.factor))
    return keys


def _temperature_keys(setting: RopeSetting, factor: float) -> dict[str, float]:
    """Return the keys of YaRN's temperature: attention_factor and, if the model has them, mscale
    and mscale_all_dim. Return only these two if they mean the same: next to attention_factor 1,
    vLLM omits them in DeepSeek's scores."""
    meant = setting.frequencies().attention_factor
    pair = {"mscale": setting.mscale, "mscale_all_dim": setting.mscale_all_dim}
    present = {key: value for key, value in pair.items() if value is not None}
    if len(present) == len(pair) and math.isclose(meant, setting.yarn_attention_factor(factor)):
        return present
    return {"attention_factor": meant, **present}


def _fixed_frequencies_as_longrope(setting: RopeSetting) -> dict[str, Any]:
    """Return longrope's keys for frequencies that do not change with the length.

    Raises: ValueError for a scaling that changes them.
    """
    scaling = setting.scaling
    if scaling is not None and scaling.depends_on_length:
        raise ValueError(
            f"{type(scaling).__name__} changes with the length, and on top of a linear scaling "
            "or in this family no config can say so"
        )
    return _frequencies_as_longrope(setting)


def _frequencies_as_longrope(setting: RopeSetting) -> dict[str, Any]:
    """Return longrope's keys for the setting's frequencies at the training length: longrope divides
    those without scaling by a factor for each pair."""
    frequencies = setting.frequencies()
    unscaled = rope_frequencies(setting.rotary_dim, setting.rope_theta).inv_freq
    # longrope divides, so a pair that does not rotate gets a wavelength beyond any text.
    factors = [
        float(p / f) if f else NO_ROTATION_DIVISOR
        for p, f in zip(unscaled, frequencies.inv_freq, strict=True)
    ]
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": setting.original_length,
        "short_factor": factors,
        "long_factor": factors,
        "factor": max(1.0, *(f for f in factors if f < NO_ROTATION_DIVISOR)),
        "attention_factor": frequencies.attention_factor,
    }
