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

from posenc.compare.trial.process import ORPHANED, at_most_every, end_with_parent


def main(parent: str, study_folder: str, trial_folder: str, checkpoint_steps: str) -> int:
    """Run the trial and return the exit code."""
    end_with_parent(int(parent))
    # Prints of libraries must not mix with the events.
    events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    from posenc.compare.results import TrialResult
    from posenc.compare.trial.config import read_trial
    from posenc.compare.trial.run_trial import reason_of, run_trial
    from posenc.compare.trial.train import TrialFailed
    from posenc.encodings import hash_of_posenc_code, hash_of_user_code
    from posenc.report.files.atomic import write_atomically

    folder = Path(trial_folder)
    config = read_trial(folder)
    written = at_most_every(0.2, lambda event: _write(events, event))

    def tell(kind: str, **values: Any) -> None:
        written({"kind": kind, **values})

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
        failed = TrialResult(config, reason=reason_of(error))
        write_atomically(folder / "result.json", failed.to_json())
        return 1
    return 0


def _write(stream: TextIO, event: dict[str, Any]) -> None:
    """Write a line of JSON."""
    try:
        stream.write(json.dumps(event) + "\n")
    except BrokenPipeError:  # the sweep has ended: stop as if killed, without a result
        os._exit(ORPHANED)
