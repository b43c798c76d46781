"""Show the trials, tokens and time of a comparison without training."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from posenc.compare.plan.splits import Cut
from posenc.compare.plan.time_estimate import kind_of, seconds_by_kind
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.material import train_tokens
from posenc.report.page.console import text_table
from posenc.report.page.progress import clock


def tokens_of(trial: TrialConfig) -> int:
    """Return the number of tokens that a trial trains on, at most."""
    return trial.steps * trial.batch * train_tokens(trial)


def dry_run(
    trials: Sequence[TrialConfig], cut: Cut | None, workers: int, here: int
) -> tuple[Table, str]:
    """Return a table with a row for each encoding and task, and a sentence for all.

    Times are from steps measured now, in processes like those of the trials, `here` at a time.
    Nothing is left on disk.
    """
    with tempfile.TemporaryDirectory(prefix="posenc-") as scratch:
        folder = Path(scratch)
        if cut is not None:
            cut.write(folder)
        seconds = seconds_by_kind(trials, folder, here)
    kinds: dict[str, list[TrialConfig]] = {}
    for trial in trials:
        kinds.setdefault(kind_of(trial), []).append(trial)
    rows = []
    for kind, alike in kinds.items():
        tokens = f"{sum(map(tokens_of, alike)):,}"
        time = clock(seconds[kind]) if kind in seconds else "not measured"
        rows.append([kind, f"{len(alike)}", f"{alike[0].steps:,}", tokens, time])
    header = ("trials of", "trials", "steps", "tokens", "time of one")
    named = "trials of"
    title = "What would run"
    table = text_table(header, rows, named=named, title=title, title_justify="left")
    counted = (
        f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}, "
        f"{sum(map(tokens_of, trials)):,} tokens"
    )
    device = trials[0].device
    if seconds.keys() != kinds.keys():
        return table, f"{counted}; their steps cannot be measured here. Nothing was trained."
    total = sum(seconds[kind_of(trial)] for trial in trials)
    longest = max(seconds.values())
    where = f"{workers} {'worker' if workers == 1 else 'workers'}"
    free = "if the cores are free" if device == "cpu" else f"on {device}"
    return table, (
        f"{counted}, about {clock(max(total / workers, longest))} on {where} {free}, from steps "
        "measured now. Nothing was trained."
    )
