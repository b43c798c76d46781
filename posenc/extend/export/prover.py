"""Compare a folder with the model in memory, in a fresh process with stock transformers and without
posenc."""

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from posenc.command_line.errors import RunFailed
from posenc.extend.measure.losses import last_logits
from posenc.files.atomic import write_atomically
from posenc.hf.checkpoint.loading import Checkpoint
from posenc.hf.model_rotation import rotary_frequencies
from posenc.hf.transformers_compat import cache_argument_name

MAX_FREQUENCY_ERROR = 1e-6
"""Largest relative error of a frequency. A config carries a float32's seven digits, and a reader
rounds them to float32 again."""
NUM_COMPARED_LOGITS = 512
"""Tokens, the last of the text, whose logits are compared; they depend on all tokens before them.
Those of a long text would take more memory than the model."""
MAX_LAST_BITS_APART = 16
"""Last bits of half precision by which decoding may differ from one pass, because every layer
rounds other products."""


OBJECTIVE_BY_CLASS = {
    "AutoModelForCausalLM": "causal",
    "AutoModelForMaskedLM": "masked",
    "AutoModelForImageTextToText": "with images",
    "AutoModel": "vectors",
}
"""What the reader in the fresh process is told, by the class that loads the folder."""


@dataclass(frozen=True)
class Proof:
    """Hold the findings of a fresh process with stock transformers about the exported folder."""

    inv_freq_error: float
    """Largest relative error of an inverse frequency against the intended one."""
    logits_error: float
    """Largest difference from the logits of the model in memory."""
    decode_error: float
    """Largest difference between step-by-step decoding with the cache and one full pass."""
    padding_error: float | None
    """Largest difference between rows of a padded batch, decoded too, and each row by itself. None
    where it cannot be compared: no mask, a mask that the family reads past, few tokens."""
    num_generated: int
    """Tokens generated past the old length."""
    rounding: float = 0.0
    """The value of the largest logit's last bit in half precision; 0 in float32."""
    logits_change_by_frequency_error: float = 0.0
    """How far logits move at these positions if frequencies are off by MAX_FREQUENCY_ERROR."""
    largest_logit: float = 1.0
    """The largest logit: if it is below 1, decoding may differ by less in proportion."""

    def failures(self, *, cache_safe: bool) -> list[str]:
        """Return in words which checks failed and what would pass; empty if the export is
        proved."""
        rounding_bound = max(
            1e-3 * min(1.0, self.largest_logit), MAX_LAST_BITS_APART * self.rounding
        )
        # Without a safe cache, decoding is expected to differ by any amount.
        decoding_bound = rounding_bound if cache_safe else math.inf
        logits_bound = max(1e-5, self.rounding, self.logits_change_by_frequency_error)
        advice_on_method = "another --method may pass"
        advice_on_precision = "--precision float32 may pass"
        checks = [
            ("frequencies are", self.inv_freq_error, MAX_FREQUENCY_ERROR, advice_on_method),
            ("logits are", self.logits_error, logits_bound, advice_on_method),
            ("decoding with the cache is", self.decode_error, decoding_bound, advice_on_precision),
            (
                "rows next to padding are",
                self.padding_error or 0.0,
                rounding_bound,
                advice_on_precision,
            ),
        ]
        return [
            f"{subject} off by {error:.1e}, expected at most {bound:.0e} ({advice})"
            for subject, error, bound, advice in checks
            if not error <= bound  # written with "not", so that NaN fails
        ]


