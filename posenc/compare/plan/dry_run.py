"""Show the trials, tokens and time of a comparison without training."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from posenc.command_line.progress import readable_duration
from posenc.compare.plan.cost import memory_in_words
from posenc.compare.plan.splits import TextSplits
from posenc.compare.plan.time_estimate import kind_of_trial, measure_kinds
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.task_of_trial import max_row_tokens
from posenc.report.report import Report, Section, Table


def most_training_tokens(trial: TrialConfig) -> int:
    """Return the maximum number of tokens that a trial trains on: sequences of a task may be
    shorter than its longest."""
    return trial.steps * trial.batch * max_row_tokens(trial)


def dry_run(
    trials: Sequence[TrialConfig], splits: TextSplits | None, workers: int, local_workers: int
) -> Report:
    """Return the report of a run that is not started: trials, tokens and time, with a row for each
    encoding and task.

    workers, local_workers: trials at a time, and those of them on this machine. Times are from
    steps measured now, in as many processes like those of the trials. Nothing is left on disk.
    """
    with tempfile.TemporaryDirectory(prefix="posenc-") as scratch:
        folder = Path(scratch)
        if splits is not None:
            splits.write(folder)
        measured = measure_kinds(trials, folder, local_workers)
    seconds_by_kind = {kind: measured_kind.seconds for kind, measured_kind in measured.items()}
    trials_by_kind: dict[str, list[TrialConfig]] = {}
    for trial in trials:
        trials_by_kind.setdefault(kind_of_trial(trial), []).append(trial)
    total_seconds = None
    if seconds_by_kind.keys() == trials_by_kind.keys():
        seconds_of_all = sum(seconds_by_kind[kind_of_trial(trial)] for trial in trials)
        # No number of workers makes a trial faster.
        total_seconds = max(seconds_of_all / workers, *seconds_by_kind.values())
    headline = _sentence(trials, total_seconds, workers)
    rows = []
    for kind, trials_of_kind in trials_by_kind.items():
        num_tokens = sum(map(most_training_tokens, trials_of_kind))
        time_in_words = (
            readable_duration(seconds_by_kind[kind]) if kind in seconds_by_kind else "not measured"
        )
        rows.append([kind, len(trials_of_kind), trials_of_kind[0].steps, num_tokens, time_in_words])
    header = ("trials of", "trials", "steps", "tokens", "time of one")
    table = Table(header, rows, "What would run", name="trials")
    return Report(
        "What would run",
        headline,
        {"seconds": total_seconds, "seconds_of_one": seconds_by_kind},
        [Section("", [table])],
    )


def _sentence(trials: Sequence[TrialConfig], seconds: float | None, workers: int) -> str:
    """Return how many trials and tokens would run, and how long; `seconds`: None if unknown."""
    counts_in_words = (
        f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}, "
        f"{sum(map(most_training_tokens, trials)):,} tokens"
    )
    memory_clause = "".join(f"; {clause}" for clause in memory_in_words(trials))
    if seconds is None:
        return (
            f"{counts_in_words}; their steps cannot be measured here{memory_clause}. Nothing was "
            "trained."
        )
    device = trials[0].device
    workers_in_words = f"{workers} {'worker' if workers == 1 else 'workers'}"
    condition = "if the cores are free" if device == "cpu" else f"on {device}"
    return (
        f"{counts_in_words}, about {readable_duration(seconds)} on {workers_in_words} "
        f"{condition}, from steps measured now{memory_clause}. Nothing was trained."
    )
