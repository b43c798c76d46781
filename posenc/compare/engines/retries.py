"""How often a trial that was lost with its machine is started again."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 3
"""Losses in a row, without a step beyond those before, after which a trial counts as failed: more
often than that it is the trial that ends its machines."""


@dataclass
class Progress:
    """How far a trial has come, and how often it was lost there."""

    step: int = 0
    step_when_lost: int = -1
    losses: int = 0

    def lost(self) -> bool:
        """Count a loss. Returns: whether the trial is worth another start."""
        self.losses = 1 if self.step > self.step_when_lost else self.losses + 1
        self.step_when_lost = self.step
        return self.losses <= MOST
