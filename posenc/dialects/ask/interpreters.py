"""Ask an installed runtime what it computes from configs, in a process of its own.

The runtime is asked by a text of its own language, a probe, which an interpreter runs in an empty
folder, offline, within a time and a memory. So nothing of a stranger's folder is imported, and a
runtime that hangs or dies takes nothing along.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from importlib.resources import files
from pathlib import Path
from typing import Any

PROBES = {
    "transformers": "transformers_probe.py",
    "vllm": "vllm_probe.py",
    "sglang": "sglang_probe.py",
    "mlx-lm": "mlx_lm_probe.py",
}
"""Runtime -> the file of this folder that asks it."""
WHICH = "which_probe.py"
"""The file of this folder that says which runtimes an interpreter has."""
PACKAGES = {
    "transformers": ("transformers", "torch"),
    "vllm": ("vllm", "torch"),
    "sglang": ("sglang", "torch"),
    "mlx-lm": ("mlx_lm", "mlx"),
}
"""Runtime -> what must be importable for its probe to ask it; its own package first."""
SECONDS = {"transformers": 60.0, "vllm": 180.0, "sglang": 180.0, "mlx-lm": 60.0}
"""Runtime -> time for starting and the first config."""
SECONDS_TO_START = 60.0
"""Time for an interpreter that imports no runtime."""
SECONDS_MORE = 20.0
"""Time for each further config."""
MEMORY = 8 * 2**30
"""Bytes of data that a probe may hold."""
LARGEST_ANSWER = 64 * 2**20
"""Bytes of an answer that are read."""
WORDS = 300
"""Letters of what a runtime says that are passed on."""
FROM_OUTSIDE = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""What another interpreter must not take over from the environment of this one."""


class AskError(ValueError):
    """An interpreter gives no answer. The message is one line that names it."""


@dataclass(frozen=True)
class Rotation:
    """What one rotary module of a model applies.

    module: its name in the model. kind: of the layers that it serves, "" for all. inv_freq: radians
    per token, one a pair. multiplier: of cos and sin. called: whether a call has shown both, and
    not only what the module keeps. layers: those that apply it; None where the module does not tell
    and `kind` says it.
    """

    module: str
    kind: str
    inv_freq: tuple[float, ...]
    multiplier: float
    called: bool
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Asked:
    """One runtime's own answer for a config.

    runtime, version: who answers. refuses: its words, where it does not build the model. no_model:
    whether it refuses because it has no model of this architecture. stops: its words, where a
    forward pass of the model that it builds stops as it rotates.
    unmeasured: why nothing is known, where it builds the model and its rotation cannot be read.
    model: the class that it builds. softmax_scales: what attention multiplies q . k by, each value
    once. changes: whether frequencies depend on the length. without_rotation: layers whose
    attention rotates nothing; None if no attention tells. interleaved: whether channels 2i and
    2i + 1 are a pair; None if that could not be measured. admits: tokens of the longest sequence
    that a server admits; of transformers, which admits any, the config's max_position_embeddings.
    read: what of the answer was not asked but read in the source, one sentence; "" for nothing.
    """

    runtime: str
    version: str
    refuses: str = ""
    no_model: bool = False
    stops: str = ""
    unmeasured: str = ""
    model: str = ""
    rotations: tuple[Rotation, ...] = ()
    changes: bool = False
    softmax_scales: tuple[float, ...] = ()
    without_rotation: tuple[int, ...] | None = None
    interleaved: bool | None = None
    admits: int | None = None
    read: str = ""


def installed_version(runtime: str) -> str | None:
    """Return the version of a runtime that can be imported beside posenc; None without one."""
    if any(util.find_spec(name) is None for name in PACKAGES[runtime]):
        return None
    try:
        return metadata.version(runtime)
    except metadata.PackageNotFoundError:
        return None


