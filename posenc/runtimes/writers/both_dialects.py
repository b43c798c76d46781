"""Write the same rotary settings in both dialects of transformers."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import STOPPING_DIVISOR, LayerRotation
from posenc.runtimes.config_model import Model, language_model_key
from posenc.runtimes.known.transformers4 import FAMILIES_WITH_TWO_KEYS
from posenc.runtimes.known.transformers5_rope_dicts import PHI3_FAMILIES
from posenc.runtimes.meaning import Meaning

KEYS_WRITTEN_ANEW = tuple(
    "rope_scaling rope_parameters rope_theta rope_local_base_freq global_rope_theta "
    "local_rope_theta compress_rope_theta "
    "original_max_position_embeddings partial_rotary_factor rotary_emb_base rotary_pct "
    "rotary_base rope_base rope_ratio".split()
)
"""Keys that a recipe writes anew."""
Parameters = dict[str, Any]


def config_in_both_dialects(
    config: Mapping[str, Any],
    meaning: Meaning,
    parameters: Mapping[str, Parameters],
    max_positions: int,
) -> dict[str, Any]:
    """Return a copy of the config with these rope dicts, one per kind of layer, in both dialects.

    max_positions: the new max_position_embeddings.
    """
    model = meaning.model
    result, language_model_part = _copy_without_rotary_keys(
        config, max_positions, _keys_left_in_place(model)
    )
    if model.has_rope_dict_per_kind:
        _write_nested(language_model_part, model, parameters)
    else:
        _write_flat(language_model_part, model, parameters["all"], max_positions)
    return result


def _keys_left_in_place(model: Model) -> tuple[str, ...]:
    """Return the rotary keys that stay where the user wrote them, since nothing reads them in this
    family."""
    return () if model.model_type.startswith("gpt_neox") else ("rotary_pct",)


def _copy_without_rotary_keys(
    config: Mapping[str, Any], max_positions: int, kept_keys: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy of the config without rotary keys, and the dict in it that has the language
    model's keys.

    max_positions: the new max_position_embeddings. kept_keys: rotary keys that stay.
    """
    result = deepcopy(dict(config))
    inner_key = language_model_key(config)
    language_model_part = result[inner_key] if inner_key else result
    for part in (result, language_model_part):
        for key in KEYS_WRITTEN_ANEW:
            if key not in kept_keys:
                part.pop(key, None)
    language_model_part["max_position_embeddings"] = max_positions
    return result, language_model_part


def config_in_newer_dialect(
    config: Mapping[str, Any], parameters: Parameters, max_positions: int
) -> dict[str, Any]:
    """Return a copy of the config with rope_parameters only, for families whose older reader
    refuses more keys."""
    result, language_model_part = _copy_without_rotary_keys(config, max_positions)
    original_length = parameters["original_max_position_embeddings"]
    language_model_part["original_max_position_embeddings"] = original_length
    language_model_part["rope_parameters"] = dict(parameters)
    return result


def _write_flat(
    language_model_part: dict[str, Any], model: Model, rope_dict: Parameters, max_positions: int
) -> None:
    """Write the one rope dict of all layers into `language_model_part` in both dialects, its base
    and its rotated share also beside it."""
    p = {k: v for k, v in rope_dict.items() if v is not None}
    theta = float(p["rope_theta"])
    p["rope_theta"] = theta
    is_neox = model.model_type.startswith("gpt_neox")
    language_model_part["rotary_emb_base" if is_neox else "rope_theta"] = theta
    if model.supports_partial_rotation:
        share = p.get("partial_rotary_factor", 1.0)
        language_model_part["rotary_pct" if is_neox else "partial_rotary_factor"] = share
        p["partial_rotary_factor"] = share
    else:
        p.pop("partial_rotary_factor", None)
    if model.model_type in PHI3_FAMILIES and p["rope_type"] == "longrope":
        _write_phi3(language_model_part, p, theta, max_positions)
        return
    _write_outer_original_length(language_model_part, p)
    language_model_part["rope_parameters"] = dict(p)
    _write_older_dict(language_model_part, p, model)


def _write_older_dict(language_model_part: dict[str, Any], p: Parameters, model: Model) -> None:
    """Write rope_scaling where an older reader has to find one."""
    if "rope_scaling" in (model.facts.get("mlx_lm") or {}).get("needs", ()):
        language_model_part["rope_scaling"] = None  # mlx-lm refuses a file without the key
    facts = model.facts.get("transformers4") or {}
    needs_dict = facts.get("nulls", {}).get("rope_scaling") == "stops"
    if p["rope_type"] == "default" and not needs_dict:
        return
    language_model_part["rope_scaling"] = {**p, "type": p["rope_type"]}
    if model.model_type in FAMILIES_WITH_TWO_KEYS and p["rope_type"] in ("linear", "dynamic"):
        # OLMo's older class refuses any other key.
        language_model_part["rope_scaling"] = {"type": p["rope_type"], "factor": p["factor"]}


