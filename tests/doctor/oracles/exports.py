"""What `posenc extend` writes, read by two major versions of transformers, each in an environment
of its own; and the same folders without the keys of one version, which must be seen to fail."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

METHODS = ("ntk", "yarn", "by-parts")
"""Written as a base only, as a word that both versions have, and as lists of factors."""
TO = 512
TOKENS = [1, *(3 + 7 * i % 250 for i in range(400))]
"""More than the training length of 256."""
DIALECT = {
    "transformers4": ("rope_theta", "rope_scaling"),
    "transformers5": ("rope_theta", "rope_scaling", "rope_parameters"),
}
"""The keys by which a version reads what was meant."""
Read = Callable[[str, Sequence[Path]], tuple[str, Sequence[np.ndarray]]]
"""Version and logits of each folder, by the Python of an environment."""


def extended(model: Path, method: str, out: Path) -> np.ndarray:
    """Export the model and return the logits that the stretched one had in memory."""
    import torch

    from posenc.extend.extension import extend
    from posenc.extend.options import Options

    ids = " ".join(str(3 + 11 * i % 250) for i in range(2 * TO))
    # Random weights know no text.
    options = Options(windows=1, task=["none"], anyway=True)
    outcome = extend(model, TO, [ids, ids], method=method, out=out, as_ids=True, options=options)
    with outcome.measured[method][0].applied() as stretched, torch.inference_mode():
        return stretched(torch.tensor([TOKENS])).logits[0].numpy()


def without(folder: Path, keys: tuple[str, ...]) -> Path:
    """A copy that lacks these keys of config.json."""
    copy = folder.with_name(f"{folder.name} without {' and '.join(keys)}")
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text("utf-8"))
    kept = {key: value for key, value in config.items() if key not in keys}
    (copy / "config.json").write_text(json.dumps(kept), "utf-8")
    return copy


def check_exports(
    model: Path, root: Path, pythons: Mapping[str, str], read: Read, allowed: float
) -> list[str]:
    """What is not as it must be, in words: an export that a version reads otherwise, or a broken
    one that it reads as was meant. pythons: by the names of DIALECT.

    Prints every difference.
    """
    meant = {out: extended(model, out.name, out) for out in (root / name for name in METHODS)}
    wrong = []
    for name, python in pythons.items():
        broken = {without(out, DIALECT[name]): logits for out, logits in meant.items()}
        folders = {**meant, **broken}
        said, found = read(python, list(folders))
        for (folder, expected), got in zip(folders.items(), found, strict=True):
            off = float(abs(got - expected).max())
            print(f"{said}, {folder.name}: logits off by {off:.1e}", flush=True)
            wrong += verdict(f"{said}, {folder.name}", off, allowed, whole=folder in meant)
    return wrong


def verdict(said: str, off: float, allowed: float, *, whole: bool) -> list[str]:
    """Why a difference is not as it must be; empty where it is."""
    if whole:
        return [] if off <= allowed else [f"{said}: off by {off:.1e}"]
    return [] if off > allowed else [f"{said}: off by only {off:.1e}, so the check sees nothing"]
