"""Write a stretched checkpoint as a folder that stock tools load, and prove it in a fresh
process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torch import Tensor

from posenc.dialects.writers.changes import config_changes
from posenc.extend.export.config import exported_config
from posenc.extend.export.prover import Proof, Prover, prove
from posenc.hf.folder import read_config, read_json, tokenizer_files
from posenc.hf.loading import Checkpoint
from posenc.report.atomic import write_atomically
from posenc.report.failure import RunFailed
from posenc.report.new_folder import new_folder


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
    with new_folder(out) as temporary:
        checkpoint.model.save_pretrained(temporary, safe_serialization=True)
        copy_tokenizer(checkpoint.folder, temporary, longest)
        config = exported_config(read_config(temporary))
        write_atomically(temporary / "config.json", json.dumps(config, indent=2) + "\n")
        proof = prove(checkpoint, temporary, prover, tokens)
        if failures := proof.failures(cache_safe=cache_safe):
            raise RunFailed(f"not exported, the proof failed: {'; '.join(failures)}.")
    return config_changes(checkpoint.raw_config, config), proof


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
