"""The rope dicts that transformers 5 has after loading a config: one for all layers, or one for
each kind of layer. Lines are those of its modeling_rope_utils.py."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from posenc.runtimes.computed_positions import NotReadError, RefusedError, require_key
from posenc.runtimes.config_model import ORIGINAL_LENGTH_KEY, Model

NEEDED_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Keys without which loading the config fails; theta and the original length have defaults."""
PHI3_FAMILIES = ("phi3", "phi4_multimodal")
"""Families that accept only longrope, under three names."""
FAMILIES_NAMING_MROPE = ("qwen2_vl_text", "qwen2_5_vl_text")
"""Families whose class takes the type mrope for default, which has sections here."""
DEEPSEEK_V4_FAMILIES = ("deepseek_v4",)
"""Families that take neither a base nor a share from a flat dict, and give yarn in it the
multiplier 1 where it states none."""
FAMILIES_OF_COMPLETE_DICTS = ("deepseek_v4", "step3p5")
"""Families that take the dicts by kind of layer if every kind has one, and otherwise make them anew
of what stands beside them."""
FAMILIES_FILLING_MISSING_KINDS = ("neomme",)
"""Families that apply a flat dict to no kind, and yet make a dict for a kind without one."""
FAMILIES_NEEDING_EACH_KIND = ("dots3_note_text",)
"""Families that apply a flat dict to all kinds, and yet need one for each kind that has layers
where the dicts are by kind."""
STRETCHING_TYPES = ("llama3", "yarn", "longrope")
NO_LENGTH_MESSAGE = "AttributeError: no attribute 'max_position_embeddings'"
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
    facts = model.transformers5_facts
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
    if parameters["rope_type"] in STRETCHING_TYPES:  # for which the top level wins (:837)
        outer_length = (model if model.facts.get("original_field") else config).get(
            ORIGINAL_LENGTH_KEY
        )
        if outer_length is not None:
            parameters[ORIGINAL_LENGTH_KEY] = outer_length
    if model.model_type in PHI3_FAMILIES and parameters["rope_type"] not in ("default", "longrope"):
        raise RefusedError(f"ValueError: the type must be longrope, got {parameters['rope_type']}")
    check_required_keys(parameters)
    for key in facts.required:
        if key != ORIGINAL_LENGTH_KEY:  # see _fill_missing_keys
            require_key(parameters, key)
    return parameters


def _older_dict(model: Model) -> Any:
    """Return rope_scaling; None in families whose class does not read it."""
    return (
        model.config.get("rope_scaling")
        if "rope_scaling" in model.transformers5_facts.reads
        else None
    )


def _flat_rope_dict(model: Model) -> Parameters:
    """Return a copy of the file's rope dict, the older name first; of the class's own where the
    file has none, or where the class does not look at it."""
    facts = model.transformers5_facts
    if not facts.reads:
        _validate_unread(model)
        rope_dict = None
    else:
        rope_dict = _older_dict(model) or model.config.get("rope_parameters")
    if rope_dict is None:
        rope_dict = deepcopy(facts.own_dicts.get("all", {}))  # with the class's own base
    return dict(rope_dict)


def _validate_unread(model: Model) -> None:
    """Raise RefusedError where the config's validation stops at a dict that no module reads."""
    rope_dict = model.config.get("rope_scaling") or model.config.get("rope_parameters") or {}
    if rope_dict.get("rope_type", rope_dict.get("type")) not in STRETCHING_TYPES:
        return
    if ORIGINAL_LENGTH_KEY in model.transformers5_facts.required:
        require_key(rope_dict, ORIGINAL_LENGTH_KEY)
    if not model.get("max_position_embeddings"):
        raise RefusedError(NO_LENGTH_MESSAGE)


def _replace_type_by_loaded_one(parameters: Parameters, model: Model) -> None:
    """Replace a type, in `parameters` itself, by the type as which the family's class loads it."""
    if model.model_type in FAMILIES_NAMING_MROPE and parameters["rope_type"] == "mrope":
        parameters["rope_type"] = "default"
    if model.model_type in PHI3_FAMILIES and parameters["rope_type"] in ("su", "yarn"):
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


