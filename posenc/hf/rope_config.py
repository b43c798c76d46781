"""A checkpoint's rotary settings: read from its config, checked, and written back in transformers'
words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posenc.queries_keys import rope_scaling as rs

KNOWN_KEYS = frozenset(
    "rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings "
    "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor "
    "low_freq_factor high_freq_factor mrope_section mrope_interleaved".split()
)
STANDSTILL = 1e30
"""A factor after which float32 sees no rotation at any position."""
EXTENDED_LAYERS = ("full_attention",)
"""Layer types that look further than their window; the others never see a longer distance."""


@dataclass(frozen=True)
class RopeSetting:
    """The rotation of one kind of layer (layer_type None: of all layers)."""

    layer_type: str | None
    rope_theta: float
    rotary_dim: int
    scaling: rs.Scaling | None
    original_length: int
    """The length in tokens that the unscaled frequencies were trained at."""

    def frequencies(self, length: int | None = None) -> rs.Frequencies:
        return rs.rope_frequencies(self.rotary_dim, self.rope_theta, self.scaling, length)


def check(raw: dict[str, Any]) -> None:
    """Refuse a config.json whose rotary keys contradict each other or leave the frequencies open.

    Raises: ValueError naming the keys and what to do.
    """
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if new and old and _canonical(new) != _canonical(old):
        raise ValueError(
            "config.json has rope_parameters and another rope_scaling, and transformers takes "
            "rope_scaling: "
            "delete the one that is wrong."
        )
    source = new or old or {}
    nested = [value for value in source.values() if isinstance(value, dict)]
    for parameters in nested or [source]:
        _check_parameters(parameters, raw, is_new=bool(new))


def _check_parameters(parameters: dict[str, Any], raw: dict[str, Any], *, is_new: bool) -> None:
    if not parameters:
        return
    if "attn_factor" in parameters:
        raise ValueError(
            "config.json gives attn_factor, which multiplies YaRN's temperature, where "
            "transformers reads "
            "attention_factor, which replaces it: write attention_factor with the product."
        )
    unknown = sorted(set(parameters) - KNOWN_KEYS)
    if unknown:
        raise ValueError(
            f"config.json: unknown rotary keys {', '.join(unknown)}; known are "
            f"{', '.join(sorted(KNOWN_KEYS))}."
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("yarn", "llama3", "longrope") and not (
        parameters.get("original_max_position_embeddings")
        or raw.get("original_max_position_embeddings")
    ):
        raise ValueError(
            f"config.json: {kind} without original_max_position_embeddings; transformers would "
            "take the "
            "extended length for the trained one. Add the length the model was trained at."
        )
    theta, outer = parameters.get("rope_theta"), raw.get("rope_theta")
    if theta is not None and outer is not None and float(theta) != float(outer):
        raise ValueError(
            f"config.json: rope_theta is {outer} outside and {theta} inside of the rotary keys."
        )
    if is_new and theta is None and outer is None:
        raise ValueError(
            "config.json: rope_parameters without rope_theta; transformers would assume its "
            "default of 10000. "
            "Add the base the model was trained with."
        )


def _canonical(parameters: dict[str, Any]) -> dict[str, Any]:
    return {("rope_type" if k == "type" else k): v for k, v in parameters.items()}


def read(config: Any) -> tuple[RopeSetting, ...]:
    """The rotary settings of a transformers config; empty where it has none."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return ()
    nested = {k: v for k, v in parameters.items() if isinstance(v, dict)}
    return tuple(_setting(kind, p, config) for kind, p in (nested or {None: parameters}).items())


def _setting(layer_type: str | None, parameters: dict[str, Any], config: Any) -> RopeSetting:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = parameters.get("partial_rotary_factor") or 1.0
    kind = parameters["rope_type"]
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * share)
    maximum = config.max_position_embeddings
    original = parameters.get("original_max_position_embeddings") or (
        getattr(config, "original_max_position_embeddings", None) if kind == "longrope" else None
    )
    scaling = _from_hf(parameters, original or maximum, maximum)
    return RopeSetting(
        layer_type, float(parameters["rope_theta"]), rotary_dim, scaling, int(original or maximum)
    )


def _from_hf(p: dict[str, Any], original: int, maximum: int) -> rs.Scaling | None:
    kind = p["rope_type"]
    if kind == "default":
        return None
    if kind == "linear":
        return rs.Linear(p["factor"])
    if kind == "dynamic":
        return rs.DynamicNTK(p["factor"], maximum)
    if kind == "llama3":
        return rs.Llama3(p["factor"], original, p["low_freq_factor"], p["high_freq_factor"])
    if kind == "proportional":
        return rs.Proportional(p.get("partial_rotary_factor", 1.0), p.get("factor", 1.0))
    if kind == "yarn":
        return rs.YaRN(
            p["factor"], original, p.get("beta_fast") or 32.0, p.get("beta_slow") or 1.0,
            truncate=p.get("truncate", True), attention_factor=_yarn_temperature(p),
        )  # fmt: skip
    if kind == "longrope":
        factor = p.get("factor") or maximum / original
        return rs.LongRoPE(
            factor,
            original,
            tuple(p["short_factor"]),
            tuple(p["long_factor"]),
            p.get("attention_factor"),
        )
    raise ValueError(
        f"rope_type {kind!r} is not one that posenc knows; nothing is assumed about it."
    )


def _yarn_temperature(p: dict[str, Any]) -> float:
    """transformers' rule: attention_factor, else the mscale pair where both are given, else factor
    alone."""
    if p.get("attention_factor") is not None:
        return p["attention_factor"]
    mscale, all_dim = p.get("mscale"), p.get("mscale_all_dim")
    if mscale and all_dim:
        return rs.yarn_temperature(p["factor"], mscale) / rs.yarn_temperature(p["factor"], all_dim)
    return rs.yarn_temperature(p["factor"])


def to_hf(setting: RopeSetting, head_dim: int) -> dict[str, Any]:
    """rope_parameters that make stock transformers compute the setting's frequencies.

    Whatever transformers has no word for is carried by longrope with short factors equal to
    the long ones.
    """
    scaling, theta = setting.scaling, setting.rope_theta
    common: dict[str, Any] = {"rope_theta": theta}
    if setting.rotary_dim != head_dim:
        common["partial_rotary_factor"] = setting.rotary_dim / head_dim
    length = {"original_max_position_embeddings": setting.original_length}
    match scaling:
        case None:
            return {"rope_type": "default", **common}
        case rs.Linear(factor=factor):
            return {"rope_type": "linear", **common, "factor": factor}
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
        case rs.LongRoPE(factor=factor):
            pairs = setting.rotary_dim // 2
            return {
                "rope_type": "longrope", **common, **length, "factor": factor,
                "short_factor": list(scaling.short_factor or (1.0,) * pairs),
                "long_factor": list(scaling.long_factor or (factor,) * pairs),
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


def write(config: Any, settings: tuple[RopeSetting, ...], max_positions: int) -> None:
    """Put settings and the new maximum length into a transformers config, in place."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    written = {s.layer_type: to_hf(s, head_dim) for s in settings}
    config.rope_parameters = written[None] if None in written else written
    config.max_position_embeddings = max_positions
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = settings[0].original_length
