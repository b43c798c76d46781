"""Measure training steps on the device of a comparison before it starts: to announce its time, and
to say what encodings cost. The module loads no torch: a measuring process is one of
`posenc.compare.trial.process`, which ends with its parent from before torch is imported."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, TypedDict

from posenc.compare.defaults import TUNE_BATCH
from posenc.compare.trial import process
from posenc.compare.trial.config import write_trial
from posenc.files.opening import make_subfolder, open_to_append
from posenc.tasks.registry import TEXT

if TYPE_CHECKING:
    from torch import nn

    from posenc.compare.trial.config import TrialConfig

WARM_UP_STEPS = 1
"""Untimed steps of each model, in which memory is allocated."""
TIMED_STEPS = 6
"""Timed steps of each model, over all processes that measure, at least. The range of six ratios
holds their median in 97 % of cases."""
MAX_BYTES_IN_TURNS = 1 << 30
"""Bytes of models and optimizers that are in memory together, to take steps in turns."""
START_SECONDS = 3
"""Time that a trial's process needs to import torch: chosen, not measured each time."""
MIN_STEPS_TO_MEASURE = 500
"""Steps of all trials together below which nothing is measured; measuring one encoding takes about
5 s."""
TIMEOUT_SECONDS = 120
"""Seconds for each training length after which the measurement of an encoding is given up: chosen,
not derived."""


@dataclass(frozen=True)
class MeasuredKind:
    """What was measured of a kind of trials, see `kind_of_trial`.

    step_seconds: of training steps, taken in turns with those of the other kinds.
    seconds: of a whole trial: start, training, validations and tests.
    """

    step_seconds: tuple[float, ...]
    seconds: float


def expected_seconds(
    trials: "Sequence[TrialConfig]",
    measured: Mapping[str, MeasuredKind],
    workers: int,
) -> int | None:
    """Return the seconds that these trials take on `workers` workers; None where a kind of them was
    not measured."""
    if not trials or any(kind_of_trial(trial) not in measured for trial in trials):
        return None
    return round(sum(measured[kind_of_trial(trial)].seconds for trial in trials) / workers)


def measure_kinds(
    trials: "Sequence[TrialConfig]", folder: Path, num_processes: int
) -> dict[str, MeasuredKind]:
    """Return what was measured of each kind of these trials, with text in `folder`; a kind that
    cannot be measured on this machine is left out.

    Every process takes steps of all kinds in turns, so that what else the machine does slows all
    alike, and each kind's tests are timed in one of them.

    num_processes: processes that measure at the same time, as many as trials will run here,
        because cores share caches and memory.
    """
    if not trials:
        return {}
    trial_by_kind = {kind_of_trial(trial): trial for trial in trials}
    trials_to_measure = list(trial_by_kind.values())
    for trial in trials_to_measure:
        write_trial(make_subfolder(folder / trial.folder), trial)
    num_processes = min(num_processes, len(trials_to_measure))
    with ThreadPoolExecutor(num_processes) as pool:
        answers = list(
            pool.map(
                lambda i: _measure_in_process(trials_to_measure, folder, i, num_processes),
                range(num_processes),
            )
        )
    return _join_measurements(answers)


def _join_measurements(answers: "Sequence[dict[str, _Measured]]") -> dict[str, MeasuredKind]:
    """Return what several processes have measured, by kind: the steps that all have taken, and the
    other seconds of the one that timed the kind's tests."""
    measured_kinds = {}
    kinds_in_all = set.intersection(*(set(answer) for answer in answers))
    for kind in answers[0]:
        measured_everywhere = [answer[kind] for answer in answers if kind in kinds_in_all]
        measured_with_tests = next(
            (measured for measured in measured_everywhere if measured["num_steps"] is not None),
            None,
        )
        if measured_with_tests is None:
            continue
        step_seconds = [
            seconds for measured in measured_everywhere for seconds in measured["step_seconds"]
        ]
        num_steps = measured_with_tests["num_steps"] or 0.0
        seconds = (
            START_SECONDS + num_steps * median(step_seconds) + measured_with_tests["test_seconds"]
        )
        measured_kinds[kind] = MeasuredKind(tuple(step_seconds), seconds)
    return measured_kinds


