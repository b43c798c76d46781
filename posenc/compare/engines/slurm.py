"""Trials as jobs of Slurm, submitted with submitit in arrays, and what such a job runs."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.compare.engines.job import Job, Lost, every
from posenc.compare.engines.remote import Remote
from posenc.compare.engines.storage import one_line
from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.process import WORKER
from posenc.report.files.atomic import write_atomically

POLL = 2.0
"""Seconds between two looks at the jobs."""
PAUSE = 2.0
"""Seconds between two steps that are told."""
MINUTES = 24 * 60
"""The time limit that is asked for. A trial that needs longer is queued again and goes on."""
LONGEST_ARRAY = 1000
"""Tasks of an array; Slurm's own limit is 1001 unless it is set higher."""
HOME, RUN = "slurm", "run"
"""Folder below the study's for submitit's files, and the file in it that names this run."""


class Slurm(Remote):
    """One task of a job array for each trial. A trial whose job is preempted, times out or is lost
    is queued again and goes on from its last checkpoint.

    Ctrl-C cancels the jobs. Jobs of a command that was killed run on, and end when the same command
    begins again, which takes what they have finished and queues the rest.

    cluster: "slurm", or "local" for processes of this machine in its place.
    """

    def __init__(
        self,
        partition: str | None,
        max_parallel: int,
        device: str,
        module: str = WORKER,
        cluster: str = "slurm",
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise ValueError(
                "--engine slurm: submitit is not installed. Install posenc[slurm]."
            ) from None
        if cluster == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
            raise ValueError(
                "--engine slurm: there is no sbatch and srun on this machine. Run the command "
                "where jobs are submitted."
            )
        super().__init__(None, module)
        self.submitit, self.cluster = submitit, cluster
        self.partition, self.max_parallel = partition, max_parallel
        self.gpus = 1 if device == "cuda" else 0
        self.running: dict[TrialConfig, Any] = {}
        self.waiting: list[tuple[TrialConfig, Job]] = []
        self.told_last: dict[TrialConfig, str] = {}

    def slots(self) -> int:
        return min(self.max_parallel, LONGEST_ARRAY)

    def describe(self) -> dict[str, str]:
        return {"engine": "slurm", "partition": self.partition or "the default"}

    def settle(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        super().settle(folder, trials, checkpoint_steps)
        self.run, self.home = secrets.token_hex(8), self.folder / HOME
        self.home.mkdir(exist_ok=True)
        for left in self.home.glob("*.said.json"):
            left.unlink()
        write_atomically(self.home / RUN, self.run)
        own: dict[str, Any] = {} if self.partition is None else {"slurm_partition": self.partition}
        if self.gpus:
            own["gpus_per_node"] = self.gpus
        self.executor = self.submitit.AutoExecutor(self.home, cluster=self.cluster)
        self.executor.update_parameters(name="posenc", cpus_per_task=1, timeout_min=MINUTES, **own)

    def send(self, trial: TrialConfig, job: Job) -> None:
        self.waiting.append((trial, job))

    def poll(self) -> None:
        if self.waiting:
            self._send_all()
        time.sleep(POLL)
        for trial, job in list(self.running.items()):
            self._listen(trial)
            if job.done():
                self._take(trial, job)

    def cancel(self) -> None:
        for job in self.running.values():
            with contextlib.suppress(Exception):
                job.cancel(check=False)
        self.running.clear()

    def _send_all(self) -> None:
        """Submit all that wait as one array."""
        batch, self.waiting = self.waiting, []
        run_file = str(self.home / RUN)
        tasks = [SlurmTask(job, str(self._words(t)), run_file, self.run) for t, job in batch]
        try:
            jobs = self.executor.submit_array(tasks)
        except Exception as error:  # submitit's, of sbatch
            raise ValueError(
                f"--engine slurm: sbatch refuses the jobs: {one_line(error)}"
            ) from error
        self.running |= {trial: job for (trial, _), job in zip(batch, jobs, strict=True)}

    def _listen(self, trial: TrialConfig) -> None:
        try:
            said = self._words(trial).read_text(encoding="utf-8")
            event = json.loads(said)
        except (OSError, ValueError):
            return
        if said != self.told_last.get(trial):
            self.told_last[trial] = said
            self.told(trial, event)

    def _words(self, trial: TrialConfig) -> Path:
        """Name the file with the last that a trial said."""
        return self.home / f"{trial.folder}.said.json"

    def _take(self, trial: TrialConfig, job: Any) -> None:
        del self.running[trial]
        self._words(trial).unlink(missing_ok=True)
        error = job.exception()
        if error is None:
            self.ended(trial, TrialResult.from_json(job.result()))
        else:
            lines = [line for line in str(error).splitlines() if "Lost:" in line]
            said = lines[-1].partition("Lost:")[2].strip() if lines else one_line(error)[:200]
            self.lost(trial, f"its job {job.job_id} has ended ({said})")


@dataclass
class SlurmTask:
    """A trial that writes what it tells into a file, for the command to read.

    words: that file.
    run_file, run: where the newest run of the command writes its name, and the name of the run
        that this job belongs to.
    """

    job: Job
    words: str
    run_file: str
    run: str

    def __call__(self) -> str:
        """Run the trial. Returns: what `TrialResult.to_json` makes of the result. Raises: Lost."""
        self._check_run()
        return self.job.run(every(PAUSE, self._tell)).to_json()

    def checkpoint(self) -> Any:
        """Return what submitit queues again after a preemption or a timeout."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _tell(self, event: dict[str, Any]) -> None:
        self._check_run()
        write_atomically(self.words, json.dumps(event))

    def _check_run(self) -> None:
        """End where the command has been started again: its own job will do this trial."""
        if Path(self.run_file).read_text(encoding="utf-8") != self.run:
            raise Lost("a newer run of the same command does this trial")
