"""llama.cpp's converter: which GGUF keys it writes for a config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import (
    LLAMA3_DEFAULTS,
    STOPPING_DIVISOR,
    NotReadError,
    RefusedError,
    require_number,
)
from posenc.runtimes.config_model import Model
from posenc.runtimes.files.gguf_metadata import Metadata
from posenc.runtimes.known import transformers5
from posenc.runtimes.runtime_facts import RuntimeFacts

HUNYUAN_LENGTH = 256 << 10
"""Tokens: the length that the converter writes for every model of HunYuan."""
ARCHITECTURES_WITH_FACTORS = ("phi3", "phimoe", "minicpm3", "minicpm")
"""Architectures whose converter writes longrope's lists and their temperature."""


@dataclass(frozen=True, eq=False, repr=False)
class LlamaCppFacts(RuntimeFacts):
    """What llama_cpp.json says of a family: how llama.cpp's converter writes its file."""

    architecture: str = ""
    """The architecture that the converter writes for the family."""
    llama3: bool = False
    """Whether the converter writes rope_freqs.weight for the type llama3."""


def converted_metadata(model: Model) -> Metadata:
    """Return the metadata that the converter writes, with transformers 5 installed.

    Raises: RefusedError where it stops; NotReadError where posenc does not know.
    """
    if model.has_rope_dict_per_kind and not set(model.layer_kinds) <= {
        "full_attention",
        "sliding_attention",
    }:
        raise NotReadError(model.model_type)
    facts = LlamaCppFacts.of(model.facts["llama_cpp"])
    parameters, sliding_theta = _rope_settings(model)
    fields: dict[str, Any] = {"context_length": model.max_positions}
    theta = parameters.get("rope_theta")
    if theta is not None:
        fields["freq_base"] = _require_float(theta)
    if sliding_theta is not None:
        fields["freq_base_swa"] = _require_float(sliding_theta)
    full_attention_model = (
        model.with_sizes_of_kind("full_attention") if model.has_rope_dict_per_kind else model
    )
    dim = _dimension_count(full_attention_model, parameters)
    if model.has_rope_dict_per_kind and model.head_dims_differ:
        fields["dimension_count_swa"] = model.head_dim
    fields.update(_scaling_fields(model, parameters, dim))
    fields.update(_log_multiplier_field(parameters, facts.architecture))
    fields.update(_attention_fields(model, facts.architecture))
    return Metadata(
        facts.architecture,
        dimension_count=dim,
        head_dim=full_attention_model.latent_query_width
        if full_attention_model.is_mla
        else full_attention_model.head_dim,
        num_layers=model.num_layers,
        given_fields=frozenset(fields),
        **fields,
    )


