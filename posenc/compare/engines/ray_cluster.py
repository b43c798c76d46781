"""Trials as tasks of a Ray cluster, whose machines are checked before anything is computed."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posenc.command_line.errors import RunFailed, one_line
from posenc.compare.engines.remote import Job, Remote, describe_difference, machine_facts
from posenc.compare.engines.storage import Storage, storage_problem
from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.process import limit_step_events
from posenc.lazy import require_package
from posenc.machine.fingerprint import processor_facts

ANSWER_SECONDS = 10.0
"""Seconds for an address to answer at all, and for an answer from a cluster that is joined."""
JOIN_SECONDS = 60.0
"""Seconds for Ray to answer at an address, and to begin a process on every machine."""
IMPORT_SECONDS = 600.0
"""Seconds for the machines to import posenc and answer after that: chosen. A cold disk or one
behind a network takes minutes, and Ray itself tells which machines are lost meanwhile."""
POLL_SECONDS = 0.5
"""Seconds between two looks for what trials have told."""
_JOIN_CODE = (
    "import ray, sys; ray.init(sys.argv[1], logging_level=40, log_to_driver=False)"  # errors
)


class RayCluster(Remote):
    """One Ray task for each trial, on one core or one GPU.

    Ray does not repeat a task: a trial whose worker or machine is lost is submitted again.

    address: of a running cluster: ray://HOST:PORT, HOST:PORT or auto; None begins one on this
        machine, with `max_parallel` or else all of its cores.
    """

    def __init__(
        self, address: str | None, storage: str | None, max_parallel: int | None, device: str
    ) -> None:
        super().__init__(storage)
        self.max_parallel = max_parallel
        self.ray = connect(address, max_parallel)
        self.resource = "GPU" if device == "cuda" else "CPU"
        self.running: dict[Any, TrialConfig] = {}
        try:
            self.nodes = facts_of_nodes(self.ray, self.resource)
            check_nodes(self.facts_here, self.nodes)
            self.facts = {"engine": "ray", "machines": str(len(self.nodes))}
            builds = {node["build of torch"] for node in self.nodes.values()}
            self.facts |= {"build of torch": ", ".join(sorted(builds))}
            self.facts |= processor_facts(self.nodes.values())
            self.mailbox = self.ray.remote(num_cpus=0, max_restarts=-1)(Mailbox).remote()
            resources = {"num_cpus": 1, "num_gpus": int(device == "cuda"), "max_retries": 0}
            self.run_remotely = self.ray.remote(scheduling_strategy="SPREAD", **resources)(run_job)
        except BaseException:
            self.cancel()
            raise

    def num_slots(self) -> int:
        """Return how many trials the cluster has cores or GPUs for, now."""
        num_available = int(self.ray.cluster_resources().get(self.resource, 0))
        return max(1, min(num_available, self.max_parallel or num_available))

    def prepare(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        """Check that every machine reads and writes the folder or storage, and copy texts there."""
        check_folder(self.ray, self.nodes, folder.absolute(), self.storage)
        super().prepare(folder, trials, checkpoint_steps)

    def send(self, trial: TrialConfig, job: Job) -> None:
        """Start the job as a task of Ray."""
        self.running[self.run_remotely.remote(job, self.mailbox)] = trial

    def poll(self) -> None:
        """Wait a moment for a task to end, and pass on what trials told and how tasks ended.
        Raises: RunFailed if the cluster is gone."""
        try:
            done_references, _ = self.ray.wait(
                list(self.running), num_returns=1, timeout=POLL_SECONDS
            )
            with contextlib.suppress(self.ray.exceptions.RayError):  # Ray makes a new mailbox
                for trial, event in self.ray.get(
                    self.mailbox.take.remote(), timeout=ANSWER_SECONDS
                ):
                    if trial in self.progress_of_trial:
                        self.report_event(trial, event)
            for reference in done_references:
                self._report_end_of_task(self.running.pop(reference), reference)
        except (ConnectionError, self.ray.exceptions.RaySystemError) as error:
            why = f"The Ray cluster is gone ({one_line(error)})."
            raise RunFailed(f"{why} The same command goes on from here.") from error

    def cancel(self) -> None:
        """End all tasks and the connection to the cluster."""
        if not self.ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # the cluster may be gone, and so are the trials
            for reference in self.running:
                self.ray.cancel(reference, force=True)
            self.ray.kill(self.mailbox)
        with contextlib.suppress(Exception):
            self.ray.shutdown()

    def _report_end_of_task(self, trial: TrialConfig, reference: Any) -> None:
        """Pass on how a task ended: with its result, or lost."""
        try:
            self.report_end(trial, self.ray.get(reference, timeout=ANSWER_SECONDS))
        except self.ray.exceptions.RayTaskError as error:
            self.retry_lost_trial(trial, one_line(error.cause))
        except self.ray.exceptions.RayError as error:
            self.retry_lost_trial(trial, f"its worker is gone ({type(error).__name__})")


class Mailbox:
    """Keeps the newest of what trials tell until the command asks for it."""

    def __init__(self) -> None:
        self.mail: deque[tuple[TrialConfig, dict[str, Any]]] = deque(maxlen=10_000)  # chosen

    def put(self, trial: TrialConfig, event: dict[str, Any]) -> None:
        """Keep what a trial tells, and forget the oldest if there is too much."""
        self.mail.append((trial, event))

    def take(self) -> list[tuple[TrialConfig, dict[str, Any]]]:
        """Return all that was kept, and keep nothing."""
        return [self.mail.popleft() for _ in range(len(self.mail))]


def run_job(job: Job, mailbox: Any) -> TrialResult:
    """Train the job's trial on the machine that Ray chose, and return its result. What happens goes
    into the mailbox, steps at most once a second."""
    return job.run(limit_step_events(1.0, lambda event: mailbox.put.remote(job.trial, event)))


def connect(address: str | None, num_workers: int | None) -> Any:
    """Connect to the cluster and return the module ray. Raises: ValueError where ray is not
    installed or no cluster answers."""
    require_package("ray", "--engine ray")
    import ray

    log_options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        from posenc.machine.hardware import num_cores  # loads torch

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local", num_cpus=num_workers or num_cores(), include_dashboard=False, **log_options
        )
        return ray
    if address != "auto":
        _check_address(address)
    try:
        ray.init(address, **log_options)
    except ConnectionError:
        if address != "auto":
            raise
        raise ValueError(
            "--address auto: no Ray cluster runs on this machine. Start one with ray start "
            "--head, name one as ray://HOST:10001, or leave --address out for one of this "
            "machine only."
        ) from None
    return ray


def _check_address(address: str) -> None:
    """Raise ValueError for a text that is no address of a Ray cluster."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    hint = "The port is 10001 with ray:// and 6379 without, unless the cluster says otherwise."
    if not host or not port.isdigit():
        usage = "--address must be ray://HOST:PORT, HOST:PORT or auto"
        raise ValueError(f"{usage}, got {address!r}. {hint}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        advice = "Is the cluster running, and its port open to this machine?"
        why = f"nothing answers there ({one_line(error)}). {advice}"
        raise ValueError(f"--address {address}: {why}") from None
    # In a process of its own: Ray may wait for minutes, and may end its process.
    command = [sys.executable, "-P", "-c", _JOIN_CODE, address]
    try:
        attempt = subprocess.run(command, capture_output=True, text=True, timeout=JOIN_SECONDS)
    except subprocess.TimeoutExpired:
        why = (
            f"something answers there, but within {JOIN_SECONDS:.0f} seconds it did not as a Ray "
            "cluster"
        )
        raise ValueError(f"--address {address}: {why}. {hint}") from None
    if attempt.returncode:
        error_lines = [
            line for line in attempt.stderr.splitlines() if line.strip() and line[0] != " "
        ]
        reason = next(
            (line for line in reversed(error_lines) if "Error" in line), (error_lines or ["?"])[-1]
        )
        raise ValueError(
            f"--address {address}: Ray cannot join the cluster: {reason.strip()[:400]}"
        )


def facts_of_nodes(ray: Any, resource: str) -> dict[str, dict[str, str]]:
    """Return the facts of every machine that can take trials, by Ray's id of it. Raises: ValueError
    where there is none, or one does not answer or has no posenc."""
    nodes = {
        node["NodeID"]: {"name": f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"}
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get(resource, 0) >= 1
    }
    answers = ask(ray, nodes, machine_facts)
    if not answers:
        raise ValueError(f"--engine ray: no machine of the cluster has a {resource} for trials.")
    return {node: nodes[node] | answers[node] for node in answers}


def check_nodes(facts_here: dict[str, str], nodes: dict[str, dict[str, str]]) -> None:
    """Refuse machines on which trials would give other numbers. Raises: ValueError."""
    for facts in nodes.values():
        difference = describe_difference(facts_here, facts)
        if difference is not None:
            advice = "Numbers would not be comparable; install the same there."
            raise ValueError(
                f"--engine ray: machine {facts['name']} differs: {difference}. {advice}"
            )


def check_folder(
    ray: Any, nodes: dict[str, dict[str, str]], folder: Path, storage: Storage | None
) -> None:
    """Refuse a folder or a storage that a machine cannot read or write.

    Raises: ValueError; FileNotFoundError for a folder that is not there.
    """
    if storage is None:
        folder.stat()  # raises where there is none, which writing would make
        storage = Storage(f"file://{folder}")
        option_in_words = f"--out {folder}"
        advice = "Give an --out that all machines share, or a --storage such as s3://bucket/run."
    else:
        option_in_words = f"--storage {storage.url}"
        advice = "Give a URL that all machines reach, with the same credentials."
    with storage.probe_file() as (name, word):
        answers = ask(ray, nodes, storage_problem, storage.url, name, word)
        for node, problem in answers.items():
            if problem is not None:
                raise ValueError(
                    f"{option_in_words}: machine {nodes[node]['name']}: {problem}. {advice}"
                )


def ask(ray: Any, nodes: dict[str, dict[str, str]], function: Any, *args: Any) -> dict[str, Any]:
    """Call `function` with `args` on each machine; return the results by Ray's ids of the
    machines, but for those that have left the cluster meanwhile.

    The wait for the cluster and the time of imports are counted apart: a machine that imports
    slowly is not taken for one that does not answer.

    Raises: ValueError where a machine does not answer.
    """

    def begin() -> None:
        """Do nothing: Ray sends a function within a function as code, and imports no posenc."""

    begun = _call_on_each(ray, nodes, begin, (), JOIN_SECONDS, "begin a process")
    nodes_with_process = {node: nodes[node] for node in begun}
    what = "import posenc and answer"
    return _call_on_each(ray, nodes_with_process, function, args, IMPORT_SECONDS, what)


def _call_on_each(
    ray: Any,
    nodes: dict[str, dict[str, str]],
    function: Any,
    args: tuple[Any, ...],
    seconds: float,
    what: str,
) -> dict[str, Any]:
    """Do what `ask` does, within `seconds`; `what` names in an error what a machine did not do."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    remote_function = ray.remote(num_cpus=0, max_retries=0)(function)
    references = {
        node: remote_function.options(scheduling_strategy=On(node, soft=False)).remote(*args)
        for node in nodes
    }
    deadline = time.monotonic() + seconds
    answers = {}
    for node, reference in references.items():
        try:
            answers[node] = ray.get(reference, timeout=max(0.1, deadline - time.monotonic()))
            continue
        except ray.exceptions.RayTaskError as error:
            why = f"cannot run posenc ({one_line(error.cause)}). Install the same posenc there."
        except ray.exceptions.GetTimeoutError:
            advice = "Is it busy, or its disk slow? The same command tries again."
            why = f"did not {what} within {seconds:.0f} seconds. {advice}"
        except ray.exceptions.RayError as error:
            why = f"did not {what} ({one_line(error)})."
        if _is_alive(ray, node):
            raise ValueError(f"--engine ray: machine {nodes[node]['name']} {why}")
    return answers


def _is_alive(ray: Any, node: str) -> bool:
    """Return True if a machine of this id belongs to the cluster now."""
    return any(
        node_of_cluster["Alive"]
        for node_of_cluster in ray.nodes()
        if node_of_cluster["NodeID"] == node
    )