def kind_of_trial(trial: "TrialConfig") -> str:
    """Return the kind of a trial as text, for the table: encoding and task, such as `rope on copy`.
    Trials of a kind take equally long."""
    encoding_and_task = (
        trial.encoding if trial.task == TEXT else f"{trial.encoding} on {trial.task}"
    )
    # Trials that choose a learning rate have the training length as their only test length. They
    # often take fewer steps, so the kind names these.
    chooses_rate = len(trial.test_lengths) == 1
    return f"{encoding_and_task}, {trial.steps:,} steps" if chooses_rate else encoding_and_task


class _Measured(TypedDict):
    """What a process has measured of a kind of trials.

    step_seconds: of training steps. num_steps: steps of a trial, those of a tuning converted to as
        many as take as long; None where another process times the tests.
    test_seconds: of validations and tests; 0 there.
    """

    step_seconds: list[float]
    num_steps: float | None
    test_seconds: float


def _measure_in_process(
    trials: "Sequence[TrialConfig]", folder: Path, index: int, count: int
) -> "dict[str, _Measured]":
    """Measure these trials, each of another kind, in a process of their own. Return what was
    measured by kind. One that cannot be measured is left out; the log of the trial at `index` has
    the reason.

    index, count: which of so many processes this is; it times the tests of each `count`-th trial.
    """
    trial_folders = [folder / trial.folder for trial in trials]
    with (
        open_to_append(trial_folders[index] / "log.txt") as log,
        subprocess.Popen(
            process.command(
                "posenc.compare.plan.time_estimate", folder, index, count, *trial_folders
            ),
            stdin=subprocess.PIPE,  # closes when this process ends, and the other one ends too
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=process.trial_environment(trials[0].device, saves_memory=trials[0].saves_memory),
        ) as measuring_process,
    ):
        assert measuring_process.stdout is not None
        num_lengths = sum(len(trial.lengths_of_steps) for trial in trials)
        timer = threading.Timer(TIMEOUT_SECONDS * num_lengths, measuring_process.kill)
        timer.daemon = True
        timer.start()
        answer_text = measuring_process.stdout.read()
        measuring_process.wait()  # closing stdin earlier would end it
        timer.cancel()
    return json.loads(answer_text or "{}")


