"""transformers 4: it reads the top-level rope_theta and rope_scaling, and ignores
rope_parameters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from posenc.dialects import formulas
from posenc.dialects.computed import (
    LLAMA3,
    Computed,
    Layer,
    RefusedError,
    Switch,
    factors,
    llama3,
    number,
    required,
)
from posenc.dialects.model import Model
from posenc.dialects.runtimes import loaded_dicts, transformers5
from posenc.dialects.runtimes.running import emulator

NEEDED = {"default": (), **transformers5.NEEDED, "llama3": tuple(LLAMA3)}
ORIGINAL = transformers5.ORIGINAL
THREE_KEYS = ("phi3", "phi4_multimodal")
"""Families whose config refuses a rope_scaling of more or less than three keys."""


@emulator("transformers-4")
def emulate(model: Model, length: int | None) -> Computed:
    """Return what transformers 4.57 computes. It never refuses a length."""
    defaults = model.facts["transformers4"].get("defaults", {})  # other ones than version 5 has
    model = replace(model, config={**defaults, **model.config})
    if len(model.without_rotation) == model.num_layers:
        return Computed(None, {}, model.scale, without_rotation=model.without_rotation)
    length = length or model.max_positions
    scaling = scaling_of(model)
    full = rotation(model, scaling, theta_of(model), length)
    layers = {"all": full}
    if model.nested:
        sliding = _sliding(model)
        layers = {kind: sliding if "sliding" in kind else full for kind in model.kinds}
    stops = [
        transformers5.stop_at_width(layer, model.of_kind(kind)) for kind, layer in layers.items()
    ]
    return Computed(
        None,
        layers,
        softmax_scale(model, scaling),
        _switch(scaling),
        None,
        model.without_rotation,
        stops=next(filter(None, stops), ""),
    )


def _sliding(model: Model) -> Layer:
    """Return the rotation of windowed layers: never scaled, and by a base of their own if the
    config or the class has one."""
    facts = model.facts["transformers4"]
    key = facts.get("theta_keys", {}).get("sliding_attention", "rope_local_base_freq")
    local_base = model.config.get(key)
    if local_base is None:
        local_base = facts.get("rope_local_base_freq")
    if local_base is None:
        theta = theta_of(model)
    else:
        theta = number(local_base, "rope_local_base_freq")
    return Layer(formulas.plain(int(model.head_dim * _share(model)), theta))


def theta_of(model: Model) -> float:
    """Return the top-level base, else the class's default. Families whose facts have `theta_in`
    read it in a dict inside instead, and 10,000 where it is not there."""
    facts = model.facts["transformers4"]
    name = facts.get("theta_keys", {}).get("full_attention", facts.get("theta_key", "rope_theta"))
    value = model.config.get(name, facts.get("rope_theta", 10000.0))
    if "theta_in" in model.facts:
        value = 10000.0 if model.inner_theta is None else model.inner_theta
    return number(value, name)


def scaling_of(model: Model) -> dict[str, Any] | None:
    """Return rope_scaling with its type settled; in most families `type` wins over `rope_type`.

    Raises: RefusedError for what the config's own validation refuses.
    """
    facts = model.facts.get("transformers4", {})
    if facts.get("scaling") is False:
        return None
    written = _written_scaling(model)
    if written is None:
        return None
    scaling = dict(written)
    has_three_keys = model.model_type in THREE_KEYS
    if facts.get("own_validation") and not has_three_keys:
        _check_two_keys(scaling)
    if "always_type" in facts:
        scaling["rope_type"] = facts["always_type"]
    if has_three_keys:
        _check_three_keys(scaling, model)
    _settle_type(scaling, model)
    if facts.get("validates", True):
        _check_missing(scaling)
    usual_type = scaling.get("type") if facts.get("reads_type", True) else "default"
    scaling.setdefault("rope_type", usual_type)
    if scaling["rope_type"] not in NEEDED:
        raise RefusedError(f"KeyError: {scaling['rope_type']!r}")
    for key in (*NEEDED[scaling["rope_type"]], *facts.get("required", ())):
        required(scaling, key)
    return scaling


def _written_scaling(model: Model) -> Mapping[str, Any] | None:
    """Return the file's rope_scaling, else the class's; None where there is none.

    Raises: RefusedError where the class looks into it in any case.
    """
    facts = model.facts.get("transformers4", {})
    scaling = model.config.get("rope_scaling", facts.get("rope_scaling"))
    if scaling is None and facts.get("needs_scaling"):  # its config replaces null, too
        scaling = facts.get("rope_scaling")
    if isinstance(scaling, Mapping):
        return scaling
    if facts.get("needs_scaling"):
        raise RefusedError("TypeError: 'NoneType' object is not subscriptable")
    return None


def _settle_type(scaling: dict[str, Any], model: Model) -> None:
    """Write the type that the class reads under rope_type."""
    facts = model.facts.get("transformers4", {})
    if model.model_type in loaded_dicts.NAMED_MROPE and scaling.get("type") == "mrope":
        scaling["type"] = "default"
    older_name_wins = facts.get("type_wins", True) or model.model_type in THREE_KEYS
    if older_name_wins and "type" in scaling:
        scaling["rope_type"] = scaling["type"]
    if model.model_type in transformers5.OWN_MSCALES:
        scaling.setdefault("rope_type", scaling.get("type"))
        for name in ("short_mscale", "long_mscale"):
            number(scaling.get(name), name)


def _check_missing(scaling: Mapping[str, Any]) -> None:
    """Raise RefusedError for a missing key of a known type; an unknown type only warns here."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    missing = {key for key in ("rope_type", *NEEDED.get(kind, ())) if key not in scaling}
    if missing and kind in NEEDED:
        raise RefusedError(
            f"KeyError: Missing required keys in `rope_scaling` for 'rope_type'='{kind}': {missing}"
        )


