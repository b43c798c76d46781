"""The rope dicts that transformers 5 has after loading a config: one for all layers, or one for
each kind of layer. Lines are those of its modeling_rope_utils.py."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from posenc.runtimes.computed_positions import NotReadError, RefusedError, require_key
from posenc.runtimes.config_model import ORIGINAL_LENGTH_KEY, Model

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
NAMED_MROPE = ("qwen2_vl_text", "qwen2_5_vl_text")
"""Families whose class takes the type mrope for default, which has sections here."""
DEEPSEEK_V4 = ("deepseek_v4",)
"""Families that take neither a base nor a share from a flat dict, and give yarn in it the
multiplier 1 where it states none."""
COMPLETE_DICTS_WIN = ("step3p5",)
"""Families in which complete dicts by kind of layer make a flat one be passed over."""
STRETCHED = ("llama3", "yarn", "longrope")
NO_LENGTH = "AttributeError: no attribute 'max_position_embeddings'"
Parameters = dict[str, Any]


def resolve_rope_dicts(model: Model) -> dict[str, Parameters]:
    """Return the flat rope dict of each kind of layer after loading, by the style of the family's
    class: one dict for all layers, or one a kind, which the class fills in or takes strictly.

    Raises: RefusedError where loading stops.
    """
    if not model.has_rope_dict_per_kind:
        return {"all": _resolve_flat(model)}
    fills_in = model.kinds_of_flat_rope_scaling is not None
    return _resolve_nested(model, _filled_dict_of_kind if fills_in else _strict_dict_of_kind)


def _resolve_flat(model: Model) -> Parameters:
    """Return the one rope dict of a family whose layers rotate alike."""
    config = model.config
    facts = model.modern
    parameters = _flat_rope_dict(model)
    if facts.declares_kinds and parameters.keys() & set(model.layer_types):
        # A class that declares kinds of layers takes a dict with such a key for nested (:764).
        raise RefusedError("KeyError: 'rope_type'")
    if model.facts.get("latent_sum") and not _older_dict(model):
        share = model.size("qk_rope_head_dim", default=64) / model.latent_query_width
        parameters.setdefault("partial_rotary_factor", share)
    theta = config.get(facts.theta_keys.get("all", "rope_theta"), facts.rope_theta)
    _fill_missing_keys(parameters, model, theta, model.rotated_share)
    _replace_type_by_loaded_one(parameters, model)
    if parameters["rope_type"] in STRETCHED:  # for which the top level wins (:837)
        outer = (model if model.facts.get("original_field") else config).get(ORIGINAL_LENGTH_KEY)
        if outer is not None:
            parameters[ORIGINAL_LENGTH_KEY] = outer
    if model.model_type in PHI3 and parameters["rope_type"] not in ("default", "longrope"):
        raise RefusedError(f"ValueError: the type must be longrope, got {parameters['rope_type']}")
    check_required_keys(parameters)
    for key in facts.required:
        if key != ORIGINAL_LENGTH_KEY:  # see _fill_missing_keys
            require_key(parameters, key)
    return parameters


def _older_dict(model: Model) -> Any:
    """Return rope_scaling; None in families whose class does not read it."""
    return model.config.get("rope_scaling") if "rope_scaling" in model.modern.reads else None


def _flat_rope_dict(model: Model) -> Parameters:
    """Return a copy of the file's rope dict, the older name first; of the class's own where the
    file has none, or where the class does not look at it."""
    facts = model.modern
    if not facts.reads:
        _validate_unread(model)
        written = None
    else:
        written = _older_dict(model) or model.config.get("rope_parameters")
    if written is None:
        written = deepcopy(facts.own_dicts.get("all", {}))  # with the class's own base
    return dict(written)


def _validate_unread(model: Model) -> None:
    """Raise RefusedError where the config's validation stops at a dict that no module reads."""
    written = model.config.get("rope_scaling") or model.config.get("rope_parameters") or {}
    if written.get("rope_type", written.get("type")) not in STRETCHED:
        return
    if ORIGINAL_LENGTH_KEY in model.modern.required:
        require_key(written, ORIGINAL_LENGTH_KEY)
    if not model.get("max_position_embeddings"):
        raise RefusedError(NO_LENGTH)


