"""Write a stretched checkpoint as a folder that stock tools load, and prove it in a fresh
process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from posenc.extend.export.config import config_diff, exported_config
from posenc.extend.export.prover import Proof, Prover, prove
from posenc.extend.restart import locked
from posenc.hf.folder import read_config, read_json, tokenizer_files
from posenc.hf.loading import Checkpoint
from posenc.report.atomic import write_atomically
from posenc.report.failure import RunFailed


def export_checkpoint(
    checkpoint: Checkpoint, out: Path, prover: Prover, tokens: Tensor, longest: int, *,
    cache_safe: bool = True,
) -> tuple[list[str], Proof]:  # fmt: skip
    """Save the model as it is in memory and prove the folder; nothing is left at `out` if that
    fails.

    Args:
        checkpoint: its model carries the settings to export.
        out: a folder that does not exist.
        prover: the process that reads the folder back.
        tokens: (1, length) longer than the trained length, for the proof; a masked model is proved
            by its logits only.
        longest: the new length in tokens.
        cache_safe: step-by-step decoding must equal one pass.

    Returns: the lines in which the two configs differ, and the proof.
    Raises: RunFailed where stock transformers does not see what was meant.
    """
    with _folder_beside(out) as temporary:
        checkpoint.model.save_pretrained(temporary, safe_serialization=True)
        copy_tokenizer(checkpoint.folder, temporary, longest)
        config = exported_config(read_config(temporary))
        write_atomically(temporary / "config.json", json.dumps(config, indent=2) + "\n")
        proof = prove(checkpoint, temporary, prover, tokens)
        if failures := proof.failures(cache_safe=cache_safe):
            raise RunFailed(f"not exported, the proof failed: {'; '.join(failures)}.")
        _to_disk(temporary)
        temporary.replace(out)
    return config_diff(checkpoint.raw_config, config), proof


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """An empty folder whose name follows from `out`, so that what a kill leaves there is cleared by
    the next run. Raises: ValueError where `out` exists or cannot be written."""
    if out.exists():
        raise ValueError(f"{out} exists already; give a new folder.")
    temporary = out.parent / f".{out.name}.unproved"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out.parent}: cannot write there ({error.strerror}).") from error
    with locked(temporary):
        for path in temporary.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _to_disk(folder: Path) -> None:
    """Have everything on the disk before the folder gets its name."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def copy_tokenizer(source: Path, target: Path, longest: int) -> None:
    """Copy what belongs to the tokenizer and is not there yet; it may read `longest` tokens."""
    for path in tokenizer_files(source):
        if not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
    settings = target / "tokenizer_config.json"
    if settings.exists():
        kept = read_json(settings)
        limit = kept.get("model_max_length")
        if isinstance(limit, int | float) and limit < longest:
            text = json.dumps({**kept, "model_max_length": longest}, indent=2, ensure_ascii=False)
            write_atomically(settings, text + "\n")
