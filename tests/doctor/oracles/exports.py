"""What `posenc extend` writes, read by two major versions of transformers, each in an environment
of its own; and the same folders without the keys of one version, which must be seen to fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

METHODS = ("ntk", "yarn", "by-parts")
"""Written as a base only, as a word that both versions have, and as lists of factors."""
TO = 512
TOKENS = [1, *(3 + 7 * i % 250 for i in range(400))]
"""More than the trained length of 256."""
DIALECT = {
    "transformers4": ("rope_theta", "rope_scaling"),
    "transformers5": ("rope_theta", "rope_scaling", "rope_parameters"),
}
"""The keys by which a version reads what was meant."""
MEANT = "transformers5"
Logits = Callable[[str, Path], tuple[str, np.ndarray]]
"""Version and logits of a folder, by the Python of an environment."""


def extended(model: Path, method: str, out: Path) -> Path:
    """The model's export, proved by the command itself in the transformers that wrote it."""
    text = out.with_name("ids.txt")
    text.write_text(" ".join(str(3 + 11 * i % 250) for i in range(4 * TO)), encoding="utf-8")
    command = [
        sys.executable, "-m", "posenc", "extend", model, "--to", TO, "--method", method,
        "--windows", 1, "--tasks", "none", "--ids", "--text", text, "--out", out,
    ]  # fmt: skip
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    return out


def without(folder: Path, keys: tuple[str, ...]) -> Path:
    """A copy that lacks these keys of config.json."""
    copy = folder.with_name(f"{folder.name} without {' and '.join(keys)}")
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text("utf-8"))
    kept = {key: value for key, value in config.items() if key not in keys}
    (copy / "config.json").write_text(json.dumps(kept), "utf-8")
    return copy


def check_exports(
    model: Path, root: Path, pythons: Mapping[str, str], logits: Logits, allowed: float
) -> list[str]:
    """What is not as it must be, in words: an export that a version reads otherwise, or a broken
    one that it reads alike. pythons: by the names of DIALECT; must have MEANT.

    Prints every difference.
    """
    wrong = []
    for method in METHODS:
        out = extended(model, method, root / f"extended by {method}")
        _, meant = logits(pythons[MEANT], out)
        for name, python in pythons.items():
            for folder in (out, without(out, DIALECT[name])):
                said, got = logits(python, folder)
                off = float(abs(got - meant).max())
                print(f"{said}, {folder.name}: logits off by {off:.1e}", flush=True)
                wrong += verdict(said, folder.name, off, allowed, whole=folder == out)
    return wrong


def verdict(said: str, name: str, off: float, allowed: float, *, whole: bool) -> list[str]:
    """Why a difference is not as it must be; empty where it is."""
    if whole:
        return [] if off <= allowed else [f"{said}, {name}: off by {off:.1e}"]
    seen = off > allowed
    return [] if seen else [f"{said}, {name}: off by only {off:.1e}, so the check sees nothing"]
