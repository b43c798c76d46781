"""Write rotary settings into a transformers config, so that stock tools compute the same
frequencies."""

import math
from typing import Any

from posenc.encodings import rope_scaling as rs
from posenc.hf.rope.settings import RopeSetting, head_size

FEW_WORDS = ("phi3", "phi4_multimodal")
"""Families whose config accepts only the rope types "default" and "longrope"."""
SECTIONS = ("mrope_section", "mrope_interleaved")
"""Keys that assign pairs to the components of positions in images; extending leaves them as they
are."""
STANDSTILL = 1e30
"""Divisor of a frequency after which float32 shows no rotation at any position."""


def write_settings(config: Any, settings: tuple[RopeSetting, ...], max_positions: int) -> None:
    """Write settings and the new maximum length into a transformers config, in place."""
    few_words = config.model_type in FEW_WORDS
    said = config.rope_parameters
    written = {}
    for s in settings:
        own = said[s.layer_type] if s.layer_type else said
        cut = own["rope_type"] == "proportional"
        head_dim = head_size(config, s.layer_type)
        sections = {key: own[key] for key in SECTIONS if key in own}
        written[s.layer_type] = {**rope_parameters(s, head_dim, few_words, cut=cut), **sections}
    if None in written and "partial_rotary_factor" in config.rope_parameters:
        # Phi-3 needs the key even if all channels are rotated.
        share = settings[0].rotary_dim / head_size(config)
        written[None].setdefault("partial_rotary_factor", share)
    if None in written:
        config.rope_parameters = written[None]
    else:  # keep the entries of layers that do not rotate, None
        config.rope_parameters = {**config.rope_parameters, **written}
    config.max_position_embeddings = max_positions
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = settings[0].original_length


def rope_parameters(
    setting: RopeSetting, head_dim: int, few_words: bool = False, *, cut: bool = False
) -> dict[str, Any]:
    """Return rope_parameters with which stock transformers computes the setting's frequencies.

    If transformers, or a family with few rope types, has no type for the frequencies, they are
    written as longrope with equal short and long factors. cut: the model's type is proportional
    already; other models would apply its fraction to attention too, and rotate fewer channels.

    Raises: ValueError if no type can express the setting.
    """
    scaling, theta, squeeze = setting.scaling, setting.rope_theta, setting.compression
    common: dict[str, Any] = {"rope_theta": theta}
    if setting.rotary_dim != head_dim:
        common["partial_rotary_factor"] = setting.rotary_dim / head_dim
    length = {"original_max_position_embeddings": setting.original_length}
    match scaling:
        case None if squeeze == 1.0:
            return {"rope_type": "default", **common}
        case None if not few_words:
            return {"rope_type": "linear", **common, "factor": squeeze}
        case rs.Linear(factor=factor) if not few_words:
            return {"rope_type": "linear", **common, "factor": factor * squeeze}
        case rs.LongRoPE(factor=factor):
            pairs = setting.rotary_dim // 2
            short, long = scaling.short_factor, scaling.long_factor
            return {
                "rope_type": "longrope",
                **common,
                **length,
                "factor": factor,
                "short_factor": [f * squeeze for f in short or (1.0,) * pairs],
                "long_factor": [f * squeeze for f in long or (factor,) * pairs],
                "attention_factor": setting.frequencies().attention_factor,
            }
        case rs.NTK(factor=factor) if squeeze == 1.0:
            base = theta * factor ** (setting.rotary_dim / (setting.rotary_dim - 2))
            return {"rope_type": "default", **common, "rope_theta": base}
    if few_words or squeeze != 1.0:  # no rope type has the rest on top of a linear scaling
        if scaling is not None and scaling.depends_on_length:
            raise ValueError(
                f"{type(scaling).__name__} changes with the length, and on top of a linear scaling "
                "or in this family no config can say so"
            )
        return {**common, **_carrier(setting), **length}
    match scaling:
        case rs.DynamicNTK(factor=factor):
            return {"rope_type": "dynamic", **common, "factor": factor}
        case rs.Llama3():
            bounds = {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
            }
            return {"rope_type": "llama3", **common, **length, "factor": scaling.factor, **bounds}
        case rs.YaRN():
            return {
                "rope_type": "yarn",
                **common,
                **length,
                "factor": scaling.factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
                **_temperatures(setting, scaling.factor),
            }
        case rs.Proportional(p=share, factor=factor) if cut:
            kept = {"partial_rotary_factor": share, "factor": factor}
            return {"rope_type": "proportional", **common, **kept}
    return {**common, **_carrier(setting), **length}


def _temperatures(setting: RopeSetting, factor: float) -> dict[str, float]:
    """Return attention_factor and, if the model has it, YaRN's pair. Return only the pair if it
    means the same: next to attention_factor 1, vLLM omits it in DeepSeek's scores."""
    meant = setting.frequencies().attention_factor
    pair = {"mscale": setting.mscale, "mscale_all_dim": setting.mscale_all_dim}
    given = {key: value for key, value in pair.items() if value is not None}
    if len(given) == len(pair) and math.isclose(meant, setting.yarn_temperature(factor)):
        return given
    return {"attention_factor": meant, **given}


def _carrier(setting: RopeSetting) -> dict[str, Any]:
    frequencies = setting.frequencies()
    plain = rs.rope_frequencies(setting.rotary_dim, setting.rope_theta).inv_freq
    # longrope divides, so a pair that does not rotate gets a wavelength beyond any text.
    factors = [
        float(p / f) if f else STANDSTILL for p, f in zip(plain, frequencies.inv_freq, strict=True)
    ]
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": max(1.0, *(f for f in factors if f < STANDSTILL)),
        "attention_factor": frequencies.attention_factor,
    }