def _resolve_nested(
    model: Model, complete_dict: Callable[..., Parameters]
) -> dict[str, Parameters]:
    """Return the loaded rope dict of each kind of layer.

    complete_dict: makes the dict of one kind complete, see `_filled_dict_of_kind`.

    A flat rope_scaling in a family that accepts none (see `refuse_unloadable_nested`) is taken for
    the full-attention layers: its author can mean no others.
    """
    _refuse_nulls(model)
    written_dicts = _written_dicts(model)
    given_dicts = dict(written_dicts.by_kind)
    if written_dicts.flat is not None:
        for kind in model.kinds_of_flat_rope_scaling or ("full_attention",):
            if written_dicts.has_nested and kind not in given_dicts:
                raise RefusedError(f"KeyError: {kind!r}")
            given_dicts[kind] = _merge_flat_into_kind(
                given_dicts.get(kind, {}), written_dicts.flat, model
            )
    resolved_dicts: dict[str, Parameters] = {}
    for kind in model.transformers5_facts.dicts_by_kind or {}:
        if kind in model.layer_kinds and set(model.layers_of_kind(kind)) & set(
            model.without_rotation
        ):
            # All layers of the kind rest, never some: in families with a dict per kind, the dict
            # alone decides that (none of them has the fact `rotates`).
            continue
        has_flat = written_dicts.flat is not None
        resolved_dicts[kind] = complete_dict(kind, given_dicts.get(kind), model, has_flat=has_flat)
        _check_dict_of_kind(resolved_dicts[kind], model)
    return {kind: resolved_dicts[kind] for kind in model.layer_kinds if kind in resolved_dicts}


def _refuse_nulls(model: Model) -> None:
    """Raise RefusedError for null under a key that the class calculates with or looks into."""
    dicts = (model.config, model.config.get("rope_parameters") or {})
    own_kinds = model.transformers5_facts.dicts_by_kind or {}
    for key, effect in model.transformers5_facts.nulls.items():
        is_null = any(key in rope_dict and rope_dict[key] is None for rope_dict in dicts)
        is_kind_without_layers = key in own_kinds and not model.layers_of_kind(key)
        if effect == "refused" and is_null and not is_kind_without_layers:
            raise RefusedError(f"TypeError: {key} is None")


def _written_dicts(model: Model) -> _WrittenDicts:
    """Return the dicts of a config, before they are merged.

    Raises: RefusedError for numbers beside the dicts where the class validates strictly;
    NotReadError for dicts by kind under the older name.
    """
    facts = model.transformers5_facts
    nested_dict = model.config.get("rope_parameters")
    flat_dict = model.config.get("rope_scaling")
    by_kind = _nested_dicts(nested_dict)
    if facts.flat_new and isinstance(nested_dict, Mapping) and not by_kind:
        flat_dict = flat_dict or nested_dict
        nested_dict = None
    if facts.strict and isinstance(nested_dict, Mapping) and len(by_kind) < len(nested_dict):
        raise RefusedError("StrictDataclassFieldValidationError: field 'rope_parameters'")
    if model.model_type in FAMILIES_OF_COMPLETE_DICTS:
        if _has_every_dict(by_kind, model):
            flat_dict = None
        else:
            by_kind = {}
            nested_dict = None
    if not isinstance(flat_dict, Mapping):
        return _WrittenDicts(by_kind, None, nested_dict is not None)
    if _nested_dicts(flat_dict):
        raise NotReadError("a dict per kind in rope_scaling")  # classes differ in what they do
    return _WrittenDicts(by_kind, flat_dict, nested_dict is not None)


def _has_every_dict(by_kind: Mapping[str, Parameters], model: Model) -> bool:
    """Return True if a class of FAMILIES_OF_COMPLETE_DICTS takes these dicts by kind: Step 3.5's if
    each kind with layers has one, DeepSeek V4's if both kinds have one and rope_scaling is empty,
    which would take their place."""
    if model.model_type in DEEPSEEK_V4_FAMILIES:
        needed_kinds = {*(model.transformers5_facts.dicts_by_kind or ())}
        return needed_kinds <= by_kind.keys() and not model.config.get("rope_scaling")
    return {*model.layer_kinds} <= by_kind.keys()


def _nested_dicts(rope_dict: Any) -> dict[str, Parameters]:
    """Return copies of the dicts nested in a rope dict; empty for anything else."""
    if not isinstance(rope_dict, Mapping):
        return {}
    return {kind: dict(p) for kind, p in rope_dict.items() if isinstance(p, Mapping)}