def _replace_type_by_loaded_one(parameters: Parameters, model: Model) -> None:
    """Replace a type, in `parameters` itself, by the type as which the family's class loads it."""
    if model.model_type in NAMED_MROPE and parameters["rope_type"] == "mrope":
        parameters["rope_type"] = "default"
    if model.model_type in PHI3 and parameters["rope_type"] in ("su", "yarn"):
        parameters["rope_type"] = "longrope"
        # It is filled in for types under their newer names only.
        check_required_keys(parameters, (ORIGINAL_LENGTH_KEY,))


class _WrittenDicts(NamedTuple):
    """The rope dicts of a config, before they are merged, in a family with one per kind of
    layer."""

    by_kind: dict[str, Parameters]
    """The dicts in rope_parameters."""
    flat: Mapping[str, Any] | None
    """The dict for kinds in general: rope_scaling, or a flat rope_parameters where it is read."""
    has_nested: bool
    """Whether rope_parameters stands for dicts of kinds, even if it has none of them."""


def _resolve_nested(model: Model, complete: Callable[..., Parameters]) -> dict[str, Parameters]:
    """Return the loaded rope dict of each kind of layer.

    complete: makes the dict of one kind complete, see `_filled_dict_of_kind`.

    A flat rope_scaling in a family that accepts none (see `refuse_unloadable_nested`) is taken for
    the full-attention layers: its author can mean no others.
    """
    _refuse_nulls(model)
    written = _written_dicts(model)
    given = dict(written.by_kind)
    if written.flat is not None:
        for kind in model.kinds_of_flat_rope_scaling or ("full_attention",):
            if written.has_nested and kind not in given:
                raise RefusedError(f"KeyError: {kind!r}")
            given[kind] = _merge_flat_into_kind(given.get(kind, {}), written.flat, model)
    resolved: dict[str, Parameters] = {}
    for kind in model.modern.dicts_by_kind or {}:
        if kind in model.layer_kinds and set(model.layers_of_kind(kind)) & set(
            model.without_rotation
        ):
            continue  # its layers rotate by nothing
        has_flat = written.flat is not None
        resolved[kind] = complete(kind, given.get(kind), model, has_flat=has_flat)
        _check_dict_of_kind(resolved[kind], model)
    return {kind: resolved[kind] for kind in model.layer_kinds if kind in resolved}


def _refuse_nulls(model: Model) -> None:
    """Raise RefusedError for null under a key that the class calculates with or looks into."""
    places = (model.config, model.config.get("rope_parameters") or {})
    for key, meaning in model.modern.nulls.items():
        if meaning == "refused" and any(key in place and place[key] is None for place in places):
            raise RefusedError(f"TypeError: {key} is None")


def _written_dicts(model: Model) -> _WrittenDicts:
    """Return the dicts of a config, before they are merged.

    Raises: RefusedError for numbers beside the dicts where the class validates strictly;
    NotReadError for dicts by kind under the older name.
    """
    facts = model.modern
    nested = model.config.get("rope_parameters")
    flat = model.config.get("rope_scaling")
    by_kind = _nested_dicts(nested)
    if facts.flat_new and nested and not by_kind:
        flat = flat or nested
        nested = None
    if facts.strict and isinstance(nested, Mapping) and len(by_kind) < len(nested):
        raise RefusedError("StrictDataclassFieldValidationError: field 'rope_parameters'")
    if model.model_type in COMPLETE_DICTS_WIN and set(model.layer_kinds) <= by_kind.keys():
        flat = None
    if not isinstance(flat, Mapping):
        return _WrittenDicts(by_kind, None, nested is not None)
    if _nested_dicts(flat):
        raise NotReadError("a dict per kind in rope_scaling")  # classes differ in what they do
    return _WrittenDicts(by_kind, flat, nested is not None)


