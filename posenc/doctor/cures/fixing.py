"""`--fix --out`: write a copy that the named runtimes read alike, checked by their emulators."""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from posenc.doctor.cures.check_copy import AskAboutCopy, runtimes_that_answered
from posenc.doctor.misreadings import TOLERANCE
from posenc.files.folders import new_folder
from posenc.files.sealed_json import strict_json
from posenc.runtimes.computed_positions import LayerRotation
from posenc.runtimes.config_model import ORIGINAL_LENGTH_KEY, Model, language_model_key
from posenc.runtimes.disagreement import differences_of_rotation
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.files.source import Source, load
from posenc.runtimes.files.spelling import (
    DRAFT_LAYERS_KEY,
    ROPE_DICT_KEYS,
    ROTARY_BASE_KEYS,
    ROTARY_SHARE_KEYS,
    require_understood_keys,
)
from posenc.runtimes.known import VERSIONS_AS_READ, emulate
from posenc.runtimes.known.llama_cpp import sliding_base
from posenc.runtimes.meaning import Meaning, meaning_of, path_in_errors
from posenc.runtimes.position_record import record_of
from posenc.runtimes.writers import gguf_edit
from posenc.runtimes.writers.both_dialects import KEYS_WRITTEN_ANEW
from posenc.runtimes.writers.copies import config_changes, copy_files, write_config
from posenc.runtimes.writers.recipes import (
    KEYS_BEYOND_FREQUENCIES,
    Recipe,
    best_recipe,
    misreading_runtimes,
    require_static,
)

CONFIG_FILE = "config.json"
KEYS_OF_SHARES = ("partial_rotary_factor", *ROTARY_SHARE_KEYS)
FACTORS_TO_TRY = (0.5, 3.0, 100.0)
"""Factors by which a number is changed to see whether it is read: it is if one of them changes the
rotation. Several, since ramps round to whole pairs, so that a small change may change nothing."""
FACTORS_TO_TRY_ON_SHARES = (0.5, 0.75)
"""The same for a share, which is 1 at most."""
KEYS_OF_A_TYPE = ("factor", "long_factor", "short_factor", "low_freq_factor", "alpha")
"""Keys of a rope dict that mean nothing without its type."""


class FixedGguf(NamedTuple):
    """What was written for a GGUF file. changes: a line for each changed key or tensor. doubts:
    guesses on which the copy rests."""

    changes: Sequence[str]
    doubts: Sequence[str]


class Proof(NamedTuple):
    """A copy that was written, read again, and held to the meaning.

    config: as read. without_code: as written, without the folder's own classes. misread: runtimes
    that read it otherwise than it is meant. num_folded: how many tensors of q were multiplied.
    files_left_behind: those that were not copied. files_in_words: those on which the proof rests.
    asked_runtimes: those, with their releases, that were asked about the copy and compute what is
    meant.
    """

    config: dict[str, Any]
    without_code: dict[str, Any]
    misread: Mapping[str, str]
    num_folded: int
    files_left_behind: list[str]
    files_in_words: str
    asked_runtimes: list[str]


class FixedCopy(NamedTuple):
    """What was written for a config.

    changes: a line for each changed key. doubts: guesses on which the copy rests. unread_numbers:
    those that were left out, with their places. proved_runtimes: named runtimes, with versions, for
    which posenc's emulator computes the meant positions from the copy. not_proved: named runtime ->
    why posenc does not know what it computes. why_not_folded: why no temperature can be folded into
    the weights; empty if one can.
    """

    family: str
    recipe: Recipe
    proof: Proof
    changes: Sequence[str]
    doubts: Sequence[str]
    unread_numbers: Sequence[str]
    proved_runtimes: Sequence[str]
    not_proved: Mapping[str, str]
    why_not_folded: str


