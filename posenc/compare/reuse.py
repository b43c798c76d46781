"""Reuse trials of other runs: one more encoding or seed trains only itself, one more length only
tests, and more steps at a constant rate go on from the last one. Weights of the run's own folder
are tested again, too, such as those of a search."""

import hashlib
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from posenc.compare.results import TrainingPoint, TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.result_files import (
    CHECKPOINT_FILE,
    RESULT_FILE,
    WEIGHTS_FILE,
    CorruptResult,
    Cursor,
    is_done,
    load_result,
    save_result,
)
from posenc.compare.trial.train import learning_rate
from posenc.files.atomic import write_atomically, write_pieces_atomically
from posenc.files.opening import PIECE_BYTES, make_subfolder, open_ordinary, path_in_folder

MAX_RESULT_BYTES = 1 << 23
"""Maximum size of a result.json that is reused. One of 200 steps has 8 kB."""
BYTES_OF_A_PARAMETER, EXTRA_BYTES = 8, 1 << 24
"""Maximum size of weights that are copied and only tested again: in float32, twice where a table is
tied, and the header, names and constants of encodings. A larger file is not what the trial wrote,
which is trained again."""

_TEST_FIELDS = ("test_lengths", "num_windows", "test_window", "tune_steps")
"""Fields of a trial that say how its trained weights are tested, not how they are trained."""


def candidate_runs(places: Sequence[Path]) -> list[Path]:
    """Return the folders that may be runs: the places, each of which is a run or has runs in it,
    and the folders in them. A link in a place is skipped."""
    folders = list(places)
    for place in places:
        folders += sorted(path for path in place.glob("*") if _has_kind(stat.S_ISDIR, path))
    return folders


def reuse_trials(
    folder: Path, trials: Sequence[TrialConfig], runs: Sequence[Path]
) -> tuple[int, list[TrialConfig]]:
    """Copy results of `trials` that one of the `runs` has finished into `folder`, with the name of
    that run. Where `folder` or a run has finished a trial that differs from one of `trials` only in
    its tests, copy the weights.

    A trial is found by the name of its folder, a hash of everything that determines its numbers
    except the CPU or GPU.

    Returns: the number of copied results, and the trials whose weights were copied: these need not
    be trained, and are still to be tested.
    """
    own_folder = folder.resolve()
    other_runs = [run for run in runs if run.resolve() != own_folder]
    num_reused = 0
    to_retest: list[TrialConfig] = []
    for trial in trials:
        if is_done(folder, trial):
            continue
        result = _reusable_result(trial, other_runs)
        if result is not None:
            save_result(make_subfolder(folder / trial.folder), result)
            num_reused += 1
            continue
        has_checkpoint = (folder / trial.folder / CHECKPOINT_FILE).exists()
        if not has_checkpoint and _copy_weights(folder, trial, other_runs):
            to_retest.append(trial)
    return num_reused, to_retest


def continue_trials(folder: Path, trials: Sequence[TrialConfig], runs: Sequence[Path]) -> int:
    """Give each of `trials` that has neither a result nor a checkpoint the last checkpoint of a
    finished trial, in `folder` or one of the `runs`, that did the same steps but fewer.

    Returns: the number of trials that go on so.
    """
    num_continued = 0
    for trial in trials:
        if is_done(folder, trial) or (folder / trial.folder / CHECKPOINT_FILE).exists():
            continue
        for shorter in _shorter_trials(trial, (folder, *runs)):
            if _is_beginning(shorter.config, trial) and _copy_checkpoint(folder, trial, shorter):
                num_continued += 1
                break
    return num_continued


def count_decayed(folder: Path, trials: Sequence[TrialConfig], runs: Sequence[Path]) -> int:
    """Return how many of `trials`, of those that begin with the first step, `folder` or one of the
    `runs` has with fewer steps, of which the learning rate was another."""
    num_decayed = 0
    for trial in trials:
        if is_done(folder, trial) or (folder / trial.folder / CHECKPOINT_FILE).exists():
            continue
        num_decayed += any(
            shorter.config.test_lengths == trial.test_lengths  # no trial of a search
            and not _is_beginning(shorter.config, trial)
            for shorter in _shorter_trials(trial, (folder, *runs))
        )
    return num_decayed


