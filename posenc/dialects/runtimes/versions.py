"""Versions of the runtimes: the recorded ones, and the facts of a family in an earlier one."""

import re
from collections.abc import Mapping
from typing import Any

RECORD = {
    "transformers-4": ("4.56", "4.57", "4.57.3"),
    "transformers-5": ("5.0", "5.24", "5.23.0"),
    "vllm": ("0.33", "0.33", "0.33.0"),
    "sglang": ("0.5.23", "0.5.23", "0.5.23"),
    "mlx-lm": ("0.32", "0.32", "0.32.2"),
    "llama.cpp": ("b11549", "b11549", "b11549"),
}
"""Runtime -> the first and the last version whose facts are recorded, and the one they were read
from. An earlier version has other facts where families.json says `since` or `before`. Of each
minor version of transformers the newest patch was run."""
VERSIONS = {
    name: f"{first if first == last else f'{first} to {last}'} (read from {read})"
    for name, (first, last, read) in RECORD.items()
} | {"llama.cpp": "b11549 (converter and source 0c1e57098)"}
"""The recorded versions of each runtime, in words."""
NEWEST: Mapping[str, str] = {}
"""Runtime -> the version that the user asked for; the others are those that were read."""


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparisons.

    >>> version_numbers("5.9") < version_numbers("5.10.4") < version_numbers("5.11")
    True
    """
    return tuple(int(part) for part in version.lstrip("b").split("."))


def runtime_and_version(text: str) -> tuple[str, str | None]:
    """Return the runtime and the version of `vllm==0.33`, or of a runtime's name.

    Raises: ValueError for a version that is no number.
    """
    name, _, version = (part.strip() for part in text.partition("=="))
    if "==" not in text:
        return name, None
    if not re.fullmatch(r"b?\d{1,9}(\.\d{1,9}){0,3}", version):
        raise ValueError(f"--for: {text!r} has no version such as {name}==5.9.")
    if name == "transformers":
        name = f"transformers-{4 if version_numbers(version) < (5,) else 5}"
    return name, version


def is_recorded(runtime: str, version: str) -> bool:
    """Return True if facts of this version of a runtime are recorded."""
    first, last, _ = (version_numbers(each) for each in RECORD[runtime])
    asked = version_numbers(version)
    return first <= asked and asked[: len(last)] <= last


def facts_in_version(facts: Mapping[str, Any] | None, version: str) -> Mapping[str, Any] | None:
    """Return the facts of families.json about a family in one runtime, as they were in a version;
    None if that version had no such model.

    `since` is the first version with the model. `before` is a list of differences, the newest
    first: each has the version `until` which it held, and keys that replace the later ones; null
    removes a key. `unread` names types and keys with which that version was not read.
    """
    asked = version_numbers(version)
    if not facts or asked < version_numbers(facts.get("since", "0")):
        return None if facts else facts
    found = dict(facts)
    for change in facts.get("before", ()):
        if asked < version_numbers(change["until"]):
            found.update(change)
    found.pop("until", None)
    return {key: value for key, value in found.items() if value is not None}