def runtimes_of(python: str | Path | None = None) -> dict[str, str]:
    """Return the runtimes that an interpreter has and that a probe can ask, each with its version.

    python: the interpreter; None for the one that runs posenc.
    Raises: AskError if it cannot be run, takes too long, dies, or prints what is no answer.

    >>> runtimes_of("/opt/vllm/bin/python")  # doctest: +SKIP
    {'transformers': '5.23.0', 'vllm': '0.33.0'}
    """
    if python is None:
        versions = {runtime: installed_version(runtime) for runtime in PROBES}
        return {runtime: version for runtime, version in versions.items() if version is not None}
    interpreter = os.fspath(python)
    probe = (files("posenc.dialects.ask") / WHICH).read_text(encoding="utf-8")
    said = _run_probe(
        interpreter, probe, json.dumps(PACKAGES), SECONDS_TO_START, own_packages=False
    )
    try:
        versions = dict(json.loads(said))
        return {name: str(versions[name])[:WORDS] for name in PROBES if name in versions}
    except (ValueError, TypeError, RecursionError):
        raise _no_answer(said, "a Python interpreter", interpreter) from None


def ask(
    configs: Sequence[tuple[Mapping[str, Any], Sequence[int]]],
    python: str | Path | None = None,
    runtime: str = "transformers",
    *,
    seconds: float | None = None,
    memory: int = MEMORY,
) -> list[Asked]:
    """Ask a runtime what it computes from configs.

    Args:
        configs: (a config.json's object, lengths in tokens), one or more. The answer is that at
            the first length; the others tell whether it changes with the length.
        python: the interpreter that has the runtime; None for the one that runs posenc.
        runtime: a key of PROBES.
        seconds: time for all of them; None for SECONDS and 20 seconds for each config but the
            first.
        memory: bytes of data that the process may hold.

    Returns: one answer per config.
    Raises: AskError if the interpreter cannot be run, lacks the runtime, takes too long, dies, or
    prints what is no answer. ValueError for a runtime that has no probe.

    >>> (answer,) = ask([({"model_type": "llama", "rope_theta": 5e5}, [4096])])  # doctest: +SKIP
    >>> answer.version, answer.rotations[0].inv_freq[:2]  # doctest: +SKIP
    ('5.23.0', (1.0, 0.81461...))
    """
    if runtime not in PROBES:
        raise ValueError(f"ask: no probe asks {runtime!r}; expected one of {', '.join(PROBES)}.")
    probe = (files("posenc.dialects.ask") / PROBES[runtime]).read_text(encoding="utf-8")
    own = python is None
    interpreter = sys.executable if python is None else os.fspath(python)
    cases = [{"config": dict(config), "lengths": list(lengths)} for config, lengths in configs]
    question = json.dumps({"memory": memory, "cases": cases})
    if seconds is None:
        seconds = SECONDS[runtime] + SECONDS_MORE * (len(cases) - 1)
    said = _run_probe(interpreter, probe, question, seconds, own_packages=own)
    return _parse_answers(said, runtime, interpreter, len(cases))


