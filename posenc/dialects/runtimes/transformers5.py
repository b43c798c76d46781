"""transformers 5: it reads rope_parameters and merges the older spelling into it."""

from collections.abc import Mapping
from copy import deepcopy
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
from posenc.dialects.runtimes.running import emulator

NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Keys without which loading the config fails; theta and the original length have defaults."""
PHI3 = ("phi3", "phi4_multimodal")
"""Families that accept only longrope, under three names."""
ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Families whose class stretches the base by a fixed alpha where the type is dynamic."""
OWN_MSCALES = ("phimoe",)
"""Families whose module multiplies by short_mscale and long_mscale."""
NAMED_MROPE = ("qwen2_vl_text", "qwen2_5_vl_text")
"""Families whose class takes the type mrope for default, which has sections here."""
STRETCHED = ("llama3", "yarn", "longrope")
ORIGINAL = "original_max_position_embeddings"
NO_LENGTH = "AttributeError: no attribute 'max_position_embeddings'"
Parameters = dict[str, Any]


def resolve(model: Model) -> dict[str, Parameters]:
    """Return the flat rope dict of each kind of layer after loading.

    Raises: RefusedError where loading stops.
    """
    if model.nested:
        return _resolve_nested(model)
    config, facts = model.config, model.facts["transformers5"]
    old = config.get("rope_scaling") if facts.get("old", True) else None
    given = old or config.get("rope_parameters")
    if not facts.get("dicts", True):  # validated, and not looked at
        if given and given.get("rope_type", given.get("type")) in STRETCHED:
            if facts.get("needs_original"):
                required(given, ORIGINAL)
            if not model.get("max_position_embeddings"):
                raise RefusedError(NO_LENGTH)
        given = None
    if given is None:
        given = deepcopy(facts.get("rope", {}))  # its base counts, too
    parameters = dict(given)
    if facts.get("declares_kinds") and parameters.keys() & set(model.layer_types):
        raise RefusedError("KeyError: 'rope_type'")
    if model.facts.get("latent_sum") and not old:
        share = model.size("qk_rope_head_dim", default=64) / model.latent_width
        parameters.setdefault("partial_rotary_factor", share)
    theta = config.get(facts.get("theta_key", "rope_theta"), facts.get("rope_theta", 10000.0))
    _fill(parameters, model, theta, model.share)
    if model.model_type in NAMED_MROPE and parameters["rope_type"] == "mrope":
        parameters["rope_type"] = "default"
    if model.model_type in PHI3 and parameters["rope_type"] in ("su", "yarn"):
        parameters["rope_type"] = "longrope"
        check(parameters, (ORIGINAL,))  # filled in for types of the newer names only
    if parameters["rope_type"] in STRETCHED:
        outer = (model if model.facts.get("original_field") else config).get(ORIGINAL)
        if outer is not None:
            parameters[ORIGINAL] = outer
    if model.model_type in PHI3 and parameters["rope_type"] not in ("default", "longrope"):
        raise RefusedError(f"ValueError: the type must be longrope, got {parameters['rope_type']}")
    check(parameters)
    for key in facts.get("required", ()):
        required(parameters, key)
    return {"all": parameters}


