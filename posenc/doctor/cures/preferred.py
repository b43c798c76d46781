"""`--prefer KEY`: take out of a config what contradicts one of its keys.

A config contradicts itself where one setting has two values in two places: two rope dicts, a base
inside and outside of one, type and rope_type, two original lengths, or a key beside the language
model's own config and in it. Only its author can say which is right.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from posenc.runtimes.config_model import OUTSIDE, language_model_key
from posenc.runtimes.files.spelling import DICTS
from posenc.runtimes.meaning import OLD_NAMES, differing_keys

TYPES = ("type", "rope_type")
INSIDE_OR_OUTSIDE = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")
"""Keys that may be in a rope dict or next to it."""
Path = tuple[str, ...]


class Contradiction(NamedTuple):
    """One setting with different values. paths: of its places, each from the top level on."""

    paths: tuple[Path, ...]

    @property
    def in_words(self) -> str:
        """Return the options that settle it, such as "--prefer rope_scaling or --prefer
        rope_parameters"."""
        return " or ".join(f"--prefer {'.'.join(path)}" for path in self.paths)


def contradictions(config: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Yield the settings of a config.json that have different values in different places."""
    inner = language_model_key(config)
    prefix = (inner,) if inner else ()
    part = config[inner] if inner else config
    yield from _two_levels(config, inner)
    old, new = part.get("rope_scaling"), part.get("rope_parameters")
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old and new:
        if set(differing_keys(old, new, part)) - {"rope_theta"}:
            yield Contradiction(((*prefix, "rope_scaling"), (*prefix, "rope_parameters")))
    for name in DICTS:
        p = part.get(name)
        if isinstance(p, Mapping) and _types_differ(p):
            yield Contradiction(tuple((*prefix, name, key) for key in TYPES))
    for key in INSIDE_OR_OUTSIDE:
        places = list(_places(part, prefix, key))
        values = [_value_at(config, path) for path in places]
        if any(value != values[0] for value in values):
            yield Contradiction(tuple(places))


def _two_levels(config: Mapping[str, Any], inner: str) -> Iterator[Contradiction]:
    """Yield a contradiction for each key that stands beside the language model's own config and has
    another value in it, or none. inner: the key of that config, such as text_config; empty without
    one."""
    for key in OUTSIDE if inner else ():
        if config.get(key) is not None and config[key] != config[inner].get(key):
            inside = ((inner, key),) if config[inner].get(key) is not None else ()
            yield Contradiction(((key,), *inside))


def _types_differ(p: Mapping[str, Any]) -> bool:
    """Return True if a rope dict has a type and a rope_type that mean different types."""
    old, new = (p.get(key) for key in TYPES)
    if old is None or new is None:
        return False
    return OLD_NAMES.get(old, old) != OLD_NAMES.get(new, new)


def _places(part: Mapping[str, Any], prefix: Path, key: str) -> Iterator[Path]:
    """Yield the paths at which a key is, next to the rope dicts and in those that are flat."""
    if part.get(key) is not None:
        yield (*prefix, key)
    for name in DICTS:
        p = part.get(name)
        if isinstance(p, Mapping) and p.get(key) is not None:
            yield (*prefix, name, key)


def _value_at(config: Mapping[str, Any], path: Path) -> Any:
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
    result = copy.deepcopy(dict(config))
    for name in (part.strip() for part in preferred.split(",")):
        path = tuple(name.split("."))
        settled = [found for found in contradictions(result) if path in found.paths]
        if _value_at(result, path) is None:
            raise ValueError(f"--prefer: the config has no {name}.")
        if not settled:
            others = [found.in_words for found in contradictions(result)]
            said = f"; it needs {'; '.join(others)}" if others else ""
            raise ValueError(f"--prefer: nothing in the config contradicts {name}{said}.")
        _set_every_place(result, path, settled[0])
    return result


def _set_every_place(config: dict[str, Any], path: Path, contradiction: Contradiction) -> None:
    """Set every place of a contradicting setting, in `config` itself, to the value that it has at
    `path`."""
    value = _value_at(config, path)
    key = path[-1]
    for other in contradiction.paths:
        if other == path:
            continue
        place = _value_at(config, other[:-1]) if other[:-1] else config
        if key in DICTS and other[-1] != key:
            _keep_base(place, place[other[-1]])
            del place[other[-1]]
        elif key in TYPES:
            del place[other[-1]]
        else:
            place[other[-1]] = copy.deepcopy(value)
    inner = language_model_key(config)
    if inner and len(path) == 1 and path[0] in OUTSIDE:
        config[inner][key] = config.pop(key)


def _keep_base(place: dict[str, Any], dropped: Mapping[str, Any]) -> None:
    """Keep the base of a rope dict that is dropped where no other place has one."""
    rest = {key: value for key, value in place.items() if value is not dropped}
    has_base = any(True for _ in _places(rest, (), "rope_theta"))
    if not has_base and dropped.get("rope_theta") is not None:
        place["rope_theta"] = dropped["rope_theta"]
