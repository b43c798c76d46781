"""What to try and how much of it to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posenc.extend.tune.tuning import TuneConfig

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done."""


@dataclass(frozen=True)
class Options:
    """What to measure and how much of it.

    windows: windows of the target length to read. search_minutes: budget of the search, 0 for none.
    targets: tokens at the end of a window whose loss is read with growing context.
    """

    windows: int = 32
    search_minutes: float = 3.0
    targets: int = 64
    passkey_trials: int = 2
    allow_cache_unsafe: bool = False
    tune: TuneConfig | None = None
    state: Path | None = None
    """Where search and tuning keep what a restart needs; None: nowhere."""


DEFAULTS = Options()
