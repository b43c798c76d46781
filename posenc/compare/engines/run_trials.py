"""Run the trials of a study, several at a time, on the engine that its plan names: what an engine
is, and the one that runs trials as processes of this machine."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from posenc.command_line.errors import RunFailed
from posenc.compare.options import Options
from posenc.compare.results import TrialResult
from posenc.compare.trial.checkpoint import delete_unneeded_checkpoint
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.process import TrialEvent, TrialProcess
from posenc.compare.trial.result_files import CorruptResult, load_result
from posenc.machine.hardware import gpus, num_cores


class Engine(Protocol):
    """Runs trials. A trial is the same process on every engine, so its numbers do not depend on it.

    Used in this order: `num_slots`, `prepare`, then `submit` and `wait` in turn, and `cancel` at
    last.

    facts: what the report says about where the trials run.
    """

    facts: dict[str, str]

    def num_slots(self) -> int:
        """Return how many trials it runs at a time, now."""
        ...

    def prepare(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        """Make the study's folder, with its text, known where trials run. checkpoint_steps: steps
        between two checkpoints; 0: by time. Raises: ValueError where trials cannot read or write
        there."""

    def submit(self, trial: TrialConfig) -> None:
        """Begin a trial, from its last checkpoint where it has one."""

    def wait(self) -> tuple[TrialConfig, TrialEvent]:
        """Wait for the next event of any submitted trial; return the trial and the event."""
        ...

    def cancel(self) -> None:
        """End what still runs. Results and checkpoints stay."""


class LocalEngine:
    """`num_workers` trials at a time, each with a thread that listens to it.

    gpus: as CUDA_VISIBLE_DEVICES names them; a trial gets the one with the fewest trials.
    """

    def __init__(self, num_workers: int, gpus: Sequence[str] = ()) -> None:
        self.num_workers = num_workers
        self.gpus = gpus
        self.facts = {}
        self.running: dict[TrialConfig, tuple[TrialProcess, threading.Thread, str | None]] = {}
        self.events: queue.Queue[tuple[TrialConfig, dict[str, Any] | None]] = queue.Queue()

    def num_slots(self) -> int:
        """Return the number of workers."""
        return self.num_workers

    def prepare(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        """Keep the folder, which trials of this machine can read and write."""
        self.folder = folder
        self.checkpoint_steps = checkpoint_steps

    def submit(self, trial: TrialConfig) -> None:
        """Start the process of a trial, and a thread that listens to it."""
        used_gpus = [gpu for _, _, gpu in self.running.values()]
        gpu = min(self.gpus, key=used_gpus.count, default=None)
        process = TrialProcess(self.folder, trial, self.checkpoint_steps, gpu=gpu)
        listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        self.running[trial] = process, listener, gpu
        listener.start()

    def wait(self) -> tuple[TrialConfig, TrialEvent]:
        """Return a trial and its next event, or its result if its process has ended."""
        trial, event = self.events.get()
        return trial, self.running.pop(trial)[0].result() if event is None else event

    def cancel(self) -> None:
        """Kill all processes, and wait for the threads that listen to them."""
        for process, _, _ in self.running.values():
            process.kill()
        for _, listener, _ in self.running.values():
            listener.join()

    def _listen(self, process: TrialProcess) -> None:
        """Queue the events of a trial for `wait`, and None when its process has ended."""
        for event in process.events():
            self.events.put((process.trial, event))
        self.events.put((process.trial, None))


def open_engine(options: Options, device: str, num_trials: int) -> Engine:
    """Open the engine that the options name, for `num_trials` trials.

    Raises: ValueError where it cannot be reached, or its machines differ from this one.
    """
    if options.engine == "local":
        gpu_names = gpus() if device == "cuda" else []
        num_workers = options.workers or len(gpu_names) or num_cores()
        return LocalEngine(min(num_workers, num_trials), gpu_names)
    if options.engine == "ray":
        from posenc.compare.engines.ray_cluster import RayCluster

        return RayCluster(options.address, options.storage, options.max_parallel, device)
    from posenc.compare.engines.slurm import Slurm

    return Slurm(options.partition, options.max_parallel or num_trials, device, options.sbatch)


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
    num_running = 0
    disk_number = folder.stat().st_dev
    try:
        while waiting or num_running:
            while waiting and num_running < engine.num_slots():
                engine.submit(waiting.popleft())
                num_running += 1
            trial, event = engine.wait()
            _check_folder_is_there(folder, disk_number)
            if isinstance(event, TrialResult):
                num_running -= 1
                tell("finished", trial, event)
            else:
                tell(event.pop("kind"), trial, **event)
    except OSError:  # which a folder that is gone explains
        _check_folder_is_there(folder, disk_number)
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
            # A kill after the result leaves it there.
            delete_unneeded_checkpoint(folder / trial.folder, trial)
            tell("finished", trial, result)
        else:
            unfinished.append(trial)
    return unfinished


def _check_folder_is_there(folder: Path, disk_number: int) -> None:
    """Raise RunFailed if the folder is gone, or is on another device: a mount point without its
    disk is an empty folder."""
    with contextlib.suppress(OSError):
        if folder.stat().st_dev == disk_number:
            return
    why = f"The results folder {folder} is gone, perhaps with its disk."
    raise RunFailed(f"{why} Once it is back, the same command goes on from there.")
