"""The process of a trial: start it, read its events, and find how it ended; and what it runs.

It reads config.json in the trial's folder and writes the files of `run_trial` there, or a
result.json with the reason of failure. Progress goes to stdout as lines of JSON. The process ends
with its parent; this is set up before torch is imported.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig, write_trial
from posenc.compare.trial.result_files import CorruptResult, load_result
from posenc.files.atomic import write_atomically
from posenc.files.opening import make_subfolder, open_to_append, read_file_text

if sys.platform == "linux":
    import fcntl

# The process must run the same posenc as this one, and no module from the user's current folder. -P
# keeps the current folder out of the path; the folder of the package is in the path for one import
# only.
_START_CODE = """\
import importlib, sys, typing
sys.path.insert(0, sys.argv[1])
import posenc
del sys.path[0]
sys.exit(importlib.import_module(sys.argv[2]).main(*sys.argv[3:]))
"""
WORKER_MODULE = "posenc.compare.trial.process"
"""The module that a trial's process runs."""
TrialEvent = dict[str, Any] | TrialResult
"""An event of a trial, of the kinds step, testing and note; or the result with which it ended."""
ReceiveEvent = Callable[[dict[str, Any]], None]
"""A function that receives an event of a trial."""
ORPHANED_EXIT_CODE = 3
"""Exit code of a process whose parent has ended."""


def command(module: str, *arguments: object) -> list[str]:
    """Return the command line that starts Python and calls `main` of a module with this process's
    id and the arguments, as strings. `main` must call `end_with_parent` first."""
    import_root = Path(__file__).resolve().parents[3]
    words = [import_root, module, os.getpid(), *arguments]
    return [sys.executable, "-P", "-c", _START_CODE, *map(str, words)]


def trial_environment(device: str, *, saves_memory: bool = False) -> dict[str, str]:
    """Return the environment variables of a process that trains or times trials on a device.

    saves_memory: give freed memory back to the system, which costs a little time.
    """
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        # One thread each: sums are bit-identical, and processes scale better than threads.
        variables |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # glibc keeps freed blocks instead of returning them to the system at every step; where
        # memory is short, each larger tensor is a mapping of its own, so that none is kept.
        threshold = 1 << 20 if saves_memory else 1 << 30
        variables["MALLOC_MMAP_THRESHOLD_"] = str(threshold)
        variables["MALLOC_TRIM_THRESHOLD_"] = str(threshold) if saves_memory else "-1"
    else:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return variables


def end_with_parent(parent_id: int) -> None:
    """End this process when the process `parent_id` ends, whose end of the stdin pipe then closes.

    On Linux the kernel then sends SIGIO, which ends the process at any time. On other systems a
    thread that reads stdin ends it when Python next runs.
    """
    if sys.platform == "linux":
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
        if os.getppid() != parent_id:  # it ended before the calls above
            os._exit(ORPHANED_EXIT_CODE)
    else:
        threading.Thread(target=_end_with_stdin, daemon=True).start()


def _end_with_stdin() -> None:
    """End this process, with the code ORPHANED_EXIT_CODE, when the pipe of its stdin closes."""
    # Not sys.stdin, whose lock must be free when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(ORPHANED_EXIT_CODE)


