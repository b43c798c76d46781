"""One trial in a process of its own: python -m posenc.compare.worker STUDY_FOLDER TRIAL_FOLDER
CHECKPOINT_STEPS.

Reads config.json in the trial's folder; writes result.json (which depends on the config alone) and
timing.json; says how it goes in lines of JSON on stdout. Ends when stdin closes, so that it never
outlives the process that started it.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from posenc.compare import checkpoint, evaluate, splits, train
from posenc.compare.as_built import effective_spec
from posenc.compare.results import Timing, TrialResult
from posenc.compare.trial import TrialConfig, read_trial
from posenc.hf.llama import export_llama, expressible
from posenc.registry import create
from posenc.report.atomic import write_atomically


def main(study_folder: str, trial_folder: str, checkpoint_steps: str) -> int:
    # What libraries print must not come between the events.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    event = _Events(events)
    folder = Path(trial_folder)
    config = read_trial(folder)
    try:
        run_trial(config, Path(study_folder), folder, event, int(checkpoint_steps))
    except Exception as error:
        traceback.print_exc()
        event("failed", reason=reason_of(error))
        write_atomically(
            folder / "result.json", TrialResult(config, reason=reason_of(error)).to_json()
        )
        return 1
    return 0


def run_trial(
    config: TrialConfig, study_folder: Path, folder: Path, event: Any, checkpoint_steps: int
) -> None:
    """Train, test, write."""
    if config.device == "cpu":
        torch.set_num_threads(1)  # how a sum is shared between threads decides its last bits
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)
    symbols = {s: splits.read_split(study_folder, s, config.corpus) for s in splits.SPLITS}
    model, cursor = train.train_decoder(
        config, symbols["train"], symbols["valid"], folder, event, checkpoint_steps
    )
    event("testing")
    began = time.perf_counter()
    by_length, by_position, by_context = evaluate.evaluate_lengths(model, symbols["test"], config)
    shape = train.shape_of(config)
    encoding = create(config.encoding, shape)  # one layer's, where each has its own
    result = TrialResult(
        config=config,
        parameters=sum(p.numel() for p in model.parameters()),
        encoding_parameters=sum(p.numel() for p in model.encoding.parameters()),
        spec=effective_spec(config.encoding, encoding, shape),
        training=cursor.training,
        by_length=by_length,
        by_position=by_position,
        by_context=by_context,
    )
    timing = Timing(
        tokens_per_second=config.steps * config.batch * config.train_length / cursor.train_seconds,
        train_seconds=cursor.train_seconds,
        test_seconds=time.perf_counter() - began,
    )
    weights = {name: value.cpu().contiguous() for name, value in model.state_dict().items()}
    write_atomically(folder / "model.safetensors", save(weights))
    if expressible(model):
        export_llama(model, folder / "huggingface", max_positions=config.train_length)
    write_atomically(folder / "timing.json", timing.to_json())
    write_atomically(folder / "result.json", result.to_json())
    checkpoint.clear_checkpoint(folder)


def reason_of(error: Exception) -> str:
    """One line for the user; the traceback is in the trial's log."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, train.TrialFailed | FloatingPointError):
        return text
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full: {text}"
    allocation = "can't allocate memory" in text
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or allocation:
        return f"out of memory; try a smaller --batch or shorter lengths ({text})"
    return f"{type(error).__name__}: {text}"


class _Events:
    """Lines of JSON; of steps no more than five a second."""

    def __init__(self, stream) -> None:
        self.stream, self.last = stream, 0.0

    def __call__(self, kind: str, **values: Any) -> None:
        now = time.monotonic()
        if kind == "step":
            if now - self.last < 0.2:
                return
            self.last = now
        try:
            self.stream.write(json.dumps({"kind": kind, **values}) + "\n")
        except BrokenPipeError:  # the sweep is gone: stop as if killed, which fails nothing
            os._exit(3)


def _end_with_stdin() -> None:
    # Not sys.stdin, whose lock a thread must not hold when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
