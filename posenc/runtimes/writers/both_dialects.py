"""Write the same rotary settings in both dialects of transformers."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import STOPPING_DIVISOR, LayerRotation
from posenc.runtimes.config_model import Model, language_model_key
from posenc.runtimes.known.transformers4 import TWO_KEYS
from posenc.runtimes.known.transformers5_rope_dicts import PHI3
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
    config: Mapping[str, Any], meaning: Meaning, parameters: Mapping[str, Parameters], largest: int
) -> dict[str, Any]:
    """Return a copy of the config with these rope dicts, one per kind of layer, in both dialects.

    largest: the new max_position_embeddings.
    """
    model = meaning.model
    result, holder = _copy_without_rotary_keys(config, largest, _keys_left_in_place(model))
    if model.has_rope_dict_per_kind:
        _write_nested(holder, model, parameters)
    else:
        _write_flat(holder, model, parameters["all"], largest)
    return result


def _keys_left_in_place(model: Model) -> tuple[str, ...]:
    """Return the rotary keys that stay where the user wrote them, since nothing reads them in this
    family."""
    return () if model.model_type.startswith("gpt_neox") else ("rotary_pct",)


def _copy_without_rotary_keys(
    config: Mapping[str, Any], largest: int, unread: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy of the config without rotary keys, and the dict in it that has the language
    model's keys.

    largest: the new max_position_embeddings. unread: rotary keys that stay.
    """
    result = deepcopy(dict(config))
    inner = language_model_key(config)
    holder = result[inner] if inner else result
    for place in (result, holder):
        for key in KEYS_WRITTEN_ANEW:
            if key not in unread:
                place.pop(key, None)
    holder["max_position_embeddings"] = largest
    return result, holder


def config_in_newer_dialect(
    config: Mapping[str, Any], parameters: Parameters, largest: int
) -> dict[str, Any]:
    """Return a copy of the config with rope_parameters only, for families whose older reader
    refuses more keys."""
    result, holder = _copy_without_rotary_keys(config, largest)
    original = parameters["original_max_position_embeddings"]
    holder["original_max_position_embeddings"] = original
    holder["rope_parameters"] = dict(parameters)
    return result


def _write_flat(holder: dict[str, Any], model: Model, given: Parameters, largest: int) -> None:
    """Write the one rope dict of all layers into `holder` in both dialects, its base and its
    rotated share also beside it."""
    p = {k: v for k, v in given.items() if v is not None}
    theta = float(p["rope_theta"])
    p["rope_theta"] = theta
    is_neox = model.model_type.startswith("gpt_neox")
    holder["rotary_emb_base" if is_neox else "rope_theta"] = theta
    if model.supports_partial_rotation:
        share = p.get("partial_rotary_factor", 1.0)
        holder["rotary_pct" if is_neox else "partial_rotary_factor"] = share
        p["partial_rotary_factor"] = share
    else:
        p.pop("partial_rotary_factor", None)
    if model.model_type in PHI3 and p["rope_type"] == "longrope":
        _write_phi3(holder, p, theta, largest)
        return
    _write_outer_original_length(holder, p)
    holder["rope_parameters"] = dict(p)
    _write_older_dict(holder, p, model)


def _write_older_dict(holder: dict[str, Any], p: Parameters, model: Model) -> None:
    """Write rope_scaling where an older reader has to find one."""
    if "rope_scaling" in (model.facts.get("mlx_lm") or {}).get("needs", ()):
        holder["rope_scaling"] = None  # mlx-lm refuses a file without the key
    facts = model.facts.get("transformers4") or {}
    needs_one = facts.get("nulls", {}).get("rope_scaling") == "stops"
    if p["rope_type"] == "default" and not needs_one:
        return
    holder["rope_scaling"] = {**p, "type": p["rope_type"]}
    if model.model_type in TWO_KEYS and p["rope_type"] in ("linear", "dynamic"):
        # OLMo's older class refuses any other key.
        holder["rope_scaling"] = {"type": p["rope_type"], "factor": p["factor"]}


def _write_outer_original_length(holder: dict[str, Any], p: Parameters) -> None:
    """Write the original length at the top level, the only place where transformers 4 looks for the
    length at which two lists switch."""
    if p["rope_type"] == "longrope" and p["short_factor"] != p["long_factor"]:
        holder["original_max_position_embeddings"] = p["original_max_position_embeddings"]