class TrialProcess:
    """A process that runs a trial.

    folder: folder of the study, which has the text and the trial's own folder.
    checkpoint_steps: steps between two checkpoints; 0: by time.
    module: the module that the process runs; see `command`.
    gpu: the GPU that it sees, as in CUDA_VISIBLE_DEVICES; None for all.
    """

    def __init__(
        self,
        folder: Path,
        trial: TrialConfig,
        checkpoint_steps: int,
        module: str = WORKER_MODULE,
        gpu: str | None = None,
    ) -> None:
        self.folder = folder
        self.trial = trial
        self.home = make_trial_folder(folder, trial)
        gpu_variable = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        with open_to_append(self.home / "log.txt") as log:
            self.process = subprocess.Popen(
                command(module, folder, self.home, checkpoint_steps),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=trial_environment(trial.device, saves_memory=trial.saves_memory) | gpu_variable,
                start_new_session=True,  # only the run gets Ctrl-C, and ends its workers
            )

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the trial until its process has ended."""
        with self.process as running:
            assert running.stdout is not None
            for line in running.stdout:
                with contextlib.suppress(ValueError):  # an incomplete line of a killed process
                    yield json.loads(line)
            running.wait()  # closing stdin earlier would end it

    def kill(self) -> None:
        """End the process, if it still runs."""
        self.process.kill()

    def killed_by(self) -> str | None:
        """Return the name of the signal that ended the process, such as "SIGKILL"; None if none
        did. Call it after `events`."""
        exit_code = self.process.returncode
        return signal.Signals(-exit_code).name if exit_code < 0 else None

    def result(self) -> TrialResult:
        """Return the result that the process wrote. If there is none, write and return a failure
        with the way in which the process ended."""
        try:
            result = load_result(self.folder, self.trial)
        except CorruptResult as error:
            return TrialResult(self.trial, reason=f"the result is corrupt ({error})")
        if result is None:
            result = TrialResult(self.trial, reason=self._cause_of_death())
            write_failure(self.home, result)
        return result

    def _cause_of_death(self) -> str:
        """Return how the process, which wrote no result, ended: its signal, or its code and the
        last line of its log."""
        signal_name = self.killed_by()
        if signal_name is not None:
            hint = ", perhaps because memory ran out" if signal_name == signal.SIGKILL.name else ""
            return f"its process was ended by {signal_name}{hint}"
        log_file = self.home / "log.txt"
        log_text = read_file_text(log_file, None, errors="replace") if log_file.exists() else ""
        last_line = f": {log_text.strip().splitlines()[-1][:300]}" if log_text.strip() else ""
        return f"its process ended with code {self.process.returncode}{last_line}"


def make_trial_folder(folder: Path, trial: TrialConfig) -> Path:
    """Make and return a trial's folder below `folder`, with its config and without a result."""
    home = make_subfolder(folder / trial.folder)
    (home / "result.json").unlink(missing_ok=True)
    write_trial(home, trial)
    return home


def limit_step_events(seconds: float, receive_event: ReceiveEvent) -> ReceiveEvent:
    """Return a function that passes its events on to `receive_event`, except a "step" within
    `seconds` of the last event that was passed on."""
    last_time = 0.0

    def tell_or_drop(event: dict[str, Any]) -> None:
        nonlocal last_time
        now = time.monotonic()
        if event["kind"] != "step" or now - last_time >= seconds:
            last_time = now
            receive_event(event)

    return tell_or_drop


def write_failure(home: Path, result: TrialResult) -> None:
    """Write the result of a trial that failed into its folder `home`, if the disk has room."""
    with contextlib.suppress(OSError):  # the disk may be full
        make_subfolder(home)
        write_atomically(home / "result.json", result.to_json())


def main(parent_id: str, study_folder: str, trial_folder: str, checkpoint_steps: str) -> int:
    """Run the trial in a process that ends with the process `parent_id`. The arguments are strings,
    as on a command line. Return the exit code: 0, or 1 for a failure that was written."""
    end_with_parent(int(parent_id))
    # Prints of libraries must not mix with the events.
    event_stream = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    from posenc.compare.results import TrialResult
    from posenc.compare.trial.config import read_trial
    from posenc.compare.trial.run_trial import failure_reason, run_trial
    from posenc.compare.trial.train import TrialFailed
    from posenc.encodings import hash_of_posenc_code, hash_of_user_code
    from posenc.files.atomic import write_atomically

    trial_home = Path(trial_folder)
    config = read_trial(trial_home)
    # Five steps a second are enough for a progress bar.
    write_event = limit_step_events(0.2, lambda event: _write_event(event_stream, event))

    def tell(kind: str, **values: Any) -> None:
        """Send an event such as tell("step", step=3, loss=2.5)."""
        write_event({"kind": kind, **values})

    try:
        has_changed = config.code and hash_of_user_code(config.encoding) != config.code
        if has_changed or (config.source and hash_of_posenc_code(config.encoding) != config.source):
            raise TrialFailed(
                f"the code of {config.encoding} has changed since the comparison began; the same "
                "command starts one with the new code"
            )
        run_trial(config, Path(study_folder), trial_home, tell, int(checkpoint_steps))
    except Exception as error:  # every error, of torch, the system or an encoding, is a result
        traceback.print_exc()
        failure = TrialResult(config, reason=failure_reason(error))
        write_atomically(trial_home / "result.json", failure.to_json())
        return 1
    return 0


def _write_event(stream: TextIO, event: dict[str, Any]) -> None:
    """Write an event as a line of JSON for the process that reads the stream; end this process if
    that one has ended."""
    try:
        stream.write(json.dumps(event) + "\n")
    except BrokenPipeError:  # the run has ended: stop as if killed, without a result
        os._exit(ORPHANED_EXIT_CODE)
