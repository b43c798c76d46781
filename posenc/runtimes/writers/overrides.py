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
    ORIGINAL_LENGTH_KEY,
    OUTSIDE,
    Model,
    language_model_key,
    language_model_key_after_loading,
    model_of,
)
from posenc.runtimes.disagreement import disagreement
from posenc.runtimes.families import SERVERS
from posenc.runtimes.files.spelling import COMMON
from posenc.runtimes.known import RUNTIMES, transformers5, vllm
from posenc.runtimes.meaning import Meaning, UnknownFamilyError, meaning_of
from posenc.runtimes.writers import both_dialects
from posenc.runtimes.writers.recipes import candidate_settings, max_positions_to_write

OPTIONS_OF_SERVER = {
    "vllm": ("--hf-overrides", "--max-model-len"),
    "sglang": ("--json-model-override-args", "--context-length"),
}
"""The options of each for a config, and for the longest sequence."""
MERGES = {("vllm", "inside"), ("sglang", "top")}
"""Where a server merges a rope dict into the file's: inside of the language model's own config, or
at the top level of a language model. In the other place the new dict takes the place of the old."""
DICTS = ("rope_parameters", "rope_scaling")
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
        for parameters, longest in _settings_to_try(meaning, runtime):
            own: dict[str, Any] = {"rope_parameters": parameters.get("all", parameters)}
            if longest != max_positions_before:
                own["max_position_embeddings"] = longest
            given = {key: own} if key else own
            computed = RUNTIMES[runtime](config_after_override(config, given, runtime), None)
            if not computed.is_known:
                raise UnknownFamilyError(f"{computed.error}")
            if computed.error is None and (computed.max_length or 0) < meaning.max_length:
                computed = ComputedPositions(f"admits {computed.max_length} tokens only")
            reason = disagreement(computed, meaning.computed)
            if not reason:
                option, length = OPTIONS_OF_SERVER[runtime]
                given_in_words = shlex.quote(json.dumps(given, allow_nan=False))
                return f"{option} {given_in_words} {length} {meaning.max_length}"
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
    for candidate in candidate_settings(meaning, fold=False):
        parameters = candidate.parameters
        longest = max_positions_to_write(parameters, meaning)
        yield parameters, longest
        p = parameters.get("all", {})
        original = p.get(ORIGINAL_LENGTH_KEY)
        if runtime == "vllm" and p.get("mrope_section") and p["rope_type"] == "yarn":
            if isinstance(original, int) and original % vllm.MROPE_POSITIONS == 0:
                shorter = {**p, ORIGINAL_LENGTH_KEY: original // vllm.MROPE_POSITIONS}
                yield {"all": shorter}, longest


def check_override(config: Mapping[str, Any], given: Mapping[str, Any], runtime: str) -> None:
    """Raise ValueError if the server would stop at the overrides themselves, or if a rope dict is
    none."""
    key = language_model_key_after_loading(config)
    family = config.get("model_type")
    for name in ("text_config", "language_config", "llm_config", "thinker_config"):
        if name in given and not isinstance(given[name], Mapping):
            raise ValueError(f"--with: {name} must be an object, got {given[name]!r:.60}.")
        if name in given and not key:
            raise ValueError(
                f"--with: {family} has no {name}: {runtime} would stop there. Give its keys at the "
                "top level."
            )
    _require_rope_dicts(given, key)


def _require_rope_dicts(given: Mapping[str, Any], key: str) -> None:
    """Raise ValueError if an override has anything but an object or null for a rope dict, or
    anything but an object for the language model's config.

    key: of the language model's own config; empty for the top level.
    """
    inner = given.get(key, {}) if key else {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"--with: {key} must be an object, got {inner!r:.60}.")
    for place in (given, inner):
        for name in DICTS:
            if place.get(name) is not None and not isinstance(place[name], Mapping):
                raise ValueError(f"--with: {name} must be an object or null, got {place[name]!r}.")


def config_after_override(
    config: Mapping[str, Any], given: Mapping[str, Any], runtime: str
) -> dict[str, Any]:
    """Return the config as the server has it after the overrides, in the form of a config.json: its
    rotary settings are in rope_parameters alone.

    config: the object of the file. given: the object of the overrides. runtime: "vllm" or "sglang".
    A file at which loading stops is returned unchanged, since overrides are not looked at then.
    """
    key = language_model_key_after_loading(config)
    own = given.get(key, {}) if key else given
    result, place = _copy_and_language_model_part(config)
    try:
        rope = _rope_dict_after_loading(model_of(config), runtime)
    except RefusedError:  # it stops while it loads the file, before it looks at overrides
        return result
    for name in DICTS:
        if name in own:
            rope = _rope_dict_after_override(
                rope, own[name], name, runtime, "inside" if key else "top"
            )
    _drop_rotary_keys(place)
    place["rope_parameters"] = rope
    place.update({k: v for k, v in own.items() if k not in DICTS})
    if key:
        result.update({k: v for k, v in given.items() if k != key and k not in OUTSIDE})
    return result


def intended_config(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that the author of the overrides means. They change what the file means:
    given rope keys replace those of the file, whichever names these have.

    Of a multimodal config, keys of the language model count in its own config, and at the top level
    only those in OUTSIDE.

    Raises: ValueError for a rope dict, or a language model's config, that is no object.
    """
    key = language_model_key_after_loading(config)
    _require_rope_dicts(given, key)
    own = {k: v for k, v in given.items() if not key or k in OUTSIDE}
    own |= given.get(key, {}) if key else {}
    result, place = _copy_and_language_model_part(config)
    asked = {name: own.pop(name) for name in (*DICTS, "rope_theta") if name in own}
    if asked:
        try:
            before = meaning_of(config).parameters
        except ValueError:  # the doctor says so itself
            before = {"all": {}}
        changed = _meant_rope_dicts_after_override(before, asked)
        _drop_rotary_keys(place)
        place["rope_parameters"] = changed.get("all", changed)
    place.update(own)
    return result


def _copy_and_language_model_part(
    config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy of a config, and the part of it with the language model's keys."""
    result = deepcopy(dict(config))
    key = language_model_key(config)
    return result, result[key] if key else result


def _drop_rotary_keys(place: dict[str, Any]) -> None:
    """Remove the rotary keys from a part of a config, but for the share, which an override of a
    rope dict leaves."""
    for name in both_dialects.KEYS_WRITTEN_ANEW:
        if name != "partial_rotary_factor":
            place.pop(name, None)


def _rope_dict_after_loading(model: Model, runtime: str) -> Parameters:
    """Return the rope dict that a server has after loading: flat, or a dict for each kind of layer.

    Raises: RefusedError where loading stops.
    """
    resolved = transformers5.resolve_rope_dicts(model)
    if runtime == "vllm":
        resolved = {kind: vllm.with_newer_type(p, model) for kind, p in resolved.items()}
    if not model.has_rope_dict_per_kind:
        return _without_type(resolved["all"])
    written = model.config.get("rope_parameters")
    null_kinds = (
        {k: None for k, v in written.items() if v is None} if isinstance(written, Mapping) else {}
    )
    return null_kinds | {kind: _without_type(p) for kind, p in resolved.items()}


def _without_type(p: Mapping[str, Any]) -> Parameters:
    """Return a loaded rope dict without the older name of rope_type, which is not read again."""
    return {key: value for key, value in p.items() if key != "type"}


def _rope_dict_after_override(
    before: Parameters, value: Any, name: str, runtime: str, place: str
) -> Parameters:
    """Return the rope dict after a server has set an override of it.

    before: the dict after loading. value: the override; None for null. name: its key. place: as in
    MERGES.

    Where `before` has a dict for each kind of layer, so has the result: the kind's dict in the
    override, or in the merge of both. A kind that has none there gets a dict in which type and base
    are None, even if it had null before: a flat override is taken to reach no kind of layer.
    """
    merges = (runtime, place) in MERGES and value is not None
    new = dict(value or {})
    # transformers settles `type` where rope_scaling is set as a whole, SGLang wherever it is alone.
    if not merges and (name == "rope_scaling" or runtime == "sglang"):
        new.setdefault("rope_type", new.get("type", "default"))
    if merges:
        new = _merged_as_vllm_does(before, new) if runtime == "vllm" else {**before, **new}
    kinds = [key for key, p in before.items() if p is None or isinstance(p, Mapping)]
    if not kinds:
        return _fill_with_none(_without_type(new), runtime)
    result = {key: p for key, p in new.items() if key not in kinds} if merges else {}
    for kind in kinds:
        result[kind] = _fill_kind_with_none(new.get(kind, {}), runtime)
    return result


def _fill_kind_with_none(p: Any, runtime: str) -> Parameters | None:
    """Return the rope dict of one kind of layer with None for the keys that loading would else fill
    in, see `_fill_with_none`; None where `p` is None, as for a kind that an override stops from
    rotating."""
    if p is None:
        return None
    return _fill_with_none(_without_type(p) if isinstance(p, Mapping) else {}, runtime)


def _merged_as_vllm_does(before: Mapping[str, Any], new: Mapping[str, Any]) -> Parameters:
    """Return vLLM's merge of two dicts: dicts in both are merged, too."""
    result = dict(before)
    for key, value in new.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged_as_vllm_does(old, value)
        result[key] = value
    return result


def _fill_with_none(p: Parameters, runtime: str) -> Parameters:
    """Return a rope dict with None for keys that transformers fills in while it loads a file, and
    that nothing fills in for an override."""
    p.setdefault("rope_type", None)
    p.setdefault("rope_theta", None)
    if runtime == "vllm" and p["rope_type"] in transformers5.STRETCHED:
        p.setdefault(ORIGINAL_LENGTH_KEY, None)
    return p


def _meant_rope_dicts_after_override(
    before: Mapping[str, Mapping[str, Any]], asked: Mapping[str, Any]
) -> dict[str, Parameters]:
    """Return the rope dict of each kind of layer that the author of an override means.

    before: the dicts that the file means. asked: the override's rope dicts and base.
    """
    given: Parameters = {}
    for name in DICTS:
        given.update((asked.get(name) or {}).items())
    is_null = any(name in asked and asked[name] is None for name in DICTS)
    has_dicts_by_kind = any(isinstance(value, Mapping) for value in given.values())
    if is_null and not given:
        given = {"rope_type": "default"}  # null takes the scaling away
    result: dict[str, Parameters] = {}
    for kind, old in before.items():
        new: Mapping[str, Any] = {}
        if has_dicts_by_kind:
            new = given.get(kind) or {}
        elif kind in ("all", "full_attention"):
            new = given
        p = _with_new_values(old, new)
        if "rope_theta" in asked and "rope_theta" not in new:
            p["rope_theta"] = asked["rope_theta"]
        result[kind] = p
    return result


def _with_new_values(old: Mapping[str, Any], new: Mapping[str, Any]) -> Parameters:
    """Return a rope dict with new values; with a new type, only common keys of the old dict
    stay."""
    kind = new.get("rope_type", new.get("type"))
    if kind is None:
        return {**old, **new}
    kept = {k: v for k, v in old.items() if k in COMMON - {"rope_type", "type"}}
    return {**kept, **new, "rope_type": kind}
