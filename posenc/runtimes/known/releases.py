"""The releases of the runtimes: those whose facts are recorded, and the facts of an earlier one.

What single releases of transformers have and compute was recorded by asking each of them.

releases.json has an entry for each recorded release, in their order: `came` and `went`, the config
classes (by model_type) that it has and the recorded release before it had not, or the other way
round; and `unread`, model_type -> config keys or rope types for which posenc does not know what
this release computes: its facts give another answer than the release gave; "all" for any config.
`make facts` writes the file.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from posenc.runtimes.families import RUNTIME_FILES, facts_of_runtime


class ReleaseRange(NamedTuple):
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


def _release_range(runtime: str) -> ReleaseRange:
    """Return the releases that a runtime's file of facts names."""
    facts = facts_of_runtime(runtime)
    return ReleaseRange(
        facts["first release"], facts["last release"], facts["read in"], facts.get("source", "")
    )


RELEASES = {runtime: _release_range(runtime) for runtime in RUNTIME_FILES}
"""Runtime -> the releases whose facts are recorded. Of each minor version of transformers the
newest patch was run."""
RELEASES_IN_WORDS = {runtime: releases.in_words for runtime, releases in RELEASES.items()}
"""The recorded releases of each runtime, in words."""
VERSIONS_AS_READ: Mapping[str, str] = {}
"""Runtime -> the version to emulate: none named, so that each is the release that was read."""


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
    runtime, _, version = (part.strip() for part in text.partition("=="))
    if "==" not in text:
        return runtime, None
    if not re.fullmatch(r"b?\d{1,9}(\.\d{1,9}){0,3}", version):
        raise ValueError(f"--for: {text!r} has no version such as {runtime}==5.9.")
    if runtime == "transformers":
        runtime = f"transformers-{4 if version_numbers(version) < (5,) else 5}"
    return runtime, version


def is_recorded(runtime: str, version: str) -> bool:
    """Return True if facts of this version of a runtime are recorded."""
    # Cut to as many numbers as the last release has, so that 5.9.1 is recorded if 5.9 is. For the
    # first no cut is needed: 5.0.1 is above 5.0 as it is.
    first_numbers = version_numbers(RELEASES[runtime].first)
    last_numbers = version_numbers(RELEASES[runtime].last)
    numbers = version_numbers(version)
    return first_numbers <= numbers and numbers[: len(last_numbers)] <= last_numbers


def facts_in_version(facts: Mapping[str, Any] | None, version: str) -> Mapping[str, Any] | None:
    """Return the facts about a family in one runtime, as they were in a version;
    None if that version had no such model.

    `since` is the first version with the model. `before` is a list of differences, the newest
    first: each has `until`, the first version in which it no longer held, and keys that replace the
    later ones; null removes a key. `unread` names types and keys with which that version was not
    read.
    """
    numbers = version_numbers(version)
    if not facts or numbers < version_numbers(facts.get("since", "0")):
        return None if facts else facts
    facts_then = dict(facts)
    for change in facts.get("before", ()):
        if numbers < version_numbers(change["until"]):
            facts_then.update(change)
    facts_then.pop("until", None)
    return {key: value for key, value in facts_then.items() if value is not None}


RECORDED_RUNTIME = "transformers"
"""The runtime whose releases were asked."""


class Release(NamedTuple):
    """One recorded release.

    version: such as "5.12.1". model_types: those of its config classes. unread:
    model_type -> config keys or rope types for which posenc does not know what the release
    computes; "all" for any config.
    """

    version: str
    model_types: frozenset[str]
    unread: dict[str, list[str]]


@lru_cache
def recorded_releases(major: int) -> tuple[Release, ...]:
    """Return the recorded releases of transformers 4 or 5, the oldest first."""
    package = "posenc.runtimes.known"
    text = resources.files(package).joinpath("releases.json").read_text(encoding="utf-8")
    entry_by_version: dict[str, Any] = json.loads(text)
    releases: list[Release] = []
    model_types: frozenset[str] = frozenset()
    for version in sorted(entry_by_version, key=version_numbers):
        if version_numbers(version)[0] != major:
            continue
        entry = entry_by_version[version]
        model_types = (model_types | {*entry["came"]}) - {*entry["went"]}
        releases.append(Release(version, model_types, entry["unread"]))
    return tuple(releases)


def releases_around(runtime: str, version: str) -> list[Release]:
    """Return the recorded releases that tell of a version: itself, or the last one before it and
    the first one after it, as far as there are such.

    version: as the user writes it: 5.12 stands for the recorded 5.12.1.
    """
    if not runtime.startswith(f"{RECORDED_RUNTIME}-"):
        return []
    wanted_numbers = version_numbers(version)
    releases = recorded_releases(wanted_numbers[0])
    for release in releases:
        if version_numbers(release.version)[: len(wanted_numbers)] == wanted_numbers:
            return [release]
    earlier_releases = [
        release for release in releases if version_numbers(release.version) < wanted_numbers
    ]
    later_releases = [
        release for release in releases if version_numbers(release.version) > wanted_numbers
    ]
    return earlier_releases[-1:] + later_releases[:1]


def is_missing(model_type: str, runtime: str, version: str) -> bool:
    """Return True if a version has no such model: none of the recorded releases around it has one,
    and some recorded release has."""
    releases = releases_around(runtime, version)
    if not releases or any(model_type in release.model_types for release in releases):
        return False
    all_releases = recorded_releases(4) + recorded_releases(5)
    return any(model_type in release.model_types for release in all_releases)


def version_spoken_of(model_type: str, runtime: str, since: str) -> str:
    """Return the version of a runtime that posenc speaks of where the user names none: the one that
    was read, or the first one after it that has such a model.

    since: the first version with the model by its facts; "0" where they do not say.
    """
    version_read = RELEASES[runtime].read
    if version_numbers(since) > version_numbers(version_read):
        return since
    if not is_missing(model_type, runtime, version_read):
        return version_read
    later_versions = [
        release.version
        for release in recorded_releases(version_numbers(version_read)[0])
        if model_type in release.model_types
        and version_numbers(release.version) > version_numbers(version_read)
    ]
    return later_versions[0] if later_versions else version_read


def unread_words(model_type: str, runtime: str, version: str) -> dict[str, list[str]]:
    """Return, by recorded release that tells of a version, the config keys and rope types for which
    it answered otherwise than posenc knows; releases without any are left out."""
    releases = releases_around(runtime, version)
    return {
        release.version: release.unread[model_type]
        for release in releases
        if model_type in release.unread
    }
