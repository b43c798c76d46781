"""Resolve what a config means, read with goodwill, whether or not any runtime agrees.

It follows transformers 5, and reads old, missing or misplaced keys as their author must have meant
them. `doubts` lists every guess.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

from posenc.frequencies import float64_formulas
from posenc.frequencies.scalings.lookup import ROPE_TYPES
from posenc.runtimes.computed_positions import (
    ARITHMETIC_ERRORS,
    ComputedPositions,
    LayerRotation,
    RefusedError,
    first_changing_switch,
)
from posenc.runtimes.config_model import (
    ORIGINAL_LENGTH_KEY,
    TRAINED_LENGTH_KEY,
    BadConfigError,
    Model,
    model_of,
)
from posenc.runtimes.families import (
    FAMILIES_WITHOUT_ROTATION,
    all_families,
    first_class,
    other_architecture,
    rotates_nothing,
)
from posenc.runtimes.files.spelling import (
    NOMIC_LENGTH_KEY,
    NUMBER_KEYS,
    with_vendors_keys_renamed,
)
from posenc.runtimes.known import transformers5

NEW_TYPE_BY_OLD = {
    "su": "longrope",
    "mrope": "default",
    "deepseek_yarn": "yarn",
    "ntk-aware": "ntk",
}
Parameters = transformers5.Parameters
YARN_KEYS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor")
NEAR_SPELLING = 0.85
"""Similarity of two names, from 0 to 1 as difflib measures it, from which one may be a misspelling
of the other: lama and llama have 0.89, roberta and eurobert 0.8. Chosen, not derived."""


class UnknownFamilyError(ValueError):
    """A family that posenc has not read: nothing is said, fixed or proved of it."""


@contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Put the path before the message of a ValueError raised in the block, unless it names it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        error_class = UnknownFamilyError if isinstance(error, UnknownFamilyError) else ValueError
        raise error_class(f"{path}: {str(error).removeprefix(f'{path.name}: ')}") from error


@dataclass(frozen=True)
class Meaning:
    """What the author of a config means by its keys, whatever the runtimes make of them.

    computed: the rotation meant at a length. parameters: the rope dict meant, by kind of layer.
    max_length: the longest sequence meant. trained_length: the length of the unscaled frequencies.
    doubts: what was guessed.
    """

    model: Model
    computed: ComputedPositions
    parameters: Mapping[str, Mapping[str, Any]]
    max_length: int
    trained_length: int
    doubts: tuple[str, ...]


def meaning_of(config: Mapping[str, Any], length: int | None = None) -> Meaning:
    """Resolve what a config.json's dict means at a length (default: the longest meant).

    Raises: UnknownFamilyError for a family whose meaning nobody has read; ValueError where the
    meaning is unclear.
    """
    require_known_family(model_of(config))
    doubts: list[str] = []
    model = model_of(_canonical_config(config, doubts))
    try:
        parameters: dict[str, Parameters] = {}
        for kind, p in transformers5.resolve_rope_dicts(model).items():
            parameters[kind] = _translated_parameters(p, model, kind, doubts)
        longest_length = max(_longest_length(p, model) for p in parameters.values())
        if length and any(p["rope_type"] == "dynamic" for p in parameters.values()):
            longest_length = max(longest_length, length)
        rotations = _rotations_by_kind(parameters, model, length or longest_length)
        softmax_scale = transformers5.softmax_scale(model, next(iter(parameters.values())))
    except BadConfigError:
        raise
    except (RefusedError, *ARITHMETIC_ERRORS) as refused:
        raise ValueError(f"cannot tell what the rotary keys mean: {refused}") from refused
    computed = ComputedPositions(
        None,
        rotations,
        softmax_scale,
        first_changing_switch(
            transformers5.frequency_switch(model, p) for p in parameters.values()
        ),
        longest_length,
        model.without_rotation,
    )
    trained_length = min(_trained_length(p, model) for p in parameters.values())
    return Meaning(
        model, computed, parameters, longest_length, trained_length, tuple(dict.fromkeys(doubts))
    )


def _rotations_by_kind(
    parameters: Mapping[str, Parameters], model: Model, length: int
) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer at a length; empty where no layer rotates."""
    rotations: dict[str, LayerRotation] = {}
    for kind, p in parameters.items():
        if len(model.without_rotation) < model.num_layers:
            rotations[kind] = transformers5.rotation(
                dict(p), model.with_sizes_of_kind(kind), length
            )
    return rotations


