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
        rows.append([kind, f"{len(alike)}", f"{alike[0].steps:,}", tokens, clock(seconds[kind])])
    header = ("trials of", "trials", "steps", "tokens", "time of one")
    named, title = "trials of", "What would run"
    table = text_table(header, rows, named=named, title=title, title_justify="left")
    total = sum(seconds[kind_of(trial)] for trial in trials)
    longest = max(seconds.values())
    how = "from steps measured now" if trials[0].device == "cpu" else "counted, not measured"
    return table, (
        f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}, "
        f"{sum(map(tokens_of, trials)):,} tokens, about {clock(max(total / workers, longest))} on "
        f"{workers} {'worker' if workers == 1 else 'workers'} if the cores are free, {how}. "
        "Nothing was trained."
    )
