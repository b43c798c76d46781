"""Write rotary settings into a transformers config, so that stock tools compute the same
frequencies."""

from __future__ import annotations

from typing import Any

from posenc.hf.rope_config import RopeSetting, head_size
from posenc.queries_keys import rope_scaling as rs

STANDSTILL = 1e30
"""A factor after which float32 sees no rotation at any position."""


def write_settings(config: Any, settings: tuple[RopeSetting, ...], max_positions: int) -> None:
    """Put settings and the new maximum length into a transformers config, in place."""
    head_dim = head_size(config)
    written = {s.layer_type: rope_parameters(s, head_dim) for s in settings}
    config.rope_parameters = written[None] if None in written else written
    config.max_position_embeddings = max_positions
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = settings[0].original_length


def rope_parameters(setting: RopeSetting, head_dim: int) -> dict[str, Any]:
    """rope_parameters that make stock transformers compute the setting's frequencies.

    Whatever transformers has no word for is carried by longrope with short factors equal to
    the long ones.
    """
    scaling, theta, squeeze = setting.scaling, setting.rope_theta, setting.compression
    common: dict[str, Any] = {"rope_theta": theta}
    if setting.rotary_dim != head_dim:
        common["partial_rotary_factor"] = setting.rotary_dim / head_dim
    length = {"original_max_position_embeddings": setting.original_length}
    match scaling:
        case None if squeeze == 1.0:
            return {"rope_type": "default", **common}
        case None:
            return {"rope_type": "linear", **common, "factor": squeeze}
        case rs.Linear(factor=factor):
            return {"rope_type": "linear", **common, "factor": factor * squeeze}
        case rs.LongRoPE(factor=factor):
            pairs = setting.rotary_dim // 2
            short, long = scaling.short_factor, scaling.long_factor
            return {
                "rope_type": "longrope", **common, **length, "factor": factor,
                "short_factor": [f * squeeze for f in short or (1.0,) * pairs],
                "long_factor": [f * squeeze for f in long or (factor,) * pairs],
                "attention_factor": setting.frequencies().attention_factor,
            }  # fmt: skip
    if squeeze != 1.0:  # transformers has no word for the rest on top of a linear scaling
        if scaling.depends_on_length:
            raise ValueError(
                f"{type(scaling).__name__} changes with the length, and this checkpoint has a "
                "linear scaling already: no config can say both."
            )
        return {**common, **_carrier(setting), **length}
    match scaling:
        case rs.NTK(factor=factor):
            base = theta * factor ** (setting.rotary_dim / (setting.rotary_dim - 2))
            return {"rope_type": "default", **common, "rope_theta": base}
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
                "rope_type": "yarn", **common, **length, "factor": scaling.factor,
                "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
                "attention_factor": setting.frequencies().attention_factor,
            }  # fmt: skip
        case rs.Proportional(p=share, factor=factor) if setting.rotary_dim == head_dim:
            cut = {"partial_rotary_factor": share, "factor": factor}
            return {"rope_type": "proportional", **common, **cut}
    return {**common, **_carrier(setting), **length}


def _carrier(setting: RopeSetting) -> dict[str, Any]:
    frequencies = setting.frequencies()
    plain = rs.rope_frequencies(setting.rotary_dim, setting.rope_theta).inv_freq
    # longrope divides: a pair that stands still gets a wavelength that no text reaches.
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