def require_known_family(model: Model) -> None:
    """Raise UnknownFamilyError if posenc has not read what the family's code means by its keys."""
    if model.facts.get("transformers5"):
        if not model.has_null_head_dim:
            return
        raise UnknownFamilyError(
            f"posenc does not know what head_dim null means for {model.model_type}, whose class "
            "has a number: remove the key, or write the number"
        )
    if not model.model_type:
        raise UnknownFamilyError(
            "config.json has no model_type, and its architectures name no family that posenc "
            "knows: write model_type"
        )
    facts = all_families().get(model.model_type, {})
    class_in_words = other_architecture(model.config, model.model_type)
    if class_in_words is not None:
        raise UnknownFamilyError(
            f"{first_class(model.config)} ({class_in_words}) is another architecture with the "
            f"model_type {model.model_type!r} than {facts['architecture']}, the one that posenc "
            "has read"
        )
    has_parts = "text" in facts
    if rotates_nothing(model.model_type, model.outer_config or model.config):
        raise UnknownFamilyError(
            f"{model.model_type} has no rotary positions; there is nothing to judge"
        )
    # A family of several parts is known by its text_config, which is what this config lacks.
    hint = " without a text_config" if has_parts else _misspelling_hint(model.model_type)
    raise UnknownFamilyError(
        f"posenc does not know the family {model.model_type!r}{hint} and cannot judge it"
    )


def _misspelling_hint(model_type: str) -> str:
    """Return " (did you mean NAME?)" with the model_type that is spelled nearly like this one;
    empty if none is, or this one is a name that posenc knows."""
    known_names = [*all_families(), *FAMILIES_WITHOUT_ROTATION]
    if model_type in known_names:
        return ""
    similar_names = get_close_matches(model_type, known_names, n=1, cutoff=NEAR_SPELLING)
    return f" (did you mean {similar_names[0]!r}?)" if similar_names else ""


def _canonical_config(config: Mapping[str, Any], doubts: list[str]) -> dict[str, Any]:
    """Return the config under transformers' names, with one type per rope dict and numbers for
    text. Guesses are added to `doubts`."""
    model = model_of(config)
    result = _with_usual_names_and_numbers(model, doubts)
    for name in ("rope_scaling", "rope_parameters"):
        rope_dict = result.get(name)
        if rope_dict and not isinstance(rope_dict, Mapping):
            raise ValueError(
                f"config.json: {name} must be an object or null, got {rope_dict!r:.60}."
            )
        if isinstance(rope_dict, Mapping):
            result[name] = _settle_rope_dicts(rope_dict, result, doubts)
    if model.has_rope_dict_per_kind:
        _move_rope_dict_by_kind(result, model, doubts)
    older_dict = result.get("rope_scaling")
    newer_dict = result.get("rope_parameters")
    if older_dict and newer_dict and differing_keys(older_dict, newer_dict, result):
        doubts.append("rope_scaling and rope_parameters differ; rope_scaling is taken")
    return result


def _with_usual_names_and_numbers(model: Model, doubts: list[str]) -> dict[str, Any]:
    """Return the config with its keys under transformers' names, and with texts that are numbers
    converted.

    A base that is null is left out: it means the default of the family's class.
    """
    facts = model.facts["transformers5"]
    own_keys = {facts.get("share_key"), *facts.get("theta_keys", {}).values()}
    result = with_vendors_keys_renamed(dict(model.config), own_keys)
    if model.theta_of_inner_dict is not None:
        result["rope_theta"] = model.theta_of_inner_dict
    for name in dict.fromkeys((*NUMBER_KEYS, *own_keys)):
        if name in result:
            result[name] = _as_number(result[name], name, doubts)
    keys_whose_null_is_default = {"rope_theta", *own_keys}
    return {k: v for k, v in result.items() if v is not None or k not in keys_whose_null_is_default}


def _move_rope_dict_by_kind(config: dict[str, Any], model: Model, doubts: list[str]) -> None:
    """Move the rope dicts of a family that has one for each kind of layer to the place where its
    class looks for them, in `config` itself."""
    older_dict = config.get("rope_scaling")
    newer_dict = config.get("rope_parameters")
    if older_dict and not newer_dict and _has_dict_per_kind(older_dict):
        doubts.append("rope_scaling has a dict per kind of layer; it is taken for rope_parameters")
        config["rope_parameters"] = config.pop("rope_scaling")
        return
    flat_is_read = model.facts["transformers5"].get("flat_new")
    if newer_dict and not _has_dict_per_kind(newer_dict) and not flat_is_read:
        doubts.append("rope_parameters is flat; it is taken for the layers with full attention")
        config["rope_parameters"] = {"full_attention": newer_dict}


def _has_dict_per_kind(rope_dict: Mapping[str, Any]) -> bool:
    """Return True if a rope dict has dicts for kinds of layers."""
    return any(isinstance(value, Mapping) for value in rope_dict.values())


