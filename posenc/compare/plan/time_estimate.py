"""Estimate the time of a comparison from steps measured on its device before it starts."""

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from posenc.compare.trial import process
from posenc.compare.trial.config import write_trial
from posenc.report.files.opened import append_to, make_inside
from posenc.tasks.known import TEXT

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from posenc.compare.trial.config import TrialConfig

WARM_UP, STEPS = 2, 2
"""Untimed steps, in which memory is allocated, and timed steps."""
START_SECONDS = 3
"""Time that a trial's process needs to import torch."""
WORTH = 500
"""Steps below which nothing is measured; measuring one encoding takes about 5 s."""
PATIENCE = 120
"""Seconds after which the measurement of an encoding is given up."""


def expected_seconds(
    trials: "Sequence[TrialConfig]", folder: Path, workers: int, here: int | None = None
) -> int | None:
    """Return the seconds that these trials, with text in `folder`, take on `workers` workers; None
    for few steps, and where an encoding cannot be measured here.

    Each encoding is measured in a process like those of the trials, `here` at a time (None:
    `workers`), because cores share caches and memory.
    """
    if sum(trial.steps for trial in trials) < WORTH:
        return None
    seconds = seconds_by_kind(trials, folder, here or workers)
    if any(kind_of(trial) not in seconds for trial in trials):
        return None
    return round(sum(seconds[kind_of(trial)] for trial in trials) / workers)


def seconds_by_kind(
    trials: "Sequence[TrialConfig]", folder: Path, at_once: int
) -> dict[str, float]:
    """Return the seconds of one trial of each kind that can be measured here, `at_once` at a time;
    {} without trials."""
    if not trials:
        return {}
    one_each = {kind_of(trial): trial for trial in trials}
    for trial in one_each.values():
        write_trial(make_inside(folder / trial.folder), trial)
    at_once = min(at_once, len(one_each))
    shares = [list(one_each.values())[i::at_once] for i in range(at_once)]
    seconds: dict[str, float] = {}
    with ThreadPoolExecutor(len(shares)) as pool:
        for of_share in pool.map(lambda share: _measured(share, folder), shares):
            seconds |= of_share
    return seconds


def kind_of(trial: "TrialConfig") -> str:
    """Return the kind of a trial; trials of a kind take equally long."""
    name = trial.encoding if trial.task == TEXT else f"{trial.encoding} on {trial.task}"
    choosing = len(trial.test_lengths) == 1  # a rate, in a fifth of the steps
    return f"{name}, {trial.steps:,} steps" if choosing else name


def _measured(trials: "Sequence[TrialConfig]", folder: Path) -> dict[str, float]:
    """Return the seconds of one trial of each encoding. One that cannot be measured is left out;
    the log of the first trial has the reason."""
    homes = [folder / trial.folder for trial in trials]
    with (
        append_to(homes[0] / "log.txt") as log,
        subprocess.Popen(
            process.command("posenc.compare.plan.time_estimate", folder, *homes),
            stdin=subprocess.PIPE,  # closes when this process ends, and the other one ends too
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=process.environment(trials[0].device),
        ) as measuring,
    ):
        assert measuring.stdout is not None
        patience = threading.Timer(PATIENCE * len(trials), measuring.kill)
        patience.daemon = True
        patience.start()
        answer = measuring.stdout.read()
        measuring.wait()  # closing stdin earlier would end it
        patience.cancel()
    return json.loads(answer or "{}")


def main(parent: str, study_folder: str, *trial_folders: str) -> int:
    """Run the measuring process: print a JSON object from each kind of trial to its seconds."""
    process.end_with_parent(int(parent))
    # Prints of a user's encoding must not mix with the result.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch

    from posenc.compare.trial.config import read_trial

    torch.set_num_threads(1)
    seconds = {}
    for trial in [read_trial(Path(folder)) for folder in trial_folders]:
        try:
            seconds[kind_of(trial)] = _seconds_of_one(trial, Path(study_folder))
        except Exception:  # torch or an encoding may raise anything
            print(f"{kind_of(trial)} could not be timed:", file=sys.stderr, flush=True)
            traceback.print_exc()
    answer.write(json.dumps(seconds))
    answer.flush()
    return 0


