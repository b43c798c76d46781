"""transformers 4: it reads the top-level rope_theta and rope_scaling, and ignores
rope_parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import (
    LLAMA3_DEFAULTS,
    ComputedPositions,
    LayerRotation,
    RefusedError,
    Switch,
    llama3_rotation,
    require_factors,
    require_key,
    require_number,
)
from posenc.runtimes.config_model import ORIGINAL_LENGTH_KEY, Model
from posenc.runtimes.known import transformers5
from posenc.runtimes.known.transformers5_rope_dicts import FAMILIES_NAMING_MROPE, NO_LENGTH_MESSAGE
from posenc.runtimes.runtime_facts import ConfigFacts

NEEDED_KEYS = {"default": (), **transformers5.NEEDED_KEYS, "llama3": tuple(LLAMA3_DEFAULTS)}
FAMILIES_WITH_TWO_KEYS = ("olmo", "olmo2")
"""Families whose config refuses a rope_scaling with more than a type and a factor."""
FAMILIES_WITH_THREE_KEYS = ("phi3", "phi4_multimodal")
"""Families whose config refuses a rope_scaling of more or less than three keys."""
FACTORS_OF_LONG_CONTEXT = {"zamba2": 8.0}
"""model_type -> the factor by which `use_long_context` divides the slowest frequency, in the base;
transformers 5 leaves the base as it is."""


@dataclass(frozen=True, eq=False, repr=False)
class Transformers4Facts(ConfigFacts):
    """How a family's class of transformers 4 reads its config, and how its module rotates.

    `own_dicts` has the class's rope_scaling under "all", and under a kind of layers the base that
    this kind has of its own.
    """

    reads: tuple[str, ...] = ("rope_scaling",)
    """As in `ConfigFacts`; no module knows the newer name."""
    validates: bool = True
    """Whether the config checks the keys that a type needs."""
    older_type: str = "wins"
    """What `type` means beside `rope_type`: it "wins", it "counts" where rope_type is missing, or
    is "unread"."""


def _facts_of(model: Model) -> Transformers4Facts:
    """Return the facts of a model's family in transformers 4."""
    return Transformers4Facts.of(model.facts.get("transformers4"))


def compute(model: Model, length: int | None) -> ComputedPositions:
    """Return what transformers 4.57 computes. It never refuses a length."""
    if len(model.without_rotation) == model.num_layers:
        return ComputedPositions(
            None, {}, model.softmax_scale, without_rotation=model.without_rotation
        )
    _refuse_period_of_kinds(model)
    length = length or model.max_positions
    scaling = scaling_of(model)
    full_rotation = rotation(model, scaling, theta_of(model), length)
    rotations = {"all": full_rotation}
    if model.has_rope_dict_per_kind:
        sliding_rotation = _sliding_window_rotation(model, scaling, length)
        rotations = {
            kind: sliding_rotation if "sliding" in kind else full_rotation
            for kind in model.layer_kinds
        }
    reasons = [
        transformers5.why_width_stops(layer_rotation, model.with_sizes_of_kind(kind))
        for kind, layer_rotation in rotations.items()
    ]
    return ComputedPositions(
        None,
        rotations,
        softmax_scale(model, scaling),
        _frequency_switch(scaling),
        None,
        model.without_rotation,
        stop_message=next(filter(None, reasons), ""),
    )


def _refuse_period_of_kinds(model: Model) -> None:
    """Raise RefusedError where a config lists no kinds of layers and its class cannot count them by
    the period that stands there: a class computes `(i + 1) % period` for each layer i."""
    key = model.facts.get("layers", {}).get("every")
    if key is None or model.config.get("layer_types") is not None:
        return
    # EXAONE's class counts by 0 where the config has no window, whatever the period is.
    no_window = model.model_type == "exaone4" and model.config.get("sliding_window", 0) is None
    period = 0 if no_window else model.config.get(key, 1)
    if not isinstance(period, int | float):
        kind = type(period).__name__
        raise RefusedError(f"TypeError: unsupported operand type(s) for %: 'int' and {kind!r}")
    if period == 0:
        raise RefusedError("ZeroDivisionError: integer modulo by zero")


