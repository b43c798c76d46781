"""What an engine is: it starts trials somewhere, and tells what happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig

Heard = dict[str, Any] | TrialResult
"""An event of a trial, of the kinds step, testing and note; or the result with which it ended."""


class Engine(Protocol):
    """Runs trials. Wherever a trial runs, it is the same process as on this machine, so its numbers
    do not depend on the engine.

    Used in this order: `slots`, `settle`, then `start` and `hear` in turn, and `close` at last,
    however it ends.
    """

    def slots(self) -> int:
        """How many trials it runs at a time, now."""
        ...

    def describe(self) -> dict[str, str]:
        """What the report says about where the trials ran."""
        ...

    def settle(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        """Make the study's folder, with its text, known where trials run.

        Raises: ValueError where trials cannot read or write there.
        """
        ...

    def start(self, trial: TrialConfig) -> None:
        """Begin a trial, from its last checkpoint where it has one."""
        ...

    def hear(self) -> tuple[TrialConfig, Heard]:
        """Wait for the next that happens to a trial that was started."""
        ...

    def close(self) -> None:
        """End what still runs. Nothing that was finished is lost."""
        ...