class Prover:
    """Run the comparison in a fresh process with stock transformers. The process may start early,
    so that its imports overlap with other work."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """Start the process, unless it runs, and return it. It waits for a line of JSON on its
        stdin."""
        if self._process is None:
            script = Path(__file__).with_name("stock_reader.py")
            # -P: the script imports no posenc, and its folder is not on the path.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(os.getpid())],
                cwd=self._scratch.name,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        return self._process

    def compare(
        self, folder: Path, expected_tensors: dict[str, Tensor], model: Any, objective: str
    ) -> Proof:
        """Compare the folder with expected tensors (frequencies, tokens, logits), in the dtype and
        on the device of the model. objective: "causal", "masked", "with images" for a causal
        model that is loaded with its part for images, or "vectors" for one without a head.

        Raises: RunFailed where the folder does not load there.
        """
        expected_file = Path(self._scratch.name) / "expected.safetensors"
        write_atomically(expected_file, save(expected_tensors))
        dtype = str(model.dtype).removeprefix("torch.")
        cache_name = cache_argument_name(model)
        reader_arguments = [
            str(folder.resolve()),
            str(expected_file),
            objective,
            dtype,
            str(model.device),
            cache_name,
        ]
        process = self.start()
        stdout_text, stderr_text = process.communicate(json.dumps(reader_arguments))
        if process.returncode:
            last_lines = stderr_text.strip().splitlines()[-1:] or ["no message"]
            raise RunFailed(
                f"the exported folder does not load in stock transformers: {last_lines[0]}"
            )
        eps = 0.0 if model.dtype == torch.float32 else torch.finfo(model.dtype).eps
        largest_logit = float(expected_tensors["logits"].abs().max())
        differences = json.loads(stdout_text.splitlines()[-1])
        return Proof(**differences, rounding=eps * largest_logit, largest_logit=largest_logit)

    def __enter__(self) -> "Prover":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        self._scratch.cleanup()


@torch.inference_mode()
def prove(checkpoint: Checkpoint, folder: Path, prover: Prover, tokens: Tensor) -> Proof:
    """Return the differences between the folder, as a fresh process reads it, and the model in
    memory. tokens: (1, length), the text on which logits are compared."""
    model = checkpoint.model
    # Before the model runs: some frequencies change with the length that was read last.
    expected_tensors = {
        f"inv_freq/{layer_type or ''}": inv_freq.cpu().clone()
        for layer_type, (inv_freq, _) in rotary_frequencies(model).items()
    }
    logits = last_logits(model, tokens, NUM_COMPARED_LOGITS)
    expected_tensors |= {"tokens": tokens, "logits": logits.contiguous()}
    objective = OBJECTIVE_BY_CLASS[checkpoint.auto_class]
    proof = prover.compare(folder, expected_tensors, model, objective)
    return replace(
        proof, logits_change_by_frequency_error=_logits_change_by_frequency_error(model, tokens)
    )


@torch.inference_mode()
def help_to_prove(model: Any, tokens: Tensor) -> None:
    """Run the model as `prove` does, in a process of torchrun that has a part of it and proves
    nothing itself."""
    last_logits(model, tokens, NUM_COMPARED_LOGITS)
    _logits_change_by_frequency_error(model, tokens)


def _logits_change_by_frequency_error(model: Any, tokens: Tensor) -> float:
    """Return the sum of two numbers: the largest change of a logit if all frequencies are too high
    by the fraction MAX_FREQUENCY_ERROR, and the largest change if every second one is too low by
    it instead. The model's frequencies are restored.

    tokens: (1, length), the text that is read.
    """
    frequencies = [inv_freq for inv_freq, _ in rotary_frequencies(model).values()]
    exact_frequencies = [inv_freq.clone() for inv_freq in frequencies]
    logits_change = 0.0
    logits = last_logits(model, tokens, NUM_COMPARED_LOGITS)
    for sign in (1, -1):
        for inv_freq, exact in zip(frequencies, exact_frequencies, strict=True):
            inv_freq *= 1 + MAX_FREQUENCY_ERROR
            inv_freq[1::2] = exact[1::2] * (1 + sign * MAX_FREQUENCY_ERROR)
        changed_logits = last_logits(model, tokens, NUM_COMPARED_LOGITS)
        logits_change += float((changed_logits - logits).abs().max())
        for inv_freq, exact in zip(frequencies, exact_frequencies, strict=True):
            inv_freq.copy_(exact)
    return logits_change
