"""What a machine must have for its trials to give the same numbers as here."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from posenc import __version__
from posenc.report.machine.processor import processor

SAME = ("python", "posenc", "code", "torch", "numpy")
"""Facts that must be equal everywhere."""


def facts() -> dict[str, str]:
    """Return the versions that decide numbers, and the CPU, of the machine that this runs on.
    Loads no torch, which would take as long as the shortest trials."""
    return {
        "python": platform.python_version(),
        "posenc": __version__,
        "code": code_hash(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "processor": processor(),
    }


def difference(here: dict[str, str], there: dict[str, str]) -> str | None:
    """Say how another machine differs from this one; None where it has all the same.

    >>> difference({"python": "3.11.9", "torch": "2.13.0"}, {"python": "3.12.1", "torch": "2.13.0"})
    'it has python 3.12.1, and here is 3.11.9'
    """
    for name in SAME:
        if here.get(name) != there.get(name):
            what = "posenc with other files, hash" if name == "code" else name
            return f"it has {what} {there.get(name)}, and here is {here.get(name)}"
    return None


@functools.cache
def code_hash() -> str:
    """Hash posenc's own source, which differs between two checkouts of one version."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def other_processors(found: Sequence[dict[str, str]]) -> str | None:
    """Warn where machines have different CPUs."""
    names = sorted({each["processor"] for each in found})
    if len(names) < 2:
        return None
    return (
        f"the machines have different processors ({', '.join(names)}), which may differ in the "
        "last bits of a sum: a trial gives the same numbers again only on the same kind"
    )
