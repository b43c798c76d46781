"""vLLM: transformers 5's loader, patches of its own, rotary classes of its own, and a limit on the
length."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import (
    ComputedPositions,
    LayerRotation,
    NotReadError,
    RefusedError,
    Switch,
    llama3_rotation,
    require_key,
    require_number,
)
from posenc.runtimes.config_model import LAYER_KINDS, Model
from posenc.runtimes.known import transformers5
from posenc.runtimes.known.vllm_and_sglang import (
    TYPES_LOSING_SECTIONS,
    compute_for_server,
    has_latent_rotation,
    longrope_rotation,
)
from posenc.runtimes.runtime_facts import RuntimeFacts

LENGTH_KEYS = tuple(
    "max_position_embeddings n_positions max_seq_len seq_length model_max_length "
    "max_target_positions max_sequence_length max_seq_length seq_len".split()
)
"""The smallest of these is the model's length."""
TYPES_ALREADY_STRETCHED = (
    "su",
    "longrope",
    "llama3",
    "yarn",
    "deepseek_yarn",
    "deepseek_llama_scaling",
)
"""Types whose factor does not multiply the length."""
FAMILIES_WITH_DUAL_CHUNK = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next")
"""Families whose model file passes dual_chunk_attention_config to the attention."""
MROPE_LENGTH_FACTOR = 4
"""By how much vLLM's M-RoPE class lengthens its table, since positions of a video run ahead of its
tokens. The class passes the lengthened number on to yarn, which takes it for the original length
(rotary_embedding/mrope.py:352)."""
FAMILIES_OF_SHORT_MROPE_TABLES = (
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Families whose model file asks for a table as long as the text (qwen3_vl.py:1818)."""
SHORTEST_SERVER_LENGTH = 1024
"""Servers are not started for fewer tokens, so a switch below this length never shows."""


@dataclass(frozen=True, eq=False, repr=False)
class VllmFacts(RuntimeFacts):
    """What vllm.json says of a family: how vLLM's model file rotates."""

    runs_transformers: bool = False
    """Whether vLLM runs transformers' model of the family, and has no file of its own for it."""


def _facts_of(model: Model) -> VllmFacts:
    """Return the facts of a model's family in vLLM."""
    return VllmFacts.of(model.facts["vllm"])


def compute(model: Model, length: int | None) -> ComputedPositions:
    """Return what vLLM 0.33 computes for a server started with max_model_len = length."""
    if model.has_rope_dict_per_kind and not set(model.layer_kinds) <= set(LAYER_KINDS):
        raise NotReadError(model.model_type)
    transformers5.refuse_booleans(model)
    transformers5.refuse_fractions(model)
    resolved_dicts = {
        kind: _rope_dict_for_layers(p, model)
        for kind, p in transformers5.resolve_rope_dicts(model).items()
    }
    if model.model_type in FAMILIES_WITH_DUAL_CHUNK and model.config.get(
        "dual_chunk_attention_config"
    ):
        raise RefusedError(
            "TypeError: __init__() got an unexpected keyword argument 'layer_idx' (no attention of "
            "vLLM takes dual_chunk_attention_config since 0.11)"
        )
    longest_admitted = largest_length(model, resolved_dicts)
    return compute_for_server(
        "vllm",
        model,
        resolved_dicts,
        length,
        longest_admitted,
        rotation,
        _softmax_scale,
        _frequency_switch,
    )


def _rope_dict_for_layers(parameters: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return the loaded rope dict as vLLM changes it before it builds the model's layers."""
    if parameters["rope_type"] is None:  # by an override; a file without a type gets one
        raise RefusedError("KeyError: 'rope_type'")
    p = with_newer_type(parameters, model)
    if has_latent_rotation(model) and p["rope_type"] != "default":
        is_unscaled = p.get("attention_factor") == 1.0
        p["rope_type"] = "deepseek_llama_scaling" if is_unscaled else "deepseek_yarn"
    return p


def with_newer_type(parameters: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return the loaded rope dict with the type that vLLM gives it in place of an older one.

    Raises: RefusedError for two types that contradict each other.
    """
    p = dict(parameters)
    older_type, newer_type = p.get("type"), p["rope_type"]
    is_allowed = (older_type, newer_type) in (("su", "longrope"), ("mrope", "default"))
    if older_type is not None and older_type != newer_type and not is_allowed:
        raise RefusedError(
            f"ValueError: Found conflicts between 'rope_type={newer_type}' (modern field) and "
            f"'type={older_type}' (legacy field). You should only specify one of them."
        )
    if p["rope_type"] == "su":
        p["rope_type"] = "longrope"
        p.setdefault("original_max_position_embeddings", model.max_positions)
    elif p["rope_type"] == "mrope":
        if "mrope_section" not in p:
            raise RefusedError(
                "ValueError: Legacy rope_type 'mrope' requires 'mrope_section' in rope_parameters"
            )
        p["rope_type"] = "default"
    elif p["rope_type"] == "telechat3-yarn":
        p["rope_type"] = "yarn"
        # TeleChat 3's own temperature, in place of yarn's 0.1 ln(factor) + 1.
        p["attention_factor"] = (
            0.07 * math.log(require_number(require_key(p, "factor"), "factor")) + 1.0
        )
    return p


def largest_length(model: Model, resolved_dicts: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the largest max_model_len that vLLM admits.

    Raises: RefusedError for scalars next to nested dicts.
    """
    _refuse_scalars_beside_kinds(model)
    stated_lengths = [model.get(key) for key in LENGTH_KEYS]
    lengths = [
        require_number(v, "max_position_embeddings") for v in stated_lengths if v is not None
    ]
    length = min(lengths, default=2048)  # vLLM's own default
    if "gemma3" in model.model_type:  # vLLM, too, looks for this part of the name
        return int(length)
    factor: Any = 1.0
    for p in resolved_dicts.values():
        if p["rope_type"] not in TYPES_ALREADY_STRETCHED:
            factor = p.get("factor", factor)
    return int(length * (1.0 if factor is None else require_number(factor, "factor")))


def _refuse_scalars_beside_kinds(model: Model) -> None:
    """Raise RefusedError for nested dicts with anything beside them: vLLM takes such a dict for a
    flat one, and looks for its type."""
    rope_parameters = model.config.get("rope_parameters")
    if not model.has_rope_dict_per_kind or not isinstance(rope_parameters, Mapping):
        return
    has_kinds = any(
        isinstance(value, Mapping) or value is None for value in rope_parameters.values()
    )
    has_only_kinds = set(rope_parameters) <= set(LAYER_KINDS)
    if has_kinds and not has_only_kinds and "rope_type" not in rope_parameters:
        raise RefusedError("KeyError: 'rope_type'")


def rotation(p: Mapping[str, Any], model: Model, length: int) -> LayerRotation:
    """Return the rotation of one kind of layer by vLLM's own rotary classes, or by transformers'
    where vLLM runs transformers' model. p: its rope dict."""
    rope_type = p["rope_type"]
    head_dim = model.head_dim
    if _facts_of(model).runs_transformers:
        return _rotation_of_transformers(p, model, length)
    share = require_number(p.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
    if not 0 < share <= 1:
        raise RefusedError(f"ValueError: partial_rotary_factor={share} must be between 0.0 and 1.0")
    theta = require_number(p["rope_theta"], "rope_theta")
    dim = int(head_dim * share)
    plain_inv_freq = float64_formulas.unscaled_frequencies(dim, theta)
    _check_sections(p, dim)
    if rope_type == "default":
        return LayerRotation(plain_inv_freq)
    if rope_type == "proportional":
        return LayerRotation(
            float64_formulas.proportional_frequencies(head_dim, theta, dim / head_dim)
        )
    if rope_type == "longrope":
        original_length = require_number(
            require_key(p, "original_max_position_embeddings"), "original length"
        )
        return longrope_rotation(
            p, model, plain_inv_freq, original_length, is_long=length > original_length
        )
    if rope_type == "dynamic":
        return LayerRotation(_dynamic_frequencies(p, model, theta, dim))
    if rope_type not in (
        "linear",
        "ntk",
        "llama3",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
    ):
        raise RefusedError(f"ValueError: Unknown RoPE scaling type {rope_type}")
    factor = require_number(require_key(p, "factor"), "factor")
    if rope_type == "linear":
        return LayerRotation(float64_formulas.linear_frequencies(plain_inv_freq, factor))
    if rope_type == "ntk":
        return LayerRotation(_ntk_frequencies(theta, factor, dim, p.get("mixed_b")))
    original_length = require_number(
        require_key(p, "original_max_position_embeddings"), "original length"
    )
    if rope_type == "llama3":
        return llama3_rotation(p, dim, theta)
    if p.get("mrope_section") and model.model_type not in FAMILIES_OF_SHORT_MROPE_TABLES:
        original_length *= MROPE_LENGTH_FACTOR
    return _yarn_rotation(p, model, theta, dim, factor, original_length)


def _rotation_of_transformers(p: Mapping[str, Any], model: Model, length: int) -> LayerRotation:
    """Return the rotation of transformers' model. What vLLM makes of frequencies that change with
    the length there, nobody has read."""
    has_two_lists = p["rope_type"] == "longrope" and p["short_factor"] != p["long_factor"]
    if p["rope_type"] == "dynamic" or has_two_lists:
        raise NotReadError(model.model_type)
    return transformers5.rotation_of_own_module(dict(p), model, length)


def _check_sections(p: Mapping[str, Any], dim: int) -> None:
    """Raise RefusedError if sections do not add up to the pairs; NotReadError for types that lose
    them."""
    rope_type = p["rope_type"]
    sections = p.get("mrope_section")
    if not sections:
        return
    if rope_type in ("default", "yarn") and sum(sections) != dim // 2:
        raise RefusedError(
            f"AssertionError: mrope_section {sections} adds up to {sum(sections)}, expected "
            f"{dim // 2}"
        )
    if rope_type in TYPES_LOSING_SECTIONS:
        raise NotReadError(f"{rope_type} with mrope_section")


def _yarn_rotation(
    p: Mapping[str, Any],
    model: Model,
    theta: float,
    dim: int,
    factor: float,
    original_length: float,
) -> LayerRotation:
    """Return the rotation of yarn, or of one of DeepSeek's two classes of it."""
    is_latent = p["rope_type"] != "yarn"
    if model.model_type == "gpt_oss":  # its file passes both on
        beta_fast = require_key(p, "beta_fast")
        beta_slow = require_key(p, "beta_slow")
    else:
        beta_fast = p.get("beta_fast", 32)
        beta_slow = p.get("beta_slow", 1)
    inv_freq = float64_formulas.yarn_frequencies(
        dim,
        theta,
        factor,
        original_length,
        require_number(beta_fast, "beta_fast"),
        require_number(beta_slow, "beta_slow"),
        True if is_latent else bool(p.get("truncate", True)),
    )
    if is_latent:
        numerator = float64_formulas.yarn_attention_factor(
            factor, require_number(p.get("mscale", 1), "mscale")
        )
        denominator = float64_formulas.yarn_attention_factor(
            factor, require_number(p.get("mscale_all_dim", 0), "mscale_all_dim")
        )
        return LayerRotation(inv_freq, numerator / denominator)
    if model.model_type == "gpt_oss":
        return LayerRotation(inv_freq, float64_formulas.yarn_attention_factor(factor))
    return LayerRotation(inv_freq, transformers5.yarn_multiplier(p, factor))


def _dynamic_frequencies(
    p: Mapping[str, Any], model: Model, theta: float, dim: int
) -> tuple[float, ...]:
    """Return the frequencies of dynamic NTK: fixed by alpha, else by the model's own length."""
    if "alpha" in p:
        return float64_formulas.unscaled_frequencies(
            dim, float64_formulas.ntk_theta(theta, require_number(p["alpha"], "alpha"), dim)
        )
    factor = require_number(p["factor"], "factor")
    max_positions = model.max_positions
    trained_length = require_number(
        p.get("max_trained_positions", max_positions), "max_trained_positions"
    )
    stretch = factor * max_positions / trained_length - (factor - 1)
    return float64_formulas.unscaled_frequencies(
        dim, float64_formulas.ntk_theta(theta, stretch, dim)
    )


def _ntk_frequencies(theta: float, factor: float, dim: int, mixed_b: Any) -> tuple[float, ...]:
    """Return the frequencies of vLLM's own NTK, which no other runtime has: the base times factor,
    and all frequencies divided by factor^(2/dim).

    mixed_b: the exponent of its mixed form, which divides later pairs by more; None for the plain
    form.
    """
    if mixed_b is None:
        return tuple(
            f / factor ** (2 / dim)
            for f in float64_formulas.unscaled_frequencies(dim, theta * factor)
        )
    exponent = require_number(mixed_b, "mixed_b")
    rate = math.log(factor) / (dim / 2) ** exponent
    plain_inv_freq = float64_formulas.unscaled_frequencies(dim, theta)
    return tuple(f / math.exp(rate * (i + 1) ** exponent) for i, f in enumerate(plain_inv_freq))


def _frequency_switch(p: Mapping[str, Any], model: Model) -> Switch:
    """Return when the frequencies change: those of longrope, with the length of the server."""
    if p["rope_type"] != "longrope":
        return "static"
    original_length = p["original_max_position_embeddings"]
    return "start" if SHORTEST_SERVER_LENGTH <= original_length < model.max_positions else "static"


def _softmax_scale(model: Model, p: Mapping[str, Any]) -> float:
    """Return the softmax scale, which latent attention multiplies by its squared temperature."""
    if p["rope_type"] != "deepseek_yarn":
        return model.softmax_scale
    factor = require_number(p["factor"], "factor")
    mscale_all_dim = require_number(p.get("mscale_all_dim", 0), "mscale_all_dim")
    return model.softmax_scale * float64_formulas.yarn_attention_factor(factor, mscale_all_dim) ** 2
