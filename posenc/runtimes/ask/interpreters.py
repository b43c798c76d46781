"""Ask an installed runtime what it computes from files, in a process of its own.

A runtime is asked by a probe, a program in its own language, which an interpreter runs in an empty
folder, offline, within a time and a memory. So nothing of a stranger's folder is imported, and a
runtime that hangs or dies takes nothing along.
"""

import contextlib
import json
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

from posenc.runtimes.ask.answers import MOST_LETTERS, RuntimeAnswer, parse_answers

PROBES_FOLDER = files("posenc.runtimes.ask") / "probes"


@dataclass(frozen=True)
class Probe:
    """A program that asks a runtime.

    file: in the folder of probes. packages: what must be importable; the runtime's own first.
    seconds: for starting and the first file. reads_gguf: whether it is asked about GGUF files, by
    their paths, and not about configs.
    """

    file: str
    packages: tuple[str, ...]
    seconds: float = 60.0
    reads_gguf: bool = False


PROBES = {
    "transformers": Probe("transformers_probe.py", ("transformers", "torch")),
    "vllm": Probe("vllm_probe.py", ("vllm", "torch"), 180.0),
    "sglang": Probe("sglang_probe.py", ("sglang", "torch"), 180.0),
    "mlx-lm": Probe("mlx_lm_probe.py", ("mlx_lm", "mlx")),
    "llama.cpp": Probe("llama_cpp_probe.py", ("xllamacpp",), reads_gguf=True),
}
"""Runtime -> the probe that asks it."""
RUNTIMES_PROBE_FILE = "installed_runtimes_probe.py"
"""The probe that says which runtimes an interpreter has."""
SECONDS_TO_START = 60.0
"""Time for an interpreter that imports no runtime."""
SECONDS_PER_FURTHER_FILE = 20.0
"""Time for each further file."""
MEMORY_LIMIT_BYTES = 8 * 2**30
"""Bytes of data that a probe may hold."""
LARGEST_ANSWER_BYTES = 64 * 2**20
"""Bytes of an answer that are read."""
PACKAGE_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""Variables that say where this interpreter finds packages: another one must not take them over."""


class AskError(ValueError):
    """An interpreter gives no answer. The message is one line that names it."""


def installed_runtime_version(runtime: str) -> str | None:
    """Return the version of a runtime that can be imported beside posenc, or of the package that
    brings it; None without one."""
    packages = PROBES[runtime].packages
    if any(util.find_spec(name) is None for name in packages):
        return None
    try:
        return metadata.version(packages[0].replace("_", "-"))
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
        versions = {runtime: installed_runtime_version(runtime) for runtime in PROBES}
        return {runtime: version for runtime, version in versions.items() if version is not None}
    interpreter = os.fspath(python)
    question = json.dumps({name: probe.packages for name, probe in PROBES.items()})
    output = _run_probe(
        interpreter, RUNTIMES_PROBE_FILE, question, SECONDS_TO_START, keep_package_variables=False
    )
    try:
        versions = dict(json.loads(output))
        return {name: str(versions[name])[:MOST_LETTERS] for name in PROBES if name in versions}
    except (ValueError, TypeError, RecursionError):
        raise _error_of_no_answer(output, "a Python interpreter", interpreter) from None


def ask(
    configs: Sequence[tuple[Mapping[str, Any] | Path, Sequence[int]]],
    python: str | Path | None = None,
    runtime: str = "transformers",
    *,
    seconds: float | None = None,
    memory: int = MEMORY_LIMIT_BYTES,
) -> list[RuntimeAnswer]:
    """Ask a runtime what it computes from configs.

    Args:
        configs: (a config.json's object, lengths in tokens), one or more; for llama.cpp the path of
            a GGUF file instead of the object. The answer is that at the first length; the others
            tell whether it changes with the length.
        python: the interpreter that has the runtime; None for the one that runs posenc.
        runtime: a key of PROBES.
        seconds: time for all of them; None for the probe's and 20 seconds for each config but the
            first.
        memory: bytes of data that the process may hold.

    Returns: one answer per config.
    Raises: AskError if the interpreter cannot be run, lacks the runtime, takes too long, dies, or
    prints what is no answer. ValueError for a runtime that has no probe, or reads no such file.

    >>> (answer,) = ask([({"model_type": "llama", "rope_theta": 5e5}, [4096])])  # doctest: +SKIP
    >>> answer.version, answer.rotations[0].inv_freq[:2]  # doctest: +SKIP
    ('5.23.0', (1.0, 0.81461...))
    """
    if runtime not in PROBES:
        raise ValueError(f"ask: no probe asks {runtime!r}; expected one of {', '.join(PROBES)}.")
    probe = PROBES[runtime]
    interpreter = sys.executable if python is None else os.fspath(python)
    if any(isinstance(config, Path) != probe.reads_gguf for config, _ in configs):
        expected_in_words = (
            "the Path of a GGUF file" if probe.reads_gguf else "a config.json's object"
        )
        raise ValueError(f"ask: {runtime} is asked about {expected_in_words}.")
    cases = [_case_of(config, lengths) for config, lengths in configs]
    question = json.dumps({"memory": memory, "cases": cases})
    if seconds is None:
        seconds = probe.seconds + SECONDS_PER_FURTHER_FILE * (len(cases) - 1)
    output = _run_probe(
        interpreter, probe.file, question, seconds, keep_package_variables=python is None
    )
    try:
        return parse_answers(output, runtime, len(cases))
    except ValueError:
        raise _error_of_no_answer(output, runtime, interpreter) from None


def _case_of(config: Mapping[str, Any] | Path, lengths: Sequence[int]) -> dict[str, Any]:
    """Return a case of a probe's question."""
    if isinstance(config, Path):  # a probe runs in another folder
        return {"file": os.fspath(config.absolute()), "lengths": list(lengths)}
    return {"config": dict(config), "lengths": list(lengths)}


def _run_probe(
    interpreter: str,
    probe_file: str,
    question: str,
    seconds: float,
    *,
    keep_package_variables: bool,
) -> bytes:
    """Run a probe in an interpreter and return what it prints to the standard output.

    probe_file: its file. question: its standard input. keep_package_variables: leave
    PACKAGE_VARIABLES in the environment, as for the interpreter that runs posenc.
    Raises: AskError where it cannot be run, takes too long, or ends with an error.
    """
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    environment["OMP_NUM_THREADS"] = "1"  # the runtime's CPU code runs in one thread
    for name in PACKAGE_VARIABLES if not keep_package_variables else ():
        environment.pop(name, None)
    interpreter_path = shutil.which(interpreter)
    if interpreter_path is None:
        raise AskError(f"--ask {interpreter}: expected a Python interpreter, found no program.")
    with tempfile.TemporaryDirectory(prefix="posenc-ask-") as folder:
        out_path, err_path = Path(folder, "out"), Path(folder, "err")
        empty_folder = Path(folder, "empty")
        empty_folder.mkdir()
        probe_path = _copy_probes(Path(folder, "probes")) / probe_file
        # Files, not pipes: a child that outlives the interpreter would keep a pipe open.
        with out_path.open("wb") as out_file, err_path.open("wb") as err_file:
            try:
                process = subprocess.Popen(
                    [Path(interpreter_path).absolute(), probe_path],
                    stdin=subprocess.PIPE,
                    stdout=out_file,
                    stderr=err_file,
                    cwd=empty_folder,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise AskError(
                    f"--ask {interpreter}: expected a Python interpreter: {error.strerror}."
                ) from error
            try:
                try:
                    process.communicate(question.encode(), timeout=seconds)
                except BrokenPipeError:  # it ended before it read the question: its code says why
                    process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                raise AskError(
                    f"--ask {interpreter}: no answer within {seconds:g} seconds."
                ) from None
            finally:
                _kill_process_group(process)
        if process.returncode:
            raise AskError(_why_ended(interpreter, process.returncode, _last_line(err_path)))
        with out_path.open("rb") as answer_file:
            return answer_file.read(LARGEST_ANSWER_BYTES)


def _copy_probes(folder: Path) -> Path:
    """Write the probes, and what they share, to a new folder, and return it. Python imports from
    the folder of the program that it runs, where no other module may lie."""
    folder.mkdir()
    for source in PROBES_FOLDER.iterdir():
        if source.name.endswith(".py"):
            text = source.read_text(encoding="utf-8")
            (folder / source.name).write_text(text, encoding="utf-8")
    return folder


def _kill_process_group(process: subprocess.Popen) -> None:
    """Stop the interpreter and everything that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # one that has no group of its own yet would be waited for without end
    process.wait()


def _last_line(path: Path) -> str:
    """Return the last line of the interpreter's standard error, of which the end is read."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:MOST_LETTERS] if lines else ""


def _why_ended(interpreter: str, exit_code: int, last_line: str) -> str:
    """Return the message about an interpreter that ended with an error.

    exit_code: its exit code, negative for a signal. last_line: the last line of its standard error.
    """
    if last_line.startswith(("ModuleNotFoundError", "ImportError")):
        return f"--ask {interpreter}: it has no such runtime: {last_line.rstrip('.')}."
    if last_line.startswith("MemoryError") or "can't allocate memory" in last_line:
        return f"--ask {interpreter}: the answer needs more memory than a probe is given."
    end_in_words = f"ended by signal {-exit_code}" if exit_code < 0 else f"ended with {exit_code}"
    return f"--ask {interpreter}: {end_in_words}: {last_line.rstrip('.') or 'it said nothing'}."


def _error_of_no_answer(output: bytes, expected_in_words: str, interpreter: str) -> AskError:
    """Return the error about what an interpreter printed, where an answer was expected."""
    beginning = output[:60].decode(errors="replace").strip()
    output_in_words = repr(beginning) if beginning else "nothing"
    return AskError(
        f"--ask {interpreter}: expected the answer of {expected_in_words}, got {output_in_words}; "
        "is it a Python interpreter?"
    )
