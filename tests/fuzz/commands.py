"""Hostile command lines, in one process: python -m tests.fuzz.commands [HOW_MANY] [SEED]

Whatever is typed, posenc must end soon, with code 0, 1 or 2 and no traceback; if the code is not 0,
stderr has one line that says why, or stdout the doctor's answer (1, and 3 for an unknown family);
and the files that were there must not change. Training, timing and measuring would take minutes
and are left out: this tries the command lines, not the work.
"""

import collections
import contextlib
import io
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from posenc.command_line import main as cli
from posenc.command_line.errors import RunFailed
from tests.fuzz import world

SECONDS = 30
"""A command that computes for longer, or waits for ten times as long, hangs."""
CLOCKS = {signal.SIGPROF: (signal.ITIMER_PROF, 1), signal.SIGALRM: (signal.ITIMER_REAL, 10)}
"""Clocks by the signal that they send: of the process, however busy the machine is, and of all."""
MEMORY = 12 << 30
FEWEST = 100
"""Command lines of which at least half must be accepted."""
MANY, ACCEPTED, DRAWN = 1500, 100, 20
"""With so many command lines, each command is accepted, and each option drawn, this often."""
SOUND = 0.73
"""Share of the command lines that are drawn to run: only they come to what is behind the checks."""
OUTPUTS = ("--out", "--report", "--state")
"""Options that name an output; they get a fresh name or a hostile one."""


@dataclass
class Ended:
    """How a command line ended."""

    arguments: list[str]
    code: object
    out: str
    err: str
    seconds: float
    crash: str = ""

    def wrong(self) -> str:
        """What must not be, or nothing."""
        if self.crash:
            return f"raised {self.crash}"
        judged = self.arguments[:1] == ["doctor"] and self.out and self.code in (1, 3)
        if self.code not in (0, 1, 2) and not judged:
            return f"ended with {self.code!r}"
        if "Traceback" in self.out + self.err:
            return "showed a traceback"
        if judged:
            return ""
        lines = [line for line in self.err.splitlines() if line.startswith("posenc: ")]
        if (
            self.code != 0
            and not judged
            and (len(lines) != 1 or not self.err.endswith(lines[0] + "\n"))
        ):
            return f"ended with {self.code} and {len(lines)} lines that say why"
        if self.code != 0 and len(lines[0]) < 15:
            return "said nothing"
        return ""


class Hangs(BaseException):
    """No handler may take this for an error of the user's."""


class Counts:
    """What was drawn and accepted so far, and which command needs the next line."""

    def __init__(self, commands: dict[str, Any]) -> None:
        self.accepted = dict.fromkeys(sorted(commands), 0)
        self.drawn = {
            (name, parameter.name): 0
            for name, command in commands.items()
            for parameter in command.params
            if parameter.param_type_name != "argument" and parameter.name != "help"
        }

    def add(self, options: list[tuple[str, str]], command: str, code: object) -> None:
        for option in options:
            self.drawn[option] += 1
        if code != 2 and command in self.accepted:
            self.accepted[command] += 1

    def least_accepted(self, rng: random.Random) -> str:
        fewest = min(self.accepted.values())
        return rng.choice([name for name, count in self.accepted.items() if count <= fewest + 5])

    def least_drawn(self, rng: random.Random) -> str:
        """The command of one of the options that were drawn least."""
        fewest = min(self.drawn.values())
        return rng.choice([name for (name, _), n in self.drawn.items() if n <= fewest + 1])

    def missing(self) -> list[str]:
        few = [f"{name}: {n} accepted" for name, n in self.accepted.items() if n < ACCEPTED]
        return few + [
            f"{name} {option}: {n} drawn" for (name, option), n in self.drawn.items() if n < DRAWN
        ]

    def __str__(self) -> str:
        options = (
            f"{name}: {count} accepted, options "
            + ", ".join(f"{o} {n}" for (of, o), n in sorted(self.drawn.items()) if of == name)
            for name, count in self.accepted.items()
        )
        return "\n".join(options)