def fix_config(
    source: Source,
    out: Path,
    named_runtimes: tuple[str, ...],
    length: int | None = None,
    versions: Mapping[str, str] = VERSIONS_AS_READ,
    ask: AskAboutCopy | None = None,
) -> FixedCopy:
    """Write a copy of a config, and of the weights beside it.

    ask: what installed runtimes answer about the copy; None to ask none.

    Raises: ValueError where nothing better can be written; `out` is then not there.
    """
    meaning = meaning_of(source.config, length)
    _require_fixable(source, meaning, length)
    if source.spelling != "transformers":
        raise ValueError(_advice_to_convert_first(source, meaning, named_runtimes))
    why_not_folded = _why_not_folded(source, meaning)
    recipe = best_recipe(
        _with_flags_as_booleans(source.raw, meaning.model),
        meaning,
        named_runtimes,
        may_fold=not why_not_folded,
        versions=versions,
    )
    unread_numbers = _unread_numbers_of_rope_dicts(source.config, meaning, length)
    proof = _write_and_prove(source, out, recipe, meaning, named_runtimes, length, versions, ask)
    answers = emulate(proof.config, None, named_runtimes, versions)
    proved_runtimes = [
        f"{name} {versions.get(name, '')}".rstrip()
        for name in named_runtimes
        if name not in proof.misread and answers[name].is_known
    ]
    not_proved = {n: answer.status_in_words for n, answer in answers.items() if not answer.is_known}
    return FixedCopy(
        family=meaning.model.model_type,
        recipe=recipe,
        proof=proof,
        changes=config_changes(source.raw, proof.without_code),
        doubts=meaning.doubts,
        unread_numbers=unread_numbers,
        proved_runtimes=proved_runtimes,
        not_proved=not_proved,
        why_not_folded=why_not_folded,
    )


