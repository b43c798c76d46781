"""Keys that no runtime reads: misspelled ones, and those that posenc does not understand."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from posenc.doctor.misreadings import Case, rope_type_of
from posenc.doctor.rule import Hit, contradiction_hit, rule
from posenc.doctor.rules.foreign_names import PATTERN_OF_BASE_NAMES, names_of_base_and_share
from posenc.runtimes.config_model import (
    INNER_CONFIG_KEYS,
    ROTARY_KEYS,
    TRAINED_LENGTH_KEY,
)
from posenc.runtimes.families import letters_and_digits
from posenc.runtimes.files.json_object import in_json_words
from posenc.runtimes.files.spelling import (
    KEYS_OF_ROPE_DICTS,
    KEYS_READ_BY_TYPE,
    KEYS_WITHOUT_EFFECT,
    unknown_keys,
)

KEYS_TO_COMPARE = (
    *ROTARY_KEYS,
    "max_position_embeddings",
    "original_max_position_embeddings",
    "head_dim",
)
"""Keys that are looked for under a misspelled name."""
KEYS_OF_SCALINGS = {"rope_type", "long_factor", "low_freq_factor"}
KEYS_OF_TOWERS = {"hidden_size", "num_hidden_layers", "depth", "d_model"}
"""Keys of a part of the model with a config of its own."""


@rule("PD047", "E")
def report_misspelled_keys(case: Case) -> Iterator[Hit]:
    """Report a key that is almost one that is read."""
    if case.metadata is not None:
        return
    for misspelled in _misspelled_keys(case):
        yield contradiction_hit(
            f"{misspelled.key}{misspelled.place_in_words} is not read by any runtime; "
            f"{misspelled.similar_key} is",
            f"If it is meant, rename {misspelled.key} to {misspelled.similar_key}.",
        )


class _MisspelledKey(NamedTuple):
    """A key that nobody reads."""

    place_in_words: str
    """ " of " and the rope dict; empty at the top level."""
    key: str
    similar_key: str
    """The key that is read, and must be meant."""


def _misspelled_keys(case: Case) -> Iterator[_MisspelledKey]:
    """Yield the keys that nobody reads and that are almost one that is read."""
    yield from _misspelled_keys_at_top_level(case)
    known_keys = (
        KEYS_OF_ROPE_DICTS | KEYS_WITHOUT_EFFECT | frozenset().union(*KEYS_READ_BY_TYPE.values())
    )
    for place, rope_dict in case.flat_rope_dicts():
        read_keys = {
            *KEYS_OF_ROPE_DICTS,
            *KEYS_READ_BY_TYPE.get(rope_type_of(rope_dict), known_keys),
        }
        for key in rope_dict.keys() - known_keys:
            similar_key = _most_similar_key(key, sorted(read_keys), 0.75)
            if similar_key and rope_dict.get(similar_key) is None:
                yield _MisspelledKey(f" of {place}", key, similar_key)


def _misspelled_keys_at_top_level(case: Case) -> Iterator[_MisspelledKey]:
    """Yield the misspelled keys at the top level of the config, and rope dicts or their keys that
    stand there under a name that no runtime reads."""
    read_names = names_of_base_and_share(case)
    read_keys = (*KEYS_TO_COMPARE, *sorted(read_names.bases | read_names.shares))
    right_keys = {*read_keys, *case.model.facts.get("keys", ())}
    right_keys |= {*INNER_CONFIG_KEYS, "rope_scaling", "rope_parameters"}
    for key, value in case.config.items():
        if value is None or key in right_keys:
            continue
        if isinstance(value, Mapping):
            if _is_rope_dict(key, value):
                yield _MisspelledKey("", key, "rope_scaling")
            continue
        similar_key = _most_similar_key(key, read_keys, 0.8)
        # swa_rope_theta is no slip
        is_part_of_name = key.endswith(f"_{similar_key}") or key.startswith(f"{similar_key}_")
        if similar_key and not is_part_of_name and case.config.get(similar_key) is None:
            yield _MisspelledKey("", key, similar_key)
        elif re.match("rope_(scaling_|type$)", key) and not (
            case.rope_scaling or case.rope_parameters
        ):
            if value not in (1, "none", "default", False):
                yield _MisspelledKey("", key, "rope_scaling")


def _is_rope_dict(key: str, value: Mapping[str, Any]) -> bool:
    """Return True for a dict with settings of RoPE scaling that is not the config of a part of the
    model, such as a vision tower."""
    has_settings = bool(value.keys() & KEYS_OF_SCALINGS) or {"factor", "type"} <= value.keys()
    return (has_settings or "yarn" in key) and not value.keys() & KEYS_OF_TOWERS


def _most_similar_key(key: str, keys: tuple[str, ...] | list[str], cutoff: float) -> str:
    """Return the key of `keys` that is spelled most like `key`; empty if none reaches `cutoff`, a
    similarity between 0 and 1 as difflib measures it."""
    key_by_spelling = {letters_and_digits(candidate): candidate for candidate in keys}
    similar = get_close_matches(letters_and_digits(key), key_by_spelling, 1, cutoff)
    return key_by_spelling[similar[0]] if similar else ""


@rule("PD055", "W")
def report_keys_not_understood(case: Case) -> Iterator[Hit]:
    """Report keys about positions that the family does not read, or whose meaning is not known."""
    if case.metadata is not None or not case.model.is_known:
        return
    misspelled_keys = {misspelled.key for misspelled in _misspelled_keys(case)}
    keys: list[str] = []
    for key in unknown_keys(case.config, case.model):
        in_rope_dict = "." in key
        is_name_of_base = PATTERN_OF_BASE_NAMES.fullmatch(letters_and_digits(key)) is not None
        if not in_rope_dict and key not in misspelled_keys and not is_name_of_base:
            keys.append(key)
    keys += _keys_of_other_families(case)
    keys = [key for key in keys if key != TRAINED_LENGTH_KEY]
    if keys:
        values_in_words = ", ".join(
            f"{key} {in_json_words(case.config.get(key)):.40}" for key in keys[:4]
        )
        yield Hit(
            f"posenc does not know what this means for {case.model.model_type}: {values_in_words}"
        )


def _keys_of_other_families(case: Case) -> list[str]:
    """Return keys that posenc knows and that this family does not read."""
    rotates = case.model.facts.get("rotates", {})
    is_read_by_key = {
        "rope_local_base_freq": case.model.has_rope_dict_per_kind,
        "no_rope_layers": "list" in rotates,
        "rope_ratio": False,
        "no_rope_layer_interval": "list" in rotates or "every" in rotates,
    }
    return [
        key
        for key, is_read in is_read_by_key.items()
        if case.config.get(key) is not None and not is_read
    ]