def main(parent_id: str, study_folder: str, index: str, count: str, *trial_folders: str) -> int:
    """Run a measuring process: print a JSON object from each kind of trial to its `_Measured`.

    parent_id: of the process that waits for it. index, count: see `_measure_in_process`.
    Returns: the exit code, 0.
    """
    process.end_with_parent(int(parent_id))
    # Prints of a user's encoding must not mix with the result.
    answer_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout goes to stderr, the log
    import torch

    from posenc.compare.trial.config import read_trial

    torch.set_num_threads(1)
    trials = [read_trial(Path(folder)) for folder in trial_folders]
    with_tests_of = [i % int(count) == int(index) for i in range(len(trials))]
    turns = -(-TIMED_STEPS // int(count))  # rounded up
    measured = _measure(trials, with_tests_of, Path(study_folder), turns)
    answer_stream.write(json.dumps(measured))
    answer_stream.flush()
    return 0


def _measure(
    trials: "Sequence[TrialConfig]", with_tests_of: Sequence[bool], folder: Path, turns: int
) -> "dict[str, _Measured]":
    """Return what is measured of these trials by kind; those that fail are left out.

    with_tests_of: for each trial, whether its tests are timed. folder: of the study, with the text.
    turns: timed steps of each.
    """
    measured_by_kind: dict[str, _Measured] = {}
    models_in_memory: list[_TimedModel] = []
    for trial, with_tests in zip(trials, with_tests_of, strict=True):
        with _report_failure(trial):
            timed_model = _TimedModel(trial, folder)
            if (
                sum(model.num_bytes for model in (*models_in_memory, timed_model))
                > MAX_BYTES_IN_TURNS
            ):
                _take_turns(models_in_memory, turns, measured_by_kind)
                models_in_memory = []
            for _ in range(WARM_UP_STEPS):
                timed_model.take_step()
            if with_tests:
                timed_model.time_tests()
            models_in_memory.append(timed_model)
    _take_turns(models_in_memory, turns, measured_by_kind)
    return measured_by_kind


def _take_turns(
    models: "list[_TimedModel]", turns: int, measured_by_kind: "dict[str, _Measured]"
) -> None:
    """Time `turns` steps of each model, one of each in turn, and add what is measured to
    `measured_by_kind`; models that fail are left out."""
    for _ in range(turns):
        for timed_model in models:
            with _report_failure(timed_model.trial):
                timed_model.step_seconds.append(timed_model.take_step())
    for timed_model in models:
        if len(timed_model.step_seconds) == turns:
            measured_by_kind[kind_of_trial(timed_model.trial)] = {
                "step_seconds": timed_model.step_seconds,
                "num_steps": timed_model.num_steps,
                "test_seconds": timed_model.test_seconds,
            }


@contextlib.contextmanager
def _report_failure(trial: "TrialConfig") -> Iterator[None]:
    """Write the error of the block under `with` to stderr, the log, and go on after it."""
    try:
        yield
    except Exception:  # torch or an encoding may raise anything
        print(f"{kind_of_trial(trial)} could not be timed:", file=sys.stderr, flush=True)
        traceback.print_exc()


class _TimedModel:
    """The model of a trial, whose training steps are timed.

    num_bytes: of the weights and the optimizer. step_seconds: of the timed steps.
    num_steps, test_seconds: as in `_Measured`, once the tests are timed.
    """

    def __init__(self, trial: "TrialConfig", folder: Path) -> None:
        """folder: that of the study, which has the text."""
        import numpy as np

        from posenc.compare.plan.cost import BYTES_PER_PARAMETER
        from posenc.compare.trial import train, windows

        self.trial = trial
        self.symbols = np.empty(0, np.uint16)
        if trial.task == TEXT:
            self.symbols = windows.read_split(folder, "train", trial.corpus, trial.vocabulary)
        self.model = train.build_model(trial)
        self.optimizer = train.optimizer_for(self.model, trial)
        self.compiled_model = train.compile_if_asked(self.model, trial)
        self.num_bytes = BYTES_PER_PARAMETER * sum(p.numel() for p in self.model.parameters())
        self.num_steps_taken = 0
        self.step_seconds: list[float] = []
        self.num_steps: float | None = None
        self.test_seconds = 0.0

    def take_step(self) -> float:
        """Take a training step with windows of each length, and return their mean seconds: a
        training has equally many of them."""
        trials_of_one_length = [
            self.trial.at_length(length) for length in self.trial.lengths_of_steps
        ]
        return fmean(map(self._take_step_of, trials_of_one_length))

    def _take_step_of(self, trial: "TrialConfig") -> float:
        """Take a training step of a trial that differs from the model's in the length of its
        windows only, and return its seconds."""
        from posenc.compare.trial import train

        self.model.train()
        began = _time_after_device(self.trial)
        train.take_step(
            self.compiled_model, self.optimizer, trial, self.symbols, self.num_steps_taken
        )
        self.num_steps_taken += 1
        return _time_after_device(self.trial) - began

    def time_tests(self) -> None:
        """Time the validations and tests of the trial, and count its steps."""
        from posenc.compare.trial.readings import can_be_tuned

        trial = self.trial
        is_on_text = trial.task == TEXT
        seconds_of_evaluation = (
            _seconds_of_text_evaluation if is_on_text else _seconds_of_task_evaluation
        )
        self.test_seconds = seconds_of_evaluation(self.model, trial)
        self.num_steps = float(trial.steps)  # tuning, added below, is no whole number of steps
        if trial.tune_steps and can_be_tuned(self.model):
            tokens_per_step = TUNE_BATCH * max(trial.test_lengths)
            cost_with_teacher = 4 / 3  # a forward pass more than forward and backward
            steps_per_tuning_step = (
                cost_with_teacher * tokens_per_step / (trial.batch * trial.train_length)
            )
            self.num_steps += trial.tune_steps * steps_per_tuning_step
            self.test_seconds *= 2  # the tuned model is tested, too


def _time_after_device(trial: "TrialConfig") -> float:
    """Wait until the trial's device has done what it was asked for, and return the time then, in
    seconds. A GPU works on while Python continues."""
    import torch

    if trial.device != "cpu":
        getattr(torch, trial.device.partition(":")[0]).synchronize()
    return time.perf_counter()


def _seconds_of_task_evaluation(model: "nn.Module", trial: "TrialConfig") -> float:
    """Return the seconds of a task's validations and tests; one piece of each case is timed."""
    from posenc.compare.trial import evaluate, train
    from posenc.compare.trial.task_of_trial import task_of

    task = task_of(trial)
    total_seconds = 0.0
    assert task is not None  # the caller has one
    model.eval()
    for case in task.cases(trial.test_lengths):
        if evaluate.why_case_impossible(model.encoding, task, case):  # type: ignore[arg-type]
            continue
        num_rows = max(1, evaluate.TASK_TOKENS_AT_ONCE // task.max_tokens(case))
        batch = task.test_batch(case, num_rows, trial.train_length)
        began = _time_after_device(trial)
        evaluate.likeliest_tokens(model, batch, trial, task.end_token, num_rows)
        seconds_per_row = (_time_after_device(trial) - began) / num_rows
        total_seconds += seconds_per_row * evaluate.NUM_TEST_SEQUENCES
        if case.length == trial.train_length and not case.variant:
            total_seconds += train.NUM_VALIDATIONS * seconds_per_row * evaluate.NUM_VALID_SEQUENCES
    return total_seconds


def _seconds_of_text_evaluation(model: "nn.Module", trial: "TrialConfig") -> float:
    """Return the seconds of validations and test; one piece at each length is timed."""
    from posenc.compare.trial import evaluate, train, windows
    from posenc.compare.trial.objectives import objective_of

    model.eval()
    objective = objective_of(trial)
    train_length = trial.train_length
    num_windows = trial.num_windows or windows.NUM_WINDOWS
    total_seconds = 0.0
    for length in trial.test_lengths:
        if evaluate.why_length_impossible(model.encoding, objective.longest_stack_input(length)):  # type: ignore[arg-type]
            continue
        seconds_per_token = _seconds_per_token_read(model, trial, length)
        if length == train_length:
            validation_tokens = windows.NUM_VALID_WINDOWS * length
            # Far targets are read in overlapping windows with near context, once for all lengths,
            # and with each shorter context.
            num_contexts = 1 + objective.num_short_contexts
            far_tokens = (
                num_windows * length * objective.num_near_pieces * num_contexts
                if trial.test_lengths[1:]
                else 0
            )
            test_tokens = max(num_windows * length, windows.NEAR_BYTES) + far_tokens
            total_seconds += seconds_per_token * (
                test_tokens + train.NUM_VALIDATIONS * validation_tokens
            )
            continue
        is_longest = length == max(trial.test_lengths)
        # The longest are read again in a window, which takes as long.
        times_read = 2 if trial.test_window and is_longest else 1
        total_seconds += seconds_per_token * num_windows * length * times_read
    return total_seconds


def _seconds_per_token_read(model: "nn.Module", trial: "TrialConfig", length: int) -> float:
    """Return the seconds for each token of windows of a length, measured on one piece."""
    import torch

    from posenc.compare.trial import evaluate
    from posenc.compare.trial.objectives import objective_of

    objective = objective_of(trial)
    # The time does not depend on the bytes; a row has the byte after its window, too.
    rows = torch.zeros(max(1, evaluate.TOKENS_AT_ONCE // length), length + 1, dtype=torch.long)
    held_out = objective.held_out_targets(rows)
    with torch.no_grad():
        began = _time_after_device(trial)
        objective.losses(model, held_out, trial)
    return (_time_after_device(trial) - began) / (rows.shape[0] * length)