def _check_two_keys(scaling: Mapping[str, Any]) -> None:
    """Raise RefusedError for what OLMo's own validation refuses: anything but a linear or dynamic
    factor."""
    factor = scaling.get("factor")
    kind = scaling.get("type")
    if len(scaling) != 2:
        raise RefusedError(
            "ValueError: `rope_scaling` must be a dictionary with two fields, `type` and `factor`, "
            f"got {scaling}"
        )
    if kind not in ("linear", "dynamic"):
        raise RefusedError(
            "ValueError: `rope_scaling`'s type field must be one of ['linear', 'dynamic'], got "
            f"{kind}"
        )
    if not isinstance(factor, float) or factor <= 1.0:
        raise RefusedError(
            f"ValueError: `rope_scaling`'s factor field must be a float > 1, got {factor}"
        )


def _check_three_keys(scaling: dict[str, Any], model: Model) -> None:
    """Rename Phi-3's older types, and raise RefusedError for what its validation refuses."""
    if scaling.get("type") in ("su", "yarn"):
        scaling["type"] = "longrope"
    if len(scaling) != 3:
        raise RefusedError(
            "ValueError: `rope_scaling` must be a dictionary with three fields, `type`, "
            f"`short_factor` and `long_factor`, got {len(scaling)}: {', '.join(scaling)}"
        )
    if scaling.get("type") != "longrope":
        raise RefusedError(
            "ValueError: `rope_scaling`'s type field must be one of ['longrope'], got "
            f"{scaling.get('type')}"
        )
    for name in ("short_factor", "long_factor"):
        factors(scaling, name, int(model.head_dim * _share(model)) // 2)


def _share(model: Model) -> float:
    """Return the fraction of each head that rotates."""
    facts = model.facts["transformers4"]
    name = facts.get("share_key", "partial_rotary_factor")
    value = model.config.get(name, facts.get("partial_rotary_factor"))
    return 1.0 if value is None else number(value, name)


def rotation(model: Model, scaling: dict[str, Any] | None, theta: float, length: int) -> Layer:
    """Return frequencies and multiplier at a length."""
    facts = model.facts["transformers4"]
    head_dim = int(model.get(facts.get("head_key", "")) or model.head_dim)
    dim = int(head_dim * _share(model))
    plain = formulas.plain(dim, theta)
    if facts.get("null_head") == "refused" and model.config.get("head_dim", 0) is None:
        raise RefusedError("TypeError: unsupported operand type(s) for *: 'int' and 'NoneType'")
    if scaling is None or scaling["rope_type"] == "default":
        return Layer(plain)
    kind = scaling["rope_type"]
    trained = model.max_positions
    # The function of a type multiplies a null, but for those two, which replace it.
    keeps_null = facts.get("null_head") and kind not in ("linear", "llama3")
    if keeps_null and model.config.get("head_dim") is None:
        raise RefusedError("TypeError: unsupported operand type(s) for *: 'NoneType' and 'float'")
    if kind == "longrope":
        return _with_own_mscale(_longrope(model, scaling, plain, length), model, scaling, length)
    factor = number(scaling["factor"], "factor")
    if kind == "linear":
        return Layer(formulas.linear(plain, factor))
    if kind == "dynamic":
        base = _dynamic_base(model, scaling, theta, dim, factor, length)
        return Layer(formulas.plain(dim, base))
    if kind == "llama3":
        return llama3(scaling, dim, theta)
    original = scaling.get("original_max_position_embeddings") or trained
    return transformers5.yarn(scaling, dim, theta, factor, number(original, "original length"))


def _dynamic_base(
    model: Model, scaling: Mapping[str, Any], theta: float, dim: int, factor: float, length: int
) -> float:
    """Return the base of dynamic NTK. HunYuan's is stretched by alpha up to the trained length, and
    by the length alone beyond it, where its class forgets alpha."""
    trained = model.max_positions
    if model.model_type in transformers5.ALPHA and length <= trained:
        alpha = number(required(scaling, "alpha"), "alpha")
        return formulas.ntk_theta(theta, alpha, dim)
    return formulas.dynamic_theta(theta, factor, length, trained, dim)


def _with_own_mscale(layer: Layer, model: Model, scaling: Mapping[str, Any], length: int) -> Layer:
    """Return longrope's rotation with the multiplier of Phi-3.5-MoE's module, which has one of its
    own for each list; with longrope's in other families."""
    if model.model_type not in transformers5.OWN_MSCALES:
        return layer
    original = number(required(scaling, "original_max_position_embeddings"), "original length")
    mscale = scaling.get("long_mscale" if length > original else "short_mscale")
    return layer if mscale is None else Layer(layer.inv_freq, number(mscale, "mscale"))


class _Original(NamedTuple):
    """longrope's original length."""

    length: float
    is_given: bool
    """False where the config has none, and the largest length counts for it."""


def _original(model: Model, scaling: Mapping[str, Any]) -> _Original:
    """Return longrope's original length. It is read from the top level only, else the largest
    length counts; Phi-3.5-MoE's class copies the dict's there."""
    outer = (model if model.facts.get("original_field") else model.config).get(ORIGINAL)
    if model.model_type in transformers5.OWN_MSCALES:
        outer = scaling.get(ORIGINAL, outer)
    if outer is None:
        return _Original(model.max_positions, is_given=False)
    return _Original(number(outer, ORIGINAL), is_given=True)


def _longrope(
    model: Model, scaling: dict[str, Any], plain: tuple[float, ...], length: int
) -> Layer:
    """Return longrope's rotation at a length: by the list and the temperature that it decides."""
    original = _original(model, scaling)
    short = factors(scaling, "short_factor", len(plain))
    long = factors(scaling, "long_factor", len(plain))
    temperature = scaling.get("attention_factor")
    if temperature is None:
        ratio = scaling.get("factor")
        if original.is_given:
            ratio = model.max_positions / original.length
        temperature = formulas.longrope_scale(number(ratio, "factor"), original.length)
    list_at_length = long if length > original.length else short
    inv_freq = formulas.divided(plain, list_at_length)
    return Layer(inv_freq, number(temperature, "attention_factor"))


def _switch(scaling: dict[str, Any] | None) -> Switch:
    """Return whether the frequencies change with the current length, of which none is refused."""
    if scaling is None or scaling["rope_type"] not in ("dynamic", "longrope"):
        return "static"
    if scaling["rope_type"] == "dynamic":
        return "length"
    return "static" if scaling["short_factor"] == scaling["long_factor"] else "length"


def softmax_scale(model: Model, scaling: dict[str, Any] | None) -> float:
    """Return the softmax scale. MLA multiplies it by the squared temperature of mscale_all_dim,
    except in DeepSeek 2."""
    if not model.mla or scaling is None or model.model_type == "deepseek_v2":
        return model.scale
    factor = number(required(scaling, "factor"), "factor")
    all_dim = number(scaling.get("mscale_all_dim") or 0, "mscale_all_dim")
    return model.scale * (formulas.yarn_scale(factor, all_dim) ** 2 if all_dim else 1.0)
