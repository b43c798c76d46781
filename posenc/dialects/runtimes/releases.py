"""What single releases of transformers have and compute, recorded by asking each of them.

releases.json has an entry for each recorded release, in their order: `came` and `went`, the config
classes (by model_type) that it has and the recorded release before it had not, or the other way
round; and `unread`, family -> words of a config with which what posenc knows of the family is not
what this release answered: keys, or types of its rope dicts; "all" for any config. `make facts`
writes the file.
"""

import json
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from posenc.dialects.runtimes.versions import RECORD, version_numbers

RECORDED = "transformers"
"""The runtime whose releases were asked."""


class Release(NamedTuple):
    """One recorded release.

    version: such as "5.12.1". classes: the model_types of its config classes. unread: family ->
    words of a config with which posenc does not know what the release computes.
    """

    version: str
    classes: frozenset[str]
    unread: dict[str, list[str]]


@lru_cache
def recorded_releases(line: int) -> tuple[Release, ...]:
    """Return the recorded releases of transformers 4 or 5, the oldest first."""
    room = "posenc.dialects.runtimes"
    text = resources.files(room).joinpath("releases.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    found: list[Release] = []
    classes: frozenset[str] = frozenset()
    for version in sorted(table, key=version_numbers):
        if version_numbers(version)[0] != line:
            continue
        entry = table[version]
        classes = (classes | {*entry["came"]}) - {*entry["went"]}
        found.append(Release(version, classes, entry["unread"]))
    return tuple(found)


def releases_around(runtime: str, version: str) -> list[Release]:
    """Return the recorded releases that tell of a version: itself, or the last one before it and
    the first one after it, as far as there are such.

    version: as the user writes it: 5.12 stands for the recorded 5.12.1.
    """
    if not runtime.startswith(f"{RECORDED}-"):
        return []
    wanted = version_numbers(version)
    releases = recorded_releases(wanted[0])
    for release in releases:
        if version_numbers(release.version)[: len(wanted)] == wanted:
            return [release]
    before = [release for release in releases if version_numbers(release.version) < wanted]
    after = [release for release in releases if version_numbers(release.version) > wanted]
    return before[-1:] + after[:1]


def is_missing(model_type: str, runtime: str, version: str) -> bool:
    """Return True if a version has no such model: none of the recorded releases around it has one,
    and some recorded release has."""
    around = releases_around(runtime, version)
    if not around or any(model_type in release.classes for release in around):
        return False
    every = recorded_releases(4) + recorded_releases(5)
    return any(model_type in release.classes for release in every)


def version_spoken_of(model_type: str, runtime: str, since: str) -> str:
    """Return the version of a runtime that posenc speaks of where the user names none: the one that
    was read, or the first one after it that has such a model.

    since: the first version with the model by its facts; "0" where they do not say.
    """
    read = RECORD[runtime].read
    if version_numbers(since) > version_numbers(read):
        return since
    if not is_missing(model_type, runtime, read):
        return read
    later = [
        release.version
        for release in recorded_releases(version_numbers(read)[0])
        if model_type in release.classes
        and version_numbers(release.version) > version_numbers(read)
    ]
    return later[0] if later else read


def unread_words(model_type: str, runtime: str, version: str) -> dict[str, list[str]]:
    """Return the words of a config with which posenc does not know what a version computes, by the
    recorded release that has answered otherwise."""
    around = releases_around(runtime, version)
    return {
        release.version: release.unread[model_type]
        for release in around
        if model_type in release.unread
    }
