"""What a machine must have for its trials to give the same numbers as here."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import runpy
from collections.abc import Sequence
from pathlib import Path

from posenc import __version__
from posenc.report.processor import processor

SAME = ("python", "posenc", "code", "torch", "numpy")
"""Facts that must be equal everywhere."""


def facts() -> dict[str, str]:
    """The versions that decide numbers, and the processor, of the machine that this runs on.
    Loads no torch, which would take as long as the shortest trials."""
    return {
        "python": platform.python_version(),
        "posenc": __version__,
        "code": code_hash(),
        "torch": _torch_version(),
        "numpy": importlib.metadata.version("numpy"),
        "processor": processor(),
    }


def difference(here: dict[str, str], there: dict[str, str]) -> str | None:
    """How another machine differs from this one, in words; None where it has all the same.

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
    """A hash of posenc's own source, which tells two checkouts of one version apart."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".c", ".json"):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _torch_version() -> str:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return "none"
    version = runpy.run_path(str(Path(found.submodule_search_locations[0]) / "version.py"))
    return str(version["__version__"])


def other_processors(found: Sequence[dict[str, str]]) -> str | None:
    """What the reader must know where machines have different processors."""
    names = sorted({each["processor"] for each in found})
    if len(names) < 2:
        return None
    return (
        f"the machines have different processors ({', '.join(names)}), which may differ in the "
        "last bits of a sum: a trial gives the same numbers again only on the same kind"
    )
