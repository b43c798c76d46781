"""Run the trials of a study, several at a time, on the engine that its plan names."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posenc.command_line.errors import RunFailed
from posenc.compare.engines.engine import Engine, LocalEngine
from posenc.compare.options import Options
from posenc.compare.results import TrialResult
from posenc.compare.trial.checkpoint import delete_checkpoint
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.result_files import CorruptResult, load_result
from posenc.machine.hardware import gpus, num_cores


def open_engine(options: Options, device: str, count: int) -> Engine:
    """Open the engine that the options name, for `count` trials.

    Raises: ValueError where it cannot be reached, or its machines differ from this one.
    """
    if options.engine == "local":
        gpu_names = gpus() if device == "cuda" else []
        workers = options.workers or len(gpu_names) or num_cores()
        return LocalEngine(min(workers, count), gpu_names)
    if options.engine == "ray":
        from posenc.compare.engines.ray_cluster import RayCluster

        return RayCluster(options.address, options.storage, options.max_parallel, device)
    from posenc.compare.engines.slurm import Slurm

    return Slurm(options.partition, options.max_parallel or count, device)


def run_trials(
    folder: Path, trials: Sequence[TrialConfig], engine: Engine, watchers: Sequence[Any]
) -> None:
    """Run all trials that have no result yet or have failed, on an engine that is prepared. After
    an interruption of any kind the same call goes on from the last checkpoints.

    watchers: each has a method for every kind of event, and `finished`; see
    `posenc.compare.progress`.

    Raises: RunFailed if the folder vanishes, which is then not made again.
    """

    def tell(event_kind: str, *values: Any, **named_values: Any) -> None:
        """Call the method of this name of every watcher."""
        for watcher in watchers:
            getattr(watcher, event_kind)(*values, **named_values)

    waiting = deque(_unfinished_trials(folder, trials, tell))
    running = 0
    device = folder.stat().st_dev
    try:
        while waiting or running:
            while waiting and running < engine.slots():
                engine.submit(waiting.popleft())
                running += 1
            trial, event = engine.wait()
            _check_folder_is_there(folder, device)
            if isinstance(event, TrialResult):
                running -= 1
                tell("finished", trial, event)
            else:
                tell(event.pop("kind"), trial, **event)
    except OSError:  # which a folder that is gone explains
        _check_folder_is_there(folder, device)
        raise


def _unfinished_trials(
    folder: Path, trials: Sequence[TrialConfig], tell: Callable[..., None]
) -> list[TrialConfig]:
    """Return the trials without a result, or with one that failed or is corrupt; tell of the
    others that they are finished."""
    unfinished = []
    for trial in trials:
        try:
            result = load_result(folder, trial)
        except CorruptResult as error:
            tell("note", trial, f"the result is corrupt ({error}); running this trial again")
            result = None
        if result is not None and result.reason is None:
            delete_checkpoint(folder / trial.folder)  # a kill after the result leaves it there
            tell("finished", trial, result)
        else:
            unfinished.append(trial)
    return unfinished


def _check_folder_is_there(folder: Path, device: int) -> None:
    """Raise RunFailed if the folder is gone, or is on another device: a mount point without its
    disk is an empty folder."""
    with contextlib.suppress(OSError):
        if folder.stat().st_dev == device:
            return
    gone = f"The results folder {folder} is gone, perhaps with its disk."
    raise RunFailed(f"{gone} Once it is back, the same command goes on from there.")
