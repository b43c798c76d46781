"""What an engine costs beside the trials: python benchmarks/engines.py local|ray

A thousand trials that sleep for ten seconds run twenty at a time, each in a process of its own that
tells its steps and writes its result, as real ones do. Written to benchmarks/results/engines.csv:
what the sweep takes over a thousand times ten seconds in twenty slots, per trial, and the memory of
this process as it goes. Sleeping takes no core, so one machine can play twenty; starting Python
does, so a busy machine looks worse by the clock than it is.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from posenc.compare.engines import sweep
from posenc.compare.engines.local import Local
from posenc.compare.engines.ray_cluster import RayCluster
from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.report import machine

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "engines.csv"
MODULE = "benchmarks.simulated_trial"
EVERY = 100
"""Trials between two looks at the memory."""


class Memory:
    """A watcher that counts what ends and looks at this process's memory."""

    def __init__(self) -> None:
        self.done, self.failed, self.notes = 0, 0, 0
        self.seen: list[tuple[int, float]] = []

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        pass

    def testing(self, trial: TrialConfig) -> None:
        pass

    def note(self, trial: TrialConfig, text: str) -> None:
        self.notes += 1

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        self.done += 1
        self.failed += result.reason is not None
        if self.done % EVERY == 0:
            self.seen.append((self.done, resident_mib()))
            print(f"{self.done} done, {self.seen[-1][1]:.1f} MiB", flush=True)


def resident_mib() -> float:
    """This process's memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("engine", choices=("local", "ray"))
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--slots", type=int, default=20)
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    like = TrialConfig(
        encoding="nope", seed=0, corpus="", train_length=2, test_lengths=(2,), steps=10, batch=1,
        width=1, layers=1, heads=1, kv_heads=1, lr=asked.seconds, device="cpu", precision="float32",
        torch=torch.__version__, task="copy",
    )  # fmt: skip
    trials = [dataclasses.replace(like, seed=seed) for seed in range(asked.trials)]
    if asked.engine == "local":
        engine: Local | RayCluster = Local(asked.slots, MODULE)
    else:
        engine = RayCluster(None, None, asked.slots, "cpu", asked.slots, MODULE)
    memory = Memory()
    with tempfile.TemporaryDirectory() as folder:
        try:
            engine.settle(Path(folder), trials, 50)
            began, used = time.monotonic(), time.process_time()
            sweep.run_trials(Path(folder), trials, engine, memory)
            wall, used = time.monotonic() - began, time.process_time() - used
        finally:
            engine.cancel()
    beside = wall * asked.slots / asked.trials - asked.seconds
    row = {
        "engine": asked.engine,
        "trials": asked.trials,
        "failed": memory.failed,
        "seconds each": asked.seconds,
        "slots": asked.slots,
        "wall seconds": f"{wall:.1f}",
        "beside each trial, seconds": f"{beside:.3f}",
        "beside each trial, share": f"{beside / asked.seconds:.4f}",
        "processor seconds of the command, each": f"{used / asked.trials:.4f}",
        "MiB after 100": f"{memory.seen[0][1]:.1f}" if memory.seen else "",
        "MiB at the end": f"{memory.seen[-1][1]:.1f}" if memory.seen else "",
        "load of the machine": f"{os.getloadavg()[2]:.1f} on {machine.num_cores()} cores",
        "processor": machine.processor(),
    }
    new = not OUT.exists()
    with OUT.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(row)
    return 1 if memory.failed else 0


if __name__ == "__main__":
    sys.exit(main())
