"""Options of an extension; annotated fields are options of the command."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from posenc.command_line.options import option
from posenc.hf.tune_config import TuneConfig

Progress = Callable[[str, float], None]
"""Called with the current step and the fraction of it that is done."""


@dataclass(frozen=True)
class Options:
    """Say what to try and what to measure; most fields are options of the command, with its help.

    tune: fine-tuning before the export. targets: tokens at the end of a window whose loss is
    measured with growing context.
    """

    windows: Annotated[int, option("Windows of the new length to measure on.", min=1)] = 32
    search_evaluations: Annotated[
        int, option("Sets of frequencies that the search tries; 0 leaves it out.", min=0)
    ] = 64
    allow_cache_unsafe: Annotated[
        bool,
        option(
            "Also write methods whose frequencies change with the length.", "--allow-cache-unsafe"
        ),
    ] = False
    state: Annotated[
        Path | None,
        option(
            "Folder for the state of search and tuning, for restarts.",
            shown="next to --out",
            panel="Where",
        ),
    ] = None
    device: Annotated[
        str, option("Where to run: auto, cpu, cuda or mps; auto takes a GPU.", panel="Where")
    ] = "auto"
    precision: Annotated[
        str,
        option(
            "Precision to run in: float32, bfloat16, float16, or auto, that of the folder. "
            "The weights that are written keep theirs.",
            panel="Where",
        ),
    ] = "auto"
    trained_length: Annotated[
        int | None,
        option(
            "Tokens that the model was trained at, where its config says another number.",
            shown="that of the config",
            min=1,
        ),
    ] = None
    anyway: Annotated[
        bool,
        option(
            "Go on although the model does not know the text.",
            "--anyway",
            panel="Data",
        ),
    ] = False
    tune: TuneConfig | None = None
    task: Annotated[
        list[str] | None,
        option(
            "Task at every length and depth; may be repeated: passkey, needle, needles, "
            "variables, needle-by-meaning; or none.",
            shown="passkey",
        ),
    ] = None
    task_trials: Annotated[int, option("Prompts per task, length and depth.", min=1)] = 2
    targets: int = 64


DEFAULTS = Options()
