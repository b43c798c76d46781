"""Write a stretched checkpoint as a folder that stock tools load, and prove it in a fresh
process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from posenc.hf.apply import rotary_frequencies
from posenc.hf.loading import Checkpoint, read_config

TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model",
    "generation_config.json", "chat_template*",
)  # fmt: skip
STALE_KEYS = ("rope_scaling", "rope_theta")
"""What an older config left behind: rope_scaling would win over rope_parameters."""


@dataclass(frozen=True)
class Proof:
    """What a fresh process with stock transformers found in the exported folder."""

    inv_freq_error: float
    """Largest relative error of an inverse frequency against the intended one."""
    logits_error: float
    """Largest difference from the logits of the model in memory."""
    decode_error: float
    """Largest difference between step-by-step decoding with the cache and one full pass."""
    generated: int
    """Tokens generated past the old length."""

    def failures(self, *, cache_safe: bool) -> list[str]:
        """What does not hold, in words; empty where the export is proved."""
        found = []
        if self.inv_freq_error > 1e-6:
            found.append(f"frequencies are off by {self.inv_freq_error:.1e}, expected below 1e-6")
        if self.logits_error > 1e-5:
            found.append(f"logits are off by {self.logits_error:.1e}, expected below 1e-5")
        if cache_safe and self.decode_error > 1e-3:
            found.append(
                f"decoding with the cache is off by {self.decode_error:.1e}, expected below 1e-3"
            )
        return found


def prepare_folder(out: Path) -> Path:
    """A temporary folder beside `out`. Raises: ValueError where `out` exists or cannot be
    written."""
    if out.exists():
        raise ValueError(f"{out} exists already; give a new folder.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ValueError(f"{out.parent}: cannot write there ({error.strerror}).") from error


def write(
    checkpoint: Checkpoint, out: Path, prover: Prover, tokens: Tensor, *, cache_safe: bool = True
) -> tuple[list[str], Proof]:
    """Save the model as it is in memory and prove the folder; nothing is left at `out` if that
    fails.

    Args:
        checkpoint: its model carries the settings to export.
        out: a folder that does not exist.
        prover: the process that reads the folder back.
        tokens: (1, length) longer than the trained length, for the proof; a masked model is proved
            by its logits alone.
        cache_safe: step-by-step decoding must equal one pass.

    Returns: the lines in which the two configs differ, and the proof.
    Raises: RuntimeError where stock transformers does not see what was meant.
    """
    temporary = prepare_folder(out)
    try:
        checkpoint.model.save_pretrained(temporary, safe_serialization=True)
        copy_tokenizer(checkpoint.folder, temporary)
        config = read_config(temporary)
        for key in STALE_KEYS:
            config.pop(key, None)
        (temporary / "config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
        proof = prove(checkpoint, temporary, prover, tokens)
        if failures := proof.failures(cache_safe=cache_safe):
            raise RuntimeError(f"not exported, the proof failed: {'; '.join(failures)}.")
        os.chmod(temporary, 0o755)  # noqa: PTH101 - mkdtemp made it private
        temporary.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return config_diff(checkpoint.raw_config, config), proof


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy what belongs to the tokenizer and is not there yet."""
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file() and not (target / path.name).exists():
                shutil.copy(path, target / path.name)


def config_diff(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line per key that is new (+), gone (-) or changed (old -> new)."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if key not in after:
            lines.append(f"- {key}: {json.dumps(old)}")
        elif key not in before:
            lines.append(f"+ {key}: {json.dumps(new)}")
        elif old != new:
            lines.append(f"  {key}: {json.dumps(old)} -> {json.dumps(new)}")
    return lines


class Prover:
    """A fresh process with stock transformers, nothing of ours, that compares a folder with what
    was meant. It may start early, so that its imports run beside other work."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._running: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """The process, waiting for a line that says what to compare."""
        if self._running is None:
            script = Path(__file__).with_name("proof.py")
            # -P: the script imports no posenc, and its folder is not on the path.
            self._running = subprocess.Popen(
                [sys.executable, "-P", str(script)], cwd=self._scratch.name, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        return self._running

    def compare(self, folder: Path, expected: dict[str, Tensor], *, masked: bool) -> Proof:
        """Raises: RuntimeError where the folder does not load there."""
        reference = Path(self._scratch.name) / "expected.safetensors"
        save_file(expected, reference)
        asked = [str(folder.resolve()), str(reference), "masked" if masked else "causal"]
        running = self.start()
        said, complained = running.communicate(json.dumps(asked))
        if running.returncode:
            last = complained.strip().splitlines()[-1:] or ["no message"]
            raise RuntimeError(
                f"the exported folder does not load in stock transformers: {last[0]}"
            )
        return Proof(**json.loads(said.splitlines()[-1]))

    def __enter__(self) -> Prover:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._running is not None and self._running.poll() is None:
            self._running.kill()
            self._running.communicate()
        self._scratch.cleanup()


@torch.inference_mode()
def prove(checkpoint: Checkpoint, folder: Path, prover: Prover, tokens: Tensor) -> Proof:
    """Compare what a fresh process reads from the folder with the model in memory."""
    model = checkpoint.model
    expected = {"tokens": tokens, "logits": model(tokens).logits.contiguous()}
    for layer_type, (inv_freq, _) in rotary_frequencies(model).items():
        expected[f"inv_freq/{layer_type or ''}"] = inv_freq.clone()
    return prover.compare(folder, expected, masked=checkpoint.masked)
