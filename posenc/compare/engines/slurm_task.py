"""What a job of Slurm runs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.compare.engines.job import Job, Lost
from posenc.report.atomic import write_atomically

PAUSE = 2.0
"""Seconds between two steps that are told."""


@dataclass
class SlurmTask:
    """A trial that writes what it tells into a file, for the command to read.

    words: that file.
    run_file, run: where the newest run of the command writes its name, and the name of the run
        that this job belongs to.
    """

    job: Job
    words: str
    run_file: str
    run: str

    def __call__(self) -> str:
        """What `TrialResult.to_json` makes of the result. Raises: Lost."""
        self._check_run()
        last = 0.0

        def tell(event: dict[str, Any]) -> None:
            nonlocal last
            now = time.monotonic()
            if event["kind"] == "step" and now - last < PAUSE:
                return
            last = now
            self._check_run()
            write_atomically(self.words, json.dumps(event))

        return self.job.run(tell).to_json()

    def checkpoint(self) -> Any:
        """What submitit queues again after a preemption or a timeout."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _check_run(self) -> None:
        """End where the command has been started again: its own job will do this trial."""
        if Path(self.run_file).read_text(encoding="utf-8") != self.run:
            raise Lost("a newer run of the same command does this trial")
