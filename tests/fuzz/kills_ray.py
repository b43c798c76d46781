"""A Ray sweep killed at random moments: python -m tests.fuzz.kills_ray [HOW_MANY SEED KIND...]

A head and two machines of one core run posenc compare. Each kill is a SIGKILL while trials run, to
a process drawn at random: of a trial, of the Ray worker that started one, of a machine (which a new
one replaces), of the mailbox, or of the command, which is then started again. After each kill,
finished results must be as they were. When the kills are spent the command runs to its end, and its
results and models must equal those of a local run that nothing disturbed, bit by bit.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.kills import TEXT, Wrong
from tests.processes import above, processes

ROOT = Path(__file__).parents[2]
NAMES = ("rope", "t5", "alibi")
COMMAND = (
    f"compare {' '.join(NAMES)} --text text.txt --train-length 16 --test-lengths 32 --batch 2 "
    "--width 32 --layers 2 --heads 2 --checkpoint-steps 20 --precision float32"
).split()
STEPS, SEEDS = 600, 2
KINDS = ("trial", "worker", "machine", "mailbox", "command")
LONGEST = 1800.0
"""Seconds for the command to end when nothing kills it any more."""


class Sweep:
    """The command, its cluster, and what it has finished."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder, self.out = folder, folder / "out"
        (folder / "text.txt").write_bytes(TEXT)
        self.finished: dict[Path, bytes] = {}
        self.cluster = Cluster()
        self.head = self.add_machine(num_cpus=0, include_dashboard=False)
        self.machines = [self.add_machine(num_cpus=1) for _ in range(2)]
        self.cluster.wait_for_nodes()
        self.command = self.start()

    def add_machine(self, **options: Any) -> Any:
        """A machine, also where this one is so busy that Ray gives up waiting for it."""
        for _ in range(4):
            try:
                return self.cluster.add_node(**options)
            except Exception as error:
                if "timed out during startup" not in str(error):
                    raise
        return self.cluster.add_node(**options)

    def start(self, *more: str) -> subprocess.Popen:
        more = more or ("--engine", "ray", "--address", self.cluster.address, "--out", "out")
        sizes = ("--steps", str(STEPS), "--seeds", str(SEEDS))
        with (self.folder / "said.txt").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "posenc", *COMMAND, *sizes, *more],
                cwd=self.folder,
                stdout=said,
                stderr=said,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def kill(self, kind: str, rng: random.Random) -> bool:
        """Kill a process of this kind; False where none runs now."""
        if kind == "command":
            if self.command.poll() is not None:
                return False
            self.command.send_signal(signal.SIGKILL)
            self.command.wait()
            self.command = self.start()
        elif kind == "machine":
            lost = self.machines.pop(rng.randrange(2))
            self.cluster.remove_node(lost, allow_graceful=False)
            self.machines.append(self.add_machine(num_cpus=1))
        else:
            found = self.processes(kind)
            if not found:
                return False
            os.kill(rng.choice(found), signal.SIGKILL)
        self.check_finished()
        return True

    def processes(self, kind: str) -> list[int]:
        """The processes of this sweep of that kind: trials name its folder, workers and the mailbox
        belong to its machines."""
        if kind == "trial":
            return processes(str(self.out), "posenc.compare.trial.process")
        nodes = [self.head, *self.machines]
        raylets = {node.all_processes["raylet"][0].process.pid for node in nodes}
        name = "ray::run_job" if kind == "worker" else "ray::Mailbox"
        return [process for process in processes(name) if above(process) in raylets]

    def check_finished(self) -> None:
        """What was finished is as it was; what is finished now is remembered."""
        for path, content in self.finished.items():
            if not path.exists() or path.read_bytes() != content:
                raise Wrong(f"{path} was finished and has changed")
        for path in self.out.glob("*/result.json"):
            content = path.read_bytes()
            if b'"reason": null' in content:
                self.finished[path] = content

    def running(self) -> bool:
        """Whether the sweep still has work; a command that ended over a failed trial goes on."""
        code = self.command.poll()
        if code is None:
            return True
        if code not in (0, 1):
            raise Wrong(f"ended with {code}: {self.said()}")
        if code == 1:
            self.command = self.start()
        return code == 1

    def finish(self) -> None:
        end = time.monotonic() + LONGEST
        while self.running():
            if time.monotonic() > end:
                raise Wrong(f"does not end: {self.said()}")
            time.sleep(0.5)
        self.check_finished()

    def said(self) -> str:
        return (self.folder / "said.txt").read_text(encoding="utf-8", errors="replace")[-500:]

    def close(self) -> None:
        self.command.kill()
        self.command.wait()
        self.cluster.shutdown()


def differences(killed: Path, whole: Path) -> list[str]:
    """The results and models of two studies that are not the same, or that one of them lacks."""
    names = {
        path.relative_to(study).as_posix()
        for study in (killed, whole)
        for path in study.glob("*/*")
        if path.name in ("result.json", "model.safetensors")
    }
    wrong = []
    for name in sorted(names):
        both = [study / name for study in (killed, whole)]
        if not all(path.exists() for path in both) or len({p.read_bytes() for p in both}) > 1:
            wrong.append(name)
    return wrong if names else ["there is nothing to compare"]


def kill_rounds(count: int, seed: int, root: Path, kinds: Sequence[str] = KINDS) -> None:
    """Kill `count` times, in as many sweeps as that takes. Raises: Wrong."""
    rng, hits, number = random.Random(seed), dict.fromkeys(kinds, 0), 0
    whole: Path | None = None
    while sum(hits.values()) < count:
        folder = root / f"round{number}"
        folder.mkdir()
        sweep = Sweep(folder)
        try:
            while sum(hits.values()) < count and sweep.running():
                time.sleep(rng.uniform(1, 20))
                kind = rng.choice(kinds)
                if sweep.running() and sweep.processes("trial") and sweep.kill(kind, rng):
                    hits[kind] += 1
                    print(
                        f"{sum(hits.values())} kills: {hits}; {len(sweep.finished)} done",
                        flush=True,
                    )
            sweep.finish()
            if whole is None:
                whole = root / "whole"
                if sweep.start("--out", str(whole), "--workers", "1").wait():
                    raise Wrong(f"the local run failed: {sweep.said()}")
        finally:
            sweep.close()
        wrong = differences(folder / "out", whole)
        if wrong:
            raise Wrong(f"{wrong} differ from an undisturbed local run's")
        trials = len(NAMES) * SEEDS
        print(f"round {number}: {trials} trials as in the undisturbed local run", flush=True)
        shutil.rmtree(folder)
        number += 1


def main(count: str = "50", seed: str = "0", *kinds: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        kill_rounds(int(count), int(seed), Path(folder), kinds or KINDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