def _resolve_nested(model: Model) -> dict[str, Parameters]:
    """Return one dict per kind of layer. A family that takes no flat rope_scaling, see
    `_refuse_nested`, can mean only its full-attention layers by it."""
    config, facts = model.config, model.facts["transformers5"]
    given = config.get("rope_parameters")
    inner: dict[str, Parameters] = {}
    for key in facts.get("never_null", ()):
        if any(key in each and each[key] is None for each in (config, given or {})):
            raise RefusedError(f"TypeError: {key} is None")
    if isinstance(given, Mapping):
        inner = {k: dict(v) for k, v in given.items() if isinstance(v, Mapping)}
    old = config.get("rope_scaling")
    if facts.get("flat_new") and given and not inner:
        old, given = old or given, None
    if isinstance(given, Mapping) and facts.get("strict") and len(inner) < len(given):
        raise RefusedError("StrictDataclassFieldValidationError: field 'rope_parameters'")
    if facts.get("nested_wins") and set(model.kinds) <= inner.keys():
        old = None
    if isinstance(old, Mapping) and any(isinstance(v, Mapping) for v in old.values()):
        raise NotReadError("a dict per kind in rope_scaling")  # classes differ in what they do
    if isinstance(old, Mapping):
        for kind in model.flat_reaches or ("full_attention",):
            if given is not None and kind not in inner:
                raise RefusedError(f"KeyError: {kind!r}")
            # The class's own rope_type stands here already, so that a `type` beside it means
            # nothing; but for classes that first settle the flat dict as other families do.
            usual = old.get("type", "default") if facts.get("settles_type") else "default"
            inner[kind] = {"rope_type": usual, **inner.get(kind, {}), **old}
            for key in facts.get("never_flat", ()):
                inner[kind].pop(key, None)
            if inner[kind]["rope_type"] == "yarn" and "attention_factor" in facts:
                inner[kind].setdefault("attention_factor", facts["attention_factor"])
    resolved = {}
    for kind, defaults in facts["nested"].items():
        if kind in model.kinds and set(model.layers_of(kind)) & set(model.without_rotation):
            continue
        theta = (defaults or {}).get("rope_theta", 10000.0)
        key = facts.get("theta_keys", {}).get(kind, "")
        key = facts.get("flat_theta", key) if kind in inner and isinstance(old, Mapping) else key
        if config.get(key) is not None or not facts.get("null_base"):
            theta = config.get(key, theta)
        if isinstance(theta, list):  # one for each layer
            theta = theta[min(model.layers_of(kind), default=0)]
        parameters = inner.get(kind)
        if parameters is None:
            parameters = {k: v for k, v in (defaults or {}).items() if k != "rope_theta"}
        share = None if model.flat_reaches is None else model.share
        if isinstance(share, list):
            share = share[min(model.layers_of(kind), default=0)]
        if facts.get("own_shares"):
            share = (defaults or {}).get("partial_rotary_factor")
        if facts.get("whole"):
            parameters["partial_rotary_factor"] = 1.0
        if kind in inner and _filled_when_built(parameters, model):
            theta, share = config.get("rope_theta", theta), config.get("partial_rotary_factor")
        _fill(parameters, model, theta, share)
        parameters.pop("truncate", None)  # transformers looks for it beside the nested dicts
        check(parameters)
        if parameters["rope_type"] == "yarn" and not facts.get("nested_yarn", True):
            raise RefusedError("KeyError: 'original_max_position_embeddings'")
        resolved[kind] = parameters
    return {kind: resolved[kind] for kind in model.kinds if kind in resolved}


def _filled_when_built(parameters: Mapping[str, Any], model: Model) -> bool:
    """Return True if a nested dict gets the top level's base and share only when its rotary module
    is built. Loading fills nothing in for newer families; the functions of all types but default
    call standardize_rope_params first (modeling_rope_utils.py:173)."""
    scaled = parameters.get("rope_type", parameters.get("type", "default")) != "default"
    return scaled and model.flat_reaches is None


def _fill(parameters: Parameters, model: Model, theta: Any, partial: Any) -> None:
    parameters.setdefault("rope_theta", theta)
    if partial is not None:
        parameters.setdefault("partial_rotary_factor", partial)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] in STRETCHED:
        if model.facts["transformers5"].get("needs_original"):
            required(parameters, ORIGINAL)
        parameters.setdefault(ORIGINAL, model.max_positions)