def _write_outer_original_length(language_model_part: dict[str, Any], p: Parameters) -> None:
    """Write the original length at the top level, the only place where transformers 4 looks for the
    length at which two lists switch."""
    if p["rope_type"] == "longrope" and p["short_factor"] != p["long_factor"]:
        language_model_part["original_max_position_embeddings"] = p[
            "original_max_position_embeddings"
        ]


def _write_phi3(
    language_model_part: dict[str, Any], p: Parameters, theta: float, max_positions: int
) -> None:
    """Write the three keys that Phi-3's classes want, and the original length at the top level."""
    phi3_dict = {
        "type": "longrope",
        "short_factor": p["short_factor"],
        "long_factor": p["long_factor"],
    }
    language_model_part["rope_scaling"] = phi3_dict
    language_model_part["original_max_position_embeddings"] = p.get(
        "original_max_position_embeddings", max_positions
    )
    language_model_part["rope_parameters"] = {**phi3_dict, "rope_theta": theta}


def _write_nested(
    language_model_part: dict[str, Any], model: Model, parameters: Mapping[str, Parameters]
) -> None:
    """Write one dict for each kind of layer, and what older readers look for beside them."""
    # A kind with null for a dict does not rotate.
    dict_by_kind: dict[str, Any] = dict.fromkeys(set(model.layer_kinds) - parameters.keys())
    for kind, p in parameters.items():
        dict_by_kind[kind] = {k: v for k, v in p.items() if v is not None}
    language_model_part["rope_parameters"] = dict_by_kind
    full_dict = dict_by_kind.get("full_attention")
    if full_dict is not None:
        _write_outer_original_length(language_model_part, full_dict)
        # Elsewhere transformers 5 would take it for other layers, too, or for all there is.
        if full_dict["rope_type"] != "default" and model.kinds_of_flat_rope_scaling == (
            "full_attention",
        ):
            language_model_part["rope_scaling"] = {
                k: v for k, v in full_dict.items() if k != "rope_theta"
            }
    _write_outer_bases(language_model_part, model, dict_by_kind)
    if "sliding_window_pattern" in (model.facts.get("mlx_lm") or {}).get("defaults", {}):
        _write_sliding_window_pattern(language_model_part, model)


def _write_outer_bases(
    language_model_part: dict[str, Any], model: Model, dict_by_kind: Mapping[str, Any]
) -> None:
    """Write the bases of the kinds of layers at the top level, by the family's keys for them."""
    key_of_kind = {
        "full_attention": "rope_theta",
        **model.facts["transformers5"].get("theta_keys", {}),
    }
    for key in dict.fromkeys(key_of_kind.values()):
        dicts_of_key = [
            dict_by_kind.get(kind) for kind, kinds_key in key_of_kind.items() if kinds_key == key
        ]
        bases = {p["rope_theta"] for p in dicts_of_key if p is not None}
        if len(bases) == 1:  # one key cannot hold the two bases of two kinds
            language_model_part[key] = bases.pop()


def _write_sliding_window_pattern(language_model_part: dict[str, Any], model: Model) -> None:
    """Write sliding_window_pattern, n where each n-th layer has full attention, if the layers have
    such a period: mlx-lm looks at no list of kinds."""
    flags_of_full_attention = [kind == "full_attention" for kind in model.layer_types]
    for period in range(1, len(flags_of_full_attention) + 1):
        if flags_of_full_attention == [
            (i + 1) % period == 0 for i in range(len(flags_of_full_attention))
        ]:
            language_model_part["sliding_window_pattern"] = period


def yarn_keys_of_multiplier(multiplier: float, factor: float) -> Parameters:
    """Return keys that give yarn any multiplier on cos and sin: attention_factor for transformers
    and vLLM, the mscale pair for SGLang and mlx-lm.

    Raises: ValueError where mscale would be 0, which transformers takes for missing.
    """
    tenth_of_log = 0.1 * math.log(factor)
    mscale = (multiplier * (tenth_of_log + 1) - 1) / tenth_of_log
    if mscale == 0:
        raise ValueError(f"no mscale gives the multiplier {multiplier:g} at factor {factor:g}")
    return {"attention_factor": multiplier, "mscale": mscale, "mscale_all_dim": 1.0}


def longrope_of_any_rotation(
    rotation: LayerRotation, theta: float, longest_length: int
) -> Parameters:
    """Return a longrope dict that gives any frequencies and multiplier in transformers 4 and 5,
    vLLM and SGLang, and in mlx-lm with multiplier 1.

    Its original length is the largest one, so that nothing switches. A pair's factor is its
    frequency without scaling over the wanted one.
    """
    plain_inv_freq = float64_formulas.unscaled_frequencies(2 * len(rotation.inv_freq), theta)
    factors = [
        p / f if f else STOPPING_DIVISOR
        for p, f in zip(plain_inv_freq, rotation.inv_freq, strict=True)
    ]
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": list(factors),
        "factor": 1.0,
        "original_max_position_embeddings": longest_length,
        "attention_factor": rotation.multiplier,
        "short_mscale": rotation.multiplier,
        "long_mscale": rotation.multiplier,
    }