def _write_phi3(holder: dict[str, Any], p: Parameters, theta: float, largest: int) -> None:
    """Write the three keys that Phi-3's classes want, and the original length at the top level."""
    three = {"type": "longrope", "short_factor": p["short_factor"], "long_factor": p["long_factor"]}
    holder["rope_scaling"] = three
    holder["original_max_position_embeddings"] = p.get("original_max_position_embeddings", largest)
    holder["rope_parameters"] = {**three, "rope_theta": theta}


def _write_nested(
    holder: dict[str, Any], model: Model, parameters: Mapping[str, Parameters]
) -> None:
    """Write one dict for each kind of layer, and what older readers look for beside them."""
    # A kind with null for a dict does not rotate.
    nested: dict[str, Any] = dict.fromkeys(set(model.layer_kinds) - parameters.keys())
    for kind, p in parameters.items():
        nested[kind] = {k: v for k, v in p.items() if v is not None}
    holder["rope_parameters"] = nested
    full = nested.get("full_attention")
    if full is not None:
        _write_outer_original_length(holder, full)
        # Elsewhere transformers 5 would take it for other layers, too, or for all there is.
        if full["rope_type"] != "default" and model.kinds_of_flat_rope_scaling == (
            "full_attention",
        ):
            holder["rope_scaling"] = {k: v for k, v in full.items() if k != "rope_theta"}
    _write_outer_bases(holder, model, nested)
    if "sliding_window_pattern" in (model.facts.get("mlx_lm") or {}).get("defaults", {}):
        _write_sliding_window_pattern(holder, model)


def _write_outer_bases(holder: dict[str, Any], model: Model, nested: Mapping[str, Any]) -> None:
    """Write the bases of the kinds of layers at the top level, by the family's keys for them."""
    keys = {"full_attention": "rope_theta", **model.facts["transformers5"].get("theta_keys", {})}
    for key in dict.fromkeys(keys.values()):
        dicts_of_key = [nested.get(kind) for kind, kinds_key in keys.items() if kinds_key == key]
        bases = {p["rope_theta"] for p in dicts_of_key if p is not None}
        if len(bases) == 1:  # one key cannot hold the two bases of two kinds
            holder[key] = bases.pop()


def _write_sliding_window_pattern(holder: dict[str, Any], model: Model) -> None:
    """Write sliding_window_pattern, n where each n-th layer has full attention, if the layers have
    such a period: mlx-lm looks at no list of kinds."""
    is_full = [kind == "full_attention" for kind in model.layer_types]
    for every in range(1, len(is_full) + 1):
        if is_full == [(i + 1) % every == 0 for i in range(len(is_full))]:
            holder["sliding_window_pattern"] = every


def yarn_keys_of_multiplier(multiplier: float, factor: float) -> Parameters:
    """Return keys that give yarn any multiplier on cos and sin: attention_factor for transformers
    and vLLM, the mscale pair for SGLang and mlx-lm.

    Raises: ValueError where mscale would be 0, which transformers takes for missing.
    """
    log = 0.1 * math.log(factor)
    mscale = (multiplier * (log + 1) - 1) / log
    if mscale == 0:
        raise ValueError(f"no mscale gives the multiplier {multiplier:g} at factor {factor:g}")
    return {"attention_factor": multiplier, "mscale": mscale, "mscale_all_dim": 1.0}


def longrope_of_any_rotation(layer: LayerRotation, theta: float, largest: int) -> Parameters:
    """Return a longrope dict that gives any frequencies and multiplier in transformers 4 and 5,
    vLLM and SGLang, and in mlx-lm with multiplier 1.

    Its original length is the largest one, so that nothing switches. A pair's factor is its
    frequency without scaling over the wanted one.
    """
    plain = float64_formulas.unscaled_frequencies(2 * len(layer.inv_freq), theta)
    ratios = [p / f if f else STOPPING_DIVISOR for p, f in zip(plain, layer.inv_freq, strict=True)]
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": ratios,
        "long_factor": list(ratios),
        "factor": 1.0,
        "original_max_position_embeddings": largest,
        "attention_factor": layer.multiplier,
        "short_mscale": layer.multiplier,
        "long_mscale": layer.multiplier,
    }