class _ShorterTrial(NamedTuple):
    """A finished trial of fewer steps: its folder and its result."""

    home: Path
    result: TrialResult

    @property
    def config(self) -> TrialConfig:
        return self.result.config


def _shorter_trials(trial: TrialConfig, runs: Sequence[Path]) -> list[_ShorterTrial]:
    """Return the finished trials in the runs that differ from this one in having fewer steps, and
    perhaps in their tests: most steps first."""
    shorter_trials = []
    for run in runs:
        for home in sorted(run.glob(f"{trial.name}-*")):
            try:
                config = TrialResult.read(home / RESULT_FILE, MAX_RESULT_BYTES).config
            except (ValueError, OSError):
                continue
            if home.name != config.folder or not _is_shorter(config, trial):
                continue
            result = _finished_result(run, config)
            if result is not None:
                shorter_trials.append(_ShorterTrial(home, result))
    return sorted(shorter_trials, key=lambda shorter: -shorter.config.steps)


def goes_on_from(trial: TrialConfig, shorter: TrialConfig) -> bool:
    """Return True if a trial can go on from the end of a shorter one: it does the same steps, and
    more."""
    return _is_shorter(shorter, trial) and _is_beginning(shorter, trial)


def _is_shorter(config: TrialConfig, trial: TrialConfig) -> bool:
    """Return True if a trial differs from another in having fewer steps, and perhaps in its
    tests."""
    fields = {name: getattr(trial, name) for name in ("steps", *_TEST_FIELDS)}
    return config.steps < trial.steps and replace(config, **fields) == trial


def _is_beginning(shorter: TrialConfig, trial: TrialConfig) -> bool:
    """Return True if all steps of a trial of fewer steps have the learning rates of this one's:
    the batch of a step depends on its number alone."""
    return all(
        learning_rate(shorter, step) == learning_rate(trial, step) for step in range(shorter.steps)
    )


def _copy_checkpoint(folder: Path, trial: TrialConfig, shorter: _ShorterTrial) -> bool:
    """Copy the checkpoint that a finished trial of fewer steps has kept into the trial's folder.
    Return False if it has none, or a damaged one."""
    try:
        cursor = Cursor.read(shorter.home / CHECKPOINT_FILE, MAX_RESULT_BYTES)
        tensors_file = path_in_folder(shorter.home, cursor.tensors)
        is_last = (cursor.trial, cursor.step) == (shorter.config.hash, shorter.config.steps)
        # Weights and AdamW's two averages.
        max_bytes = 3 * BYTES_OF_A_PARAMETER * shorter.result.parameters + EXTRA_BYTES
        if not _has_kind(stat.S_ISREG, tensors_file) or tensors_file.stat().st_size > max_bytes:
            return False
    except (ValueError, OSError):
        return False
    if not is_last or cursor.reused_from:
        return False
    home = make_subfolder(folder / trial.folder)
    if _copy_and_hash(tensors_file, home / tensors_file.name) != cursor.tensors_sha256:
        (home / tensors_file.name).unlink()
        return False
    write_atomically(home / CHECKPOINT_FILE, replace(cursor, trial=trial.hash).to_json())
    return True


def _reusable_result(trial: TrialConfig, runs: Sequence[Path]) -> TrialResult | None:
    """Return the result of the first run that finished the trial, with that run as `reused_from`;
    None if no run has it."""
    for run in runs:
        result = _finished_result(run, trial)
        if result is None or result.timing is None:  # each finished trial has a timing
            continue
        first_run = result.timing.reused_from or str(run)
        return replace(result, timing=replace(result.timing, reused_from=first_run))
    return None