def _nested_dicts(rope_dict: Any) -> dict[str, Parameters]:
    """Return copies of the dicts nested in a rope dict; empty for anything else."""
    if not isinstance(rope_dict, Mapping):
        return {}
    return {kind: dict(p) for kind, p in rope_dict.items() if isinstance(p, Mapping)}


def _merge_flat_into_kind(nested: Parameters, flat: Mapping[str, Any], model: Model) -> Parameters:
    """Return the rope dict of a kind of layer merged with the flat one, whose keys win."""
    facts = model.modern
    # Most classes write their own rope_type into the kind's dict before they merge the flat one, so
    # that a `type` in the flat dict means nothing. Classes with flat_new first turn the flat dict's
    # `type` into its rope_type, as families with one dict do.
    usual = flat.get("type", "default") if facts.flat_new else "default"
    merged = {"rope_type": usual, **nested, **flat}
    if model.model_type in DEEPSEEK_V4:
        merged.pop("rope_theta", None)
        merged.pop("partial_rotary_factor", None)
        if merged["rope_type"] == "yarn":
            merged.setdefault("attention_factor", 1.0)
    return merged


def _filled_dict_of_kind(
    kind: str, given: Parameters | None, model: Model, *, has_flat: bool
) -> Parameters:
    """Return the complete dict of one kind of layer, of a class that fills in what it lacks by the
    keys beside the dicts.

    given: what the config says of the kind; None: nothing, so that the class's own dict counts.
    has_flat: the config has a flat dict as well.
    """
    parameters = _own_dict_of_kind(kind, model) if given is None else given
    if model.modern.share_use == "ignored":
        parameters["partial_rotary_factor"] = 1.0
    theta = _base_for_dict_without_one(kind, model, by_flat=given is not None and has_flat)
    _fill_missing_keys(parameters, model, theta, _share_for_dict_without_one(kind, model))
    return parameters


def _strict_dict_of_kind(
    kind: str, given: Parameters | None, model: Model, *, has_flat: bool
) -> Parameters:
    """Return the complete dict of one kind of layer, of a class that accepts no keys beside its
    dicts and fills nothing in while it loads. The arguments are those of `_filled_dict_of_kind`.

    Building a scaled rotary module does take a base and a share from beside the dicts: the
    functions of all types but default call standardize_rope_params first (:173).
    """
    own = model.modern.rope_of_kind(kind)
    theta = own.get("rope_theta", 10000.0)
    has_own_share = model.modern.share_use == "own"
    share = own.get("partial_rotary_factor") if has_own_share else None
    parameters = _own_dict_of_kind(kind, model) if given is None else given
    if given is not None and _is_scaled(parameters):
        theta = model.config.get("rope_theta", theta)
        share = model.config.get("partial_rotary_factor")
    _fill_missing_keys(parameters, model, theta, share)
    return parameters


def _own_dict_of_kind(kind: str, model: Model) -> Parameters:
    """Return a copy of the class's own dict of a kind of layer, without its base: the config's
    other keys may give another."""
    own = model.modern.rope_of_kind(kind)
    return {key: value for key, value in own.items() if key != "rope_theta"}


def _is_scaled(parameters: Mapping[str, Any]) -> bool:
    """Return True if the type of a rope dict, in either spelling, is another than default."""
    return parameters.get("rope_type", parameters.get("type", "default")) != "default"


def _check_dict_of_kind(parameters: Parameters, model: Model) -> None:
    """Raise RefusedError where no rotary module can be built of a complete dict; remove `truncate`
    from it, for which the module looks beside the nested dicts."""
    parameters.pop("truncate", None)
    check_required_keys(parameters)
    types = model.modern.types
    if parameters["rope_type"] == "yarn" and types is not None and "yarn" not in types:
        raise RefusedError("KeyError: 'original_max_position_embeddings'")


