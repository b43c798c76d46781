"""Reuse trials of other runs: one more encoding or seed trains only itself, one more length only
tests."""

import hashlib
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.files import (
    STATE,
    WEIGHTS,
    CorruptResult,
    Cursor,
    is_done,
    load_result,
    save_result,
)
from posenc.report.files.atomic import write_atomically
from posenc.report.files.opened import bytes_of, make_inside, text_of

MOST_BYTES = 1 << 23
"""Maximum size of a result that is reused. One of 200 steps has 8 kB."""
MOST_WEIGHTS = 1 << 30
"""Maximum size of weights that are only tested again; larger ones are trained."""


def runs_below(places: Sequence[Path]) -> list[Path]:
    """Return the places and the folders in them. A link in a place is skipped."""
    inside = [sorted(p for p in each.glob("*") if _is(stat.S_ISDIR, p)) for each in places]
    return [*places, *(folder for folders in inside for folder in folders)]


def reuse_trials(
    folder: Path, trials: Sequence[TrialConfig], runs: Sequence[Path]
) -> tuple[int, list[TrialConfig]]:
    """Copy results of `trials` that other runs have finished into `folder`, and note the run; of
    those that differ only in their test lengths, copy the weights.

    A trial is found by the name of its folder, a hash of everything that determines its numbers
    except the CPU or GPU.

    Returns: the number of copied results, and the trials that are only tested.
    """
    here = folder.resolve()
    others = [run for run in runs if run.resolve() != here]
    count, tested = 0, []
    for trial in trials:
        if is_done(folder, trial):
            continue
        found = ((run, _finished(run, trial)) for run in others)
        run, result = next((each for each in found if each[1] is not None), (here, None))
        if result is not None and result.timing is not None:
            source = result.timing.reused_from or str(run)
            home = make_inside(folder / trial.folder)
            save_result(home, replace(result, timing=replace(result.timing, reused_from=source)))
            count += 1
        elif not (folder / trial.folder / STATE).exists() and _weights(folder, trial, others):
            tested.append(trial)
    return count, tested


def _weights(folder: Path, trial: TrialConfig, runs: Sequence[Path]) -> bool:
    """Copy the weights of a finished trial with other test lengths, as the checkpoint after the
    last step. Returns: True if there is one."""
    for home in (home for run in runs for home in sorted(run.glob(f"{trial.name}-*"))):
        try:
            known = TrialResult.from_json(text_of(home / "result.json", MOST_BYTES)).config
            result = _finished(home.parent, known) if home.name == known.folder else None
            if replace(known, test_lengths=trial.test_lengths) != trial or result is None:
                continue
            if not _is(stat.S_ISREG, home / WEIGHTS):
                continue
            weights = bytes_of(home / WEIGHTS, MOST_WEIGHTS)
        except (ValueError, OSError):
            continue
        seconds = result.timing.train_seconds if result.timing else 0.0
        if not seconds > 0 or [point.step for point in result.training][-1:] != [trial.steps]:
            continue
        here = make_inside(folder / trial.folder)
        write_atomically(here / WEIGHTS, weights)
        cursor = Cursor(
            trial.hash,
            trial.steps,
            training=result.training,
            train_seconds=seconds,
            tensors=WEIGHTS,
            tensors_sha256=hashlib.sha256(weights).hexdigest(),
            reused_from=f"{home.parent}, tested again here",
        )
        write_atomically(here / STATE, cursor.to_json())
        return True
    return False


def _finished(run: Path, trial: TrialConfig) -> TrialResult | None:
    """Return the result of a finished trial, or None if it is missing, damaged, too large, or
    behind a link."""
    home = run / trial.folder
    if not _is(stat.S_ISDIR, home):
        return None
    files = [home / "result.json", home / "timing.json"]
    if not all(_is(stat.S_ISREG, f) and f.lstat().st_size <= MOST_BYTES for f in files):
        return None
    try:
        result = load_result(run, trial)
    except CorruptResult:
        return None
    if result is None or result.reason is not None:
        return None
    measured = {score.length for score in result.by_length or result.by_case}
    return result if measured == set(trial.test_lengths) else None


def _is(kind, path: Path) -> bool:
    """Return True if the path itself, not what it links to, is of this kind."""
    try:
        return kind(path.lstat().st_mode)
    except OSError:
        return False