def _merge_flat_into_kind(
    nested_dict: Parameters, flat_dict: Mapping[str, Any], model: Model
) -> Parameters:
    """Return the rope dict of a kind of layer merged with the flat one, whose keys win."""
    facts = model.transformers5_facts
    # Most classes write their own rope_type into the kind's dict before they merge the flat one, so
    # that a `type` in the flat dict means nothing. Classes with flat_new first turn the flat dict's
    # `type` into its rope_type, as families with one dict do.
    usual_type = flat_dict.get("type", "default") if facts.flat_new else "default"
    merged = {"rope_type": usual_type, **nested_dict, **flat_dict}
    if model.model_type in DEEPSEEK_V4_FAMILIES:
        merged.pop("rope_theta", None)
        merged.pop("partial_rotary_factor", None)
        if merged["rope_type"] == "yarn":
            merged.setdefault("attention_factor", 1.0)
    return merged


def _filled_dict_of_kind(
    kind: str, given_dict: Parameters | None, model: Model, *, has_flat: bool
) -> Parameters:
    """Return the complete dict of one kind of layer, of a class that fills in what it lacks by the
    keys beside the dicts.

    given_dict: what the config says of the kind; None: nothing, so that the class's own dict
    counts. has_flat: the config has a flat dict as well.
    """
    parameters = _own_dict_of_kind(kind, model) if given_dict is None else dict(given_dict)
    if model.transformers5_facts.share_use == "ignored":
        parameters["partial_rotary_factor"] = 1.0
    theta = _base_for_dict_without_one(kind, model, is_given=given_dict is not None)
    share = _share_for_dict_without_one(kind, model)
    is_nested = given_dict is not None and not has_flat
    if is_nested and model.model_type in DEEPSEEK_V4_FAMILIES:
        # Loading completes such dicts before the class looks at the keys of its own.
        theta = model.config.get("rope_theta", model.transformers5_facts.rope_theta)
        share = model.config.get("partial_rotary_factor", 1.0)
    _fill_missing_keys(parameters, model, theta, share)
    return parameters


def _strict_dict_of_kind(
    kind: str, given_dict: Parameters | None, model: Model, *, has_flat: bool
) -> Parameters:
    """Return the complete dict of one kind of layer, of a class that accepts no keys beside its
    dicts and fills nothing in while it loads, but perhaps while it builds its rotary module: see
    `_kinds_filled_while_building`. The arguments are those of `_filled_dict_of_kind`."""
    own_dict = model.transformers5_facts.rope_of_kind(kind)
    theta = own_dict.get("rope_theta", 10000.0)
    has_own_share = model.transformers5_facts.share_use == "own"
    share = own_dict.get("partial_rotary_factor") if has_own_share else None
    parameters = _own_dict_of_kind(kind, model) if given_dict is None else dict(given_dict)
    if kind in _kinds_filled_while_building(model):
        share = model.config.get("partial_rotary_factor")
        if given_dict is not None:
            theta = model.config.get("rope_theta", theta)
    _fill_missing_keys(parameters, model, theta, share)
    return parameters


def _kinds_filled_while_building(model: Model) -> set[str]:
    """Return the kinds of layers whose dicts take a base and a share from beside the dicts while
    the rotary module of a strict class is built.

    The functions of all types but default fill in all dicts first (:173). The kinds are built in
    the order of the alphabet: those before the first scaled one are built already.
    """
    dict_by_kind = _nested_dicts(model.config.get("rope_parameters"))
    kinds = sorted(model.layer_kinds)
    scaled_kinds = [
        kind
        for kind in kinds
        if _is_scaled(dict_by_kind.get(kind, model.transformers5_facts.rope_of_kind(kind)))
    ]
    return {kind for kind in kinds if scaled_kinds and kind >= scaled_kinds[0]}


def _own_dict_of_kind(kind: str, model: Model) -> Parameters:
    """Return a copy of the class's own dict of a kind of layer, without its base: the config's
    other keys may give another."""
    own_dict = model.transformers5_facts.rope_of_kind(kind)
    return {key: value for key, value in own_dict.items() if key != "rope_theta"}


def _is_scaled(parameters: Mapping[str, Any]) -> bool:
    """Return True if the type of a rope dict, in either spelling, is another than default."""
    return parameters.get("rope_type", parameters.get("type", "default")) != "default"


def _check_dict_of_kind(parameters: Parameters, model: Model) -> None:
    """Raise RefusedError where no rotary module can be built of a complete dict; remove `truncate`
    from it, for which the module looks beside the nested dicts.

    Of the types that a release does not take, yarn alone stops here: before 5.9, its function looks
    for the original length beside the nested dicts. `rotation` answers the other types.
    """
    parameters.pop("truncate", None)
    check_required_keys(parameters)
    allowed_types = model.transformers5_facts.types
    if (
        parameters["rope_type"] == "yarn"
        and allowed_types is not None
        and "yarn" not in allowed_types
    ):
        raise RefusedError("KeyError: 'original_max_position_embeddings'")