def _sliding_window_rotation(
    model: Model, scaling: dict[str, Any] | None, length: int
) -> LayerRotation:
    """Return the rotation of windowed layers: not scaled in most families, and by a base of their
    own if the config or the class has one."""
    facts = _facts_of(model)
    key = facts.theta_keys.get("sliding_attention", "rope_local_base_freq")
    local_base = model.config.get(key)
    # ModernBERT's class takes a null for the full layers' base; a missing key has a default there.
    null_means_full_base = key == "local_rope_theta" and key in model.config
    if local_base is None and not null_means_full_base:
        local_base = facts.own_dicts.get("sliding_attention", {}).get("rope_theta")
    if local_base is None:
        theta = theta_of(model)
    else:
        theta = require_number(local_base, "rope_local_base_freq")
    # ModernBERT, whose facts name this key, builds the windowed layers' module by its whole config,
    # with the scaling; the others leave that out.
    is_scaled = "sliding_attention" in facts.theta_keys
    return rotation(model, scaling if is_scaled else None, theta, length)


def theta_of(model: Model) -> float:
    """Return the top-level base, else the class's default. Families whose facts have `theta_in`
    read it in a dict inside instead, and 10,000 where it is not there."""
    facts = _facts_of(model)
    key = facts.theta_keys.get("full_attention", facts.theta_keys.get("all", "rope_theta"))
    theta = model.config.get(key, facts.rope_theta)
    if "theta_in" in model.facts:
        theta = 10000.0 if model.theta_of_inner_dict is None else model.theta_of_inner_dict
    theta = require_number(theta, key)
    if model.config.get("use_long_context") and model.model_type in FACTORS_OF_LONG_CONTEXT:
        factor = FACTORS_OF_LONG_CONTEXT[model.model_type]
        return float64_formulas.ntk_theta(theta, factor, model.head_dim)
    return theta


def scaling_of(model: Model) -> dict[str, Any] | None:
    """Return rope_scaling with its type settled; in most families `type` wins over `rope_type`.

    Raises: RefusedError for what the config's own validation refuses.
    """
    facts = _facts_of(model)
    if not facts.reads:
        return None
    scaling_in_config = _scaling_in_config(model)
    if scaling_in_config is None:
        return None
    scaling = dict(scaling_in_config)
    has_three_keys = model.model_type in FAMILIES_WITH_THREE_KEYS
    if model.model_type in FAMILIES_WITH_TWO_KEYS:
        _check_olmo_scaling(scaling)
    if model.model_type == "llama4_text":  # whose module looks at no type
        scaling["rope_type"] = "llama3"
    if has_three_keys:
        _rename_and_check_phi3_scaling(scaling, model)
    _set_rope_type(scaling, model)
    if facts.validates:
        _check_required_keys(scaling)
    usual_type = "default" if facts.older_type == "unread" else scaling.get("type")
    scaling.setdefault("rope_type", usual_type)
    if scaling["rope_type"] not in NEEDED_KEYS:
        raise RefusedError(f"KeyError: {scaling['rope_type']!r}")
    for key in (*NEEDED_KEYS[scaling["rope_type"]], *facts.required):
        require_key(scaling, key)
    return scaling


def _scaling_in_config(model: Model) -> Mapping[str, Any] | None:
    """Return the dict rope_scaling of the file, or if the file lacks the key, the default of its
    class; None where neither is a dict. Null in the file means the class's default only in a class
    that reads keys of the dict without looking whether there is one.

    Raises: RefusedError where there is no dict, and the class is of that kind.
    """
    facts = _facts_of(model)
    own_dict = facts.own_dicts.get("all")
    needs_dict = facts.nulls.get("rope_scaling") == "stops"
    scaling = model.config.get("rope_scaling", own_dict)
    if scaling is None and needs_dict:  # its config replaces null, too
        scaling = own_dict
    if isinstance(scaling, Mapping):
        return scaling
    if needs_dict:
        raise RefusedError("TypeError: 'NoneType' object is not subscriptable")
    return None


def _set_rope_type(scaling: dict[str, Any], model: Model) -> None:
    """Set rope_type to the type that the class reads, in `scaling` itself."""
    facts = _facts_of(model)
    if model.model_type in FAMILIES_NAMING_MROPE and scaling.get("type") == "mrope":
        scaling["type"] = "default"
    older_name_wins = facts.older_type == "wins" or model.model_type in FAMILIES_WITH_THREE_KEYS
    if older_name_wins and "type" in scaling:
        scaling["rope_type"] = scaling["type"]
    if model.model_type in transformers5.FAMILIES_WITH_OWN_MSCALES:
        scaling.setdefault("rope_type", scaling.get("type"))
        for name in ("short_mscale", "long_mscale"):
            require_number(scaling.get(name), name)


