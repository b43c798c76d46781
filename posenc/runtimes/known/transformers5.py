"""transformers 5: it reads rope_parameters and merges the older spelling into it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import (
    ComputedPositions,
    LayerRotation,
    NotReadError,
    RefusedError,
    Switch,
    first_changing_switch,
    llama3_rotation,
    require_factors,
    require_key,
    require_number,
)
from posenc.runtimes.config_model import (
    ORIGINAL_LENGTH_KEY,
    Model,
    model_of,
)
from posenc.runtimes.known.transformers5_rope_dicts import (
    NEEDED_KEYS,
    NO_LENGTH_MESSAGE,
    STRETCHING_TYPES,
    Parameters,
    check_required_keys,
    refuse_unloadable_nested,
    resolve_rope_dicts,
)

HUNYUAN_FAMILIES = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Families whose class stretches the base by a fixed alpha where the type is dynamic."""
FAMILIES_WITH_OWN_MSCALES = ("phimoe",)
"""Families whose module multiplies by short_mscale and long_mscale."""
FAMILIES_WITH_SHARED_AXES = ("pixtral",)
"""Towers whose height and width take the frequencies of one head in turn."""
FAMILIES_WITH_RESTING_KINDS = ("beam",)
"""Families with a dict per kind whose layers do not rotate where the dict of their kind is null.
All others ask cos and sin of each kind that has layers, so that a forward pass stops, as the
installed 5.24 answered."""
FAMILIES_NEEDING_FULL_ATTENTION = ("neomme",)
"""Families whose class refuses layer_types without a layer of full attention."""
FAMILIES_WITH_EMPTY_LIST_AS_NONE = ("llama4_text",)
"""Families in which an empty list of the layers that rotate counts for no list."""


def yarn_multiplier(parameters: Mapping[str, Any], factor: float) -> float:
    """Return yarn's multiplier of cos and sin: attention_factor, else by the mscale pair if both
    are given, else yarn's own for the factor."""
    attention_factor = parameters.get("attention_factor")
    if attention_factor is not None:
        return require_number(attention_factor, "attention_factor")
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        mscale = require_number(mscale, "mscale")
        mscale_all_dim = require_number(mscale_all_dim, "mscale_all_dim")
        numerator = float64_formulas.yarn_attention_factor(factor, mscale)
        return numerator / float64_formulas.yarn_attention_factor(factor, mscale_all_dim)
    return float64_formulas.yarn_attention_factor(factor)


