"""SGLang: transformers 5's loader, rotary classes of its own, and a limit on the length."""

from collections.abc import Mapping
from typing import Any

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import (
    LLAMA3_DEFAULTS,
    ComputedPositions,
    LayerRotation,
    NotReadError,
    RefusedError,
    Switch,
    llama3_rotation,
    require_key,
    require_number,
)
from posenc.runtimes.config_model import Model
from posenc.runtimes.known import transformers5
from posenc.runtimes.known.vllm_and_sglang import (
    TYPES_LOSING_SECTIONS,
    compute_for_server,
    has_latent_rotation,
    longrope_rotation,
)
from posenc.runtimes.runtime_facts import ConfigFacts

LENGTH_KEYS = tuple(
    "max_sequence_length seq_length max_seq_len model_max_length max_position_embeddings".split()
)
"""The first of these that is given is the model's length."""
FAMILIES_WITH_DUAL_CHUNK = ("qwen2", "qwen2_moe", "qwen3_moe", "glm4")
"""Families whose rotation reads dual_chunk_attention_config."""


def compute(model: Model, length: int | None) -> ComputedPositions:
    """Return what SGLang 0.5 computes for a batch whose longest sequence is `length`."""
    transformers5.refuse_booleans(model)
    transformers5.refuse_fractions(model)
    resolved_dicts = transformers5.resolve_rope_dicts(model)
    if model.model_type in FAMILIES_WITH_DUAL_CHUNK and model.config.get(
        "dual_chunk_attention_config"
    ):
        raise RefusedError(
            "SGLang rotates queries five times for dual_chunk_attention_config, and has no "
            "attention that takes them"
        )
    longest_admitted = largest_length(model, resolved_dicts)
    return compute_for_server(
        "sglang",
        model,
        resolved_dicts,
        length,
        longest_admitted,
        rotation,
        _softmax_scale,
        _frequency_switch,
    )


def _length_in_config(model: Model) -> float:
    """Return the value of the first of LENGTH_KEYS that the config has; 2048 without any."""
    for key in LENGTH_KEYS:
        length = model.get(key)
        if length is not None:
            return require_number(length, "max_position_embeddings")
    return 2048


