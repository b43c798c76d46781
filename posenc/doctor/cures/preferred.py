"""`--prefer KEY`: take out of a config what contradicts one of its keys.

A config contradicts itself where one setting has two values in two places: two rope dicts, a base
inside and outside of one, type and rope_type, two original lengths, or a key beside the language
model's own config and in it. Only its author can say which is right.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from posenc.runtimes.config_model import KEYS_OF_LANGUAGE_MODEL, language_model_key
from posenc.runtimes.files.spelling import ROPE_DICT_KEYS
from posenc.runtimes.meaning import NEW_TYPE_BY_OLD, differing_keys

TYPE_KEYS = ("type", "rope_type")
INSIDE_OR_OUTSIDE = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")
"""Keys that may be in a rope dict or next to it."""
KeyPath = tuple[str, ...]


class Contradiction(NamedTuple):
    """One setting with different values. paths: of its places, each from the top level on."""

    paths: tuple[KeyPath, ...]

    @property
    def in_words(self) -> str:
        """Return the options that settle it, such as "--prefer rope_scaling or --prefer
        rope_parameters"."""
        return " or ".join(f"--prefer {'.'.join(path)}" for path in self.paths)


def contradictions(config: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Yield the settings of a config.json that have different values in different places."""
    inner_key = language_model_key(config)
    prefix = (inner_key,) if inner_key else ()
    part = config[inner_key] if inner_key else config
    yield from _two_levels(config, inner_key)
    if _rope_dicts_differ(part):
        yield Contradiction(((*prefix, "rope_scaling"), (*prefix, "rope_parameters")))
    for name in ROPE_DICT_KEYS:
        p = part.get(name)
        if isinstance(p, Mapping) and _types_differ(p):
            yield Contradiction(tuple((*prefix, name, key) for key in TYPE_KEYS))
    for key in INSIDE_OR_OUTSIDE:
        paths = list(_places(part, prefix, key))
        values = [_value_at(config, path) for path in paths]
        if any(value != values[0] for value in values):
            yield Contradiction(tuple(paths))


def _two_levels(config: Mapping[str, Any], inner_key: str) -> Iterator[Contradiction]:
    """Yield a contradiction for each key that stands beside the language model's own config and has
    another value in it, or none. inner: the key of that config, such as text_config; empty without
    one."""
    for key in KEYS_OF_LANGUAGE_MODEL if inner_key else ():
        if config.get(key) is not None and config[key] != config[inner_key].get(key):
            inner_paths = ((inner_key, key),) if config[inner_key].get(key) is not None else ()
            yield Contradiction(((key,), *inner_paths))


def _rope_dicts_differ(part: Mapping[str, Any]) -> bool:
    """Return True if a config has both rope dicts, and they differ in more than rope_theta, which
    is compared by itself."""
    older_dict, newer_dict = part.get("rope_scaling"), part.get("rope_parameters")
    if not isinstance(older_dict, Mapping) or not isinstance(newer_dict, Mapping):
        return False
    if not older_dict or not newer_dict:
        return False
    return bool(set(differing_keys(older_dict, newer_dict, part)) - {"rope_theta"})


def _types_differ(p: Mapping[str, Any]) -> bool:
    """Return True if a rope dict has a type and a rope_type that mean different types."""
    older_type, newer_type = (p.get(key) for key in TYPE_KEYS)
    if older_type is None or newer_type is None:
        return False
    return NEW_TYPE_BY_OLD.get(older_type, older_type) != NEW_TYPE_BY_OLD.get(
        newer_type, newer_type
    )


def _places(part: Mapping[str, Any], prefix: KeyPath, key: str) -> Iterator[KeyPath]:
    """Yield the paths at which a key is, next to the rope dicts and in those that are flat."""
    if part.get(key) is not None:
        yield (*prefix, key)
    for name in ROPE_DICT_KEYS:
        p = part.get(name)
        if isinstance(p, Mapping) and p.get(key) is not None:
            yield (*prefix, name, key)


def _value_at(config: Mapping[str, Any], path: KeyPath) -> Any:
    """Return the value at a path; None where there is none."""
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def with_preferred(config: Mapping[str, Any], preferred: str) -> dict[str, Any]:
    """Return a copy of a config.json in which nothing contradicts the preferred keys.

    preferred: their paths with commas, such as "rope_theta,rope_scaling" or
    "text_config.rope_scaling". A key next to the language model's own config is moved into it.

    Raises: ValueError for a path at which there is nothing, or that nothing contradicts.

    >>> with_preferred({"rope_theta": 1e4, "rope_scaling": {"rope_theta": 5e5}}, "rope_theta")
    {'rope_theta': 10000.0, 'rope_scaling': {'rope_theta': 10000.0}}
    """
    settled_config = copy.deepcopy(dict(config))
    for name in (part.strip() for part in preferred.split(",")):
        path = tuple(name.split("."))
        contradictions_there = [
            contradiction
            for contradiction in contradictions(settled_config)
            if path in contradiction.paths
        ]
        if _value_at(settled_config, path) is None:
            raise ValueError(f"--prefer: the config has no {name}.")
        if not contradictions_there:
            options_in_words = [
                contradiction.in_words for contradiction in contradictions(settled_config)
            ]
            hint = f"; it needs {'; '.join(options_in_words)}" if options_in_words else ""
            raise ValueError(f"--prefer: nothing in the config contradicts {name}{hint}.")
        _set_every_place(settled_config, path, contradictions_there[0])
    return settled_config


def _set_every_place(config: dict[str, Any], path: KeyPath, contradiction: Contradiction) -> None:
    """Set every place of a contradicting setting, in `config` itself, to the value that it has at
    `path`."""
    value = _value_at(config, path)
    key = path[-1]
    for other_path in contradiction.paths:
        if other_path == path:
            continue
        holder = _value_at(config, other_path[:-1]) if other_path[:-1] else config
        if key in ROPE_DICT_KEYS and other_path[-1] != key:
            _keep_base(holder, holder[other_path[-1]])
            del holder[other_path[-1]]
        elif key in TYPE_KEYS:
            del holder[other_path[-1]]
        else:
            holder[other_path[-1]] = copy.deepcopy(value)
    inner_key = language_model_key(config)
    if inner_key and len(path) == 1 and path[0] in KEYS_OF_LANGUAGE_MODEL:
        config[inner_key][key] = config.pop(key)


def _keep_base(part: dict[str, Any], dropped_dict: Mapping[str, Any]) -> None:
    """Keep the base of a rope dict that is dropped where no other place has one."""
    rest_of_part = {key: value for key, value in part.items() if value is not dropped_dict}
    has_base = any(True for _ in _places(rest_of_part, (), "rope_theta"))
    if not has_base and dropped_dict.get("rope_theta") is not None:
        part["rope_theta"] = dropped_dict["rope_theta"]