def _copy_weights(folder: Path, trial: TrialConfig, runs: Sequence[Path]) -> bool:
    """Copy the weights of a finished trial that differs from this one only in its tests, as the
    checkpoint after the last step. Return True if `folder` or one of the runs has one."""
    for run in (folder, *runs):
        for home in sorted(run.glob(f"{trial.name}-*")):
            training = _read_training(home, trial)
            if training is not None:
                source_in_words = "the same folder" if run == folder else home.parent
                reused_from = f"{source_in_words}, tested again here"
                _write_last_checkpoint(folder, trial, training, reused_from)
                return True
    return False


class _FinishedTraining(NamedTuple):
    """A training to its last step: curve, duration and the path of its model.safetensors."""

    curve: tuple[TrainingPoint, ...]
    seconds: float
    weights_file: Path


def _read_training(home: Path, trial: TrialConfig) -> _FinishedTraining | None:
    """Return the training in the folder `home` if its trial equals `trial` but for its tests;
    None if it is another trial, incomplete or damaged."""
    try:
        config = TrialResult.read(home / "result.json", MAX_RESULT_BYTES).config
        test_fields = {name: getattr(trial, name) for name in _TEST_FIELDS}
        trains_the_same = replace(config, **test_fields) == trial
        if home.name != config.folder or not trains_the_same:
            return None
        result = _finished_result(home.parent, config)
        weights_file = home / WEIGHTS_FILE
        if result is None or not _has_kind(stat.S_ISREG, weights_file):
            return None
        max_bytes = BYTES_OF_A_PARAMETER * result.parameters + EXTRA_BYTES
        if weights_file.lstat().st_size > max_bytes:
            return None
    except (ValueError, OSError):
        return None
    curve = result.training
    seconds = result.timing.train_seconds if result.timing else 0.0
    # Speed is computed from the seconds, which a foreign file may give as 0 or NaN.
    if not seconds > 0 or not curve or curve[-1].step != trial.steps:
        return None
    return _FinishedTraining(curve, seconds, weights_file)


def _write_last_checkpoint(
    folder: Path, trial: TrialConfig, training: _FinishedTraining, reused_from: str
) -> None:
    """Write weights as the checkpoint of a trial that is trained and not yet tested."""
    home = make_subfolder(folder / trial.folder)
    weights_sha256 = _copy_and_hash(training.weights_file, home / WEIGHTS_FILE)
    cursor = Cursor(
        trial.hash,
        trial.steps,
        training=training.curve,
        train_seconds=training.seconds,
        tensors=WEIGHTS_FILE,
        tensors_sha256=weights_sha256,
        reused_from=reused_from,
    )
    write_atomically(home / CHECKPOINT_FILE, cursor.to_json())


def _copy_and_hash(source: Path, target: Path) -> str:
    """Copy a file piece by piece, however large it is; `target` has all of it or is not changed.
    Return the SHA-256 of what was copied. Raises ValueError where `source` is a link."""
    digest = hashlib.sha256()

    def hashed_pieces() -> Iterator[bytes]:
        with open_ordinary(source, follow_links=False) as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                yield piece

    write_pieces_atomically(target, hashed_pieces())
    return digest.hexdigest()


def _finished_result(run: Path, trial: TrialConfig) -> TrialResult | None:
    """Return the result of a trial that the run has finished; None if it is missing, damaged, too
    large, a failure, without a score of each test length, or behind a link."""
    home = run / trial.folder
    if not _has_kind(stat.S_ISDIR, home):
        return None
    if not (_is_small_file(home / "result.json") and _is_small_file(home / "timing.json")):
        return None
    try:
        result = load_result(run, trial)
    except CorruptResult:
        return None
    if result is None or result.reason is not None:
        return None
    measured_lengths = {score.length for score in result.by_length or result.by_case}
    return result if measured_lengths == set(trial.test_lengths) else None


def _is_small_file(path: Path) -> bool:
    """Return True for an ordinary file, no link, that is small enough for a result."""
    return _has_kind(stat.S_ISREG, path) and path.lstat().st_size <= MAX_RESULT_BYTES


def _has_kind(is_kind: Callable[[int], bool], path: Path) -> bool:
    """Return True if the path itself, not what it links to, is of this kind."""
    try:
        return is_kind(path.lstat().st_mode)
    except OSError:
        return False
