"""Kill `posenc extend` while it searches, tunes, writes and proves, and hold what comes of going
on to an undisturbed run: python -m tests.fuzz.kills_extend KILLS [SEED]

Every other kill comes at a random time, the others inside a write: with half of a file written, or
just before or after a file or folder gets its name. After each, no process of the killed run may
live for more than a second. Once a run comes through, its export must be the same, bit for bit, no
file may be left beside it, and nothing that was saved may have been done twice.
"""

import atexit
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS, SAVE_EVERY, TRIES = 24, 4, 24
TARGET = 192
EXPORTED = ("config.json", "model.safetensors", "extend.csv")
WRITES = ("half", "before", "after")
PHASES = ("start", "search", "tuning", "export")


class UnlikeUndisturbed(AssertionError):
    """A kill left a trace."""


@dataclass
class Run:
    """One start of the command, and what it wrote down of itself."""

    code: int
    done: list[list[Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[Any]:
        return [value for name, value, _ in self.done if name == kind]

    def writes(self, phase: str) -> list[int]:
        """Numbers of the writes of a phase."""
        return [n for n, path in self.of("write") if phase_of(path) == phase]

    def lines(self, phase: str) -> list[int]:
        """Numbers of the lines that a phase wrote down."""
        places = [Run(0, self.done[: n + 1]).phase for n in range(len(self.done))]
        return [n for n, place in enumerate(places) if place == phase]

    @property
    def phase(self) -> str:
        """Where it was last seen."""
        kind, value, _ = self.done[-1]
        if kind == "write":
            return phase_of(value[1])
        return {"scored": "search", "step": "tuning"}.get(kind, "start")


def phase_of(path: str) -> str:
    """Which phase writes a file."""
    if "search.json" in path:
        return "search"
    return "tuning" if "/tune" in path else "export"


def main(kills: int, seed: int = 0) -> dict[str, int]:
    """Kill so many times; what was seen. Raises: UnlikeUndisturbed."""
    from tests.hf_models import save

    draw = random.Random(seed)
    seen = {"kills": 0, "at a random time": 0, "inside a write": 0, "runs that came through": 0}
    seen |= {f"in the {phase}": 0 for phase in PHASES}
    with tempfile.TemporaryDirectory(prefix="posenc-kills-") as scratch:
        work = Path(scratch)
        model = save("llama", work / "model")
        (work / "text.txt").write_text(
            "<|endoftext|>".join(f"{i} the fox and the dog " * 12 for i in range(40))
        )
        whole = start(model, work / "whole", work)
        check(whole.code == 0, f"the undisturbed run ended with {whole.code}")
        series: list[Run] = []
        while seen["kills"] < kills or series:
            out = work / f"out-{seen['runs that came through']}"
            plan = plan_of(draw, whole, seen["kills"]) if seen["kills"] < kills else {}
            run = start(model, out, work, **plan)
            series.append(run)
            if run.code == -signal.SIGKILL:
                seen["kills"] += 1
                seen["inside a write" if "write" in plan else "at a random time"] += 1
                seen[f"in the {run.phase}"] += 1
                check(not out.exists() or whole_export(out), f"{out} is there, but not whole")
                if not out.exists():
                    continue
            check(run.code in (0, -signal.SIGKILL), f"a run ended with {run.code}")
            compare(work, out, series, whole, killed=run.code != 0)
            seen["runs that came through"] += 1
            series = []
    return seen


def plan_of(draw: random.Random, whole: Run, number: int) -> dict[str, Any]:
    """When to kill: a moment after a line of the log, or inside the n-th write; one phase after the
    other."""
    phase = PHASES[1:][number // 2 % 3]
    if number % 2 == 0:
        # Not after some seconds: how long anything takes changes with the machine's load.
        return {"line": draw.choice(whole.lines(phase)), "more": draw.uniform(0, 0.05)}
    return {"write": draw.choice(whole.writes(phase)), "how": draw.choice(WRITES)}


def start(model: Path, out: Path, work: Path, **plan: Any) -> Run:
    """Run the command in a process of its own, killed as planned."""
    log = work / "log.jsonl"
    asked = json.dumps({"model": str(model), "out": str(out), "log": str(log), **plan})
    log.write_text(json.dumps(["began", None, time.monotonic()]) + "\n")
    running = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.kills_extend", "--child", asked],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while running.poll() is None:
        if "line" in plan and log.read_bytes().count(b"\n") > plan["line"]:
            time.sleep(plan["more"])
            running.kill()
            break
        time.sleep(0.003)
    said = running.communicate()[1]
    if running.returncode not in (0, -signal.SIGKILL):
        sys.stderr.write(said)
    time.sleep(1.0)
    left = orphans(running.pid)
    check(not left, f"still there a second after the kill: {left}")
    lines = log.read_text().splitlines() if log.exists() else []
    return Run(running.returncode, [json.loads(line) for line in lines])


def orphans(parent: int) -> list[str]:
    """Provers of a process, which they name on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(parent).encode() in words and any(word.endswith(b"proof.py") for word in words):
            found.append(path.parent.name)
    return found


def whole_export(out: Path) -> bool:
    """The folder gets its name after it was proved; the page comes last."""
    return all((out / name).exists() for name in EXPORTED[:2])


def compare(work: Path, out: Path, series: list[Run], whole: Run, *, killed: bool) -> None:
    """The export against the undisturbed one, what lies beside it, and what was done twice."""
    # Killed after the folder got its name, a run may lack its page and leave its state.
    for name in EXPORTED[:2] if killed else EXPORTED:
        same = (out / name).read_bytes() == (work / "whole" / name).read_bytes()
        check(same, f"{name} is another one than undisturbed")
    hidden = [path.name for path in work.iterdir() if path.name.startswith(".")]
    if not killed:
        check(not hidden, f"left beside the export: {hidden}")
    for path in work.glob(f".{out.name}.*") if killed else ():
        check(path.is_dir(), f"left beside the export: {path}")
        shutil.rmtree(path)
    scored = [key for run in series for key in run.of("scored")]
    # A score counts once it is on disk: of each killed run the last one may be missing.
    allowed = len(set(scored)) + len(series) - 1
    check(len(scored) <= allowed, f"{len(scored)} scores for {len(set(scored))} sets")
    check(set(scored) == set(whole.of("scored")), "another way of the search")
    steps = [run.of("step") for run in series if run.of("step")]
    for before, after in itertools.pairwise(steps):
        begun = before[-1]
        saved = begun // SAVE_EVERY * SAVE_EVERY
        # The save that the kill came into is lost, none before it.
        lost = SAVE_EVERY if begun == saved or begun + 1 == STEPS else 0
        check(after[0] >= saved - lost, f"step {after[0]} again, though {saved} were saved")
    check(steps[-1][-1] == STEPS - 1, f"the last step was {steps[-1][-1]}")


def check(holds: bool, message: str) -> None:
    if not holds:
        raise UnlikeUndisturbed(message)


def child(asked: dict[str, Any]) -> None:
    """The command, writing down what it does, and killing itself inside a write if asked to."""
    from posenc.command_line.main import main as posenc
    from posenc.extend.frequency_search import FrequencySearch
    from posenc.hf import tuning

    log = Path(asked["log"]).open("a", encoding="utf-8", buffering=1)
    writes = itertools.count()

    def tell(kind: str, value: Any) -> None:
        log.write(json.dumps([kind, value, time.monotonic()]) + "\n")

    def die_if(how: str, write: int) -> None:
        if (asked.get("write"), asked.get("how")) == (write, how):
            os.kill(os.getpid(), signal.SIGKILL)

    def step_tokens(*args: Any, plain: Any = tuning.step_tokens) -> Any:
        tell("step", args[-1])
        return plain(*args)

    def prepare(search: Any, *args: Any, plain: Any = FrequencySearch.__init__) -> None:
        plain(search, *args)
        score = search.scorer.score  # the other scorer's scores, of the finalists, are not kept

        def telling(genome: Any, *bar: float) -> Any:
            tell("scored", genome.key)
            return score(genome, *bar)

        search.scorer.score = telling

    def fsync(handle: int, plain: Any = os.fsync) -> None:
        write = next(writes)
        tell("write", [write, str(Path(f"/proc/self/fd/{handle}").readlink())])
        if (asked.get("write"), asked.get("how")) == (write, "half"):
            with contextlib.suppress(OSError):  # a folder, or opened to read
                os.ftruncate(handle, os.fstat(handle).st_size // 2)
        die_if("half", write)
        plain(handle)
        now[0] = write

    def replace(source: Any, target: Any, plain: Any = os.replace, **where: int) -> None:
        die_if("before", now[0])
        plain(source, target, **where)
        die_if("after", now[0])

    now = [-1]
    tuning.SAVE_EVERY = SAVE_EVERY
    tuning.step_tokens = step_tokens
    FrequencySearch.__init__ = prepare  # type: ignore[method-assign]
    os.fsync, os.replace = fsync, replace
    atexit.register(tell, "end", None)
    posenc(
        [
            "extend",
            asked["model"],
            "--to",
            str(TARGET),
            "--method",
            "search",
            "--search-evaluations",
            str(TRIES),
            "--tune",
            str(STEPS),
            "--batch",
            "1",
            "--windows",
            "2",
            "--lr",
            "1e-3",
            "--text",
            str(Path(asked["log"]).with_name("text.txt")),
            "--out",
            asked["out"],
        ]
    )


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(json.loads(sys.argv[2]))
    else:
        print(json.dumps(main(*map(int, sys.argv[1:]))))
