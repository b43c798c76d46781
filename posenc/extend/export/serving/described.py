"""An exported folder, as SERVE.md describes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.dialects.meaning import Meaning
from posenc.dialects.runtimes import RUNTIMES, emulate
from posenc.dialects.writers.recipes import Recipe


@dataclass(frozen=True)
class Export:
    """An exported folder. folder: its current path. name: its final name. method: the method that
    stretched it. trained: the original length. longest: the new length. recipe: its config.json.
    meaning: the meaning of the recipe. saved: the config of the model in memory. source, before:
    the original folder and its config, None if the weights were changed too.
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
        """Return the runtimes that have the model and read the folder correctly."""
        known = emulate(self.recipe.config)
        return tuple(n for n in RUNTIMES if known[n].knows and n not in self.recipe.cannot)
