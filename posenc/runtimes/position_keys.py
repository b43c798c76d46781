"""Decide which keys about positions posenc understands; `--fix` touches no file with others."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from posenc.runtimes.config_model import Model, with_language_model_on_top
from posenc.runtimes.families import json_table

ABOUT_POSITIONS = re.compile(
    r"rope|rotary|rotate|yarn|theta|(?<!com)position|mscale|(?<!layer_)freq|ntk|alibi|swa_|nope|logn"
)
ROTATION = re.compile(r"(\w+_)?(rope|rotary)(_pos\w*)?(_emb\w*)?")
"""Flags that turn the rotation itself off, so that false is no default."""
TRAINED_LENGTH_OF_NOMIC = "max_trained_positions"
"""nomic-embed-text's key for the length of its training, in tokens, beside n_positions."""
OTHERS = ("rotary", "text_config", "layer kinds", "layer types")
TABLE = json_table("position_keys")
READ = {use: frozenset(keys) for use, keys in TABLE.items() if use not in OTHERS}
"""The keys that a type of rope dict reads, beyond the common ones."""
KEYS, COMMON, NO_EFFECT = (READ.pop(use) for use in ("any", "rope dict", "no effect"))
"""Keys of a config of any family; those of a rope dict of any type; those that a fix may drop,
since their effect is known, or is none."""


def unknown_keys(config: Mapping[str, Any], model: Model) -> list[str]:
    """Return the keys about positions that posenc does not understand in this family."""
    flat, own = with_language_model_on_top(config), model.facts.get("keys", ())
    found = [
        key
        for key, value in flat.items()
        if ABOUT_POSITIONS.search(key)
        and key not in (*KEYS, TRAINED_LENGTH_OF_NOMIC)
        and key not in own
        and value is not None
        and (value is not False or ROTATION.fullmatch(key))
    ]
    if config.get(key := model.facts.get("layout_key", "")) is False:
        found.append(key)  # not every runtime reads it
    return found + [
        key
        for name in ("rope_scaling", "rope_parameters")
        for key in _unread_keys_of_dict(flat.get(name), name)
    ]


def _unread_keys_of_dict(given: Any, where: str) -> Iterator[str]:
    """Yield the path of each key in a rope dict, and in the dicts in it, that no runtime reads.

    given: the rope dict, or any other value. where: its path.
    """
    if not isinstance(given, Mapping):
        return
    every = COMMON | NO_EFFECT | frozenset().union(*READ.values())
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from _unread_keys_of_dict(value, f"{where}.{key}")
        elif key not in every and value is not None:
            yield f"{where}.{key}"


def require_understood_keys(config: Mapping[str, Any], model: Model) -> None:
    """Raise ValueError naming a key about positions that posenc does not understand."""
    if found := unknown_keys(config, model):
        raise ValueError(
            f"--fix: posenc does not know what {', '.join(found)} means for {model.model_type}, so "
            "it writes nothing. Remove the key if it has no effect, or change the file by hand."
        )