def differing_keys(
    older_dict: Mapping[str, Any], newer_dict: Mapping[str, Any], config: Mapping[str, Any]
) -> list[str]:
    """Return the keys in which two rope dicts differ, after filling in types and the outer base.

    If the old dict is flat and the new one has a dict for each kind of layer, only that of
    full_attention is compared.
    """
    if not _has_dict_per_kind(older_dict):
        full_attention_dict = newer_dict.get("full_attention")
        newer_dict = full_attention_dict if isinstance(full_attention_dict, Mapping) else newer_dict
    older_with_base = _with_type_and_base(older_dict, config)
    newer_with_base = _with_type_and_base(newer_dict, config)
    return sorted(
        k
        for k in older_with_base.keys() | newer_with_base.keys()
        if older_with_base.get(k) != newer_with_base.get(k)
    )


def _with_type_and_base(rope_dict: Mapping[str, Any], config: Mapping[str, Any]) -> Parameters:
    """Return a copy of a rope dict with its type under rope_type, the top level's base where it has
    none, and without nulls, so that two dicts can be compared."""
    p = dict(rope_dict)
    older_type = p.pop("type", None)
    if p.get("rope_type") is None:
        p["rope_type"] = "default" if older_type is None else older_type
    if p.get("rope_theta") is None and config.get("rope_theta") is not None:
        p["rope_theta"] = config["rope_theta"]
    return {k: v for k, v in p.items() if v is not None}


def _settle_rope_dicts(
    rope_dict: Mapping[str, Any], config: Mapping[str, Any], doubts: list[str]
) -> Parameters:
    """Return a rope dict of which each flat dict has one type, and texts that are numbers
    converted; see `_settle_rope_dict`."""
    if not _has_dict_per_kind(rope_dict):
        return _settle_rope_dict(rope_dict, config, doubts)
    settled: Parameters = {}
    for key, value in rope_dict.items():
        settled[key] = (
            _settle_rope_dict(value, config, doubts) if isinstance(value, Mapping) else value
        )
    return settled


def _settle_rope_dict(
    rope_dict: Mapping[str, Any], config: Mapping[str, Any], doubts: list[str]
) -> Parameters:
    """Return a flat rope dict with texts that are numbers converted, and its type under rope_type
    by the name that transformers 5 has for it."""
    p = {k: _as_number(v, k, doubts) if k in NUMBER_KEYS else v for k, v in rope_dict.items()}
    rope_type = _meant_type(p.pop("type", None), p.get("rope_type"), doubts)
    if rope_type is None and p.get("factor") not in (None, 1, 1.0):
        rope_type = _guess_type(p)
        doubts.append(f"the rope dict has a factor and no type; {rope_type!r} is taken")
    if rope_type is not None:
        p["rope_type"] = NEW_TYPE_BY_OLD.get(rope_type, rope_type)
    outer_length = config.get(ORIGINAL_LENGTH_KEY)
    inner_length = p.get(ORIGINAL_LENGTH_KEY)
    if inner_length is not None and outer_length is not None and inner_length != outer_length:
        doubts.append(
            f"the original length is {inner_length} inside and {outer_length} at the top level"
        )
    return p


def _meant_type(older_type: Any, newer_type: Any, doubts: list[str]) -> Any:
    """Return the type meant by `type` and `rope_type`; None where both are missing or null."""
    if newer_type is None:
        return older_type
    if older_type is not None and NEW_TYPE_BY_OLD.get(
        older_type, older_type
    ) != NEW_TYPE_BY_OLD.get(newer_type, newer_type):
        doubts.append(f"type is {older_type!r} and rope_type {newer_type!r}; rope_type is taken")
    return newer_type


def _guess_type(p: Mapping[str, Any]) -> str:
    """Return the type that the keys of a rope dict with a factor and no type suggest."""
    if "long_factor" in p:
        return "longrope"
    if "low_freq_factor" in p:
        return "llama3"
    if any(key in p for key in YARN_KEYS) or "original_max_position_embeddings" in p:
        return "yarn"
    return "linear"