def draw(
    rng: random.Random, commands: dict[str, Any], counts: Counts
) -> tuple[list[str], list[tuple[str, str]]]:
    """A command line and the options that it draws: a sound one that runs, or a command with some
    of its options, each with a value of its kind or with any other."""
    if rng.random() < SOUND and (drawn := sound(rng, counts.least_accepted(rng))):
        return drawn, []
    if rng.random() < 0.03:
        return [_any_value(rng) for _ in range(rng.randrange(4))], []
    name = counts.least_drawn(rng)
    arguments, options = name.split(), []
    for parameter in commands[name].params:
        if parameter.name == "help":
            continue
        if parameter.param_type_name == "argument":
            count = 1 if parameter.nargs == 1 else rng.choice((0, 1, 1, 1, 2, 3))
            arguments += [_positional(rng) for _ in range(count)]
        elif rng.random() < (0.25 if counts.drawn[name, parameter.name] >= DRAWN else 0.6):
            options.append((name, parameter.name))
            option = rng.choice(parameter.opts)
            if parameter.is_flag:
                arguments.append(option)
            else:
                values = [_value(rng, option, parameter) for _ in range(max(1, parameter.nargs))]
                joined = len(values) == 1 and rng.random() < 0.2
                arguments += [f"{option}={values[0]}"] if joined else [option, *values]
    if rng.random() < 0.1:
        arguments.insert(rng.randrange(len(arguments) + 1), _any_value(rng))
    if rng.random() < 0.05:
        rng.shuffle(arguments)
    return arguments, options


def sound(rng: random.Random, command: str) -> list[str]:
    """A command line of a command that nothing refuses; none for a command that takes long."""
    fresh = f"out{rng.randrange(10**6)}"
    name = rng.choice(("rope", "alibi", "t5", "nope", "learned", "rope:rope_theta=500", "shaw"))
    option = rng.choice
    lines = {
        "list": [[], ["--json"], [name], [name, "alibi", "--json"]],
        "compare": [
            [
                name,
                "--text",
                "text.txt",
                "--train-length",
                "16",
                "--test-lengths",
                "16,32",
                "--batch",
                "2",
                "--steps",
                "2",
                "--width",
                "16",
                "--heads",
                "2",
                "--layers",
                "1",
                *option(
                    [
                        ["--seeds", "2"],
                        ["--kv-heads", "1"],
                        ["--objective", "causal"],
                        ["--train-lengths", "4,8,16"],
                        [],
                    ]
                ),
                *option([["--projections", "k=v"], ["--yes"], ["--lr", "0.01"], []]),
                "--out",
                fresh,
            ]
        ],
        "doctor": [
            ["model"],
            ["model/config.json"],
            ["model", "--json"],
            ["model", "model"],
            ["--each", "model", "model-null"],
            ["model", "--for", option(("vllm", "sglang"))],
            ["model", "--length", option(("8", "64", "4096"))],
            ["--explain", "PD017"],
            ["model", "--ignore", "PD001,PD013"],
            ["model", "--overrides", option(("vllm", "sglang"))],
            ["model-yarn"],
            ["model-yarn", "--json"],
            ["model-yarn", "--fix", "--out", fresh],
        ],
        "bench": [
            ["--quick", "--only", option(("attention", "rotation", "layer", "backward"))],
            ["--quick", "--lengths", option(("16", "8,32"))],
            ["--quick", "--json"],
            ["--quick", "--only", "attention", "--head-dim", "8", "--out", f"{fresh}.json"],
        ],
        "judge": [
            ["losses.csv"],
            ["losses.csv", "--json"],
            ["losses.csv", "--columns", "loss=loss", "--out", fresh],
        ],
        "leaderboard": [[], ["--json"]],
        "explore": [["--out", f"{fresh}.html"]],
        "inspect encoding": [
            [name],
            [name, "alibi", "--compare"],
            [name, "--json"],
            [name, "--head-dim", "8", "--heads", "2", "--train-length", "32"],
        ],
        "inspect model": [["model"], ["model", "--bytes", "--json"]],
        "inspect module": [["tests.inspect.module.planted:CosSin", "--as", "cos-sin"]],
        "inspect contract": [[name]],
        "extend": [
            [
                "model",
                "--to",
                "64",
                "--bytes",
                "--text",
                "text.txt",
                *option([["--method", "yarn"], ["--task", "none"], ["--windows", "2"], []]),
            ],
        ],
    }
    studies = sorted(str(path.parent) for path in Path().glob("out*/study.json"))
    if studies:
        one, other = rng.choice(studies), rng.choice(studies)
        lines["report"] = [[one], [one, "--out", fresh], [one, other]]
    chosen = lines.get(command)
    return [*command.split(), *rng.choice(chosen)] if chosen else []


def _positional(rng: random.Random) -> str:
    kinds = (world.NAMES, world.NAMES, world.PATHS, world.CLASSES, world.WORDS)
    return rng.choice(rng.choice(kinds))


def _value(rng: random.Random, option: str, parameter: Any) -> str:
    if rng.random() < 0.3:
        return _any_value(rng)
    if option in OUTPUTS:
        return rng.choice((f"out{rng.randrange(10**6)}", rng.choice(world.PATHS)))
    if option == "--text":
        return rng.choice(world.PATHS)
    kind = str(getattr(parameter, "type_descriptor", getattr(parameter, "type", ""))).lower()
    if "int" in kind or "float" in kind:
        return rng.choice(("0", "1", "2", "3", "4", "8", "16", "64", "-1", "1000000000000", "0.01"))
    return _any_value(rng)


