"""Versions of the runtimes: the recorded ones, and the facts of a family in an earlier one."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from posenc.dialects.families import RUNTIME_FILES, facts_of_runtime


class RecordedReleases(NamedTuple):
    """The releases of a runtime whose facts its file has.

    first, last: such as "5.0" and "5.24". read: the one from which they were read, such as
    "5.23.0". An earlier one has other facts where a line says `since` or `before`. source: further
    words about where it was read; empty if there are none.
    """

    first: str
    last: str
    read: str
    source: str

    @property
    def in_words(self) -> str:
        """Return the releases as a sentence names them: "5.0 to 5.24 (read from 5.23.0)"."""
        releases = self.first if self.first == self.last else f"{self.first} to {self.last}"
        return f"{releases} ({self.source or f'read from {self.read}'})"


def _recorded_releases(runtime: str) -> RecordedReleases:
    """Return the releases that a runtime's file of facts names."""
    file = facts_of_runtime(runtime)
    return RecordedReleases(
        file["first release"], file["last release"], file["read in"], file.get("source", "")
    )


RECORD = {runtime: _recorded_releases(runtime) for runtime in RUNTIME_FILES}
"""Runtime -> the releases whose facts are recorded. Of each minor version of transformers the
newest patch was run."""
VERSIONS = {runtime: releases.in_words for runtime, releases in RECORD.items()}
"""The recorded releases of each runtime, in words."""
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
    first = version_numbers(RECORD[runtime].first)
    last = version_numbers(RECORD[runtime].last)
    asked = version_numbers(version)
    return first <= asked and asked[: len(last)] <= last


def facts_in_version(facts: Mapping[str, Any] | None, version: str) -> Mapping[str, Any] | None:
    """Return the facts about a family in one runtime, as they were in a version;
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