def _as_number(value: Any, name: str, doubts: list[str]) -> Any:
    """Return the number that a text stands for, and add a doubt; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if not math.isfinite(number):
        return value
    doubts.append(f"{name} is the string {value!r}; {number:g} is taken")
    return number


def _translated_parameters(
    p: Mapping[str, Any], model: Model, kind: str, doubts: list[str]
) -> Parameters:
    """Return a loaded rope dict of one kind of layer in transformers' types and keys: without NTK
    types and attn_factor of vendors."""
    p = dict(p)
    rope_dict_in_config = _rope_dict_in_config(model, kind)
    if isinstance(rope_dict_in_config, Mapping):
        if "truncate" in rope_dict_in_config:
            p["truncate"] = rope_dict_in_config[
                "truncate"
            ]  # transformers drops it where dicts are nested
        dicts = (rope_dict_in_config, model.config)
        has_original = any(
            dict_with_length.get(ORIGINAL_LENGTH_KEY) is not None for dict_with_length in dicts
        )
        if p["rope_type"] in transformers5.STRETCHING_TYPES and not has_original:
            doubts.append(f"{ORIGINAL_LENGTH_KEY} is missing; {p[ORIGINAL_LENGTH_KEY]} is taken")
    if (
        model.model_type in transformers5.FAMILIES_WITH_OWN_MSCALES
        and p.get("attention_factor") is None
    ):
        # A meaning holds at the longest length meant, beyond the original one, where their module
        # multiplies by long_mscale.
        p["attention_factor"] = p.get("long_mscale")
    if p["rope_type"] == "ntk":
        _stretch_base(p, p.pop("factor", 1.0), model)
        doubts.append(f"type 'ntk' is taken as a base of {p['rope_theta']:g}")
    elif p["rope_type"] == "dynamic" and "alpha" in p:
        _stretch_base(p, p["alpha"], model)
    elif p["rope_type"] == "yarn" and "attn_factor" in p and p.get("attention_factor") is None:
        _take_attn_factor(p, doubts)
    return p


def _rope_dict_in_config(model: Model, kind: str) -> Any:
    """Return the rope dict of a kind of layer as the config has it; empty where it has none."""
    rope_dict = model.config.get("rope_scaling") or model.config.get("rope_parameters") or {}
    return rope_dict[kind] if isinstance(rope_dict, Mapping) and kind in rope_dict else rope_dict


def _stretch_base(p: Parameters, factor: Any, model: Model) -> None:
    """Replace a fixed NTK scaling by the larger base that it amounts to, in `p` itself."""
    dim = int(model.head_dim * p.get("partial_rotary_factor", 1.0))
    factor = float(factor)
    p["rope_theta"] = float64_formulas.ntk_theta(float(p["rope_theta"]), factor, dim)
    p["rope_type"] = "default"


def _take_attn_factor(p: Parameters, doubts: list[str]) -> None:
    """Set attention_factor to what attn_factor means, in `p` itself.

    SGLang multiplies yarn's usual temperature by attn_factor. A file with the usual temperature
    itself there must mean attention_factor.
    """
    usual_multiplier = transformers5.yarn_multiplier(p, float(p["factor"]))
    repeats_usual = math.isclose(p["attn_factor"], usual_multiplier, rel_tol=1e-3)  # files round it
    p["attention_factor"] = (
        usual_multiplier if repeats_usual else usual_multiplier * p["attn_factor"]
    )
    meaning_in_words = (
        "as the temperature itself" if repeats_usual else "as a multiple of yarn's temperature"
    )
    doubts.append(f"attn_factor {p['attn_factor']:g} is taken {meaning_in_words}")


def _trained_length(p: Mapping[str, Any], model: Model) -> int:
    """Return the length at which the unscaled frequencies were trained, in tokens."""
    original_length = p.get("original_max_position_embeddings")
    if _has_original_length(p["rope_type"]) and isinstance(original_length, int | float):
        length_kept = model.config.get(TRAINED_LENGTH_KEY)
        return length_kept if is_length(length_kept) else int(original_length)
    length_of_nomic = model.config.get(NOMIC_LENGTH_KEY)
    return (
        min(length_of_nomic, model.max_positions)
        if is_length(length_of_nomic)
        else model.max_positions
    )


def _has_original_length(rope_type: str) -> bool:
    """Return True for a type of which original_max_position_embeddings is the training length."""
    return rope_type in ROPE_TYPES and ROPE_TYPES[rope_type].has_original_length


def is_length(value: Any) -> TypeGuard[int]:
    """Return True for an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _longest_length(p: Mapping[str, Any], model: Model) -> int:
    """Return max_position_embeddings, or the length that yarn stretches to if that is longer."""
    longest_length, factor = model.max_positions, p.get("factor")
    if p["rope_type"] == "yarn" and isinstance(factor, int | float):
        return max(longest_length, stretched_length(_trained_length(p, model), factor))
    return longest_length


def stretched_length(original_length: float, factor: float) -> int:
    """Return original_length * factor, rounded down to whole tokens.

    A product that rounding of floats leaves just below an integer counts as that integer.

    >>> stretched_length(3, 5 / 3)
    5
    """
    return int(original_length * factor * (1 + 1e-12))
