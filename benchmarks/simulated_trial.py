"""A trial that sleeps in place of computing, for benchmarks/engines.py; otherwise like a trial:
it tells steps, writes its result, and ends with the process that started it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from posenc.compare.trial.process import end_with_parent
from posenc.report.atomic import write_atomically
from posenc.report.record import seal


def main(parent: str, study_folder: str, trial_folder: str, checkpoint_steps: str) -> int:
    end_with_parent(int(parent))
    home = Path(trial_folder)
    config = json.loads((home / "config.json").read_text(encoding="utf-8"))
    seconds = config["lr"]  # what is simulated needs no learning rate
    for step in range(1, config["steps"] + 1):
        time.sleep(seconds / config["steps"])
        told = {"kind": "step", "step": step, "loss": 2.0}
        os.write(1, (json.dumps(told) + "\n").encode())
    write_atomically(home / "timing.json", seal(dict.fromkeys(_TIMING, seconds)))
    result = {"config": config, "reason": None, "timing": None} | dict.fromkeys(_NUMBERS, 0)
    result |= {name: [] for name in _LISTS} | {"spec": {}}
    write_atomically(home / "result.json", seal(result))
    return 0


_TIMING = ("tokens_per_second", "train_seconds", "test_seconds")
_NUMBERS = ("parameters", "encoding_parameters")
_LISTS = ("training", "by_length", "by_position", "by_context", "by_case")