def rotation(parameters: Parameters, model: Model, length: int) -> LayerRotation:
    """Return the rotation of one kind of layer at a length, by its loaded rope dict."""
    rope_type = parameters["rope_type"]
    facts = model.transformers5_facts
    theta = require_number(parameters["rope_theta"], "rope_theta")
    share = require_number(parameters.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
    usual_head_dim = model.head_dim
    trained_length = model.max_positions
    head_dim = int(model.get(facts.head_key) or usual_head_dim)
    takes_type = facts.types is None or rope_type in facts.types
    if not takes_type and not model.has_rope_dict_per_kind:
        raise RefusedError(
            f"ValueError: requires another rope type, but found {rope_type} instead."
        )
    if facts.axes is not None:
        return axial_rotation(rope_type, model, head_dim, theta)
    if rope_type == "proportional":
        factor = require_number(parameters.get("factor", 1.0), "factor")
        return LayerRotation(
            float64_formulas.proportional_frequencies(head_dim, theta, share, factor)
        )
    if rope_type == "default":
        # Each class has a function of its own for this type, and few of them read the share.
        dim = int(head_dim * share) if model.supports_partial_rotation else head_dim
        return LayerRotation(float64_formulas.unscaled_frequencies(dim, theta))
    dim = int(head_dim * share)
    _refuse_null_head(rope_type, model)
    if rope_type == "longrope":
        return _longrope_rotation(parameters, theta, dim, trained_length, length)
    _refuse_scaling(rope_type, dim, model)
    factor = _scaling_factor(parameters, trained_length)
    alpha = _fixed_alpha(model, parameters)
    if rope_type == "llama3":
        return llama3_rotation(parameters, dim, theta)
    if rope_type == "linear":
        return LayerRotation(
            float64_formulas.linear_frequencies(
                float64_formulas.unscaled_frequencies(dim, theta), factor
            )
        )
    if alpha is not None:
        base = float64_formulas.ntk_theta(theta, alpha, head_dim)
        return LayerRotation(float64_formulas.unscaled_frequencies(head_dim, base))
    if rope_type == "dynamic":
        base = float64_formulas.dynamic_theta(theta, factor, length, trained_length, dim)
        return LayerRotation(float64_formulas.unscaled_frequencies(dim, base))
    original_length = require_number(parameters[ORIGINAL_LENGTH_KEY], ORIGINAL_LENGTH_KEY)
    return yarn_rotation(parameters, dim, theta, factor, original_length)


def axial_rotation(rope_type: str, model: Model, head_dim: int, theta: float) -> LayerRotation:
    """Return the frequencies of a tower that rotates by the height and the width of a patch."""
    if rope_type not in ("default", "axial"):
        raise RefusedError(f"ValueError: supports only axial rope, but requested {rope_type}")
    if model.model_type in FAMILIES_WITH_SHARED_AXES:
        inv_freq_of_both_axes = float64_formulas.unscaled_frequencies(head_dim, theta)
        return LayerRotation(inv_freq_of_both_axes[0::2] + inv_freq_of_both_axes[1::2])
    return LayerRotation(
        float64_formulas.unscaled_frequencies(
            head_dim // (model.transformers5_facts.axes or 1), theta
        )
    )


def _refuse_null_head(rope_type: str, model: Model) -> None:
    """Raise RefusedError where a type's function multiplies a head_dim that is null. Those of
    linear and llama3 replace it by the width of a head (modeling_rope_utils.py:180 and :638 of the
    release that was read), the others only one that is missing (:324, :415, :548)."""
    facts = model.transformers5_facts
    # A class that admits null beside integers has null as its default.
    is_null_by_default = "head_dim" in facts.checked_keys.integers_or_null
    value_if_missing = None if is_null_by_default else 0  # 0: any number, which is not null
    is_null = model.config.get("head_dim", value_if_missing) is None
    is_multiplied = facts.nulls.get("head_dim") == "multiplied"
    if is_null and is_multiplied and rope_type not in ("linear", "llama3"):
        raise RefusedError("TypeError: unsupported operand type(s) for *: 'NoneType' and 'float'")


def _refuse_scaling(rope_type: str, dim: int, model: Model) -> None:
    """Raise RefusedError for an unknown type, or one whose function stops at the model's sizes."""
    if rope_type not in NEEDED_KEYS:
        raise RefusedError(f"KeyError: {rope_type!r}")
    if rope_type != "linear" and model.get("max_position_embeddings") is None:
        raise RefusedError(NO_LENGTH_MESSAGE)
    if rope_type == "yarn" and dim % 2:
        raise RefusedError(f"RuntimeError: The size of tensor a must match: {dim} channels, odd")


def _scaling_factor(parameters: Parameters, trained_length: int) -> float:
    """Return the factor. yarn's function replaces a null by the ratio of the two lengths."""
    factor = parameters["factor"]
    if factor is None and parameters["rope_type"] == "yarn":
        factor = trained_length / require_number(parameters[ORIGINAL_LENGTH_KEY], "original length")
    return require_number(factor, "factor")


def _fixed_alpha(model: Model, parameters: Parameters) -> float | None:
    """Return the alpha by which HunYuan's class stretches the base of the type dynamic at any
    length; None for other types, and where the length decides."""
    alpha = parameters.get("alpha")
    is_read = parameters["rope_type"] == "dynamic" and model.model_type in HUNYUAN_FAMILIES
    return require_number(alpha, "alpha") if is_read and alpha else None  # 0 counts for none


def yarn_rotation(
    p: Mapping[str, Any], dim: int, theta: float, factor: float, original_length: float
) -> LayerRotation:
    """Return the rotation of yarn, of `dim` channels. original_length: trained at, in tokens."""
    beta_fast = require_number(p.get("beta_fast") or 32, "beta_fast")
    beta_slow = require_number(p.get("beta_slow") or 1, "beta_slow")
    truncate = bool(p.get("truncate", True))
    inv_freq = float64_formulas.yarn_frequencies(
        dim, theta, factor, original_length, beta_fast, beta_slow, truncate
    )
    return LayerRotation(inv_freq, yarn_multiplier(p, factor))


def _longrope_rotation(
    p: Parameters, theta: float, dim: int, trained_length: int, length: int
) -> LayerRotation:
    """Return the rotation of longrope at a length: by its short or its long list of factors."""
    original_length = require_number(require_key(p, ORIGINAL_LENGTH_KEY), "original length")
    num_pairs = (dim + 1) // 2
    short_factors = require_factors(p, "short_factor", num_pairs)
    long_factors = require_factors(p, "long_factor", num_pairs)
    factor = p.get("factor")
    length_ratio = (
        trained_length / original_length if factor is None else require_number(factor, "factor")
    )
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        attention_factor = float64_formulas.longrope_attention_factor(length_ratio, original_length)
    factors_at_length = long_factors if length > original_length else short_factors
    inv_freq = float64_formulas.divide_each(
        float64_formulas.unscaled_frequencies(dim, theta), factors_at_length
    )
    return LayerRotation(inv_freq, require_number(attention_factor, "it"))


def frequency_switch(model: Model, parameters: Parameters) -> Switch:
    """Return whether the frequencies change with the current length: those of dynamic NTK do beyond
    the trained length, and longrope's beyond the original one. No length is refused. HunYuan's are
    fixed by alpha."""
    rope_type = parameters["rope_type"]
    if rope_type == "dynamic":
        return "length" if _fixed_alpha(model, parameters) is None else "static"
    has_two_lists = (
        rope_type == "longrope" and parameters["short_factor"] != parameters["long_factor"]
    )
    return "length" if has_two_lists else "static"


def _model_of_scale(model: Model) -> Model:
    """Return the model with the sizes from which its softmax scale follows: those of the one kind
    of layers that it has. Where kinds differ there is no one scale, and it is that of the sizes in
    the config, which are the full-attention layers'."""
    if len(model.layer_kinds) == 1:
        (kind,) = model.layer_kinds
        return model.with_sizes_of_kind(kind)
    return model


def softmax_scale(model: Model, parameters: Parameters) -> float:
    """Return the softmax scale. MLA multiplies it by the squared temperature of mscale_all_dim."""
    mscale_all_dim = parameters.get("mscale_all_dim")
    if not model.is_mla or parameters["rope_type"] == "default" or not mscale_all_dim:
        return model.softmax_scale
    factor = require_number(require_key(parameters, "factor"), "factor")
    return (
        model.softmax_scale
        * float64_formulas.yarn_attention_factor(
            factor, require_number(mscale_all_dim, "mscale_all_dim")
        )
        ** 2
    )


def rotation_of_own_module(p: Parameters, model: Model, length: int) -> LayerRotation:
    """Return the rotation of a family's own module. Phi-3.5-MoE's always uses the short list, and
    one of its two mscales for every type."""
    if model.model_type not in FAMILIES_WITH_OWN_MSCALES or p["rope_type"] == "default":
        return rotation(p, model, length)
    original_length = require_number(require_key(p, ORIGINAL_LENGTH_KEY), "original length")
    mscale_key = "long_mscale" if length > original_length else "short_mscale"
    layer_rotation = rotation(p, model, min(length, int(original_length)))
    return LayerRotation(
        layer_rotation.inv_freq, require_number(require_key(p, mscale_key), mscale_key)
    )


def why_width_stops(layer_rotation: LayerRotation, model: Model) -> str:
    """Return the error of a forward pass if cos and sin have another number of channels than
    attention rotates by them; "" if the pass runs. In some families, torch's own message has other
    numbers."""
    width = 2 * len(layer_rotation.inv_freq)
    required_width = model.required_table_width
    if required_width is None or required_width % 2 or required_width == width:
        return ""
    return (
        "RuntimeError: The size of tensor a must match the size of tensor b: attention rotates "
        f"{required_width} channels of each head, and cos and sin have {width}"
    )


def _why_sections_stop(p: Parameters, layer_rotation: LayerRotation, model: Model) -> str:
    """Return why a forward pass stops where a module splits its pairs into sections that are more
    or fewer; empty if it runs."""
    default_sections = model.transformers5_facts.sections
    stated_sections = p.get("mrope_section")
    sections = stated_sections if isinstance(stated_sections, list) else [*(default_sections or ())]
    if default_sections is None or sum(sections) == len(layer_rotation.inv_freq):
        return ""
    return (
        f"RuntimeError: mrope_section {sections} adds up to {sum(sections)}, and each head has "
        f"{len(layer_rotation.inv_freq)} rotated pairs"
    )


def _refuse_values(model: Model) -> None:
    """Raise RefusedError where building the class's config or its layers stops at a value."""
    facts = model.transformers5_facts
    for key, value in facts.checked_keys.refused_values(model.config):
        raise RefusedError(f"TypeError: the class or its layers refuse {key} {value!r}")
    _refuse_nulls_at_which_layers_stop(model)
    refuse_booleans(model)
    _refuse_short_list_of_rotating_layers(model)
    if facts.whole_heads and model.size("hidden_size") % model.num_heads:
        raise RefusedError("ValueError: the hidden size is no multiple of the attention heads")
    if (
        model.model_type in FAMILIES_NEEDING_FULL_ATTENTION
        and "full_attention" not in model.layer_types
    ):
        raise RefusedError("ValueError: layer_types must contain at least one full_attention layer")
    for name in ("rope_scaling", "rope_parameters"):
        outer_dict = model.outer_config.get(name)
        if isinstance(outer_dict, Mapping):
            _validate_outer_rope_dict(outer_dict, model)


def _refuse_nulls_at_which_layers_stop(model: Model) -> None:
    """Raise RefusedError for a null with which building a layer stops. A rope dict with a key of
    that name takes its place."""
    rope_dict = model.config.get("rope_scaling") or model.config.get("rope_parameters") or {}
    for key, effect in model.transformers5_facts.nulls.items():
        if effect == "stops" and model.config.get(key, 1) is None and key not in rope_dict:
            raise RefusedError(f"TypeError: the class or its layers refuse {key} None")


def refuse_booleans(model: Model) -> None:
    """Raise RefusedError for the first value that is neither true nor false where the config's
    class wants one of them, also in servers that read by the classes of transformers 5."""
    for key, value in model.transformers5_facts.checked_keys.refused_booleans(model.config):
        type_name = type(value).__name__
        raise RefusedError(
            f"StrictDataclassFieldValidationError: Field {key!r} expected bool, got {type_name} "
            f"(value: {value!r:.60})"
        )


def refuse_fractions(model: Model) -> None:
    """Raise RefusedError for a number with a point where the config's class wants an integer, which
    servers read by the classes of transformers 5."""
    for key, value in model.transformers5_facts.checked_keys.floats_where_integers_belong(
        model.config
    ):
        raise RefusedError(f"TypeError: Field {key!r} expected int, got float (value: {value})")


def _refuse_short_list_of_rotating_layers(model: Model) -> None:
    """Raise RefusedError for a list of which layers rotate that has too few entries. Some classes
    replace an empty one."""
    flags = model.config.get(model.facts.get("rotates", {}).get("list", ""))
    if not isinstance(flags, list) or len(flags) >= model.num_layers:
        return
    if flags or model.model_type not in FAMILIES_WITH_EMPTY_LIST_AS_NONE:
        raise RefusedError("IndexError: list index out of range")


def _validate_outer_rope_dict(outer_dict: Mapping[str, Any], model: Model) -> None:
    """Check a rope dict at the top level of a multimodal config: transformers validates it, and
    reads only the one inside the language model's own config.

    Raises: RefusedError where a required key or the length is missing; NotReadError for a type that
    stretches, if the top level does say a length.
    """
    rope_type = outer_dict.get("rope_type", outer_dict.get("type", "default"))
    check_required_keys({**outer_dict, "rope_type": rope_type})
    if rope_type in STRETCHING_TYPES:
        has_length = "max_position_embeddings" in model.outer_config
        raise (NotReadError if has_length else RefusedError)(NO_LENGTH_MESSAGE)


def compute(model: Model, length: int | None) -> ComputedPositions:
    """Return what transformers 5.23 computes. It never refuses a length."""
    model = _as_autoconfig_class(model)
    _refuse_values(model)
    model = _with_null_share_replaced(model)
    if "theta_in" in model.facts and model.theta_of_inner_dict is None:
        raise RefusedError("AttributeError: 'DbrxAttentionConfig' has no attribute 'rope_theta'")
    resolved_dicts = resolve_rope_dicts(model)
    if len(model.without_rotation) == model.num_layers:
        return ComputedPositions(
            None,
            {},
            _model_of_scale(model).softmax_scale,
            without_rotation=model.without_rotation,
            stop_message=_first_reason_to_stop({}, {}, model),
        )
    if model.has_rope_dict_per_kind:
        refuse_unloadable_nested(model, resolved_dicts)
    elif (
        model.config.get(ORIGINAL_LENGTH_KEY, 0) is None
        and resolved_dicts["all"]["rope_type"] in STRETCHING_TYPES
    ):
        raise RefusedError("TypeError: unsupported operand type(s) for /: 'NoneType' and 'float'")
    length = length or model.max_positions
    rotations = {
        kind: rotation_of_own_module(p, model.with_sizes_of_kind(kind), length)
        for kind, p in resolved_dicts.items()
    }
    first_dict = next(iter(resolved_dicts.values()))
    return ComputedPositions(
        None,
        rotations,
        softmax_scale(_model_of_scale(model), first_dict),
        first_changing_switch(frequency_switch(model, p) for p in resolved_dicts.values()),
        None,
        model.without_rotation,
        stop_message=_first_reason_to_stop(rotations, resolved_dicts, model),
    )


def _as_autoconfig_class(model: Model) -> Model:
    """Return the model as the class that AutoConfig takes: Ministral's for a file of Mistral's with
    layer_types."""
    if model.model_type == "mistral" and "layer_types" in model.config and not model.outer_config:
        return replace(model, facts=model_of({"model_type": "ministral"}).facts)
    return model


def _with_null_share_replaced(model: Model) -> Model:
    """Return the model with whole heads rotated where its class takes a null share for 1."""
    facts = model.transformers5_facts
    key = facts.share_key
    if facts.nulls.get(key) == "whole" and model.config.get(key, 0) is None:
        return replace(model, config={**model.config, key: 1.0})
    return model


def _first_reason_to_stop(
    rotations: Mapping[str, LayerRotation], resolved_dicts: Mapping[str, Parameters], model: Model
) -> str:
    """Return why the first forward pass stops; empty if it runs. Too wide or narrow tables of any
    kind of layer come before sections."""
    reasons = [
        why_width_stops(layer_rotation, model.with_sizes_of_kind(kind))
        for kind, layer_rotation in rotations.items()
    ]
    reasons += [
        _why_sections_stop(resolved_dicts[kind], layer_rotation, model)
        for kind, layer_rotation in rotations.items()
    ]
    reasons.append(_why_null_dict_stops(model))
    return next(filter(None, reasons), "")


def _why_null_dict_stops(model: Model) -> str:
    """Return why a forward pass stops where a kind that has layers has null for a rope dict; empty
    if it runs."""
    if not model.has_rope_dict_per_kind or model.model_type in FAMILIES_WITH_RESTING_KINDS:
        return ""
    if not model.without_rotation:
        return ""
    return f"KeyError: {model.layer_types[model.without_rotation[0]]!r}"