def _base_for_dict_without_one(kind: str, model: Model, *, is_given: bool) -> Any:
    """Return the base of a kind whose dict has none: by the family's key for this kind, else the
    class's own.

    is_given: the config has a dict for this kind, flat or its own. Some families then take the base
    of another key, or the one that their class has for all kinds.
    """
    facts = model.transformers5_facts
    theta = facts.rope_of_kind(kind).get("rope_theta", 10000.0)
    key = facts.theta_keys.get(kind, "")
    if is_given and "given" in facts.theta_keys:
        theta = facts.rope_theta
        key = facts.theta_keys["given"]
    # Most classes keep a null, at which building their layers stops; some replace it.
    null_is_replaced = facts.nulls.get("rope_theta") == "missing"
    if model.config.get(key) is not None or not null_is_replaced:
        theta = model.config.get(key, theta)
    return _entry_of_first_layer(theta, kind, model)


def _share_for_dict_without_one(kind: str, model: Model) -> Any:
    """Return the rotated share of a kind whose dict has none; None where none is filled in."""
    facts = model.transformers5_facts
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
    if parameters["rope_type"] in STRETCHING_TYPES:
        if ORIGINAL_LENGTH_KEY in model.transformers5_facts.required:
            require_key(parameters, ORIGINAL_LENGTH_KEY)
        parameters.setdefault(ORIGINAL_LENGTH_KEY, model.max_positions)


def check_required_keys(parameters: Parameters, needed_keys: tuple[str, ...] = ()) -> None:
    """Raise RefusedError if a key is missing: one of `needed_keys`, or of those that the rope_type
    needs where `needed_keys` is empty."""
    rope_type = parameters["rope_type"]
    missing_keys = [
        key for key in needed_keys or NEEDED_KEYS.get(rope_type, ()) if key not in parameters
    ]
    if missing_keys:
        raise RefusedError(
            f"KeyError: Missing required keys in `rope_parameters`: {set(missing_keys)}"
        )


def refuse_unloadable_nested(model: Model, resolved_dicts: Mapping[str, Parameters]) -> None:
    """Raise RefusedError where loading a family with nested rope dicts fails.

    Newer families accept no flat dict and fill nothing in. Where head dimensions differ between
    layers, validating longrope fails.
    """
    rope_dict = model.config.get("rope_scaling") or model.config.get("rope_parameters")
    if isinstance(rope_dict, Mapping):
        for kind, parameters in resolved_dicts.items():
            if kind not in rope_dict and _needs_each_kind(model, rope_dict):
                raise RefusedError(f"KeyError: {kind!r}")
            if model.kinds_of_flat_rope_scaling is None:
                is_base_filled_in = kind in _kinds_filled_while_building(model)
                _require_complete(rope_dict[kind], parameters, model, is_base_filled_in)
    if model.head_dims_differ and any(
        p["rope_type"] == "longrope" for p in resolved_dicts.values()
    ):
        raise RefusedError("AmbiguousGlobalPerLayerAttributeError: 'head_dim'")


def _needs_each_kind(model: Model, rope_dict: Mapping[str, Any]) -> bool:
    """Return True if loading stops where a rope dict that is written, though empty, lacks one for a
    kind that has layers."""
    if model.kinds_of_flat_rope_scaling:
        is_nested = bool(_nested_dicts(rope_dict))
        return is_nested and model.model_type in FAMILIES_NEEDING_EACH_KIND
    fills_missing_kinds = model.model_type in FAMILIES_FILLING_MISSING_KINDS
    return not fills_missing_kinds or rope_dict is model.config.get("rope_scaling")


def _require_complete(
    given_dict: Mapping[str, Any], parameters: Parameters, model: Model, is_base_filled_in: bool
) -> None:
    """Raise RefusedError if a nested dict lacks a key that nothing fills in.

    given_dict: the dict of the file; parameters: the same one after loading. is_base_filled_in:
    whether it may take the base from beside the dicts.
    """
    needed_keys = {"rope_theta"}
    if parameters["rope_type"] in STRETCHING_TYPES:
        needed_keys.add(ORIGINAL_LENGTH_KEY)
    if is_base_filled_in and model.config.get("rope_theta") is not None:
        needed_keys.remove("rope_theta")
    missing_keys = sorted(needed_keys - given_dict.keys())
    if missing_keys:
        raise RefusedError(f"KeyError: {missing_keys[0]!r}")