def _check_required_keys(scaling: Mapping[str, Any]) -> None:
    """Raise RefusedError for a missing key of a known type; an unknown type only warns here."""
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    missing_keys = {
        key for key in ("rope_type", *NEEDED_KEYS.get(rope_type, ())) if key not in scaling
    }
    if missing_keys and rope_type in NEEDED_KEYS:
        raise RefusedError(
            f"KeyError: Missing required keys in `rope_scaling` for 'rope_type'='{rope_type}': "
            f"{missing_keys}"
        )


def _check_olmo_scaling(scaling: Mapping[str, Any]) -> None:
    """Raise RefusedError for what OLMo's own validation refuses: anything but a linear or dynamic
    factor."""
    factor = scaling.get("factor")
    rope_type = scaling.get("type")
    if len(scaling) != 2:
        raise RefusedError(
            "ValueError: `rope_scaling` must be a dictionary with two fields, `type` and `factor`, "
            f"got {scaling}"
        )
    if rope_type not in ("linear", "dynamic"):
        raise RefusedError(
            "ValueError: `rope_scaling`'s type field must be one of ['linear', 'dynamic'], got "
            f"{rope_type}"
        )
    if not isinstance(factor, float) or factor <= 1.0:
        raise RefusedError(
            f"ValueError: `rope_scaling`'s factor field must be a float > 1, got {factor}"
        )


