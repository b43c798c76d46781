"""Rotary keys outside of the dict in which they are read."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from posenc.doctor.misreadings import ALL_RUNTIMES, Case, rope_type_of
from posenc.doctor.rule import Hit, rule
from posenc.doctor.rules.unread_keys import KEYS_OF_SCALINGS, KEYS_OF_TOWERS
from posenc.runtimes.config_model import (
    INNER_CONFIG_KEYS,
    KEYS_OF_LANGUAGE_MODEL,
    ROTARY_KEYS,
    language_model_key,
)
from posenc.runtimes.files.json_object import in_json_words
from posenc.runtimes.files.spelling import ROPE_DICT_KEYS
from posenc.runtimes.meaning import NEW_TYPE_BY_OLD, differing_keys


@rule("PD057", "E")
def report_misplaced_keys(case: Case) -> Iterator[Hit]:
    """Report rotary keys outside of the dict in which they are read."""
    if case.metadata is not None:
        return
    yield from _report_keys_in_unread_parts(case)
    yield from _report_bases_in_other_dicts(case)


def _report_keys_in_unread_parts(case: Case) -> Iterator[Hit]:
    """Report keys about positions in a part of the config where the language model's keys are not
    read."""
    config = case.source.config
    inner_key = language_model_key(config)
    read_config = config[inner_key] if inner_key else config
    read_place = inner_key or "the top level"
    for unread_place, part in _unread_parts(case, inner_key):
        for key in KEYS_OF_LANGUAGE_MODEL:
            value = part.get(key)
            read_value = _value_read_for_key(read_config, key)
            if value is None or _mean_the_same(value, read_value):
                continue
            yield Hit(
                f"{key} {in_json_words(value):.60} stands {unread_place}, where it is not read; "
                f"{read_place} has "
                + ("none" if read_value is None else f"{in_json_words(read_value):.60}"),
                concerned=(),
                affected=ALL_RUNTIMES,
                is_contradiction=read_value is None or not inner_key or key in ROTARY_KEYS,
                cure=f"Move {key} into {read_place}.",
            )


def _unread_parts(case: Case, inner_key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dicts that may have a language model's keys and are not read for them, with the
    words for where they are. inner: the key of the one that is; empty for the top level."""
    config = case.source.config
    for name in INNER_CONFIG_KEYS:
        part = config.get(name)
        if name != inner_key and case.model.is_known and isinstance(part, Mapping):
            yield f"in {name}", part
    if inner_key:
        yield "at the top level", config


def _report_bases_in_other_dicts(case: Case) -> Iterator[Hit]:
    """Report a base in a dict that is neither a rope dict nor the config of a part."""
    for name, value in case.config.items():
        if not isinstance(value, Mapping) or name in (
            "rope_scaling",
            "rope_parameters",
            *INNER_CONFIG_KEYS,
        ):
            continue
        base = value.get("rope_theta")
        changes_nothing = base in (None, case.config.get("rope_theta"))
        is_a_part = value.get("model_type") or value.keys() & (KEYS_OF_TOWERS | KEYS_OF_SCALINGS)
        if changes_nothing or is_a_part:
            continue
        yield Hit(
            f"rope_theta {in_json_words(base)} stands in {name}, where transformers 5 does "
            "not look",
            concerned=case.named_and_known(("transformers-5",)),
            affected=ALL_RUNTIMES,
            is_contradiction=case.config.get("rope_theta", case.model.theta_of_inner_dict) is None,
            cure=f'If {base} is right, write "rope_theta": {base} at the top level too.',
        )


def _value_read_for_key(read_config: Mapping[str, Any], key: str) -> Any:
    """Return the value that a config has for a key; None without one.

    A rope dict counts under either of its names, and a base or a share inside of a rope dict.
    """
    value = read_config.get(key)
    if value is None and key in ROPE_DICT_KEYS:
        value = _first_value_given(read_config, ROPE_DICT_KEYS)
    if value is None and key in ("rope_theta", "partial_rotary_factor"):
        for name in ROPE_DICT_KEYS:
            rope_dict = read_config.get(name)
            if value is None and isinstance(rope_dict, Mapping):
                value = rope_dict.get(key)
    return value


def _first_value_given(config: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the value of the first of these keys that is there and not null; None without one."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    return None


def _mean_the_same(value: Any, other: Any) -> bool:
    """Return True if two values of a key mean the same; rope dicts may name their type by either
    key."""
    if not (isinstance(value, Mapping) and isinstance(other, Mapping)):
        return value == other
    return not differing_keys(
        _with_one_type_and_no_base(value), _with_one_type_and_no_base(other), {}
    )


def _with_one_type_and_no_base(p: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rope dict with its type under the newer key and name, and without the base, which
    may stand outside of the dict."""
    rope_type = rope_type_of(p)
    return {k: v for k, v in p.items() if k not in ("type", "rope_theta")} | {
        "rope_type": NEW_TYPE_BY_OLD.get(rope_type, rope_type)
    }
