"""transformers 5: it reads rope_parameters and merges the older spelling into it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from posenc.dialects import formulas
from posenc.dialects.computed import (
    Computed,
    Layer,
    NotReadError,
    RefusedError,
    Switch,
    factors,
    first_switch,
    llama3,
    number,
    required,
)
from posenc.dialects.model import Model, model_of
from posenc.dialects.runtimes.loaded_dicts import (
    NEEDED,
    NO_LENGTH,
    ORIGINAL,
    STRETCHED,
    Parameters,
    check,
    refuse_nested,
    resolve,
)
from posenc.dialects.runtimes.running import emulator

MARKS = "?+!~%"
"""Of the words of `values`, see `_refuse_values`."""
ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Families whose class stretches the base by a fixed alpha where the type is dynamic."""
OWN_MSCALES = ("phimoe",)
"""Families whose module multiplies by short_mscale and long_mscale."""


def yarn_multiplier(parameters: Mapping[str, Any], factor: float) -> float:
    """Return attention_factor, else the ratio of the mscale pair if both are given, else yarn's."""
    given = parameters.get("attention_factor")
    if given is not None:
        return number(given, "attention_factor")
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return formulas.yarn_scale(factor, number(mscale, "mscale")) / formulas.yarn_scale(
            factor, number(all_dim, "mscale_all_dim")
        )
    return formulas.yarn_scale(factor)


