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
from posenc.files.opening import make_subfolder, open_to_append
from posenc.tasks.registry import TEXT

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from posenc.compare.trial.config import TrialConfig

WARM_UP, STEPS = 2, 2
"""Untimed steps, in which memory is allocated, and timed steps."""
START_SECONDS = 3
"""Time that a trial's process needs to import torch: chosen, not measured each time."""
MIN_STEPS_TO_MEASURE = 500
"""Steps of all trials together below which nothing is measured; measuring one encoding takes about
5 s."""
TIMEOUT_SECONDS = 120
"""Seconds after which the measurement of an encoding is given up: chosen, not derived."""


def expected_seconds(
    trials: "Sequence[TrialConfig]", folder: Path, workers: int, local_workers: int | None = None
) -> int | None:
    """Return the seconds that these trials, with text in `folder`, take on `workers` workers; None
    for few steps, and where an encoding cannot be measured on this machine.

    Each encoding is measured in a process like those of the trials, `local_workers` at a time
    (None: `workers`), because cores share caches and memory.
    """
    if sum(trial.steps for trial in trials) < MIN_STEPS_TO_MEASURE:
        return None
    seconds = seconds_by_kind(trials, folder, local_workers or workers)
    if any(kind_of_trial(trial) not in seconds for trial in trials):
        return None
    return round(sum(seconds[kind_of_trial(trial)] for trial in trials) / workers)


def seconds_by_kind(
    trials: "Sequence[TrialConfig]", folder: Path, at_once: int
) -> dict[str, float]:
    """Return the seconds of one trial by its kind, see `kind_of_trial`; a kind that cannot be
    measured here is left out.

    at_once: number of processes that measure at the same time.
    """
    if not trials:
        return {}
    trial_by_kind = {kind_of_trial(trial): trial for trial in trials}
    to_measure = list(trial_by_kind.values())
    for trial in to_measure:
        write_trial(make_subfolder(folder / trial.folder), trial)
    at_once = min(at_once, len(to_measure))
    shares = [to_measure[i::at_once] for i in range(at_once)]
    seconds: dict[str, float] = {}
    with ThreadPoolExecutor(len(shares)) as pool:
        for seconds_of_share in pool.map(lambda share: _measure_in_process(share, folder), shares):
            seconds |= seconds_of_share
    return seconds


def kind_of_trial(trial: "TrialConfig") -> str:
    """Return the kind of a trial as text, for the table: encoding and task, such as `rope on copy`.
    Trials of a kind take equally long."""
    name = trial.encoding if trial.task == TEXT else f"{trial.encoding} on {trial.task}"
    chooses_rate = len(trial.test_lengths) == 1  # often in fewer steps
    return f"{name}, {trial.steps:,} steps" if chooses_rate else name


def _measure_in_process(trials: "Sequence[TrialConfig]", folder: Path) -> dict[str, float]:
    """Measure these trials, each of another kind, one after the other in a process of their own.
    Return the seconds of each by its kind. One that cannot be measured is left out; the log of the
    first trial has the reason."""
    homes = [folder / trial.folder for trial in trials]
    with (
        open_to_append(homes[0] / "log.txt") as log,
        subprocess.Popen(
            process.command("posenc.compare.plan.time_estimate", folder, *homes),
            stdin=subprocess.PIPE,  # closes when this process ends, and the other one ends too
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=process.trial_environment(trials[0].device),
        ) as measuring,
    ):
        assert measuring.stdout is not None
        patience = threading.Timer(TIMEOUT_SECONDS * len(trials), measuring.kill)
        patience.daemon = True
        patience.start()
        answer = measuring.stdout.read()
        measuring.wait()  # closing stdin earlier would end it
        patience.cancel()
    return json.loads(answer or "{}")


def main(parent: str, study_folder: str, *trial_folders: str) -> int:
    """Run the measuring process: print a JSON object from each kind of trial to its seconds.

    parent: id of the process that waits for it.
    Returns: the exit code, 0.
    """
    process.end_with_parent(int(parent))
    # Prints of a user's encoding must not mix with the result.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout goes to stderr, the log
    import torch

    from posenc.compare.trial.config import read_trial

    torch.set_num_threads(1)
    seconds = {}
    for trial in [read_trial(Path(folder)) for folder in trial_folders]:
        try:
            seconds[kind_of_trial(trial)] = _seconds_of_trial(trial, Path(study_folder))
        except Exception:  # torch or an encoding may raise anything
            print(f"{kind_of_trial(trial)} could not be timed:", file=sys.stderr, flush=True)
            traceback.print_exc()
    answer.write(json.dumps(seconds))
    answer.flush()
    return 0


