"""Trials on other machines: what a machine must have, what it runs, and what is done after that."""

import os
import platform
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posenc.command_line.errors import one_line
from posenc.compare.engines.storage import (
    Mirror,
    Storage,
    download_result,
    download_results,
    move_checkpoint,
    names_of_trials,
    replace_with_stored_files,
)
from posenc.compare.results import TrialResult
from posenc.compare.trial.config import CONSTANT, TrialConfig
from posenc.compare.trial.process import (
    ReceiveEvent,
    TrialEvent,
    TrialProcess,
    make_trial_folder,
    write_failure,
)
from posenc.compare.trial.result_files import (
    CHECKPOINT_FILE,
    RESULT_FILE,
    folder_of_text,
    is_done,
    load_results,
)
from posenc.files.opening import make_private_folder, make_subfolder
from posenc.machine.fingerprint import describe_difference, machine_facts

MAX_LOST_RUNS = 3
"""How often in a row a trial may be lost without a step beyond those before: chosen. One more, and
it counts as failed."""


class Lost(Exception):
    """Raised where a trial ended because its process or machine did, not by an error of its own:
    another start goes on from its last checkpoint."""


@dataclass(frozen=True)
class Job:
    """A trial, and where its files are.

    folder: path of the study's folder. Without a storage, all machines must see it there.
    storage: URL of the storage that all machines see; None where they see the folder.
    checkpoint_steps: steps between two checkpoints; 0: by time.
    facts_here: facts of the machine that the command runs on.
    cwd: the command's current folder, from which files with encodings are named.
    """

    trial: TrialConfig
    folder: str
    storage: str | None
    checkpoint_steps: int
    facts_here: dict[str, str]
    cwd: str

    def run(self, receive_event: ReceiveEvent) -> TrialResult:
        """Run the trial on this machine and return its result, which may be a failure.

        receive_event: called with each event of the trial.
        Raises: Lost if the trial could not run to its end here, through no fault of its own.
        """
        difference = describe_difference(self.facts_here, machine_facts())
        if difference is not None:
            raise Lost(f"{platform.node()}: {difference}")
        if self.trial.code and Path(self.cwd).is_dir():
            os.chdir(self.cwd)
        if self.storage is None:
            return self._run_in_process(Path(self.folder), receive_event)
        with tempfile.TemporaryDirectory(prefix="posenc-") as scratch_folder:
            try:
                return self._run_with_storage(
                    Storage(self.storage), Path(scratch_folder), receive_event
                )
            except OSError as error:
                raise Lost(f"{self.storage}: {one_line(error)}") from error

    def _run_with_storage(
        self, storage: Storage, folder: Path, receive_event: ReceiveEvent
    ) -> TrialResult:
        """Run the trial in `folder` with its text and checkpoint from the storage, and copy there
        what it writes."""
        if self.trial.is_on_text:
            # Kept between trials; no other user can write there.
            texts_folder = make_private_folder(
                Path(tempfile.gettempdir()) / f"posenc-texts-{os.getuid()}"
            )
            text_folder = folder_of_text(texts_folder, self.trial.corpus)
            storage.download_text(text_folder)
            folder_of_text(folder, self.trial.corpus).symlink_to(text_folder)
        trial_folder = folder / self.trial.folder
        replace_with_stored_files(storage, trial_folder)
        mirror = Mirror(storage, trial_folder)

        def keep_and_tell(event: dict[str, Any]) -> None:
            mirror.copy_checkpoint()
            receive_event(event)

        result = self._run_in_process(folder, keep_and_tell)
        if result.reason is None:
            mirror.copy_result()
        if mirror.copy_error:
            receive_event(
                {"kind": "note", "text": f"a checkpoint could not be kept: {mirror.copy_error}"}
            )
        return result

    def _run_in_process(self, folder: Path, receive_event: ReceiveEvent) -> TrialResult:
        """Run the trial as a process of this machine, below a study's folder that has its text."""
        if is_done(folder, self.trial):  # its machine was lost after the result was written
            return load_results(folder, [self.trial])[0][self.trial]
        process = TrialProcess(folder, self.trial, self.checkpoint_steps)
        try:
            for event in process.events():
                receive_event(event)
        finally:
            process.kill()
        killing_signal = process.killed_by()
        if killing_signal is not None:
            raise Lost(f"its process was ended by {killing_signal}")
        return process.result()


@dataclass
class Progress:
    """How far a trial has come, and how often it was lost there.

    step: the last step that was told.
    step_when_lost: the last step when it was lost before; -1 if it was not.
    lost_runs: how often in a row it was lost without a further step.
    """

    step: int = 0
    step_when_lost: int = -1
    lost_runs: int = 0

    def count_lost_run(self) -> bool:
        """Count a lost run, from 1 again if the trial came further than before. Return True
        if another start is worth it: at most MAX_LOST_RUNS in a row at one step."""
        self.lost_runs = 1 if self.step > self.step_when_lost else self.lost_runs + 1
        self.step_when_lost = self.step
        return self.lost_runs <= MAX_LOST_RUNS


def _longest_beginning(
    storage: Storage, names_by_folder: Mapping[str, Sequence[str]], trial: TrialConfig
) -> TrialConfig | None:
    """Return the finished trial in the storage from whose last checkpoint a trial can go on, that
    of most steps; None if there is none. names_by_folder: see `names_of_trials`."""
    # It loads torch, which a job imports after it has compared its machine.
    from posenc.compare.reuse import goes_on_from

    longest = None
    for folder_name, names in names_by_folder.items():
        has_last_checkpoint = {RESULT_FILE, CHECKPOINT_FILE} <= {*names}
        if not has_last_checkpoint or not folder_name.startswith(f"{trial.name}-"):
            continue
        config = _config_of_result(storage, folder_name)
        if config is None or not goes_on_from(trial, config):
            continue
        if longest is None or config.steps > longest.steps:
            longest = config
    return longest


