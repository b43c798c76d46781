"""Reuse trials of other runs: one more encoding or seed trains only itself, one more length only
tests."""

import hashlib
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from posenc.compare.results import TrainingPoint, TrialResult
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
    folders = list(places)
    for place in places:
        folders += sorted(path for path in place.glob("*") if _is(stat.S_ISDIR, path))
    return folders


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
    count = 0
    tested: list[TrialConfig] = []
    for trial in trials:
        if is_done(folder, trial):
            continue
        result = _reusable_result(trial, others)
        if result is not None:
            save_result(make_inside(folder / trial.folder), result)
            count += 1
            continue
        has_checkpoint = (folder / trial.folder / STATE).exists()
        if not has_checkpoint and _copy_weights(folder, trial, others):
            tested.append(trial)
    return count, tested


def _reusable_result(trial: TrialConfig, runs: Sequence[Path]) -> TrialResult | None:
    """Return the result of the first run that finished the trial, with a note of this run."""
    for run in runs:
        result = _finished(run, trial)
        if result is None:
            continue
        if result.timing is None:
            return None
        source = result.timing.reused_from or str(run)
        return replace(result, timing=replace(result.timing, reused_from=source))
    return None


def _copy_weights(folder: Path, trial: TrialConfig, runs: Sequence[Path]) -> bool:
    """Copy the weights of a finished trial with other test lengths, as the checkpoint after the
    last step. Returns: True if there is one."""
    for run in runs:
        for home in sorted(run.glob(f"{trial.name}-*")):
            trained = _trained(home, trial)
            if trained is not None:
                _write_last_checkpoint(folder, trial, trained, f"{home.parent}, tested again here")
                return True
    return False


class _Trained(NamedTuple):
    """What remains of a training to its last step."""

    curve: tuple[TrainingPoint, ...]
    seconds: float
    weights: bytes


def _trained(home: Path, trial: TrialConfig) -> _Trained | None:
    """Read the folder of a finished trial that differs in its test lengths only; return None if it
    is of another trial, incomplete or damaged."""
    try:
        config = TrialResult.from_json(text_of(home / "result.json", MOST_BYTES)).config
        trains_the_same = replace(config, test_lengths=trial.test_lengths) == trial
        if home.name != config.folder or not trains_the_same:
            return None
        result = _finished(home.parent, config)
        if result is None or not _is(stat.S_ISREG, home / WEIGHTS):
            return None
        weights = bytes_of(home / WEIGHTS, MOST_WEIGHTS)
    except (ValueError, OSError):
        return None
    curve = result.training
    seconds = result.timing.train_seconds if result.timing else 0.0
    if not seconds > 0 or not curve or curve[-1].step != trial.steps:
        return None
    return _Trained(curve, seconds, weights)


def _write_last_checkpoint(
    folder: Path, trial: TrialConfig, trained: _Trained, reused_from: str
) -> None:
    """Write weights as the checkpoint of a trial that is trained and not yet tested."""
    home = make_inside(folder / trial.folder)
    write_atomically(home / WEIGHTS, trained.weights)
    cursor = Cursor(
        trial.hash,
        trial.steps,
        training=trained.curve,
        train_seconds=trained.seconds,
        tensors=WEIGHTS,
        tensors_sha256=hashlib.sha256(trained.weights).hexdigest(),
        reused_from=reused_from,
    )
    write_atomically(home / STATE, cursor.to_json())


def _finished(run: Path, trial: TrialConfig) -> TrialResult | None:
    """Return the result of a finished trial, or None if it is missing, damaged, too large, or
    behind a link."""
    home = run / trial.folder
    if not _is(stat.S_ISDIR, home):
        return None
    if not (_is_small(home / "result.json") and _is_small(home / "timing.json")):
        return None
    try:
        result = load_result(run, trial)
    except CorruptResult:
        return None
    if result is None or result.reason is not None:
        return None
    measured = {score.length for score in result.by_length or result.by_case}
    return result if measured == set(trial.test_lengths) else None


def _is_small(path: Path) -> bool:
    """Return True for an ordinary file, no link, that is small enough for a result."""
    return _is(stat.S_ISREG, path) and path.lstat().st_size <= MOST_BYTES


def _is(kind: Callable[[int], bool], path: Path) -> bool:
    """Return True if the path itself, not what it links to, is of this kind."""
    try:
        return kind(path.lstat().st_mode)
    except OSError:
        return False
