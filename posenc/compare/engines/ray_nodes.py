"""Reach a Ray cluster, or say within seconds why not, and look at its machines before anything is
computed there."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from posenc.compare.engines.node import difference, facts
from posenc.compare.engines.storage import Storage, one_line

REACH = 10.0
"""Seconds for a machine to answer at all."""
JOIN = 60.0
"""Seconds for Ray to answer there."""
ANSWER = 60.0
"""Seconds for all machines to answer."""
_TRY = """\
import logging, sys
import ray
ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
"""


def connect(address: str | None, cores: int) -> Any:
    """Return the module ray, connected.

    Raises: ValueError where Ray is not installed, or does not answer there.
    """
    try:
        import ray
    except ImportError:
        raise ValueError(
            "--engine ray: Ray is not installed. Install posenc[ray] here and on the cluster."
        ) from None
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", num_cpus=cores, include_dashboard=False, **quiet)
        return ray
    if address != "auto":
        _check_reachable(address)
        _check_answers(address)
    try:
        ray.init(address, **quiet)
    except ConnectionError:
        if address != "auto":
            raise
        raise ValueError(
            "--address auto: no Ray cluster runs on this machine. Start one with ray start "
            "--head, name one as ray://HOST:10001, or leave --address out for one of this "
            "machine only."
        ) from None
    return ray


def _check_reachable(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"--address must be ray://HOST:PORT, HOST:PORT or auto, got {address!r}. The port is "
            "10001 with ray:// and 6379 without, unless the cluster says otherwise."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--address {address}: nothing answers there ({one_line(error)}). Is the cluster "
            "running, and its port open to this machine?"
        ) from None


def _check_answers(address: str) -> None:
    """Connect in a process of its own: Ray may wait for minutes, and may end its process."""
    command = [sys.executable, "-c", _TRY, address]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=JOIN)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"--address {address}: something answers there, but within {JOIN:.0f} seconds it did "
            "not as a Ray cluster. With ray:// the port is 10001, without it 6379, unless the "
            "cluster says otherwise."
        ) from None
    if tried.returncode:
        lines = [line for line in tried.stderr.splitlines() if line.strip() and line[0] != " "]
        said = next((line for line in reversed(lines) if "Error" in line), (lines or ["?"])[-1])
        raise ValueError(f"--address {address}: Ray cannot join the cluster: {said.strip()[:400]}")


def look_at(ray: Any, resource: str) -> dict[str, dict[str, str]]:
    """Return the facts of every machine that can take trials, by Ray's id of it.

    Raises: ValueError where there is none, or one does not answer or has no posenc.
    """
    nodes = {
        node["NodeID"]: {"name": f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"}
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get(resource, 0) >= 1
    }
    found = ask(ray, nodes, facts)
    if not found:
        raise ValueError(f"--engine ray: no machine of the cluster has a {resource} for trials.")
    return {node: nodes[node] | found[node] for node in found}


def check_nodes(here: dict[str, str], nodes: dict[str, dict[str, str]]) -> None:
    """Refuse machines on which trials would give other numbers. Raises: ValueError."""
    for node in nodes.values():
        differs = difference(here, node)
        if differs is not None:
            raise ValueError(
                f"--engine ray: machine {node['name']} differs: {differs}. Numbers would not be "
                "comparable; install the same there."
            )


def check_folder(
    ray: Any, nodes: dict[str, dict[str, str]], folder: Path, storage: Storage | None
) -> None:
    """Refuse a folder or a storage that a machine cannot read or write. Raises: ValueError."""
    if storage is None:
        folder.stat()  # raises where there is none, which writing would make
        storage, where = Storage(f"file://{folder}"), f"--out {folder}"
        advice = "Give an --out that all machines share, or a --storage such as s3://bucket/run."
    else:
        where = f"--storage {storage.url}"
        advice = "Give a URL that all machines reach, with the same credentials."
    with storage.token() as (name, word):
        found = ask(ray, nodes, _answer, storage.url, name, word)
    for node, wrong in found.items():
        if wrong is not None:
            raise ValueError(f"{where}: machine {nodes[node]['name']}: {wrong}. {advice}")


def ask(ray: Any, nodes: dict[str, dict[str, str]], question: Any, *args: Any) -> dict[str, Any]:
    """Return what each machine answers, but for those that have left the cluster meanwhile.

    Raises: ValueError where a machine does not answer.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    remote = ray.remote(num_cpus=0, max_retries=0)(question)
    asked = {n: remote.options(scheduling_strategy=On(n, soft=False)).remote(*args) for n in nodes}
    end, answers = time.monotonic() + ANSWER, {}
    for node, reference in asked.items():
        machine = f"--engine ray: machine {nodes[node]['name']}"
        try:
            answers[node] = ray.get(reference, timeout=max(0.1, end - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            raise ValueError(f"{machine} has not answered within {ANSWER:.0f} seconds.") from None
        except ray.exceptions.RayTaskError as error:
            raise ValueError(
                f"{machine} cannot run posenc ({one_line(error.cause)}). Install the same posenc "
                "there."
            ) from None
        except ray.exceptions.RayError as error:
            if node in {each["NodeID"] for each in ray.nodes() if each["Alive"]}:
                raise ValueError(f"{machine} does not answer ({one_line(error)}).") from None
    return answers


def _answer(url: str, name: str, word: str) -> str | None:
    try:
        return Storage(url).answer(name, word)
    except ValueError as error:
        return str(error)