def _with_flags_as_booleans(raw: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Return a copy of a config in which the numbers that its class refuses in the place of true
    and false are what older readers make of them."""
    config_copy = copy.deepcopy(dict(raw))
    inner_key = language_model_key(raw)
    part = config_copy[inner_key] if inner_key else config_copy
    for key, value in [*model.transformers5_facts.checked_keys.refused_booleans(part)]:
        part[key] = bool(value)
    return config_copy


def _why_not_folded(source: Source, meaning: Meaning) -> str:
    """Return why no temperature can be folded into the weights beside the config; empty if one can.

    Raises: ValueError where there are weights that do not go with the config.
    """
    has_weights = source.path.name == CONFIG_FILE and any(source.folder.glob("*.safetensors"))
    if not has_weights:
        return "a config alone has no weights"
    from posenc.runtimes.writers.fold_temperature import why_not_foldable  # needs NumPy
    from posenc.runtimes.writers.weight_rows import check_and_describe_weights

    reason = why_not_foldable(source.folder, meaning.model)
    check_and_describe_weights(source.folder, meaning.model)
    return reason


def _require_fixable(source: Source, meaning: Meaning, length: int | None) -> None:
    """Raise ValueError for a config of which no copy can be written that means the same."""
    require_static(meaning, length)
    require_understood_keys(source.config, meaning.model)
    require_no_guess(source, meaning, "--fix writes nothing")
    if not meaning.computed.rotations:
        raise ValueError(f"{meaning.model.model_type} rotates no layer; there is nothing to fix.")
    with path_in_errors(source.path):
        strict_json(source.raw)  # what JSON lacks is not written through
    _require_nothing_lost(source.config, meaning, length)


def require_no_guess(source: Source, meaning: Meaning, refused: str) -> None:
    """Raise ValueError for a config of which the meaning is a guess, which nothing written for
    runtimes may say for its author. refused: what is not done, for the message."""
    with path_in_errors(source.path):
        _require_rope_types(source.config, refused)
        _require_one_original_length(source.config, meaning, refused)
        _require_no_guessed_base(source.config, meaning, refused)


def _require_rope_types(config: Mapping[str, Any], refused: str) -> None:
    """Raise ValueError for a rope dict that stretches by something and does not say of which type:
    the meaning has a guess for it, and a copy would say the guess."""
    for where, p in _flat_rope_dicts(_language_model_part(config)):
        if p.get("rope_type") is not None or p.get("type") is not None:
            continue
        for key in KEYS_OF_A_TYPE:
            if p.get(key) not in (None, 1):
                raise ValueError(
                    f"{where} has {key} {p[key]!r:.60} and no rope_type, which decides what it "
                    f"means: {refused}. Write the rope_type that it is for, or drop the dict."
                )


def _language_model_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config with the language model's keys: the config itself, or a dict in
    it such as text_config."""
    inner_key = language_model_key(config)
    return config[inner_key] if inner_key else config


def _flat_rope_dicts(part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the flat rope dicts with their names: those nested in a dict, else the dict itself."""
    for name in ROPE_DICT_KEYS:
        rope_dict = part.get(name)
        if not isinstance(rope_dict, Mapping):
            continue
        by_path = {f"{name}.{k}": v for k, v in rope_dict.items() if isinstance(v, Mapping)}
        yield from (by_path or {name: rope_dict}).items()


def _require_one_original_length(config: Mapping[str, Any], meaning: Meaning, refused: str) -> None:
    """Raise ValueError for two original lengths, of which a copy would keep one. (Families with the
    key at the top level, such as phi3, look at no other.)"""
    part = _language_model_part(config)
    outer_length = part.get(ORIGINAL_LENGTH_KEY)
    if outer_length is None or meaning.model.facts.get("original_field"):
        return
    for where, value in _numbers_of_rope_dicts(part):
        if where[-1] == ORIGINAL_LENGTH_KEY and value != outer_length:
            inner_key = language_model_key(config)
            prefix = f"{inner_key}." if inner_key else ""
            raise ValueError(
                f"{ORIGINAL_LENGTH_KEY} is {outer_length} at the top level and {value} in "
                f"{'.'.join(where[:-1])}: {refused}. Make them equal. The right one is the "
                "length that the model was trained at, before any stretching. With --fix, say "
                f"which: --prefer {prefix}{ORIGINAL_LENGTH_KEY} or --prefer "
                f"{prefix}{'.'.join(where)}."
            )


def _require_no_guessed_base(config: Mapping[str, Any], meaning: Meaning, refused: str) -> None:
    """Raise ValueError if the file states a base and transformers 5 takes another one for a kind of
    layers, the default of its class, although the class has the same default for all kinds. Which
    of the two its author meant is a guess, so that a copy may state neither.

    refused: what is not done, for the message.
    """
    default_dicts = meaning.model.transformers5_facts.dicts_by_kind or {}
    if len({p["rope_theta"] for p in default_dicts.values() if p}) != 1:
        return  # such a class has a base of its own for each kind
    part = _language_model_part(config)
    rope_dicts = [p for _, p in _flat_rope_dicts(part)]
    stated_bases = [part.get(key) for key in ("rope_theta", *ROTARY_BASE_KEYS)]
    stated_bases += [p.get("rope_theta") for p in rope_dicts]
    bases = {float(base) for base in stated_bases if isinstance(base, int | float)}
    for kind, p in meaning.parameters.items():
        if bases and p["rope_theta"] not in bases:
            raise ValueError(
                f"rope_theta is {_numbers_in_words(bases)}, and transformers 5 takes its class's "
                f"default {p['rope_theta']:g} for {kind}: {refused}. Write a dict for each kind "
                "of layers into rope_parameters, each with its rope_theta."
            )


def _numbers_in_words(values: Iterable[float]) -> str:
    """Return numbers in words, such as "10000 and 500000"."""
    return " and ".join(f"{value:g}" for value in sorted(values))


def _write_and_prove(
    source: Source,
    out: Path,
    recipe: Recipe,
    meaning: Meaning,
    named_runtimes: tuple[str, ...],
    length: int | None,
    versions: Mapping[str, str],
    ask: AskAboutCopy | None,
) -> Proof:
    """Write what the recipe says into the new folder `out`, and prove the copy.

    Raises: ValueError or RuntimeError if the copy is not what was meant; `out` is then not there.
    """
    # The family's own class reads what is written; code of the folder stays behind.
    without_code = {key: value for key, value in recipe.config.items() if key != "auto_map"}
    files_in_words = "config.json"
    files_left_behind: list[str] = []
    num_folded = 0
    with new_folder(out) as folder:
        if source.path.name == CONFIG_FILE:
            files_left_behind = copy_files(
                source.folder, folder, names_to_leave=frozenset({CONFIG_FILE})
            )
        if any(folder.glob("*.safetensors")):
            from posenc.runtimes.writers.weight_rows import check_and_describe_weights

            files_in_words += (
                f", {check_and_describe_weights(folder, meaning.model)}"  # of what was copied
            )
        write_config(folder / CONFIG_FILE, without_code)
        if recipe.folded_multiplier != 1:
            from posenc.runtimes.writers.fold_temperature import fold_multiplier

            num_folded = len(fold_multiplier(folder, meaning.model, recipe.folded_multiplier))
        config = read_json(folder / CONFIG_FILE)
        _require_same_frequencies(config, meaning, length)
        misreading = misreading_runtimes(
            config,
            meaning,
            named_runtimes,
            folded_multiplier=recipe.folded_multiplier,
            versions=versions,
        )
        if set(misreading) != set(recipe.misreadings):
            raise RuntimeError(f"not written, the proof failed: {misreading}")
        answers = {} if ask is None else ask(config)
        proved_by_answer = runtimes_that_answered(
            answers, meaning.computed, misreading, recipe.folded_multiplier
        )
    return Proof(
        config,
        without_code,
        misreading,
        num_folded,
        files_left_behind,
        files_in_words,
        proved_by_answer,
    )


def _rotates_otherwise(rotation: LayerRotation, meant: LayerRotation) -> bool:
    """Return True if a kind of layer has other frequencies than are meant, or more or fewer."""
    found_differences = differences_of_rotation(rotation, meant, TOLERANCE)
    return any(difference.aspect in ("pairs", "frequencies") for difference in found_differences)


def _require_same_frequencies(
    written_config: Mapping[str, Any], meaning: Meaning, length: int | None
) -> None:
    """Raise ValueError if the copy, judged by itself, means other frequencies than the file: the
    doctor would then call what its runtimes misread "as meant". (Its multiplier may be another,
    where a temperature is folded into q.)"""
    copied_rotations = meaning_of(written_config, length).computed.rotations
    for kind, meant_rotation in meaning.computed.rotations.items():
        copied_rotation = copied_rotations.get(kind)
        if copied_rotation is None or _rotates_otherwise(copied_rotation, meant_rotation):
            raise ValueError(
                "no spelling that the named runtimes read says what the file means "
                f"({len(meant_rotation.inv_freq)} rotated pairs): --fix writes nothing. Name those "
                "that matter by --for, or write by hand what is meant."
            )


def _require_nothing_lost(config: Mapping[str, Any], meaning: Meaning, length: int | None) -> None:
    """Raise ValueError if a base or a share would be deleted that nothing was read from."""
    inner_key = language_model_key(config)
    part = _language_model_part(config)
    where_in_words = f" in {inner_key}" if inner_key else ""
    for key, value in _numbers_written_anew(part, meaning):
        if not _number_is_read(config, (key,), value, meaning, length):
            raise ValueError(_words_of_lost_number(key, value, where_in_words, meaning))
    if inner_key:  # beside a language model's own config none of them is read
        for key, value in _numbers_written_anew(config, meaning):
            raise ValueError(_words_of_lost_number(key, value, " at the top level", meaning))


def _numbers_written_anew(
    part: Mapping[str, Any], meaning: Meaning
) -> Iterator[tuple[str, int | float]]:
    """Yield the keys of a part of a config that a copy writes anew, with their numbers, but for
    those that the copy has anyway: a base that the model uses, and a share of the whole head."""
    bases = {float(p["rope_theta"]) for p in meaning.parameters.values()}
    for key in KEYS_WRITTEN_ANEW:
        value = part.get(key)
        if key == ORIGINAL_LENGTH_KEY or isinstance(value, bool):
            continue
        if not isinstance(value, int | float):
            continue
        is_whole_head = key in KEYS_OF_SHARES and value == 1
        if value not in bases and not is_whole_head:
            yield key, value


def _words_of_lost_number(key: str, value: float, where_in_words: str, meaning: Meaning) -> str:
    """Return why nothing is written where a copy would be without a number of the file."""
    return (
        f"{key} {value:g}{where_in_words} is not read for {meaning.model.model_type}, and a copy "
        "would be without it: --fix writes nothing. Remove the key if it has no effect, or write "
        "the value where it is read."
    )


def _unread_numbers_of_rope_dicts(
    config: Mapping[str, Any], meaning: Meaning, length: int | None
) -> list[str]:
    """Return the numbers in the rope dicts that change nothing of the meaning, in words: place and
    value. The copy leaves them out."""
    part = _language_model_part(config)
    unread_numbers: list[str] = []
    for where, value in _numbers_of_rope_dicts(part):
        key = where[-1]
        kept_values = [p.get(key) for p in meaning.parameters.values()]
        stays_as_it_is = value in kept_values and _has_both_rope_dicts(part)
        # 0 times a factor is 0, and 1 is mostly a default: `_number_is_read` could not tell.
        is_another_setting = key in KEYS_BEYOND_FREQUENCIES or key == ORIGINAL_LENGTH_KEY
        if value in (0, 1) or is_another_setting or stays_as_it_is:
            continue
        if not _number_is_read(config, where, value, meaning, length):
            unread_numbers.append(f"{'.'.join(where)} {value!r:.60}")
    return unread_numbers


def _has_both_rope_dicts(part: Mapping[str, Any]) -> bool:
    """Return True if both rope dicts are given: they say the same, or --fix refuses the file."""
    return all(part.get(name) for name in ROPE_DICT_KEYS)


def _numbers_of_rope_dicts(part: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the place and value of each number, and of each list, in the rope dicts."""
    for name in ROPE_DICT_KEYS:
        rope_dict = part.get(name)
        if isinstance(rope_dict, Mapping):
            yield from _numbers_of_one_rope_dict(rope_dict, (name,))


def _numbers_of_one_rope_dict(
    rope_dict: Mapping[str, Any], where: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the place and value of each number, and of each list, in one rope dict and the dicts in
    it. where: the place of the dict itself."""
    for key, value in rope_dict.items():
        if isinstance(value, Mapping):
            yield from _numbers_of_one_rope_dict(value, (*where, key))
        elif isinstance(value, int | float | list) and not isinstance(value, bool):
            yield (*where, key), value


def _number_is_read(
    config: Mapping[str, Any],
    where: tuple[str, ...],
    value: Any,
    meaning: Meaning,
    length: int | None,
) -> bool:
    """Return True if a number or list decides the rotation: with another value at its place the
    config means another rotation, or cannot be read.

    where: the keys that lead to it, from the language model's part of the config on.
    """
    inner_key = language_model_key(config)
    for factor in FACTORS_TO_TRY_ON_SHARES if where[-1] in KEYS_OF_SHARES else FACTORS_TO_TRY:
        changed_config = copy.deepcopy(dict(config))
        part = changed_config[inner_key] if inner_key else changed_config
        for key in where[:-1]:
            part = part[key]
        is_number = isinstance(value, int | float)
        part[where[-1]] = factor * value if is_number else [factor * item for item in value]
        try:
            changed_meaning = meaning_of(changed_config, length)
        except (ValueError, TypeError):
            return True
        if changed_meaning.computed != meaning.computed:
            return True
    return False


def _advice_to_convert_first(
    source: Source, meaning: Meaning, named_runtimes: tuple[str, ...]
) -> str:
    """Return the advice for a checkpoint in its vendor's spelling: to convert it first. Its weights
    have other names, and mostly another order of rows, than a config.json implies."""
    try:
        written_config = best_recipe(source.config, meaning, named_runtimes).config
    except ValueError:  # no spelling is better than what was read
        written_config = source.config
    rotary_keys = {
        k: written_config[k]
        for k in (*KEYS_WRITTEN_ANEW, "max_position_embeddings")
        if k in written_config
    }
    if source.spelling == "speculators":
        return (
            f"{source.path} is the config of a draft model, which --fix does not write. Put these "
            f"rotary keys into its {DRAFT_LAYERS_KEY}: {json.dumps(rotary_keys)}"
        )
    return (
        f"{source.path} is in {source.spelling}'s words, and so are the names and rows of its "
        "weights: --fix writes a config.json only beside weights that go with one. Convert the "
        "folder first (transformers has convert_..._weights_to_hf.py for Llama and Mistral), and "
        f"put these rotary keys into its config.json: {json.dumps(rotary_keys)}"
    )


def fix_gguf(source: Source, out: Path, like: Path | None) -> FixedGguf:
    """Write a copy of a GGUF file whose keys and tensors for positions are rewritten, so that
    llama.cpp computes what is meant. Return what was changed, and on which guesses that rests.

    like: the config whose positions the copy is to have; None for what the file's own keys mean.

    Raises: ValueError where `like` is a GGUF file, the meaning is unclear or depends on the length,
    keys and tensors of the architecture cannot express it, or `out` exists. Nothing is then
    written.
    """
    meta = source.metadata
    assert meta is not None
    max_length = meta.context_length
    if like is None:
        with path_in_errors(source.path):
            wanted_positions = gguf_edit.meaning_of_metadata(meta)
        bases = dict.fromkeys(wanted_positions.rotations, meta.freq_base)
        if gguf_edit.SLIDING_KIND in bases:
            bases[gguf_edit.SLIDING_KIND] = sliding_base(meta)
    else:
        like_source = load(like)
        if like_source.metadata is not None:
            raise ValueError(f"--like: expected a config, {like} is a GGUF file.")
        with path_in_errors(like):
            meaning = meaning_of(like_source.config)
        require_static(meaning, None)
        wanted_positions = meaning.computed
        max_length = meaning.max_length
        bases = {kind: float(p["rope_theta"]) for kind, p in meaning.parameters.items()}
    edit = gguf_edit.plan_edit(meta, wanted_positions, bases, max_length)
    gguf_edit.write_edited_copy(source.path, out, edit, wanted_positions)
    return FixedGguf(edit.lines, () if like else record_of(source).doubts)