def largest_length(model: Model, resolved_dicts: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the longest admitted sequence: the first length key, times the factor unless the dict
    has an original length or is llama3's."""
    length = _length_in_config(model)
    if model.has_rope_dict_per_kind:
        return int(length)
    p = resolved_dicts["all"]
    if "original_max_position_embeddings" in p or p["rope_type"] == "llama3":
        return int(length)
    return int(length * require_number(p.get("factor", 1), "factor"))


def rotation(p: Mapping[str, Any], model: Model, length: int) -> LayerRotation:
    """Return the rotation of one kind of layer by SGLang's own rotary classes. p: its rope dict."""
    rope_type = p["rope_type"]
    head_dim = model.head_dim
    theta = require_number(p["rope_theta"], "rope_theta")
    dim = _rotated_channels(p, model)
    plain_inv_freq = float64_formulas.unscaled_frequencies(dim, theta)
    if rope_type == "default" or not ConfigFacts.of(model.facts["sglang"]).reads:
        # A file that reads no rope dict hands none on.
        return LayerRotation(plain_inv_freq)
    if rope_type == "deepseek_yarn" or has_latent_rotation(model):
        return _yarn_rotation(p, model, theta, dim, is_latent=True)  # whatever the type is called
    if p.get("mrope_section") and rope_type in TYPES_LOSING_SECTIONS:
        raise NotReadError(f"{rope_type} with mrope_section")
    if rope_type == "proportional":
        return LayerRotation(
            float64_formulas.proportional_frequencies(head_dim, theta, dim / head_dim)
        )
    if rope_type == "longrope":
        original_length = p.get("original_max_position_embeddings", model.max_positions)
        original_length = require_number(original_length, "original length")
        # The largest position of the batch decides, not its length.
        return longrope_rotation(
            p, model, plain_inv_freq, original_length, is_long=length - 1 > original_length
        )
    if rope_type == "dynamic" and "alpha" in p:
        base = float64_formulas.ntk_theta(theta, require_number(p["alpha"], "alpha"), dim)
        return LayerRotation(float64_formulas.unscaled_frequencies(dim, base))
    return _rotation_by_factor(p, model, theta, dim)


def _rotated_channels(p: Mapping[str, Any], model: Model) -> int:
    """Return how many channels of a head rotate: all, where the model's file passes no share on."""
    share = require_number(p.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
    is_proportional = model.has_rope_dict_per_kind and p["rope_type"] == "proportional"
    reads_share = model.supports_partial_rotation or is_proportional
    return int(model.head_dim * share) if reads_share else model.head_dim


def _rotation_by_factor(
    p: Mapping[str, Any], model: Model, theta: float, dim: int
) -> LayerRotation:
    """Return the rotation of linear, dynamic, llama3 or yarn. Raises: RefusedError for others."""
    rope_type = p["rope_type"]
    if rope_type not in ("linear", "dynamic", "llama3", "yarn"):
        raise RefusedError(f"ValueError: Unknown RoPE scaling type {rope_type}")
    factor = require_number(p.get("factor", 1.0), "factor")
    trained_length = model.max_positions
    if rope_type == "linear":
        return LayerRotation(
            float64_formulas.linear_frequencies(
                float64_formulas.unscaled_frequencies(dim, theta), factor
            )
        )
    if rope_type == "dynamic":
        # Its table is made once, for the length that the factor reaches.
        base = float64_formulas.dynamic_theta(
            theta, factor, trained_length * factor, trained_length, dim
        )
        return LayerRotation(float64_formulas.unscaled_frequencies(dim, base))
    if rope_type == "llama3":
        original_length = require_number(
            p.get("original_max_position_embeddings", trained_length), "original length"
        )
        return llama3_rotation(
            {**LLAMA3_DEFAULTS, "original_max_position_embeddings": original_length, **p},
            dim,
            theta,
        )
    return _yarn_rotation(p, model, theta, dim, is_latent=False)


def _yarn_rotation(
    p: Mapping[str, Any], model: Model, theta: float, dim: int, *, is_latent: bool
) -> LayerRotation:
    """Return the rotation of yarn.

    is_latent: that of DeepSeek's latent attention, which ignores truncate: its ramp between kept
    and divided frequencies always ends at whole pairs.
    """
    factor = require_number(p.get("factor", 1.0), "factor")
    trained_length = model.max_positions
    original_length = require_number(
        p.get("original_max_position_embeddings", trained_length), "original length"
    )
    if not is_latent and "mrope_section" in p:
        _refuse_mscale_with_sections(p)
    inv_freq = float64_formulas.yarn_frequencies(
        dim,
        theta,
        factor,
        original_length,
        require_number(p.get("beta_fast", 32), "beta_fast"),
        require_number(p.get("beta_slow", 1), "beta_slow"),
        is_latent or bool(p.get("truncate", True)),
        require_number(p.get("extrapolation_factor", 1), "extrapolation_factor"),
    )
    return LayerRotation(inv_freq, _yarn_multiplier(p, factor, is_latent=is_latent))


def _refuse_mscale_with_sections(p: Mapping[str, Any]) -> None:
    """Raise RefusedError if yarn with M-RoPE sections has an mscale key, which its class takes
    not."""
    for key in ("mscale", "mscale_all_dim"):
        if key in p:
            raise RefusedError(
                "TypeError: YaRNScalingMRotaryEmbedding.__init__() got an unexpected keyword "
                f"argument {key!r}"
            )


def _yarn_multiplier(p: Mapping[str, Any], factor: float, *, is_latent: bool) -> float:
    """Return yarn's multiplier of cos and sin: by the mscale pair where both are given, else yarn's
    own, times attn_factor. SGLang ignores attention_factor."""
    mscale = p.get("mscale", 1 if is_latent else None)
    mscale_all_dim = p.get("mscale_all_dim", 0 if is_latent else None)
    attn_factor = require_number(p.get("attn_factor", 1), "attn_factor")
    if mscale is None or mscale_all_dim is None:
        return float64_formulas.yarn_attention_factor(factor) * attn_factor
    numerator = float64_formulas.yarn_attention_factor(factor, require_number(mscale, "mscale"))
    denominator = float64_formulas.yarn_attention_factor(
        factor, require_number(mscale_all_dim, "mscale_all_dim")
    )
    return numerator / denominator * attn_factor


def _frequency_switch(p: Mapping[str, Any], model: Model) -> Switch:
    """Return when the frequencies change: those of longrope's two lists, with each batch."""
    if p["rope_type"] != "longrope":
        return "static"
    original_length = p.get("original_max_position_embeddings", model.max_positions)
    return "batch" if original_length < model.max_positions else "static"


def _softmax_scale(model: Model, p: Mapping[str, Any]) -> float:
    """Return the softmax scale, which latent attention multiplies by its squared temperature."""
    if not has_latent_rotation(model) or p["rope_type"] == "default":
        return model.softmax_scale
    factor = require_number(require_key(p, "factor"), "factor")
    mscale_all_dim = require_number(p.get("mscale_all_dim") or 0, "mscale_all_dim")
    return model.softmax_scale * float64_formulas.yarn_attention_factor(factor, mscale_all_dim) ** 2
