"""Find the command-line options with which a server computes what was meant, without changing
files; and apply such options as a server does.

A server sets them on the config that transformers 5 has loaded. It reads the language model's
settings from their own config, such as text_config, if the family has one: what stands at the top
level then changes nothing.

Read in vLLM 0.33.0, config/model.py:531 and :555, transformers_utils/config.py:989; and in SGLang
0.5.23, srt/utils/hf_transformers/config.py:411.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from posenc.runtimes.computed_positions import ComputedPositions, RefusedError
from posenc.runtimes.config_model import (
    KEYS_OF_LANGUAGE_MODEL,
    ORIGINAL_LENGTH_KEY,
    Model,
    language_model_key,
    language_model_key_after_loading,
    model_of,
)
from posenc.runtimes.disagreement import disagreement
from posenc.runtimes.families import SERVERS
from posenc.runtimes.files.spelling import KEYS_OF_ROPE_DICTS
from posenc.runtimes.known import RUNTIMES, transformers5, vllm
from posenc.runtimes.meaning import Meaning, UnknownFamilyError, meaning_of
from posenc.runtimes.writers import both_dialects
from posenc.runtimes.writers.recipes import candidate_settings, max_positions_to_write

OPTIONS_OF_SERVER = {
    "vllm": ("--hf-overrides", "--max-model-len"),
    "sglang": ("--json-model-override-args", "--context-length"),
}
"""The options of each for a config, and for the longest sequence."""
MERGING_PLACES = {("vllm", "inside"), ("sglang", "top")}
"""Where a server merges a rope dict into the file's: inside of the language model's own config, or
at the top level of a language model. In the other place the new dict takes the place of the old."""
ROPE_DICT_KEYS = ("rope_parameters", "rope_scaling")
Parameters = dict[str, Any]


def override_options(config: Mapping[str, Any], meaning: Meaning, runtime: str) -> str:
    """Return the options for vLLM or SGLang, checked with its emulator.

    Raises: UnknownFamilyError where posenc does not know what the server computes; ValueError for
        another runtime, or where no options do it.
    """
    if runtime not in SERVERS:
        raise ValueError(
            f"{runtime} takes no overrides of a config on its command line; expected "
            f"{' or '.join(SERVERS)}. `posenc doctor --fix --out FOLDER` writes a copy."
        )
    key = language_model_key_after_loading(config)
    max_positions_before = model_of(config).max_positions
    reasons = []
    try:
        for parameters, max_positions in _settings_to_try(meaning, runtime):
            language_model_overrides: dict[str, Any] = {
                "rope_parameters": parameters.get("all", parameters)
            }
            if max_positions != max_positions_before:
                language_model_overrides["max_position_embeddings"] = max_positions
            overrides = {key: language_model_overrides} if key else language_model_overrides
            computed = RUNTIMES[runtime](config_after_override(config, overrides, runtime), None)
            if not computed.is_known:
                raise UnknownFamilyError(f"{computed.error}")
            if computed.error is None and (computed.max_length or 0) < meaning.max_length:
                computed = ComputedPositions(f"admits {computed.max_length} tokens only")
            reason = disagreement(computed, meaning.computed)
            if not reason:
                override_option, length_option = OPTIONS_OF_SERVER[runtime]
                overrides_in_words = shlex.quote(json.dumps(overrides, allow_nan=False))
                return (
                    f"{override_option} {overrides_in_words} {length_option} {meaning.max_length}"
                )
            reasons.append(reason)
    except (ArithmeticError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"no options of {runtime} carry these numbers ({error}).") from error
    raise ValueError(_why_no_options(runtime, reasons[0] if reasons else "no recipe is known"))


def _why_no_options(runtime: str, reason: str) -> str:
    """Return the sentence that no options of a server carry a meaning. reason: as `disagreement`
    gives it."""
    refusal = reason.removeprefix("refuses: ")
    if refusal != reason:
        return f"{runtime} refuses the file with any options: {refusal}."
    return f"no options make {runtime} compute what the file means: {reason}."


def _settings_to_try(meaning: Meaning, runtime: str) -> Iterator[tuple[dict[str, Parameters], int]]:
    """Yield the rope dict of each kind of layer to try, and the max_position_embeddings that goes
    with it, in tokens.

    vLLM's M-RoPE lengthens yarn's original length for some families; a quarter of it then means
    the whole.
    """
    for candidate in candidate_settings(meaning, may_fold=False):
        parameters = candidate.parameters
        max_positions = max_positions_to_write(parameters, meaning)
        yield parameters, max_positions
        p = parameters.get("all", {})
        original_length = p.get(ORIGINAL_LENGTH_KEY)
        if runtime == "vllm" and p.get("mrope_section") and p["rope_type"] == "yarn":
            if isinstance(original_length, int) and original_length % vllm.MROPE_LENGTH_FACTOR == 0:
                dict_of_shorter_length = {
                    **p,
                    ORIGINAL_LENGTH_KEY: original_length // vllm.MROPE_LENGTH_FACTOR,
                }
                yield {"all": dict_of_shorter_length}, max_positions


def check_override(config: Mapping[str, Any], overrides: Mapping[str, Any], runtime: str) -> None:
    """Raise ValueError if the server would stop at the overrides themselves, or if a rope dict is
    none."""
    key = language_model_key_after_loading(config)
    model_type = config.get("model_type")
    for name in ("text_config", "language_config", "llm_config", "thinker_config"):
        if name in overrides and not isinstance(overrides[name], Mapping):
            raise ValueError(f"--with: {name} must be an object, got {overrides[name]!r:.60}.")
        if name in overrides and not key:
            raise ValueError(
                f"--with: {model_type} has no {name}: {runtime} would stop there. Give its keys at "
                "the top level."
            )
    _require_rope_dicts(overrides, key)


def _require_rope_dicts(overrides: Mapping[str, Any], key: str) -> None:
    """Raise ValueError if an override has anything but an object or null for a rope dict, or
    anything but an object for the language model's config.

    key: of the language model's own config; empty for the top level.
    """
    inner_overrides = overrides.get(key, {}) if key else {}
    if not isinstance(inner_overrides, Mapping):
        raise ValueError(f"--with: {key} must be an object, got {inner_overrides!r:.60}.")
    for part in (overrides, inner_overrides):
        for name in ROPE_DICT_KEYS:
            if part.get(name) is not None and not isinstance(part[name], Mapping):
                raise ValueError(f"--with: {name} must be an object or null, got {part[name]!r}.")


def config_after_override(
    config: Mapping[str, Any], overrides: Mapping[str, Any], runtime: str
) -> dict[str, Any]:
    """Return the config as the server has it after the overrides, in the form of a config.json: its
    rotary settings are in rope_parameters alone.

    config: the object of the file. overrides: the object of the overrides. runtime: "vllm" or
    "sglang". A file at which loading stops is returned unchanged, since overrides are not looked at
    then.
    """
    key = language_model_key_after_loading(config)
    language_model_overrides = overrides.get(key, {}) if key else overrides
    result, language_model_part = _copy_and_language_model_part(config)
    try:
        rope_dict = _rope_dict_after_loading(model_of(config), runtime)
    except RefusedError:  # it stops while it loads the file, before it looks at overrides
        return result
    for name in ROPE_DICT_KEYS:
        if name in language_model_overrides:
            rope_dict = _rope_dict_after_override(
                rope_dict, language_model_overrides[name], name, runtime, "inside" if key else "top"
            )
    _drop_rotary_keys(language_model_part)
    language_model_part["rope_parameters"] = rope_dict
    language_model_part.update(
        {k: v for k, v in language_model_overrides.items() if k not in ROPE_DICT_KEYS}
    )
    if key:
        result.update(
            {k: v for k, v in overrides.items() if k != key and k not in KEYS_OF_LANGUAGE_MODEL}
        )
    return result


def intended_config(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that the author of the overrides means. They change what the file means:
    given rope keys replace those of the file, whichever names these have.

    Of a multimodal config, keys of the language model count in its own config, and at the top level
    only those in KEYS_OF_LANGUAGE_MODEL.

    Raises: ValueError for a rope dict, or a language model's config, that is no object.
    """
    key = language_model_key_after_loading(config)
    _require_rope_dicts(overrides, key)
    language_model_overrides = {
        k: v for k, v in overrides.items() if not key or k in KEYS_OF_LANGUAGE_MODEL
    }
    language_model_overrides |= overrides.get(key, {}) if key else {}
    result, language_model_part = _copy_and_language_model_part(config)
    rope_overrides = {
        name: language_model_overrides.pop(name)
        for name in (*ROPE_DICT_KEYS, "rope_theta")
        if name in language_model_overrides
    }
    if rope_overrides:
        try:
            dicts_before = meaning_of(config).parameters
        except ValueError:  # the doctor says so itself
            dicts_before = {"all": {}}
        dicts_after = _meant_rope_dicts_after_override(dicts_before, rope_overrides)
        _drop_rotary_keys(language_model_part)
        language_model_part["rope_parameters"] = dicts_after.get("all", dicts_after)
    language_model_part.update(language_model_overrides)
    return result