def _config_of_result(storage: Storage, folder_name: str) -> TrialConfig | None:
    """Return the trial of which a folder in the storage has the result; None for a damaged one, and
    for that of another trial."""
    try:
        content = storage.read(f"{folder_name}/{RESULT_FILE}") or b""
        config = TrialResult.from_json(content.decode()).config
    except ValueError:
        return None
    return config if config.folder == folder_name else None


class Remote:
    """Base class of engines that run trials on other machines.

    A subclass defines `send`, which starts a job, and `poll`, which waits a moment and calls
    `report_event`, `report_end` and `retry_lost_trial` for what happened.
    """

    def __init__(self, storage: str | None) -> None:
        self.storage = None if storage is None else Storage(storage)
        self.facts_here = machine_facts()
        self.progress_of_trial: dict[TrialConfig, Progress] = {}
        self.events: deque[tuple[TrialConfig, TrialEvent]] = deque()

    def prepare(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        """Copy the texts of these trials to the storage, if there is one, and finished trials from
        it: these, and those of fewer steps from which these can go on."""
        self.folder = folder.absolute()
        self.checkpoint_steps = checkpoint_steps
        if self.storage is None:
            return
        for corpus_hash in {trial.corpus for trial in trials if trial.is_on_text}:
            self.storage.upload_text(folder_of_text(folder, corpus_hash))
        missing_trials = [trial for trial in trials if not is_done(folder, trial)]
        download_results(self.storage, [folder / trial.folder for trial in missing_trials])
        self._download_beginnings(self.storage, folder, missing_trials)

    def _download_beginnings(
        self, storage: Storage, folder: Path, trials: Sequence[TrialConfig]
    ) -> None:
        """Copy from the storage the finished trials of fewer steps that these trials go on from,
        unless a trial has begun itself or its beginning lies in `folder`."""
        trials = [trial for trial in trials if trial.schedule == CONSTANT]
        if not trials:
            return
        names_by_folder = names_of_trials(storage)
        for trial in trials:
            has_begun_here = (folder / trial.folder / CHECKPOINT_FILE).exists()
            if has_begun_here or trial.folder in names_by_folder:
                continue
            beginning = _longest_beginning(storage, names_by_folder, trial)
            if beginning is None or (folder / beginning.folder / CHECKPOINT_FILE).exists():
                continue
            download_result(storage, make_subfolder(folder / beginning.folder))

    def submit(self, trial: TrialConfig) -> None:
        """Send the trial as a job, from its last checkpoint where it has one: in the storage if
        there is one. A checkpoint in its folder, such as that of a trial of fewer steps, is moved
        there."""
        make_trial_folder(self.folder, trial)
        self.progress_of_trial[trial] = Progress()
        if self.storage is not None:
            try:
                move_checkpoint(self.storage, self.folder / trial.folder)
            except Exception as error:  # of any of fsspec's file systems
                why = f"{self.storage.url} did not take its checkpoint ({one_line(error)})"
                note_event = {"kind": "note", "text": f"{why}; it begins again"}
                self.report_event(trial, note_event)
        self.send(trial, self._job(trial))

    def wait(self) -> tuple[TrialConfig, TrialEvent]:
        """Wait for the next event of any submitted trial; return the trial and the event."""
        while not self.events:
            self.poll()
        return self.events.popleft()

    def send(self, trial: TrialConfig, job: Job) -> None:
        """Start a job on some machine."""
        raise NotImplementedError

    def poll(self) -> None:
        """Wait a moment. Then call `report_event` for each event of a trial, `report_end` for each
        trial that has a result, and `retry_lost_trial` for each that was lost."""
        raise NotImplementedError

    def report_event(self, trial: TrialConfig, event: dict[str, Any]) -> None:
        """Queue an event of a running trial for `wait`, and note its step."""
        progress = self.progress_of_trial[trial]
        progress.step = max(progress.step, event.get("step", 0))
        self.events.append((trial, event))

    def report_end(self, trial: TrialConfig, result: TrialResult) -> None:
        """Write the result of a trial that has ended into its folder, and queue it for `wait`. The
        result may be a failure."""
        del self.progress_of_trial[trial]
        if result.reason is not None:
            write_failure(self.folder / trial.folder, result)
        elif self.storage is not None:
            make_subfolder(self.folder / trial.folder)  # raises if the disk was removed
            download_result(self.storage, self.folder / trial.folder)
        self.events.append((trial, result))

    def retry_lost_trial(self, trial: TrialConfig, why: str) -> None:
        """Start a trial again that has ended through no fault of its own. If it was lost more than
        MAX_LOST_RUNS times at one step, report a failure with the reason `why` instead."""
        progress = self.progress_of_trial[trial]
        if progress.count_lost_run():
            note_event = {"kind": "note", "text": f"{why}; it goes on from its last checkpoint"}
            self.report_event(trial, note_event)
            self.send(trial, self._job(trial))
        else:
            reason = f"lost {progress.lost_runs} times at step {progress.step}: {why}"
            self.report_end(trial, TrialResult(trial, reason=reason))

    def _job(self, trial: TrialConfig) -> Job:
        """Return the job of a trial, with this command's folder or storage."""
        # torch.__version__ is of torch's own subclass of str: unpickling it would load torch before
        # the job has compared its machine with this one.
        trial = replace(trial, torch=str(trial.torch))
        url = None if self.storage is None else self.storage.url
        return Job(
            trial, str(self.folder), url, self.checkpoint_steps, self.facts_here, str(Path.cwd())
        )