def _seconds_of_one(trial: "TrialConfig", folder: Path) -> float:
    """Measure how long a trial takes in all: start, training, validations and test. folder: that of
    the study, which has the text."""
    import numpy as np

    from posenc.compare.trial import train, windows

    model = train.build_model(trial)
    text = trial.task == TEXT
    symbols = windows.read_split(folder, "train", trial.corpus) if text else np.empty(0, np.uint16)
    step = _seconds_per_step(model, trial, symbols)
    testing = _seconds_without_gradients if text else _seconds_of_cases
    return START_SECONDS + trial.steps * step + testing(model, trial)


def _seconds_per_step(model: "nn.Module", trial: "TrialConfig", symbols: "np.ndarray") -> float:
    """Return the mean seconds of a training step, after WARM_UP untimed ones."""
    from posenc.compare.trial import train

    optimizer = train.optimizer_for(model, trial)
    model = train.maybe_compiled(model, trial)
    for step in range(WARM_UP):
        train.take_step(model, optimizer, trial, symbols, step)
    began = _now(trial)
    for step in range(WARM_UP, WARM_UP + STEPS):
        train.take_step(model, optimizer, trial, symbols, step)
    return (_now(trial) - began) / STEPS


def _now(trial: "TrialConfig") -> float:
    """Return the time at which the device has done what it was asked for."""
    import torch

    if trial.device != "cpu":
        getattr(torch, trial.device.partition(":")[0]).synchronize()
    return time.perf_counter()


def _seconds_of_cases(model: "nn.Module", trial: "TrialConfig") -> float:
    """Return the seconds of a task's validations and tests; one piece of each case is timed after
    an untimed one."""
    from posenc.compare.trial import evaluate, forward, train
    from posenc.compare.trial.material import task_of

    task = task_of(trial)
    total = 0.0
    assert task is not None
    model.eval()
    for case in task.cases(trial.test_lengths):
        if evaluate.cannot_run(model.encoding, task, case):  # type: ignore[arg-type]
            continue
        rows = max(1, evaluate.TASK_TOKENS_AT_ONCE // task.tokens(case))
        batch = task.test_batch(case, rows, trial.train_length)
        forward.answers(model, batch, trial, task.end, rows)
        began = _now(trial)
        forward.answers(model, batch, trial, task.end, rows)
        seconds = (_now(trial) - began) / rows
        total += seconds * evaluate.SEQUENCES
        if case.length == trial.train_length and not case.variant:
            total += train.VALIDATIONS * seconds * evaluate.VALID_SEQUENCES
    return total


def _seconds_without_gradients(model: "nn.Module", trial: "TrialConfig") -> float:
    """Return the seconds of validations and test; one piece at each length is timed after an
    untimed one."""
    import torch

    from posenc.compare.trial import evaluate, train, windows
    from posenc.compare.trial.objectives import objective_of

    model.eval()
    objective = objective_of(trial)
    total = 0.0
    for length in trial.test_lengths:
        if evaluate.cannot(model.encoding, objective.longest_part(length)):  # type: ignore[arg-type]
            continue
        rows = torch.zeros(max(1, evaluate.TOKENS_AT_ONCE // length), length + 1, dtype=torch.long)
        asked = objective.ask_held_out(rows)
        with torch.no_grad():
            objective.losses(model, asked, trial)
            began = _now(trial)
            objective.losses(model, asked, trial)
        per_token = (_now(trial) - began) / (rows.shape[0] * length)
        total += per_token * windows.HELD_OUT_BYTES
        if length == trial.train_length:
            count = min(windows.VALID_WINDOWS, windows.HELD_OUT_BYTES // length)
            total += train.VALIDATIONS * per_token * count * length
    return total