def _scaling_fields(model: Model, parameters: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """Return the keys and factor tensors of the type of scaling."""
    facts = LlamaCppFacts.of(model.facts["llama_cpp"])
    rope_type = str(parameters.get("rope_type", "default"))
    if model.model_type in transformers5.HUNYUAN_FAMILIES and rope_type == "dynamic":
        return _hunyuan_fields(model, parameters, dim)
    if facts.architecture in ARCHITECTURES_WITH_FACTORS:
        return _longrope_fields(model, parameters, rope_type, dim)
    fields = _common_scaling_fields(parameters, rope_type)
    if rope_type == "llama3" and facts.llama3:
        refuses_equal_bounds = not facts.read.startswith("conversion/llama.py")
        fields["rope_freqs"] = _llama3_divisors(
            parameters, dim, refuses_equal_bounds=refuses_equal_bounds
        )
    if rope_type == "proportional" and facts.architecture == "gemma4":
        fields["rope_freqs"] = _divisors_that_stop_unrotated_pairs(parameters, dim)
    return fields


def _divisors_that_stop_unrotated_pairs(
    parameters: Mapping[str, Any], dim: int
) -> tuple[float, ...]:
    """Return the divisors of Gemma 4's frequencies: 1 for pairs of the rotated share,
    STOPPING_DIVISOR for the others. dim: channels of a head."""
    share = float(parameters["partial_rotary_factor"])
    # A pair that does not rotate has frequency 0. Nothing else is read, so any base above 1 does.
    inv_freq = float64_formulas.proportional_frequencies(dim, 2.0, share)
    return tuple(1.0 if frequency else STOPPING_DIVISOR for frequency in inv_freq)


def _log_multiplier_field(parameters: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return {"log_multiplier": value}, the temperature of latent attention that the converter
    writes; {} if the config has none or the architecture no such key. Mistral's class writes it
    ten times as large as DeepSeek's."""
    mscale_all_dim = parameters.get("mscale_all_dim")
    if mscale_all_dim is None or architecture not in ("deepseek2", "deepseek32", "mistral3"):
        return {}
    unit = 1.0 if architecture == "mistral3" else 0.1
    return {"log_multiplier": unit * require_number(mscale_all_dim, "mscale_all_dim")}


def _attention_fields(model: Model, architecture: str) -> dict[str, Any]:
    """Return what decides which layers rotate and what multiplies q.k, for the architectures whose
    converter writes it: conversion/afmoe.py:35, command_r.py:41 and :100, exaone.py:84,
    llama.py:396."""
    window_size = _window_size(model)
    layer_types = model.layer_types
    window_flags = tuple(int(kind == "sliding_attention") for kind in layer_types)
    if architecture.startswith("granite"):  # granite.py:39
        attention_scale = model.get("attention_multiplier")
        return {"attention_scale": attention_scale} if attention_scale else {}
    if architecture in ("gemma2", "gemma3"):
        hidden_size = model.size("hidden_size")
        return {"width_per_head": hidden_size // model.num_heads}
    if architecture == "llama4":
        return {"sliding_window": 0} if set(layer_types) == {"full_attention"} else {}
    if architecture == "cohere2":
        return {"sliding_window": window_size}
    if architecture == "cohere2moe":
        num_dense_layers = model.config.get("first_k_dense_replace") or 0
        return {
            "sliding_window": window_size,
            "window_pattern": window_flags,
            "num_leading_dense": num_dense_layers,
        }
    if architecture in ("exaone4", "exaone-moe") and window_size is not None:
        return {"sliding_window": window_size, "window_pattern": window_flags}
    return {}


def _window_size(model: Model) -> int | None:
    """Return how many keys the layers with a sliding window see; None without such a number."""
    window_size = model.get("sliding_window")
    return window_size if isinstance(window_size, int) and window_size > 0 else None


def _require_float(value: Any) -> float:
    """Return a value that the converter packs as a float32, unchanged.

    Raises: RefusedError for anything but a number, at which packing stops.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RefusedError("struct.error: required argument is not a float")
    return value


class _RopeSettings(NamedTuple):
    """The rotary settings that the converter finds in a config."""

    parameters: Mapping[str, Any]
    """The rope dict of the full-attention layers."""
    sliding_theta: Any
    """The base of windowed layers; None where nothing says one."""


def _rope_settings(model: Model) -> _RopeSettings:
    """Return the rope dict of the full-attention layers, and theta of the windowed layers.

    The config is loaded by transformers 5 where that works, and read raw otherwise. The top-level
    original length counts only for families whose config class has the field.
    """
    try:
        if not model.has_rope_dict_per_kind:
            return _RopeSettings(_flat_rope_dict(model), None)
        resolved_dicts = transformers5.resolve_rope_dicts(model)
        full_dict = resolved_dicts.get("full_attention") or next(iter(resolved_dicts.values()))
        return _RopeSettings(
            full_dict, resolved_dicts.get("sliding_attention", {}).get("rope_theta")
        )
    except RefusedError:
        dict_in_config = model.config.get("rope_parameters", model.config.get("rope_scaling")) or {}
        p = dict(dict_in_config) if isinstance(dict_in_config, Mapping) else {}
        p.setdefault("rope_theta", model.config.get("rope_theta"))
        p.setdefault("rope_type", p.get("type", "default"))
        return _RopeSettings(p, None)


def _flat_rope_dict(model: Model) -> Mapping[str, Any]:
    """Return the flat rope dict, without the top level's original length where no class has it."""
    if model.facts.get("original_field"):
        return transformers5.resolve_rope_dicts(model)["all"]
    config = {k: v for k, v in model.config.items() if k != "original_max_position_embeddings"}
    return transformers5.resolve_rope_dicts(Model(config, model.model_type, model.facts))["all"]


def _dimension_count(model: Model, parameters: Mapping[str, Any]) -> int:
    """Return how many channels of a head rotate, or have frequencies that may be 0."""
    if not model.supports_partial_rotation or parameters.get("rope_type") == "proportional":
        return model.head_dim
    share = require_number(parameters.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
    return int(model.head_dim * share)


def _common_scaling_fields(p: Mapping[str, Any], rope_type: str) -> dict[str, Any]:
    """Return the keys that most converters write for a type; none for one that they do not know."""
    factor = p.get("factor")
    if rope_type == "linear" and factor is not None:
        return {"scaling_type": "linear", "scaling_factor": _require_float(factor)}
    if rope_type == "yarn" and factor is not None:
        fields: dict[str, Any] = {
            "scaling_type": "yarn",
            "scaling_factor": _require_float(factor),
            "original_length": require_number(
                p["original_max_position_embeddings"], "original length"
            ),
        }
        optional_values = {
            "yarn_ext_factor": p.get("extrapolation_factor"),
            "yarn_attn_factor": p.get("attention_factor", p.get("attn_factor")),
            "beta_fast": p.get("beta_fast"),
            "beta_slow": p.get("beta_slow"),
        }
        fields.update({k: _require_float(v) for k, v in optional_values.items() if v is not None})
        return fields
    if rope_type in ("su", "longrope"):
        return {"scaling_type": "longrope"}
    return {}


def _hunyuan_fields(model: Model, p: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """Return the keys of HunYuan's models, whose base is stretched by alpha.

    Raises: RefusedError for other values than those of the published models, as the converter does.
    """
    is_dense = model.model_type == "hunyuan_v1_dense"
    alpha = require_number(p.get("alpha", 50 if is_dense else 1000), "alpha")
    base = require_number(p.get("rope_theta", 10000.0), "rope_theta")
    length_is_published = model.max_positions in (32 << 10, HUNYUAN_LENGTH)
    alpha_is_published = is_dense or (alpha == 1000 and dim == 128)
    if base != 10000.0 or not length_is_published or not alpha_is_published:
        raise RefusedError("AssertionError: HunYuan dynamic RoPE scaling assumptions changed")
    return {
        "freq_base": float64_formulas.ntk_theta(base, alpha, dim),
        "scaling_type": "none",
        "scaling_factor": 1.0,
        "original_length": HUNYUAN_LENGTH,
        "context_length": HUNYUAN_LENGTH,
    }


def _longrope_fields(
    model: Model, p: Mapping[str, Any], rope_type: str, dim: int
) -> dict[str, Any]:
    """Return the keys of longrope with its two lists and its multiplier, as the converters of Phi-3
    and MiniCPM write them.

    rope_type: the rope type. dim: rotated channels of a head.
    Raises: RefusedError where the converter stops.
    """
    original_length = p.get("original_max_position_embeddings")
    if original_length is None:
        original_length = model.get("original_max_position_embeddings", model.max_positions)
    original_length = require_number(original_length, "original length")
    fields: dict[str, Any] = {"original_length": original_length}
    long_factors = p.get("long_factor")
    short_factors = p.get("short_factor")
    if not long_factors:
        return fields
    length_ratio = model.max_positions / original_length
    if rope_type in ("su", "longrope"):
        fields["attn_factor"] = float64_formulas.longrope_attention_factor(
            length_ratio, original_length
        )
    elif rope_type == "yarn":
        fields["attn_factor"] = float64_formulas.yarn_attention_factor(length_ratio)
    else:
        raise RefusedError(
            f"NotImplementedError: The rope scaling type {rope_type} is not supported yet"
        )
    if not short_factors or len(long_factors) != len(short_factors) or len(long_factors) != dim / 2:
        raise RefusedError(
            f"ValueError: The length of rope long and short factors must be {dim / 2}. "
            f"long_factors = {len(long_factors)}, short_factors = {len(short_factors or ())}."
        )
    fields["factors_long"] = tuple(long_factors)
    fields["factors_short"] = tuple(short_factors)
    return fields


def _llama3_divisors(
    p: Mapping[str, Any], dim: int, *, refuses_equal_bounds: bool
) -> tuple[float, ...]:
    """Return llama3's divisors of the frequencies, one for each of the dims / 2 pairs.

    refuses_equal_bounds: raise RefusedError if low_freq_factor == high_freq_factor, as all
    converters do but Llama's: Llama 4 has equal ones.
    """
    p = {"rope_theta": 10000.0, **LLAMA3_DEFAULTS, **p}
    factor, low_freq_factor, high_freq_factor, original_length, theta = (
        require_number(p[key], key) for key in (*LLAMA3_DEFAULTS, "rope_theta")
    )
    if refuses_equal_bounds and math.isclose(low_freq_factor, high_freq_factor):
        raise RefusedError("AssertionError: low_freq_wavelen != high_freq_wavelen")
    return float64_formulas.llama3_divisors(
        dim, theta, factor, low_freq_factor, high_freq_factor, original_length
    )