def _copy_and_language_model_part(
    config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy of a config, and the part of it with the language model's keys."""
    result = deepcopy(dict(config))
    key = language_model_key(config)
    return result, result[key] if key else result


def _drop_rotary_keys(config_part: dict[str, Any]) -> None:
    """Remove the rotary keys from a part of a config, but for the share, which an override of a
    rope dict leaves."""
    for name in both_dialects.KEYS_WRITTEN_ANEW:
        if name != "partial_rotary_factor":
            config_part.pop(name, None)


def _rope_dict_after_loading(model: Model, runtime: str) -> Parameters:
    """Return the rope dict that a server has after loading: flat, or a dict for each kind of layer.

    Raises: RefusedError where loading stops.
    """
    resolved_dicts = transformers5.resolve_rope_dicts(model)
    if runtime == "vllm":
        resolved_dicts = {
            kind: vllm.with_newer_type(p, model) for kind, p in resolved_dicts.items()
        }
    if not model.has_rope_dict_per_kind:
        return _without_type(resolved_dicts["all"])
    rope_parameters = model.config.get("rope_parameters")
    null_kinds = (
        {k: None for k, v in rope_parameters.items() if v is None}
        if isinstance(rope_parameters, Mapping)
        else {}
    )
    return null_kinds | {kind: _without_type(p) for kind, p in resolved_dicts.items()}


def _without_type(p: Mapping[str, Any]) -> Parameters:
    """Return a loaded rope dict without the older name of rope_type, which is not read again."""
    return {key: value for key, value in p.items() if key != "type"}


def _rope_dict_after_override(
    dict_before: Parameters, override: Any, name: str, runtime: str, level: str
) -> Parameters:
    """Return the rope dict after a server has set an override of it.

    dict_before: the dict after loading. override: the override; None for null. name: its key.
    level: as in MERGING_PLACES.

    Where `dict_before` has a dict for each kind of layer, so has the result: the kind's dict in the
    override, or in the merge of both. A kind that has none there gets a dict in which type and base
    are None, even if it had null before: a flat override is taken to reach no kind of layer.
    """
    is_merged = (runtime, level) in MERGING_PLACES and override is not None
    new_dict = dict(override or {})
    # transformers settles `type` where rope_scaling is set as a whole, SGLang wherever it is alone.
    if not is_merged and (name == "rope_scaling" or runtime == "sglang"):
        new_dict.setdefault("rope_type", new_dict.get("type", "default"))
    if is_merged:
        new_dict = (
            _merged_as_vllm_does(dict_before, new_dict)
            if runtime == "vllm"
            else {**dict_before, **new_dict}
        )
    kinds = [key for key, p in dict_before.items() if p is None or isinstance(p, Mapping)]
    if not kinds:
        return _fill_with_none(_without_type(new_dict), runtime)
    result = {key: p for key, p in new_dict.items() if key not in kinds} if is_merged else {}
    for kind in kinds:
        result[kind] = _fill_kind_with_none(new_dict.get(kind, {}), runtime)
    return result


def _fill_kind_with_none(p: Any, runtime: str) -> Parameters | None:
    """Return the rope dict of one kind of layer with None for the keys that loading would else fill
    in, see `_fill_with_none`; None where `p` is None, as for a kind that an override stops from
    rotating."""
    if p is None:
        return None
    return _fill_with_none(_without_type(p) if isinstance(p, Mapping) else {}, runtime)


def _merged_as_vllm_does(dict_before: Mapping[str, Any], new_dict: Mapping[str, Any]) -> Parameters:
    """Return vLLM's merge of two dicts: dicts in both are merged, too."""
    result = dict(dict_before)
    for key, value in new_dict.items():
        old_value = result.get(key)
        if isinstance(old_value, Mapping) and isinstance(value, Mapping):
            value = _merged_as_vllm_does(old_value, value)
        result[key] = value
    return result


def _fill_with_none(p: Parameters, runtime: str) -> Parameters:
    """Return a rope dict with None for keys that transformers fills in while it loads a file, and
    that nothing fills in for an override."""
    p.setdefault("rope_type", None)
    p.setdefault("rope_theta", None)
    if runtime == "vllm" and p["rope_type"] in transformers5.STRETCHING_TYPES:
        p.setdefault(ORIGINAL_LENGTH_KEY, None)
    return p


def _meant_rope_dicts_after_override(
    dicts_before: Mapping[str, Mapping[str, Any]], rope_overrides: Mapping[str, Any]
) -> dict[str, Parameters]:
    """Return the rope dict of each kind of layer that the author of an override means.

    dicts_before: the dicts that the file means. rope_overrides: the override's rope dicts and base.
    """
    given_keys: Parameters = {}
    for name in ROPE_DICT_KEYS:
        given_keys.update((rope_overrides.get(name) or {}).items())
    is_null = any(
        name in rope_overrides and rope_overrides[name] is None for name in ROPE_DICT_KEYS
    )
    has_dicts_by_kind = any(isinstance(value, Mapping) for value in given_keys.values())
    if is_null and not given_keys:
        given_keys = {"rope_type": "default"}  # null takes the scaling away
    result: dict[str, Parameters] = {}
    for kind, old_dict in dicts_before.items():
        new_dict: Mapping[str, Any] = {}
        if has_dicts_by_kind:
            new_dict = given_keys.get(kind) or {}
        elif kind in ("all", "full_attention"):
            new_dict = given_keys
        p = _with_new_values(old_dict, new_dict)
        if "rope_theta" in rope_overrides and "rope_theta" not in new_dict:
            p["rope_theta"] = rope_overrides["rope_theta"]
        result[kind] = p
    return result


def _with_new_values(old_dict: Mapping[str, Any], new_dict: Mapping[str, Any]) -> Parameters:
    """Return a rope dict with new values; with a new type, only common keys of the old dict
    stay."""
    rope_type = new_dict.get("rope_type", new_dict.get("type"))
    if rope_type is None:
        return {**old_dict, **new_dict}
    kept_keys = {
        k: v for k, v in old_dict.items() if k in KEYS_OF_ROPE_DICTS - {"rope_type", "type"}
    }
    return {**kept_keys, **new_dict, "rope_type": rope_type}
