"""Reach a Ray cluster, or say within seconds why not."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from typing import Any

from posenc.compare.engines.storage import one_line

REACH = 10.0
"""Seconds for a machine to answer at all."""
JOIN = 60.0
"""Seconds for Ray to answer there."""
_TRY = """\
import logging, sys
import ray
ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
"""


def connect(address: str | None, cores: int) -> Any:
    """The module ray, connected.

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
    if address == "auto":
        try:
            ray.init("auto", **quiet)
        except ConnectionError:
            raise ValueError(
                "--address auto: no Ray cluster runs on this machine. Start one with ray start "
                "--head, name one as ray://HOST:10001, or leave --address out for one of this "
                "machine only."
            ) from None
        return ray
    _check_reachable(address)
    _check_answers(address)
    ray.init(address, **quiet)
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
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _TRY, address], capture_output=True, text=True, timeout=JOIN
        )
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