def _base_for_dict_without_one(kind: str, model: Model, *, by_flat: bool) -> Any:
    """Return the base of a kind whose dict has none: by the family's key for this kind, else the
    class's own.

    by_flat: the config has a flat dict, which counts for this kind. Some families then look for the
    base under another key.
    """
    facts = model.modern
    theta = facts.rope_of_kind(kind).get("rope_theta", 10000.0)
    key = facts.theta_keys.get(kind, "")
    if by_flat:
        key = facts.theta_keys.get("flat", key)
    # Most classes keep a null, at which building their layers stops; some replace it.
    null_is_replaced = facts.nulls.get("rope_theta") == "missing"
    if model.config.get(key) is not None or not null_is_replaced:
        theta = model.config.get(key, theta)
    return _entry_of_first_layer(theta, kind, model)


def _share_for_dict_without_one(kind: str, model: Model) -> Any:
    """Return the rotated share of a kind whose dict has none; None where none is filled in."""
    facts = model.modern
    if facts.share_use == "own":
        return facts.rope_of_kind(kind).get("partial_rotary_factor")
    return _entry_of_first_layer(model.rotated_share, kind, model)


def _entry_of_first_layer(value: Any, kind: str, model: Model) -> Any:
    """Return, of a list with one value per layer, that of the first layer of a kind; any other
    value unchanged."""
    return value[min(model.layers_of_kind(kind), default=0)] if isinstance(value, list) else value


def _fill_missing_keys(parameters: Parameters, model: Model, theta: Any, share: Any) -> None:
    """Set the base, the rotated share, the type and the original length where a rope dict has none,
    in `parameters` itself."""
    parameters.setdefault("rope_theta", theta)
    if share is not None:
        parameters.setdefault("partial_rotary_factor", share)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] in STRETCHED:
        if ORIGINAL_LENGTH_KEY in model.modern.required:
            require_key(parameters, ORIGINAL_LENGTH_KEY)
        parameters.setdefault(ORIGINAL_LENGTH_KEY, model.max_positions)


def check_required_keys(parameters: Parameters, needed: tuple[str, ...] = ()) -> None:
    """Raise RefusedError if a key is missing: one of `needed`, or of those that the rope_type needs
    where `needed` is empty."""
    kind = parameters["rope_type"]
    missing = [key for key in needed or NEEDED.get(kind, ()) if key not in parameters]
    if missing:
        raise RefusedError(f"KeyError: Missing required keys in `rope_parameters`: {set(missing)}")


def refuse_unloadable_nested(model: Model, resolved: Mapping[str, Parameters]) -> None:
    """Raise RefusedError where loading a family with nested rope dicts fails.

    Newer families accept no flat dict and fill nothing in. Where head dimensions differ between
    layers, validating longrope fails.
    """
    given = model.config.get("rope_scaling") or model.config.get("rope_parameters") or {}
    if given and not model.kinds_of_flat_rope_scaling:
        for kind, parameters in resolved.items():
            if kind not in given:
                raise RefusedError(f"KeyError: {kind!r}")
            if model.kinds_of_flat_rope_scaling is None:
                _require_complete(given[kind], parameters, model)
    if model.head_dims_differ and any(p["rope_type"] == "longrope" for p in resolved.values()):
        raise RefusedError("AmbiguousGlobalPerLayerAttributeError: 'head_dim'")


def _require_complete(given: Mapping[str, Any], parameters: Parameters, model: Model) -> None:
    """Raise RefusedError if a nested dict lacks a key that nothing fills in.

    given: the dict of the file; parameters: the same one after loading.
    """
    needed = {"rope_theta"}
    if parameters["rope_type"] in STRETCHED:
        needed.add(ORIGINAL_LENGTH_KEY)
    if _is_scaled(parameters) and model.config.get("rope_theta") is not None:
        needed.remove("rope_theta")
    missing = sorted(needed - given.keys())
    if missing:
        raise RefusedError(f"KeyError: {missing[0]!r}")
