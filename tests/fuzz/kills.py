"""posenc compare killed at random moments: python -m tests.fuzz.kills [HOW_MANY] [SEED]

Each kill is a SIGKILL to the command, at a random time or inside a write of the command or of a
worker, with the file half written. After each kill every process of the command must be gone within
a second, and finished results must never change again. After the last kill of a round the same
command runs to its end: its results must equal those of an undisturbed run bit by bit, and it must
leave the same files.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.texts import prose

TEXT = prose(9000)
COMMAND = (
    "compare rope t5 --text text.txt --out out --train-length 16 --test-lengths 32 --seeds 1 "
    "--steps 12 --batch 2 --width 32 --layers 2 --heads 2 --checkpoint-steps 3 --workers 2 "
    "--precision float32"
).split()
WRITES = {"command": 8, "worker": 13}
"""How many files the process of the command makes durable, and that of a trial."""

# Python runs this at every start. The nth file that a process of this kind makes durable is cut in
# half instead, and the command is killed there and then.
_SITE = """
import os, signal, sys
kind, nth = os.environ.get("KILL", "- 0").split()
if sys.argv[:1] != ["-c"]:
    os.environ["KILL_PID"] = str(os.getpid())  # the command's, which its workers inherit
if kind == ("worker" if sys.argv[:1] == ["-c"] else "command"):
    made, seen = os.fsync, 0
    def fsync(descriptor):
        global seen
        seen += 1
        if seen == int(nth):
            try:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            except OSError:  # a folder, or opened to read
                pass
            os.kill(int(os.environ["KILL_PID"]), signal.SIGKILL)
            signal.pause()
        made(descriptor)
    os.fsync = fsync
"""


class Wrong(AssertionError):
    """What a kill may not do."""


def kill_rounds(count: int, seed: int, root: Path, kinds: tuple[str, ...]) -> None:
    """Kill `count` times in rounds of up to five, each round in a folder of its own.

    kinds: "time", "command" or "worker", one of which is drawn for each kill.
    Prints how many kills of each kind there were, after each round. Raises: Wrong.
    """
    rng = random.Random(seed)
    (root / "site").mkdir()
    (root / "site" / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    whole = _Study(root / "whole")
    seconds = whole.finish()
    hits = dict.fromkeys(kinds, 0)
    left, number = count, 0
    while left:
        study = _Study(root / f"round{number}")
        for _ in range(min(left, rng.randrange(1, 6))):
            kind = rng.choice(kinds)
            if not study.kill(kind, rng, seconds):
                break  # it ended before the kill, which does not count
            hits[kind] += 1
            left -= 1
        study.finish()
        study.compare_with(whole)
        number += 1
        print(f"{count - left} kills in {number} rounds: {hits}", flush=True)


class _Study:
    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        folder.mkdir()
        (folder / "text.txt").write_bytes(TEXT)
        self.finished: dict[Path, tuple[int, bytes]] = {}

    def start(self, kill: str = "- 0") -> tuple[subprocess.Popen, str]:
        mark = uuid.uuid4().hex
        paths = [str(self.folder.parent / "site"), str(Path(__file__).parent.parent.parent)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "KILL": kill,
            "KILL_MARK": mark,
        }
        with (self.folder / "said.txt").open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "posenc", *COMMAND],
                cwd=self.folder,
                stdout=said,
                stderr=said,
                env=environment,
            )
        return process, mark

    def kill(self, kind: str, rng: random.Random, seconds: float) -> bool:
        """Start the command and kill it; False if it had ended before that."""
        if kind == "time":
            process, mark = self.start()
            time.sleep(rng.uniform(0, seconds))
            process.send_signal(signal.SIGKILL)
        else:
            process, mark = self.start(f"{kind} {rng.randint(1, WRITES[kind])}")
        code = process.wait(300)
        self._check_orphans(mark)
        if code not in (0, -signal.SIGKILL):
            raise Wrong(f"ended with {code}: {self._said()}")
        self._check_finished()
        return code != 0

    def finish(self) -> float:
        """Run to the end; the seconds that took."""
        began = time.monotonic()
        process, mark = self.start()
        if process.wait(300):
            raise Wrong(f"the same command did not go on: {self._said()}")
        seconds = time.monotonic() - began
        self._check_orphans(mark)
        self._check_finished()
        return seconds

    def compare_with(self, whole: _Study) -> None:
        """The same files, and the same results and models in them."""
        names = [{str(p.relative_to(s.out)) for p in s.out.rglob("*")} for s in (self, whole)]
        if names[0] != names[1]:
            raise Wrong(f"left, or misses: {sorted(names[0] ^ names[1])}")
        for name in names[0]:
            if Path(name).name not in ("result.json", "model.safetensors") and ".u16" not in name:
                continue
            if (self.out / name).read_bytes() != (whole.out / name).read_bytes():
                raise Wrong(f"{name} differs from an undisturbed run's")

    def _check_finished(self) -> None:
        """What was finished is as it was; what is finished now is remembered."""
        for path, (when, content) in self.finished.items():
            if (path.stat().st_mtime_ns, path.read_bytes()) != (when, content):
                raise Wrong(f"{path} was finished and is made again")
        for path in self.out.glob("*/result.json"):
            self.finished[path] = (path.stat().st_mtime_ns, path.read_bytes())

    def _check_orphans(self, mark: str) -> None:
        end = time.monotonic() + 1
        while orphans := _running(mark):
            if time.monotonic() > end:
                raise Wrong(f"still running a second later: {orphans}")
            time.sleep(0.02)

    def _said(self) -> str:
        return (self.folder / "said.txt").read_text(encoding="utf-8", errors="replace")[-500:]


def _running(mark: str) -> list[str]:
    """Processes with this mark in their environment; one that is dead has none."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append(path.name)
        except OSError:
            continue
    return found


def main(count: int = 50, seed: int = 0) -> int:
    with tempfile.TemporaryDirectory() as folder:
        kill_rounds(count, seed, Path(folder), ("time", "command", "worker"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