def _rename_and_check_phi3_scaling(scaling: dict[str, Any], model: Model) -> None:
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
        require_factors(scaling, name, int(model.head_dim * _rotated_share(model)) // 2)


def _rotated_share(model: Model) -> float:
    """Return the fraction of each head that rotates."""
    facts = _facts_of(model)
    share = model.config.get(facts.share_key, facts.partial_rotary_factor)
    return 1.0 if share is None else require_number(share, facts.share_key)


def rotation(
    model: Model, scaling: dict[str, Any] | None, theta: float, length: int
) -> LayerRotation:
    """Return the rotation at a length. scaling: as `scaling_of` returns it."""
    facts = _facts_of(model)
    head_dim = int(model.get(facts.head_key) or model.head_dim)
    dim = int(head_dim * _rotated_share(model))
    if facts.nulls.get("head_dim") == "refused" and model.config.get("head_dim", 0) is None:
        raise RefusedError("TypeError: unsupported operand type(s) for *: 'int' and 'NoneType'")
    if model.transformers5_facts.axes is not None:  # a tower, which reads no scaling
        head_dim = model.size("hidden_size") // model.num_heads  # whatever head_dim says
        return transformers5.axial_rotation("default", model, head_dim, theta)
    if scaling is None or scaling["rope_type"] == "default":
        return LayerRotation(float64_formulas.unscaled_frequencies(dim, theta))
    _refuse_null_sizes(model, scaling["rope_type"])
    return _scaled_rotation(model, scaling, dim, theta, length)


def _refuse_null_sizes(model: Model, rope_type: str) -> None:
    """Raise RefusedError where a type's function computes with a size that is null or missing."""
    if rope_type != "linear" and model.get("max_position_embeddings") is None:
        raise RefusedError(NO_LENGTH_MESSAGE)
    # The function of a type multiplies a null, but for those two, which replace it.
    meaning_of_null_head = _facts_of(model).nulls.get("head_dim")
    keeps_null = meaning_of_null_head is not None and rope_type not in ("linear", "llama3")
    if keeps_null and model.config.get("head_dim") is None:
        raise RefusedError("TypeError: unsupported operand type(s) for *: 'NoneType' and 'float'")


def _scaled_rotation(
    model: Model, scaling: dict[str, Any], dim: int, theta: float, length: int
) -> LayerRotation:
    """Return the rotation of `dim` channels by a scaling, see `scaling_of`, at a length."""
    rope_type = scaling["rope_type"]
    unscaled = float64_formulas.unscaled_frequencies(dim, theta)
    if rope_type == "longrope":
        longrope = _longrope_rotation(model, scaling, unscaled, length)
        return _with_own_mscale(longrope, model, scaling, length)
    factor = require_number(scaling["factor"], "factor")
    if rope_type == "linear":
        return LayerRotation(float64_formulas.linear_frequencies(unscaled, factor))
    if rope_type == "dynamic":
        base = _dynamic_base(model, scaling, theta, dim, factor, length)
        return LayerRotation(float64_formulas.unscaled_frequencies(dim, base))
    if rope_type == "llama3":
        return llama3_rotation(scaling, dim, theta)
    original_length = scaling.get("original_max_position_embeddings") or model.max_positions
    return transformers5.yarn_rotation(
        scaling, dim, theta, factor, require_number(original_length, "original length")
    )


def _dynamic_base(
    model: Model, scaling: Mapping[str, Any], theta: float, dim: int, factor: float, length: int
) -> float:
    """Return the base of dynamic NTK. HunYuan's is stretched by alpha up to the trained length, and
    by the length alone beyond it, where its class forgets alpha."""
    trained_length = model.max_positions
    if model.model_type in transformers5.HUNYUAN_FAMILIES and length <= trained_length:
        alpha = require_number(require_key(scaling, "alpha"), "alpha")
        return float64_formulas.ntk_theta(theta, alpha, dim)
    return float64_formulas.dynamic_theta(theta, factor, length, trained_length, dim)


def _with_own_mscale(
    layer_rotation: LayerRotation, model: Model, scaling: Mapping[str, Any], length: int
) -> LayerRotation:
    """Return longrope's rotation with the multiplier of Phi-3.5-MoE's module, which has one of its
    own for each list; with longrope's in other families."""
    if model.model_type not in transformers5.FAMILIES_WITH_OWN_MSCALES:
        return layer_rotation
    original_length = require_number(
        require_key(scaling, "original_max_position_embeddings"), "original length"
    )
    mscale = scaling.get("long_mscale" if length > original_length else "short_mscale")
    return (
        layer_rotation
        if mscale is None
        else LayerRotation(layer_rotation.inv_freq, require_number(mscale, "mscale"))
    )


class _OriginalLength(NamedTuple):
    """longrope's original length."""

    length: float
    is_given: bool
    """False where the config has none, and the largest length counts for it."""


def _original_length(model: Model, scaling: Mapping[str, Any]) -> _OriginalLength:
    """Return longrope's original length. It is read from the top level only, else the largest
    length counts; Phi-3.5-MoE's class copies the dict's there."""
    length_stated = (model if model.facts.get("original_field") else model.config).get(
        ORIGINAL_LENGTH_KEY
    )
    if model.model_type in transformers5.FAMILIES_WITH_OWN_MSCALES:
        length_stated = scaling.get(ORIGINAL_LENGTH_KEY, length_stated)
    if length_stated is None:
        return _OriginalLength(model.max_positions, is_given=False)
    return _OriginalLength(require_number(length_stated, ORIGINAL_LENGTH_KEY), is_given=True)


def _longrope_rotation(
    model: Model, scaling: dict[str, Any], plain_inv_freq: tuple[float, ...], length: int
) -> LayerRotation:
    """Return longrope's rotation at a length: with long_factor beyond the original length, else
    with short_factor. plain_inv_freq: frequencies without scaling."""
    original = _original_length(model, scaling)
    short_factors = require_factors(scaling, "short_factor", len(plain_inv_freq))
    long_factors = require_factors(scaling, "long_factor", len(plain_inv_freq))
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        ratio = scaling.get("factor")
        if original.is_given:
            ratio = model.max_positions / original.length
        attention_factor = float64_formulas.longrope_attention_factor(
            require_number(ratio, "factor"), original.length
        )
    factors_at_length = long_factors if length > original.length else short_factors
    inv_freq = float64_formulas.divide_each(plain_inv_freq, factors_at_length)
    return LayerRotation(inv_freq, require_number(attention_factor, "attention_factor"))


def _frequency_switch(scaling: dict[str, Any] | None) -> Switch:
    """Return "length" if the frequencies change with the length of the text, else "static"."""
    if scaling is None or scaling["rope_type"] not in ("dynamic", "longrope"):
        return "static"
    if scaling["rope_type"] == "dynamic":
        return "length"
    return "static" if scaling["short_factor"] == scaling["long_factor"] else "length"


def softmax_scale(model: Model, scaling: dict[str, Any] | None) -> float:
    """Return the softmax scale. MLA multiplies it by the squared temperature of mscale_all_dim,
    except in DeepSeek 2."""
    if not model.is_mla or scaling is None or model.model_type == "deepseek_v2":
        return model.softmax_scale
    factor = require_number(require_key(scaling, "factor"), "factor")
    mscale_all_dim = require_number(scaling.get("mscale_all_dim") or 0, "mscale_all_dim")
    return model.softmax_scale * (
        float64_formulas.yarn_attention_factor(factor, mscale_all_dim) ** 2
        if mscale_all_dim
        else 1.0
    )