def _any_value(rng: random.Random) -> str:
    return rng.choice(rng.choice((world.NAMES, world.PATHS, world.CLASSES, world.WORDS)))


def run(arguments: list[str]) -> Ended:
    """The command line in this process, with its output."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    code: object = None
    crash = ""
    began = time.monotonic()

    def hang(*frame: object) -> None:
        raise Hangs("".join(traceback.format_stack(frame[1])[-3:]))  # type: ignore[arg-type]

    before = {number: signal.signal(number, hang) for number in CLOCKS}
    for clock, times in CLOCKS.values():
        signal.setitimer(clock, times * SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with mock.patch("sys.stdin", io.StringIO("")):
                cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        crash = f"{type(error).__name__}: {error}"
    finally:
        for number, (clock, _) in CLOCKS.items():
            signal.setitimer(clock, 0)
            signal.signal(number, before[number])
    seconds = time.monotonic() - began
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))  # type: ignore[attr-defined]
    return Ended(arguments, code, *texts, seconds, crash)


@contextlib.contextmanager
def without_the_work() -> Iterator[None]:
    """Commands check, read and write as ever; what would take minutes is not done."""

    def refuse(*arguments: object, **options: object) -> None:
        raise RunFailed("the fuzzer does not measure.")

    from posenc.compare.plan import cost  # noqa: F401  # or it would keep what is put in place

    patches = [
        mock.patch("posenc.compare.engines.run_trials.run_trials", lambda *arguments: None),
        mock.patch("posenc.compare.plan.time_estimate.measure_kinds", lambda *arguments: {}),
        mock.patch("posenc.bench.measure.measure_case", lambda *arguments: []),
        mock.patch("posenc.extend.extension.load_checkpoint", refuse),
        mock.patch("posenc.inspect.checkpoint.measurements.load_checkpoint", refuse),
        mock.patch("posenc.inspect.api.measure", refuse),
        mock.patch("posenc.inspect.contract.every_check", refuse),
        mock.patch("torch.set_num_threads", lambda count: None),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def leaves(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each command, those of a group by two words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{before}{name} ")
        else:
            yield before + name, command


def command_of(arguments: list[str], commands: dict[str, Any]) -> str:
    two = " ".join(arguments[:2])
    return two if two in commands else two.partition(" ")[0]


def fuzz(count: int, seed: int, folder: Path, only: tuple[str, ...] = ()) -> list[str]:
    """Try `count` command lines in `folder`; a line for each that ended as none may."""
    rng = random.Random(seed)
    world.build(folder)
    before = world.fingerprint(folder)
    commands = {name: c for name, c in leaves(cli.app()) if not only or name in only}
    wrong: list[str] = []
    named: set[str] = set()
    codes: collections.Counter[object] = collections.Counter()
    slowest, counts = 0.0, Counts(commands)
    here = Path.cwd()
    os.chdir(folder)
    try:
        with without_the_work():
            for number in range(count):
                arguments, options = draw(rng, commands, counts)
                ended = run(arguments)
                counts.add(options, command_of(arguments, commands), ended.code)
                codes[ended.code] += 1
                if ended.code == 0:  # a file that is named as the output may be replaced
                    words = [word for each in arguments for word in each.split("=", 1)]
                    named |= {value for option, value in pairwise(words) if option in OUTPUTS}
                slowest = max(slowest, ended.seconds)
                if problem := ended.wrong():
                    wrong.append(f"{number}: {problem}: {arguments!r:.300}")
                if partial := list(folder.rglob("*.partial")):
                    wrong.append(f"{number}: left {partial}: {arguments!r:.300}")
                    for path in partial:
                        path.rename(path.with_suffix(".seen"))
    finally:
        os.chdir(here)
    after = world.fingerprint(folder)
    kept = {name: was for name, was in before.items() if name not in named}
    wrong += [f"changed {name}" for name, was in kept.items() if after.get(name) != was]
    accepted = count - codes[2]
    if count >= FEWEST and not 2 * accepted >= count:
        wrong.append(f"only {accepted} of {count} were accepted")
    if count >= MANY:
        wrong += counts.missing()
        print(counts)
    shown = ", ".join(f"{n} with {code}" for code, n in sorted(codes.items(), key=str))
    print(f"{count} command lines, seed {seed}: {shown}; slowest {slowest:.1f} s")
    return wrong


def main(count: int = 2000, seed: int = 0) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder, "inner")  # so that ".." is a folder of ours, too
        inner.mkdir()
        wrong = fuzz(count, seed, inner)
    print(*wrong, f"{len(wrong)} of them wrong", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
