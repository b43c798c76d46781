"""Trials as tasks of a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posenc.compare.engines import ray_nodes
from posenc.compare.engines.job import Job, every
from posenc.compare.engines.node import other_processors
from posenc.compare.engines.remote import Remote
from posenc.compare.engines.storage import one_line
from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.process import WORKER
from posenc.report.page.failure import RunFailed

POLL = 0.5
"""Seconds between two looks for what trials have told."""
PATIENCE = 10.0
"""Seconds for an answer from the cluster."""
PAUSE = 1.0
"""Seconds between two steps of a trial that are told."""


class RayCluster(Remote):
    """One Ray task for each trial, on one core or one GPU; the trial is a process of its own below
    it, the same as on this machine.

    Ray does not repeat a task: a trial whose worker or machine is lost is submitted again, and goes
    on from its last checkpoint wherever there is room.

    address: of a running cluster: ray://HOST:PORT, HOST:PORT or auto; None begins one on this
        machine, with `cores` cores.
    """

    def __init__(
        self,
        address: str | None,
        storage: str | None,
        max_parallel: int | None,
        device: str,
        cores: int,
        module: str = WORKER,
    ) -> None:
        super().__init__(storage, module)
        self.max_parallel = max_parallel
        self.ray = ray_nodes.connect(address, max_parallel or cores)
        self.resource = "GPU" if device == "cuda" else "CPU"
        self.running: dict[Any, TrialConfig] = {}
        try:
            self.nodes = ray_nodes.look_at(self.ray, self.resource)
            ray_nodes.check_nodes(self.here, self.nodes)
            self.mailbox = self.ray.remote(num_cpus=0, max_restarts=-1)(Mailbox).remote()
            gpus = 1 if self.resource == "GPU" else 0
            self.run = self.ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(run_job).options(
                scheduling_strategy="SPREAD"
            )
        except BaseException:
            self.cancel()
            raise

    def slots(self) -> int:
        there = int(self.ray.cluster_resources().get(self.resource, 0))
        return max(1, min(there, self.max_parallel or there))

    def describe(self) -> dict[str, str]:
        processors = ", ".join(sorted({node["processor"] for node in self.nodes.values()}))
        told = {"engine": "ray", "machines": str(len(self.nodes)), "processor": processors}
        warning = other_processors(list(self.nodes.values()))
        return told if warning is None else told | {"warning": warning}

    def settle(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        ray_nodes.check_folder(self.ray, self.nodes, folder.absolute(), self.storage)
        super().settle(folder, trials, checkpoint_steps)

    def send(self, trial: TrialConfig, job: Job) -> None:
        self.running[self.run.remote(job, self.mailbox, trial.folder)] = trial

    def poll(self) -> None:
        try:
            done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL)
            self._take_mail()
            for reference in done:
                self._take(reference)
        except (ConnectionError, self.ray.exceptions.RaySystemError) as error:
            raise RunFailed(
                f"The Ray cluster is gone ({one_line(error)}). The same command goes on from here."
            ) from error

    def cancel(self) -> None:
        if not self.ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # the cluster may be gone, and so are the trials
            for reference in self.running:
                self.ray.cancel(reference, force=True)
            self.ray.kill(self.mailbox)
        with contextlib.suppress(Exception):
            self.ray.shutdown()

    def _take_mail(self) -> None:
        try:
            mail = self.ray.get(self.mailbox.take.remote(), timeout=PATIENCE)
        except self.ray.exceptions.RayError:  # with its machine; Ray makes it anew elsewhere
            return
        trials = {trial.folder: trial for trial in self.running.values()}
        for key, event in mail:
            if key in trials:
                self.told(trials[key], event)

    def _take(self, reference: Any) -> None:
        trial = self.running.pop(reference)
        try:
            result = TrialResult.from_json(self.ray.get(reference, timeout=PATIENCE))
        except self.ray.exceptions.RayTaskError as error:
            self.lost(trial, one_line(error.cause))
        except self.ray.exceptions.RayError as error:
            self.lost(trial, f"its worker is gone ({type(error).__name__})")
        else:
            self.ended(trial, result)


class Mailbox:
    """What trials tell, until the command asks for it."""

    MOST = 10_000

    def __init__(self) -> None:
        self.mail: list[tuple[str, dict[str, Any]]] = []

    def put(self, key: str, event: dict[str, Any]) -> None:
        if len(self.mail) < self.MOST:
            self.mail.append((key, event))

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        mail, self.mail = self.mail, []
        return mail


def run_job(job: Job, mailbox: Any, key: str) -> str:
    """Run the task. Returns: what `TrialResult.to_json` makes of the result."""
    return job.run(every(PAUSE, lambda event: mailbox.put.remote(key, event))).to_json()
