"""An exported folder, as SERVE.md describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.dialects.meaning import Meaning
from posenc.dialects.runtimes import RUNTIMES, emulate
from posenc.dialects.writers.recipes import Recipe


@dataclass(frozen=True)
class Export:
    """folder: where its files are now. name: what the folder will be called. method: what stretched
    it, in words. trained: its length before. longest: the new length. recipe: its config.json.
    meaning: what that means. saved: the config of the model in memory. source, before: the original
    folder and its config, None if the weights were changed too.
    """

    folder: Path
    name: str
    method: str
    trained: int
    longest: int
    recipe: Recipe
    meaning: Meaning
    saved: Mapping[str, Any]
    source: Path | None = None
    before: Mapping[str, Any] | None = None

    @property
    def right(self) -> tuple[str, ...]:
        """The runtimes that have the model and read the folder as meant."""
        known = emulate(self.recipe.config)
        return tuple(n for n in RUNTIMES if known[n].knows and n not in self.recipe.cannot)
