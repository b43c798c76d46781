"""Run one trial in a process.

Reads config.json in the trial's folder and writes the files of `run_trial` there, or a result.json
with the reason of failure. Progress goes to stdout as lines of JSON. The process ends with its
parent; this is set up before torch is imported.
"""

import json
import os
import traceback
from pathlib import Path
from typing import Any, TextIO

from posenc.compare.trial.process import ORPHANED, end_with_parent, limit_step_events


def main(parent: str, study_folder: str, trial_folder: str, checkpoint_steps: str) -> int:
    """Run the trial in a process that ends with the process `parent`. The arguments are strings, as
    on a command line. Return the exit code: 0, or 1 for a failure that was written."""
    end_with_parent(int(parent))
    # Prints of libraries must not mix with the events.
    events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    from posenc.compare.results import TrialResult
    from posenc.compare.trial.config import read_trial
    from posenc.compare.trial.run_trial import failure_reason, run_trial
    from posenc.compare.trial.train import TrialFailed
    from posenc.encodings import hash_of_posenc_code, hash_of_user_code
    from posenc.files.atomic import write_atomically

    folder = Path(trial_folder)
    config = read_trial(folder)
    # Five steps a second are enough for a progress bar.
    write_event = limit_step_events(0.2, lambda event: _write_event(events, event))

    def tell(kind: str, **values: Any) -> None:
        """Send an event such as tell("step", step=3, loss=2.5)."""
        write_event({"kind": kind, **values})

    try:
        changed = config.code and hash_of_user_code(config.encoding) != config.code
        if changed or (config.source and hash_of_posenc_code(config.encoding) != config.source):
            raise TrialFailed(
                f"the code of {config.encoding} has changed since the comparison began; the same "
                "command starts one with the new code"
            )
        run_trial(config, Path(study_folder), folder, tell, int(checkpoint_steps))
    except Exception as error:  # every error, of torch, the system or an encoding, is a result
        traceback.print_exc()
        failed = TrialResult(config, reason=failure_reason(error))
        write_atomically(folder / "result.json", failed.to_json())
        return 1
    return 0


def _write_event(stream: TextIO, event: dict[str, Any]) -> None:
    """Write an event as a line of JSON for the process that reads the stream; end this process if
    that one has ended."""
    try:
        stream.write(json.dumps(event) + "\n")
    except BrokenPipeError:  # the run has ended: stop as if killed, without a result
        os._exit(ORPHANED)
