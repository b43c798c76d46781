"""What an engine is: it runs trials somewhere, and tells what happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig

Heard = dict[str, Any] | TrialResult
"""An event of a trial, of the kinds step, testing and note; or the result with which it ended."""


class Engine(Protocol):
    """Runs trials. A trial is the same process on every engine, so its numbers do not depend on it.

    Used in this order: `slots`, `settle`, then `submit` and `wait` in turn, and `cancel` at last.
    """

    def slots(self) -> int:
        """Return how many trials it runs at a time, now."""
        ...

    def describe(self) -> dict[str, str]:
        """Return what the report says about where the trials ran."""
        ...

    def settle(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        """Make the study's folder, with its text, known where trials run.

        Raises: ValueError where trials cannot read or write there.
        """
        ...

    def submit(self, trial: TrialConfig) -> None:
        """Begin a trial, from its last checkpoint where it has one."""
        ...

    def wait(self) -> tuple[TrialConfig, Heard]:
        """Wait for the next that happens to a trial that was submitted."""
        ...

    def cancel(self) -> None:
        """End what still runs. Results and checkpoints stay."""
        ...