def rotation(parameters: Parameters, model: Model, length: int) -> Layer:
    """Return frequencies and multiplier of one kind of layer at a length."""
    kind = parameters["rope_type"]
    facts = model.facts["transformers5"]
    theta = number(parameters["rope_theta"], "rope_theta")
    share = number(parameters.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
    usual_head_dim = model.head_dim
    trained = model.max_positions
    head_dim = int(model.get(facts.get("head_key", "")) or usual_head_dim)
    if kind not in facts.get("types", (kind,)):
        raise RefusedError(f"ValueError: requires another rope type, but found {kind} instead.")
    if "axes" in facts:
        return _axial(kind, facts, head_dim, theta)
    if kind == "proportional":
        factor = number(parameters.get("factor", 1.0), "factor")
        return Layer(formulas.proportional(head_dim, theta, share, factor))
    if kind == "default":
        # Each class has a function of its own for this type, and few of them read the share.
        dim = int(head_dim * share) if model.owns_partial else head_dim
        return Layer(formulas.plain(dim, theta))
    dim = int(head_dim * share)
    _refuse_null_head(kind, model)
    if kind == "longrope":
        return _longrope(parameters, theta, dim, trained, length)
    _refuse_to_scale(kind, dim, model)
    factor = _factor(parameters, trained)
    if kind == "linear":
        return Layer(formulas.linear(formulas.plain(dim, theta), factor))
    if kind == "dynamic":
        alpha = _fixed_alpha(model, parameters)
        if alpha is not None:
            base = formulas.ntk_theta(theta, number(alpha, "alpha"), head_dim)
            return Layer(formulas.plain(head_dim, base))
        base = formulas.dynamic_theta(theta, factor, length, trained, dim)
        return Layer(formulas.plain(dim, base))
    original = number(parameters[ORIGINAL], ORIGINAL)
    if kind == "llama3":
        return llama3(parameters, dim, theta)
    return yarn(parameters, dim, theta, factor, original)


def _axial(kind: str, facts: Mapping[str, Any], head_dim: int, theta: float) -> Layer:
    """Return the frequencies of a tower that rotates by the height and the width of a patch."""
    if kind not in ("default", "axial"):
        raise RefusedError(f"ValueError: supports only axial rope, but requested {kind}")
    if facts.get("shared_axes"):  # height and width take the frequencies of one head in turn
        both_axes = formulas.plain(head_dim, theta)
        return Layer(both_axes[0::2] + both_axes[1::2])
    return Layer(formulas.plain(head_dim // facts["axes"], theta))


def _refuse_null_head(kind: str, model: Model) -> None:
    """Raise RefusedError where a type's function multiplies a head_dim that is null. Those of
    linear and llama3 replace it by the width of a head (modeling_rope_utils.py:180 and :638), the
    others only one that is missing (:324, :415, :548)."""
    facts = model.facts["transformers5"]
    null_by_default = "head_dim?" in facts.get("values", "").split()  # a field that is None
    missing = None if null_by_default else 0
    is_null = facts.get("null_head") and model.config.get("head_dim", missing) is None
    if is_null and kind not in ("linear", "llama3"):
        raise RefusedError("TypeError: unsupported operand type(s) for *: 'NoneType' and 'float'")


def _refuse_to_scale(kind: str, dim: int, model: Model) -> None:
    """Raise RefusedError for a type that is none, or where its function stops at the sizes."""
    if kind not in NEEDED:
        raise RefusedError(f"KeyError: {kind!r}")
    if kind != "linear" and model.get("max_position_embeddings") is None:
        raise RefusedError(NO_LENGTH)
    if kind == "yarn" and dim % 2:
        raise RefusedError(f"RuntimeError: The size of tensor a must match: {dim} channels, odd")


def _factor(parameters: Parameters, trained: int) -> float:
    """Return the factor. yarn's function replaces a null by the ratio of the two lengths."""
    factor = parameters["factor"]
    if factor is None and parameters["rope_type"] == "yarn":
        factor = trained / number(parameters[ORIGINAL], "original length")
    return number(factor, "factor")


def _fixed_alpha(model: Model, parameters: Parameters) -> Any:
    """Return the alpha by which HunYuan's class stretches its base at any length; None where the
    length decides."""
    if model.model_type not in ALPHA:
        return None
    return parameters.get("alpha") or None  # 0 counts for none


def yarn(p: Mapping[str, Any], dim: int, theta: float, factor: float, original: float) -> Layer:
    """Return frequencies and multiplier of yarn."""
    fast = number(p.get("beta_fast") or 32, "beta_fast")
    slow = number(p.get("beta_slow") or 1, "beta_slow")
    truncate = bool(p.get("truncate", True))
    inv_freq = formulas.yarn(dim, theta, factor, original, fast, slow, truncate)
    return Layer(inv_freq, yarn_multiplier(p, factor))


def _longrope(p: Parameters, theta: float, dim: int, trained: int, length: int) -> Layer:
    original = number(required(p, ORIGINAL), "original length")
    pairs = (dim + 1) // 2
    short = factors(p, "short_factor", pairs)
    long = factors(p, "long_factor", pairs)
    factor = p.get("factor")
    ratio = trained / original if factor is None else number(factor, "factor")
    scale = p.get("attention_factor")
    if scale is None:
        scale = formulas.longrope_scale(ratio, original)
    list_at_length = long if length > original else short
    inv_freq = formulas.divided(formulas.plain(dim, theta), list_at_length)
    return Layer(inv_freq, number(scale, "it"))


def switch(model: Model, parameters: Parameters) -> Switch:
    """Return whether the frequencies change with the current length: those of dynamic NTK do beyond
    the trained length, and longrope's beyond the original one. No length is refused. HunYuan's are
    fixed by alpha."""
    kind = parameters["rope_type"]
    if kind == "dynamic":
        return "length" if _fixed_alpha(model, parameters) is None else "static"
    two_lists = kind == "longrope" and parameters["short_factor"] != parameters["long_factor"]
    return "length" if two_lists else "static"


def softmax_scale(model: Model, parameters: Parameters) -> float:
    """Return the softmax scale. MLA multiplies it by the squared temperature of mscale_all_dim."""
    all_dim = parameters.get("mscale_all_dim")
    if not model.mla or parameters["rope_type"] == "default" or not all_dim:
        return model.scale
    factor = number(required(parameters, "factor"), "factor")
    return model.scale * formulas.yarn_scale(factor, number(all_dim, "mscale_all_dim")) ** 2


def own_rotation(p: Parameters, model: Model, length: int) -> Layer:
    """Return the rotation of a family's own module. Phi-3.5-MoE's always uses the short list, and
    one of its two mscales for every type."""
    if model.model_type not in OWN_MSCALES or p["rope_type"] == "default":
        return rotation(p, model, length)
    original = number(required(p, ORIGINAL), "original length")
    name = "long_mscale" if length > original else "short_mscale"
    short = rotation(p, model, min(length, int(original)))
    return Layer(short.inv_freq, number(required(p, name), name))


def stop_at_width(layer: Layer, model: Model) -> str:
    """Return why a forward pass stops where cos and sin are wider or narrower than what attention
    rotates by them; empty if it runs. torch's error has other numbers in some families."""
    width, part = 2 * len(layer.inv_freq), model.rotated_part
    if part is None or part % 2 or part == width:
        return ""
    return (
        "RuntimeError: The size of tensor a must match the size of tensor b: attention rotates "
        f"{part} channels of each head, and cos and sin have {width}"
    )


def _stop_at_sections(p: Parameters, layer: Layer, model: Model) -> str:
    """Return why a forward pass stops where a module splits its pairs into sections that are more
    or fewer; empty if it runs."""
    usual = model.facts["transformers5"].get("sections")
    given = p.get("mrope_section")
    sections = given if isinstance(given, list) else usual
    if usual is None or sum(sections) == len(layer.inv_freq):
        return ""
    return (
        f"RuntimeError: mrope_section {sections} adds up to {sum(sections)}, and each head has "
        f"{len(layer.inv_freq)} rotated pairs"
    )


def _refuse_values(model: Model) -> None:
    """Raise RefusedError where building the class's config or its layers stops at a value.

    A word of `values` is a key with an integer; with ? it may be null, with + it may not be
    missing, with ! not be given; with ~ it is of any kind but null; with % it is not 0 where
    layer_types is missing.
    """
    config = model.config
    facts = model.facts["transformers5"]
    for word in facts.get("values", "").split():
        key = word.rstrip(MARKS)
        mark = word[-1]
        value = config.get(key, None if mark == "+" else 1)
        if not _accepts(mark, key, value, config):
            raise RefusedError(f"TypeError: the class or its layers refuse {key} {value!r}")
    _refuse_short_list(model)
    if facts.get("whole_heads") and model.size("hidden_size") % model.num_heads:
        raise RefusedError("ValueError: the hidden size is no multiple of the attention heads")
    for name in ("rope_scaling", "rope_parameters"):
        outer_dict = model.outer.get(name)
        if isinstance(outer_dict, Mapping):
            _validate_outer(outer_dict, model)


def _accepts(mark: str, key: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Return True if the class takes a value of a key with such a mark, see `_refuse_values`."""
    is_integer = type(value) is int  # True and False are refused
    if mark == "?":
        return is_integer or value is None
    if mark == "!":
        return is_integer and key not in config
    if mark == "~":
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        return value is not None or key in scaling
    if mark == "%":
        return "layer_types" in config or (is_integer and value != 0)
    return is_integer


def _refuse_short_list(model: Model) -> None:
    """Raise RefusedError for a list of which layers rotate that has too few entries. Some classes
    replace an empty one."""
    listed = model.config.get(model.facts.get("rotates", {}).get("list", ""))
    if not isinstance(listed, list) or len(listed) >= model.num_layers:
        return
    if listed or not model.facts["transformers5"].get("empty_list"):
        raise RefusedError("IndexError: list index out of range")


def _validate_outer(outer_dict: Mapping[str, Any], model: Model) -> None:
    """Raise RefusedError where validation stops at a rope dict next to the language model's own
    config, where nothing else reads it."""
    kind = outer_dict.get("rope_type", outer_dict.get("type", "default"))
    check({**outer_dict, "rope_type": kind})
    if kind in STRETCHED:
        has_length = "max_position_embeddings" in model.outer
        raise (NotReadError if has_length else RefusedError)(NO_LENGTH)


@emulator("transformers-5")
def emulate(model: Model, length: int | None) -> Computed:
    """Return what transformers 5.23 computes. It never refuses a length."""
    model = _by_autoconfig(model)
    _refuse_values(model)
    model = _with_null_share_replaced(model)
    if "theta_in" in model.facts and model.inner_theta is None:
        raise RefusedError("AttributeError: 'DbrxAttentionConfig' has no attribute 'rope_theta'")
    resolved = resolve(model)
    if len(model.without_rotation) == model.num_layers:
        return Computed(None, {}, model.scale, without_rotation=model.without_rotation)
    if model.nested:
        refuse_nested(model, resolved)
    elif model.config.get(ORIGINAL, 0) is None and resolved["all"]["rope_type"] in STRETCHED:
        raise RefusedError("TypeError: unsupported operand type(s) for /: 'NoneType' and 'float'")
    length = length or model.max_positions
    layers = {kind: own_rotation(p, model.of_kind(kind), length) for kind, p in resolved.items()}
    first = next(iter(resolved.values()))
    return Computed(
        None,
        layers,
        softmax_scale(model, first),
        first_switch(switch(model, p) for p in resolved.values()),
        None,
        model.without_rotation,
        stops=_first_stop(layers, resolved, model),
    )


def _by_autoconfig(model: Model) -> Model:
    """Return the model as the class that AutoConfig takes: Ministral's for a file of Mistral's with
    layer_types."""
    if model.model_type == "mistral" and "layer_types" in model.config and not model.outer:
        return replace(model, facts=model_of({"model_type": "ministral"}).facts)
    return model


def _with_null_share_replaced(model: Model) -> Model:
    """Return the model with whole heads rotated where its class takes a null share for 1."""
    facts = model.facts["transformers5"]
    key = facts.get("share_key", "partial_rotary_factor")
    if facts.get("null_share") and model.config.get(key, 0) is None:
        return replace(model, config={**model.config, key: 1.0})
    return model


def _first_stop(
    layers: Mapping[str, Layer], resolved: Mapping[str, Parameters], model: Model
) -> str:
    """Return why the first forward pass stops; empty if it runs. Too wide or narrow tables of any
    kind of layer come before sections."""
    stops = [stop_at_width(layer, model.of_kind(kind)) for kind, layer in layers.items()]
    stops += [_stop_at_sections(resolved[kind], layer, model) for kind, layer in layers.items()]
    return next(filter(None, stops), "")