def _run_probe(
    interpreter: str, probe: str, question: str, seconds: float, *, own_packages: bool
) -> bytes:
    """Run the probe in an interpreter and return what it prints to the standard output.

    question: the probe's standard input. own_packages: leave the variables in the environment that
    say where this interpreter finds packages; another one must not take them over.
    Raises: AskError where it cannot be run, takes too long, or ends with an error.
    """
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    environment["OMP_NUM_THREADS"] = "1"
    for name in FROM_OUTSIDE if not own_packages else ():
        environment.pop(name, None)
    program = shutil.which(interpreter)
    if program is None:
        raise AskError(f"--ask {interpreter}: expected a Python interpreter, found no program.")
    with tempfile.TemporaryDirectory(prefix="posenc-ask-") as folder:
        out, err, empty = Path(folder, "out"), Path(folder, "err"), Path(folder, "empty")
        empty.mkdir()
        file = Path(folder, "probe", "probe.py")  # Python imports from the folder of what it runs
        file.parent.mkdir()
        file.write_text(probe, encoding="utf-8")
        # Files, not pipes: a child that outlives the interpreter would keep a pipe open.
        with out.open("wb") as to, err.open("wb") as errors:
            try:
                process = subprocess.Popen(
                    [Path(program).absolute(), file],
                    stdin=subprocess.PIPE,
                    stdout=to,
                    stderr=errors,
                    cwd=empty,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise AskError(
                    f"--ask {interpreter}: expected a Python interpreter: {error.strerror}."
                ) from error
            try:
                process.communicate(question.encode(), timeout=seconds)
            except subprocess.TimeoutExpired:
                raise AskError(
                    f"--ask {interpreter}: no answer within {seconds:g} seconds."
                ) from None
            except BrokenPipeError:  # it ended before it read the question: its code says why
                process.wait()
            finally:
                _kill_process_group(process)
        if process.returncode:
            raise AskError(_why_ended(interpreter, process.returncode, _last_line(err)))
        with out.open("rb") as answer:
            return answer.read(LARGEST_ANSWER)


def _kill_process_group(process: subprocess.Popen) -> None:
    """Stop the interpreter and everything that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(path: Path) -> str:
    """Return the last line of the interpreter's standard error, of which the end is read."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:WORDS] if lines else ""


def _why_ended(interpreter: str, code: int, last: str) -> str:
    """Return the message about an interpreter that ended with an error.

    code: its exit code, negative for a signal. last: the last line of its standard error.
    """
    if last.startswith(("ModuleNotFoundError", "ImportError")):
        return f"--ask {interpreter}: it has no such runtime: {last}"
    if last.startswith("MemoryError") or "can't allocate memory" in last:
        return f"--ask {interpreter}: the answer needs more memory than a probe is given."
    how = f"ended by signal {-code}" if code < 0 else f"ended with {code}"
    return f"--ask {interpreter}: {how}: {last or 'it said nothing'}"


def _no_answer(said: bytes, expected: str, interpreter: str) -> AskError:
    """Return the error about what an interpreter printed, where an answer was expected."""
    return AskError(
        f"--ask {interpreter}: expected the answer of {expected}, got {said[:60]!r}; is it a "
        "Python interpreter?"
    )


def _parse_answers(said: bytes, runtime: str, interpreter: str, count: int) -> list[Asked]:
    """Return the answers that an interpreter printed, every part of which is checked.

    count: how many there must be.
    Raises: AskError for anything that is no answer of this runtime.
    """
    wrong = _no_answer(said, runtime, interpreter)
    try:
        answer = json.loads(said)
        cases = answer["cases"]
        version = str(answer["version"])[:WORDS]
        if answer["runtime"] != runtime or len(cases) != count:
            raise wrong
        return [_parse_answer(case, runtime, version) for case in cases]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise wrong from None


def _parse_answer(case: Mapping[str, Any], runtime: str, version: str) -> Asked:
    """Return one answer of the probe. Raises: KeyError, TypeError, ValueError for another form."""
    if "refuses" in case:
        admits = case.get("admits")
        return Asked(
            runtime,
            version,
            refuses=str(case["refuses"])[:WORDS],
            no_model=bool(case.get("no_model")),
            admits=admits if isinstance(admits, int) else None,
        )
    if "unmeasured" in case:
        return Asked(runtime, version, unmeasured=str(case["unmeasured"])[:WORDS])
    interleaved, admits = case["interleaved"], case["admits"]
    without_rotation = case["without_rotation"]
    return Asked(
        runtime,
        version,
        stops=str(case["stops"])[:WORDS],
        model=str(case["class"])[:WORDS],
        rotations=tuple(_parse_rotation(row) for row in case["rotations"]),
        changes=bool(case["changes"]),
        softmax_scales=tuple(_finite_number(value) for value in case["softmax_scales"]),
        without_rotation=None if without_rotation is None else tuple(map(int, without_rotation)),
        interleaved=None if interleaved is None else bool(interleaved),
        admits=admits if isinstance(admits, int) else None,
        read=str(case.get("read", ""))[:WORDS],
    )


def _parse_rotation(row: Mapping[str, Any]) -> Rotation:
    """Return one rotation of an answer. Raises: KeyError, TypeError, ValueError for another
    form."""
    layers = row.get("layers")
    return Rotation(
        str(row["module"])[:WORDS],
        str(row["kind"])[:WORDS],
        tuple(_finite_number(value) for value in row["inv_freq"]),
        _finite_number(row["multiplier"]),
        bool(row["called"]),
        None if layers is None else tuple(map(int, layers)),
    )


def _finite_number(value: Any) -> float:
    """Return a number. Raises: ValueError for one that is not finite."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no frequency")
    return number