def check(parameters: Parameters, needed: tuple[str, ...] = ()) -> None:
    """Raise RefusedError if a key that the rope_type needs, or one of `needed`, is missing."""
    kind = parameters["rope_type"]
    missing = [key for key in needed or NEEDED.get(kind, ()) if key not in parameters]
    if missing:
        raise RefusedError(f"KeyError: Missing required keys in `rope_parameters`: {set(missing)}")


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
    kind, facts = parameters["rope_type"], model.facts["transformers5"]
    theta = number(parameters["rope_theta"], "rope_theta")
    share = number(parameters.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
    head_dim, trained = model.head_dim, model.max_positions
    head_dim = int(model.get(facts.get("head_key", "")) or head_dim)
    if kind not in facts.get("types", (kind,)):
        raise RefusedError(f"ValueError: requires another rope type, but found {kind} instead.")
    if "axes" in facts:
        if kind not in ("default", "axial"):
            raise RefusedError(f"ValueError: supports only axial rope, but requested {kind}")
        if facts.get("shared_axes"):  # height and width take the frequencies of one head in turn
            whole = formulas.plain(head_dim, theta)
            return Layer(whole[0::2] + whole[1::2])
        return Layer(formulas.plain(head_dim // facts["axes"], theta))
    if kind == "proportional":
        factor = number(parameters.get("factor", 1.0), "factor")
        return Layer(formulas.proportional(head_dim, theta, share, factor))
    if kind == "default" and not model.owns_partial:
        share = 1.0
    dim = int(head_dim * share)
    if kind == "default":
        return Layer(formulas.plain(dim, theta))
    usual = None if "head_dim?" in facts.get("values", "").split() else 0  # a field that is None
    null = facts.get("null_head") and model.config.get("head_dim", usual) is None
    if null and kind not in ("linear", "llama3"):
        raise RefusedError("TypeError: unsupported operand type(s) for *: 'NoneType' and 'float'")
    if kind == "longrope":
        return _longrope(parameters, theta, dim, trained, length)
    if kind not in NEEDED:
        raise RefusedError(f"KeyError: {kind!r}")
    if kind != "linear" and model.get("max_position_embeddings") is None:
        raise RefusedError(NO_LENGTH)
    if dim % 2 and kind == "yarn":
        raise RefusedError(f"RuntimeError: The size of tensor a must match: {dim} channels, odd")
    factor = parameters["factor"]
    if factor is None and kind == "yarn":
        factor = trained / number(parameters[ORIGINAL], "original length")
    factor = number(factor, "factor")
    if kind == "linear":
        return Layer(tuple(f / factor for f in formulas.plain(dim, theta)))
    if kind == "dynamic" and model.model_type in ALPHA and parameters.get("alpha"):
        alpha = number(parameters["alpha"], "alpha")
        return Layer(formulas.plain(head_dim, formulas.ntk_theta(theta, alpha, head_dim)))
    if kind == "dynamic":
        base = formulas.dynamic_theta(theta, factor, length, trained, dim)
        return Layer(formulas.plain(dim, base))
    original = number(parameters[ORIGINAL], ORIGINAL)
    if kind == "llama3":
        return llama3(parameters, dim, theta)
    return yarn(parameters, dim, theta, factor, original)


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
    short, long = factors(p, "short_factor", pairs), factors(p, "long_factor", pairs)
    factor = p.get("factor")
    ratio = trained / original if factor is None else number(factor, "factor")
    given = p.get("attention_factor")
    scale = formulas.longrope_scale(ratio, original) if given is None else number(given, "it")
    chosen = long if length > original else short
    return Layer(formulas.divided(formulas.plain(dim, theta), chosen), scale)


def switch(model: Model, parameters: Parameters) -> Switch:
    """Return whether the frequencies change with the current length: those of dynamic NTK do beyond
    the trained length, and longrope's beyond the original one. No length is refused. HunYuan's are
    fixed by alpha."""
    kind = parameters["rope_type"]
    if kind == "dynamic":
        fixed = model.model_type in ALPHA and parameters.get("alpha")
        return "static" if fixed else "length"
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


def _refuse_nested(model: Model, resolved: Mapping[str, Parameters]) -> None:
    """Raise RefusedError where loading a family with nested rope dicts fails. Newer families accept
    no flat dict and fill nothing in. Where head dimensions differ between layers, validating
    longrope fails.

    Raises: RefusedError.
    """
    old, new = model.config.get("rope_scaling"), model.config.get("rope_parameters")
    given = old or new or {}
    for kind, p in resolved.items() if given and not model.flat_reaches else ():
        if kind not in given:
            raise RefusedError(f"KeyError: {kind!r}")
        needed = {"rope_theta", *((ORIGINAL,) if p["rope_type"] in STRETCHED else ())}
        if _filled_when_built(p, model) and model.config.get("rope_theta") is not None:
            needed.remove("rope_theta")
        if model.flat_reaches is None and (missing := sorted(needed - given[kind].keys())):
            raise RefusedError(f"KeyError: {missing[0]!r}")
    if model.uneven_heads and any(p["rope_type"] == "longrope" for p in resolved.values()):
        raise RefusedError("AmbiguousGlobalPerLayerAttributeError: 'head_dim'")


def _refuse_values(model: Model) -> None:
    """Raise RefusedError where building the class's config or its layers stops at a value.

    A word of `values` is a key with an integer; with ? it may be null, with + it may not be
    missing, with ! not be given; with ~ it is of any kind but null; with % it is not 0 where
    layer_types is missing.
    """
    config, facts = model.config, model.facts["transformers5"]
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    for word in facts.get("values", "").split():
        key, mark = word.rstrip("?+!~%"), word[-1]
        value = config.get(key, None if mark == "+" else 1)
        kinds = (int, type(None)) if mark == "?" else (int,)
        right = type(value) in kinds and not (mark == "!" and key in config)
        if mark == "~":
            right = value is not None or key in scaling
        if mark == "%":
            right = "layer_types" in config or (right and value != 0)
        if not right:
            raise RefusedError(f"TypeError: the class or its layers refuse {key} {value!r}")
    listed = config.get(model.facts.get("rotates", {}).get("list", ""))
    if isinstance(listed, list) and len(listed) < model.num_layers:
        if listed or not facts.get("empty_list"):
            raise RefusedError("IndexError: list index out of range")
    if facts.get("whole_heads") and model.size("hidden_size") % model.num_heads:
        raise RefusedError("ValueError: the hidden size is no multiple of the attention heads")
    for name in ("rope_scaling", "rope_parameters"):  # next to text_config they are validated only
        if isinstance(given := model.outer.get(name), Mapping):
            kind = given.get("rope_type", given.get("type", "default"))
            check({**given, "rope_type": kind})
            if kind in STRETCHED:
                known = "max_position_embeddings" in model.outer
                raise (NotReadError if known else RefusedError)(NO_LENGTH)


@emulator("transformers-5")
def emulate(model: Model, length: int | None) -> Computed:
    """Return what transformers 5.23 computes. It never refuses a length."""
    if model.model_type == "mistral" and "layer_types" in model.config and not model.outer:
        model = replace(model, facts=model_of({"model_type": "ministral"}).facts)  # by AutoConfig
    _refuse_values(model)
    key = model.facts["transformers5"].get("share_key", "partial_rotary_factor")
    if model.facts["transformers5"].get("null_share") and model.config.get(key, 0) is None:
        model = replace(model, config={**model.config, key: 1.0})
    if "theta_in" in model.facts and model.inner_theta is None:
        raise RefusedError("AttributeError: 'DbrxAttentionConfig' has no attribute 'rope_theta'")
    resolved = resolve(model)
    if len(model.without_rotation) == model.num_layers:
        return Computed(None, {}, model.scale, without_rotation=model.without_rotation)
    if model.nested:
        _refuse_nested(model, resolved)
    elif model.config.get(ORIGINAL, 0) is None and resolved["all"]["rope_type"] in STRETCHED:
        raise RefusedError("TypeError: unsupported operand type(s) for /: 'NoneType' and 'float'")
    length = length or model.max_positions
    layers = {kind: own_rotation(p, model.of_kind(kind), length) for kind, p in resolved.items()}
    stops = [stop_at_width(layer, model.of_kind(kind)) for kind, layer in layers.items()]
    stops += [_stop_at_sections(resolved[kind], layer, model) for kind, layer in layers.items()]
    first = next(iter(resolved.values()))
    return Computed(
        None,
        layers,
        softmax_scale(model, first),
        first_switch(switch(model, p) for p in resolved.values()),
        None,
        model.without_rotation,
        stops=next(filter(None, stops), ""),
    )
