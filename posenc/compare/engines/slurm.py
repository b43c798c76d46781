"""Trials as jobs of Slurm, submitted with submitit in arrays, and what such a job runs."""

import contextlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.command_line.errors import one_line
from posenc.compare.engines.remote import Job, Lost, Remote
from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.process import limit_step_events
from posenc.files.atomic import write_atomically
from posenc.files.opening import make_subfolder, read_file_text, remove_folder
from posenc.lazy import require_package

POLL_SECONDS = 2.0
"""Seconds between two looks at the jobs, and between two steps of a trial that are told."""
TIME_LIMIT_MINUTES = 24 * 60
"""The time limit that is asked for. A trial that needs longer is queued again and goes on."""
LONGEST_ARRAY = 1000
"""Tasks of an array; Slurm's own limit is 1001 unless it is set higher."""


class Slurm(Remote):
    """One task of a job array for each trial. A job that is preempted, times out or is lost is
    queued again. Jobs of a command that was killed run on, and end when the same command begins
    again, which takes what they have finished and queues the rest.

    sbatch: the text of the option --sbatch, see `submitit_parameters`.
    cluster: "slurm", or "local" for processes of this machine in its place.
    """

    def __init__(
        self,
        partition: str | None,
        max_parallel: int,
        device: str,
        sbatch: str | None = None,
        cluster: str = "slurm",
    ) -> None:
        parameters_of_user = submitit_parameters(sbatch or "")
        require_package("submitit", "--engine slurm")
        import submitit

        if cluster == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
            advice = "Run the command where jobs are submitted."
            raise ValueError(
                f"--engine slurm: there is no sbatch and srun on this machine. {advice}"
            )
        super().__init__(None)
        self.facts = {"engine": "slurm", "partition": partition or "the default"}
        self.submitit = submitit
        self.cluster = cluster
        self.max_parallel = max_parallel
        self.job_parameters = {
            "name": "posenc",
            "cpus_per_task": 1,
            "timeout_min": TIME_LIMIT_MINUTES,
        }
        self.job_parameters |= {} if partition is None else {"slurm_partition": partition}
        self.job_parameters |= {"gpus_per_node": 1} if device == "cuda" else {}
        self.job_parameters |= parameters_of_user
        self.running: dict[TrialConfig, Any] = {}
        self.waiting: list[tuple[TrialConfig, Job]] = []

    def num_slots(self) -> int:
        """Return how many jobs may be queued or run at a time."""
        return min(self.max_parallel, LONGEST_ARRAY)

    def prepare(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        """Make a folder for the messages of this run, delete those of earlier ones, whose jobs then
        end, and build submitit's executor."""
        super().prepare(folder, trials, checkpoint_steps)
        slurm_folder = make_subfolder(self.folder / "slurm")
        for earlier_folder in slurm_folder.glob("run-*"):
            remove_folder(earlier_folder)
        self.run_folder = slurm_folder / f"run-{secrets.token_hex(8)}"
        make_subfolder(self.run_folder)
        self.executor = self.submitit.AutoExecutor(slurm_folder, cluster=self.cluster)
        self.executor.update_parameters(**self.job_parameters)

    def send(self, trial: TrialConfig, job: Job) -> None:
        """Keep the job for the next array, which `poll` submits."""
        self.waiting.append((trial, job))

    def poll(self) -> None:
        """Submit the jobs that wait, and pass on what trials told and how jobs ended."""
        if self.waiting:
            self._submit_waiting()
        time.sleep(POLL_SECONDS)
        for trial, job in list(self.running.items()):
            message_file = self.run_folder / f"{trial.folder}.json"
            with contextlib.suppress(OSError):  # it has said nothing more
                event = json.loads(read_file_text(message_file))
                message_file.unlink()
                self.report_event(trial, event)
            if job.done():
                self._report_end_of_task(trial, job)

    def cancel(self) -> None:
        """Cancel all jobs."""
        for job in self.running.values():
            with contextlib.suppress(Exception):
                job.cancel(check=False)
        self.running.clear()

    def _submit_waiting(self) -> None:
        """Submit all that wait as one array."""
        batch = self.waiting
        self.waiting = []
        tasks = [
            SlurmTask(job, str(self.run_folder / f"{trial.folder}.json")) for trial, job in batch
        ]
        try:
            jobs = self.executor.submit_array(tasks)
        except Exception as error:  # submitit's, of sbatch
            why = f"--engine slurm: sbatch refuses the jobs: {one_line(error)}"
            raise ValueError(why) from error
        self.running |= {trial: job for (trial, _), job in zip(batch, jobs, strict=True)}

    def _report_end_of_task(self, trial: TrialConfig, job: Any) -> None:
        """Pass on how a job ended: with its result, or lost."""
        del self.running[trial]
        if (error := job.exception()) is None:
            self.report_end(trial, job.result())
        else:
            reasons = re.findall(r"Lost:(.*)", str(error)) or [one_line(error)[:200]]
            self.retry_lost_trial(trial, f"its job {job.job_id} has ended ({reasons[-1].strip()})")


def submitit_parameters(text: str) -> dict[str, Any]:
    """Return submitit's parameters for the text of the option --sbatch, pairs such as
    `account=ml,time=12:00:00`.

    >>> submitit_parameters("account=ml,mem=8G,time=1-12:00:00")
    {'slurm_account': 'ml', 'slurm_mem': '8G', 'timeout_min': 2160}

    Raises: ValueError for another name, one that is there twice, or a value that Slurm refuses.
    """
    parameters: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        if name not in _PARAMETER_OF_SETTING or not value:
            raise ValueError(
                f"--sbatch takes {', '.join(_PARAMETER_OF_SETTING)}, each as in mem=8G and "
                f"separated by commas, got {pair!r}."
            )
        parameter = _PARAMETER_OF_SETTING[name]
        if parameter in parameters:
            raise ValueError(f"--sbatch has {name} twice; give it once.")
        parameters[parameter] = _value_of_setting(name, value)
    return parameters


_PARAMETER_OF_SETTING = {
    "account": "slurm_account",
    "qos": "slurm_qos",
    "mem": "slurm_mem",
    "time": "timeout_min",
    "signal": "slurm_signal_delay_s",
}
"""submitit's name of each setting of --sbatch. `timeout_min`, which its local executor knows too,
is also what submitit measures a job by."""


def _value_of_setting(name: str, value: str) -> str | int:
    """Return the value of a setting of --sbatch: memory as text, time in minutes, a signal in
    seconds. Raises: ValueError."""
    if name == "time":
        return _minutes(value)
    if name == "mem" and not re.fullmatch(r"[1-9]\d*[KMGT]?", value):
        raise ValueError(f"--sbatch: mem must be a whole number with K, M, G or T, got {value!r}.")
    if name == "signal":
        if not re.fullmatch(r"[1-9]\d{0,4}", value):  # Slurm takes at most 65,535
            raise ValueError(f"--sbatch: signal must be seconds before the end, got {value!r}.")
        return int(value)
    return value


def _minutes(text: str) -> int:
    """Return the minutes of one of Slurm's forms of a time, rounded up: M, M:S, H:M:S, D-H, D-H:M,
    D-H:M:S. Raises: ValueError for another text, and for no time at all."""
    days_text, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(re.fullmatch(r"\d{1,6}", part) for part in ([days_text] if dash else []) + parts):
        parts = []
    minutes = 0
    if dash and 1 <= len(parts) <= 3:
        hours, minutes_text, seconds = (*parts, "0", "0")[:3]
        minutes = _sum_in_minutes(days_text, hours, minutes_text, seconds)
    elif len(parts) == 3:
        minutes = _sum_in_minutes("0", *parts)
    elif 1 <= len(parts) <= 2:
        minutes = _sum_in_minutes("0", "0", *(*parts, "0")[:2])
    if minutes < 1:
        raise ValueError(
            f"--sbatch: time must be as Slurm takes it, such as 90, 12:00:00 or 2-00:00:00, got "
            f"{text!r}."
        )
    return minutes


def _sum_in_minutes(days: str, hours: str, minutes: str, seconds: str) -> int:
    """Return a time in minutes, rounded up."""
    total_minutes = (24 * int(days) + int(hours)) * 60 + int(minutes)
    return total_minutes + (1 if int(seconds) else 0)


@dataclass
class SlurmTask:
    """A trial as a Slurm job. It writes its progress messages to the file `message_file`, which
    `posenc compare` reads; the next run of `posenc compare` deletes the file's folder."""

    job: Job
    message_file: str

    def __call__(self) -> TrialResult:
        """Run the trial and return its result, which may be a failure. Raises: Lost if it could not
        run to its end here, or if the command was started again."""
        self._raise_if_replaced()
        return self.job.run(limit_step_events(POLL_SECONDS, self._write_message))

    def checkpoint(self) -> Any:
        """Return this task, which submitit queues again after a preemption or a timeout, as the
        submission that it expects."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _write_message(self, event: dict[str, Any]) -> None:
        """Write an event to the file `message_file`, in place of one that was not read yet."""
        self._raise_if_replaced()
        write_atomically(self.message_file, json.dumps(event))

    def _raise_if_replaced(self) -> None:
        """Raise Lost if the command was started again, whose newer job does this trial."""
        if not Path(self.message_file).parent.is_dir():
            raise Lost("a newer run of the same command does this trial")
