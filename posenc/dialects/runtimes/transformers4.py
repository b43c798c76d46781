"""transformers 4: it reads the top-level rope_theta and rope_scaling, and ignores
rope_parameters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
        keys = model.facts["transformers4"].get("theta_keys", {})
        local = model.config.get(keys.get("sliding_attention", "rope_local_base_freq"))
        if local is None:
            local = model.facts["transformers4"].get("rope_local_base_freq")
        theta = theta_of(model) if local is None else number(local, "rope_local_base_freq")
        sliding = Layer(formulas.plain(int(model.head_dim * _share(model)), theta))
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


def theta_of(model: Model) -> float:
    """Return the top-level base, else the class's default."""
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
    classes = model.facts.get("transformers4", {})
    if classes.get("scaling") is False:
        return None
    given = model.config.get("rope_scaling", classes.get("rope_scaling"))
    if given is None and classes.get("needs_scaling"):  # its config replaces null, too
        given = classes.get("rope_scaling")
    if not isinstance(given, Mapping):
        if classes.get("needs_scaling"):
            raise RefusedError("TypeError: 'NoneType' object is not subscriptable")
        return None
    scaling = dict(given)
    if classes.get("own_validation") and model.model_type not in THREE_KEYS:
        _check_two_keys(scaling)
    if "always_type" in classes:
        scaling["rope_type"] = classes["always_type"]
    if model.model_type in THREE_KEYS:
        _check_three_keys(scaling, model)
    if model.model_type in loaded_dicts.NAMED_MROPE and scaling.get("type") == "mrope":
        scaling["type"] = "default"
    if "type" in scaling and (classes.get("type_wins", True) or model.model_type in THREE_KEYS):
        scaling["rope_type"] = scaling["type"]
    if model.model_type in transformers5.OWN_MSCALES:
        scaling.setdefault("rope_type", scaling.get("type"))
        for name in ("short_mscale", "long_mscale"):
            number(scaling.get(name), name)
    if classes.get("validates", True):
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        missing = {key for key in ("rope_type", *NEEDED.get(kind, ())) if key not in scaling}
        if missing and kind in NEEDED:
            raise RefusedError(
                f"KeyError: Missing required keys in `rope_scaling` for 'rope_type'='{kind}': "
                f"{missing}"
            )
    named = scaling.get("type") if classes.get("reads_type", True) else "default"
    scaling.setdefault("rope_type", named)
    if scaling["rope_type"] not in NEEDED:
        raise RefusedError(f"KeyError: {scaling['rope_type']!r}")
    for key in (*NEEDED[scaling["rope_type"]], *classes.get("required", ())):
        required(scaling, key)
    return scaling


def _check_two_keys(scaling: Mapping[str, Any]) -> None:
    """Raise RefusedError for what OLMo's own validation refuses: anything but a linear or dynamic
    factor."""
    factor, kind = scaling.get("factor"), scaling.get("type")
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
    kind, trained = scaling["rope_type"], model.max_positions
    null = facts.get("null_head") and model.config.get("head_dim") is None
    if null and kind not in ("linear", "llama3"):
        raise RefusedError("TypeError: unsupported operand type(s) for *: 'NoneType' and 'float'")
    if kind == "longrope":
        layer = _longrope(model, scaling, plain, length)
        if model.model_type not in transformers5.OWN_MSCALES:
            return layer
        original = number(required(scaling, "original_max_position_embeddings"), "original length")
        given = scaling.get("long_mscale" if length > original else "short_mscale")
        return layer if given is None else Layer(layer.inv_freq, number(given, "mscale"))
    factor = number(scaling["factor"], "factor")
    if kind == "linear":
        return Layer(formulas.linear(plain, factor))
    if kind == "dynamic":
        if (
            model.model_type in transformers5.ALPHA and length <= trained
        ):  # beyond, alpha is forgotten
            alpha = number(required(scaling, "alpha"), "alpha")
            return Layer(formulas.plain(dim, formulas.ntk_theta(theta, alpha, dim)))
        base = formulas.dynamic_theta(theta, factor, length, trained, dim)
        return Layer(formulas.plain(dim, base))
    if kind == "llama3":
        return llama3(scaling, dim, theta)
    original = scaling.get("original_max_position_embeddings") or trained
    return transformers5.yarn(scaling, dim, theta, factor, number(original, "original length"))


def _original(model: Model, scaling: Mapping[str, Any]) -> tuple[float, bool]:
    """Return longrope's original length, and whether it was given. It is read from the top level
    only, else the largest length counts; Phi-3.5-MoE's class copies the dict's there."""
    outer = (model if model.facts.get("original_field") else model.config).get(ORIGINAL)
    if model.model_type in transformers5.OWN_MSCALES:
        outer = scaling.get(ORIGINAL, outer)
    return (model.max_positions, False) if outer is None else (number(outer, ORIGINAL), True)


def _longrope(
    model: Model, scaling: dict[str, Any], plain: tuple[float, ...], length: int
) -> Layer:
    original, given = _original(model, scaling)
    short = factors(scaling, "short_factor", len(plain))
    long = factors(scaling, "long_factor", len(plain))
    temperature = scaling.get("attention_factor")
    if temperature is None:
        ratio = model.max_positions / original if given else scaling.get("factor")
        temperature = formulas.longrope_scale(number(ratio, "factor"), original)
    chosen = long if length > original else short
    return Layer(formulas.divided(plain, chosen), number(temperature, "attention_factor"))


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