def _seconds_of_trial(trial: "TrialConfig", folder: Path) -> float:
    """Return how many seconds a trial takes in all: start, training, validations and test.

    folder: folder of the study, which has the text.
    """
    import numpy as np

    from posenc.compare.trial import train, windows
    from posenc.compare.trial.readings.tuned import can_be_tuned
    from posenc.hf.tune.config import TuneConfig

    model = train.build_model(trial)
    symbols = np.empty(0, np.uint16)
    evaluation = _seconds_of_task_evaluation
    if trial.task == TEXT:
        symbols = windows.read_split(folder, "train", trial.corpus)
        evaluation = _seconds_of_text_evaluation
    seconds_per_step = _seconds_per_step(model, trial, symbols)
    seconds_of_test = evaluation(model, trial)
    seconds = START_SECONDS + trial.steps * seconds_per_step + seconds_of_test
    if trial.tune_steps and can_be_tuned(model):
        per_token = seconds_per_step / (trial.batch * trial.train_length)
        tokens_per_step = TuneConfig().batch * max(trial.test_lengths)
        with_teacher = 4 / 3  # a forward pass more than forward and backward
        seconds += trial.tune_steps * tokens_per_step * per_token * with_teacher + seconds_of_test
    return seconds


def _seconds_per_step(model: "nn.Module", trial: "TrialConfig", symbols: "np.ndarray") -> float:
    """Return the mean seconds of a training step, after WARM_UP untimed ones.

    symbols: the training text; a task ignores it.
    """
    from posenc.compare.trial import train

    optimizer = train.optimizer_for(model, trial)
    model = train.compile_if_asked(model, trial)
    for step in range(WARM_UP):
        train.take_step(model, optimizer, trial, symbols, step)
    began = _time_after_device(trial)
    for step in range(WARM_UP, WARM_UP + STEPS):
        train.take_step(model, optimizer, trial, symbols, step)
    return (_time_after_device(trial) - began) / STEPS


def _time_after_device(trial: "TrialConfig") -> float:
    """Wait until the trial's device has done what it was asked for, and return the time then, in
    seconds. A GPU works on while Python continues."""
    import torch

    if trial.device != "cpu":
        getattr(torch, trial.device.partition(":")[0]).synchronize()
    return time.perf_counter()


def _seconds_of_task_evaluation(model: "nn.Module", trial: "TrialConfig") -> float:
    """Return the seconds of a task's validations and tests; one piece of each case is timed after
    an untimed one."""
    from posenc.compare.trial import evaluate, forward, train
    from posenc.compare.trial.task_of_trial import task_of

    task = task_of(trial)
    total = 0.0
    assert task is not None  # the caller has one
    model.eval()
    for case in task.cases(trial.test_lengths):
        if evaluate.why_case_impossible(model.encoding, task, case):  # type: ignore[arg-type]
            continue
        rows = max(1, evaluate.TASK_TOKENS_AT_ONCE // task.max_tokens(case))
        batch = task.test_batch(case, rows, trial.train_length)
        forward.likeliest_tokens(model, batch, trial, task.end, rows)
        began = _time_after_device(trial)
        forward.likeliest_tokens(model, batch, trial, task.end, rows)
        seconds = (_time_after_device(trial) - began) / rows
        total += seconds * evaluate.TEST_SEQUENCES
        if case.length == trial.train_length and not case.variant:
            total += train.VALIDATIONS * seconds * evaluate.VALID_SEQUENCES
    return total


def _seconds_of_text_evaluation(model: "nn.Module", trial: "TrialConfig") -> float:
    """Return the seconds of validations and test; one piece at each length is timed after an
    untimed one."""
    from posenc.compare.trial import evaluate, train, windows
    from posenc.compare.trial.objectives import objective_of

    model.eval()
    objective = objective_of(trial)
    near = trial.train_length
    num_windows = trial.num_windows or windows.NUM_WINDOWS
    total = 0.0
    for length in trial.test_lengths:
        if evaluate.why_length_impossible(model.encoding, objective.longest_stack_input(length)):  # type: ignore[arg-type]
            continue
        per_token = _seconds_per_token_read(model, trial, length)
        if length == near:
            validation = windows.VALID_WINDOWS * length
            # Far targets are read with near context in overlapping windows, once for all lengths.
            far = num_windows * length * objective.near_pieces if trial.test_lengths[1:] else 0
            tokens = max(num_windows * length, windows.NEAR_BYTES) + far
            total += per_token * (tokens + train.VALIDATIONS * validation)
            continue
        is_longest = length == max(trial.test_lengths)
        # The longest are read again in a window, which takes as long.
        times_read = 2 if trial.test_window and is_longest else 1
        total += per_token * num_windows * length * times_read
    return total


def _seconds_per_token_read(model: "nn.Module", trial: "TrialConfig", length: int) -> float:
    """Return the seconds for each token of windows of a length, measured after an untimed piece."""
    import torch

    from posenc.compare.trial import evaluate
    from posenc.compare.trial.objectives import objective_of

    objective = objective_of(trial)
    # The time does not depend on the bytes; a row has the byte after its window, too.
    rows = torch.zeros(max(1, evaluate.TOKENS_AT_ONCE // length), length + 1, dtype=torch.long)
    held_out = objective.held_out_targets(rows)
    with torch.no_grad():
        objective.losses(model, held_out, trial)
        began = _time_after_device(trial)
        objective.losses(model, held_out, trial)
    return (_time_after_device(trial) - began) / (rows.shape[0] * length)
