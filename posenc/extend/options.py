"""Options of an extension; annotated fields are options of the command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from posenc.extend.tune.config import TuneConfig

Progress = Callable[[str, float], None]
"""Called with the current step and the fraction of it that is done."""


@dataclass(frozen=True)
class Options:
    """What to try and measure, and how much of it.

    windows: windows of the target length to read. search_evaluations: sets of frequencies that the
    search tries, 0 for no search. allow_cache_unsafe: also export methods whose frequencies change
    with the length. state: folder for what a restart of search or tuning needs; None: next to the
    new folder, or nowhere. device, dtype: where and in what dtype to run; written weights keep the
    folder's dtype. tune: fine-tuning before the export. targets: tokens at the end of a window
    whose loss is measured with growing context. tasks: tasks at every length and depth, see
    measure/tasks.py. task_trials: prompts for each.
    """

    windows: Annotated[
        int, typer.Option(min=1, help="Windows of the new length to measure on.")
    ] = 32
    search_evaluations: Annotated[
        int,
        typer.Option(min=0, help="Sets of frequencies that the search tries; 0 leaves it out."),
    ] = 64
    allow_cache_unsafe: Annotated[
        bool, typer.Option(help="Also write methods whose frequencies change with the length.")
    ] = False
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder where search and tuning keep what a restart needs.",
            show_default="beside --out",
        ),
    ] = None
    device: Annotated[
        str, typer.Option(help="Where to run: auto, cpu, cuda or mps; auto takes a GPU.")
    ] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            help="dtype to run in: float32, bfloat16, float16, or auto, that of the folder "
            "(float32 while tuning). The weights that are written keep theirs."
        ),
    ] = "auto"
    tune: TuneConfig | None = None
    tasks: Annotated[
        str,
        typer.Option(
            help="What to ask at every length and depth, between commas: passkey, needle, needles, "
            "variables, common-words; or none."
        ),
    ] = "passkey"
    task_trials: Annotated[int, typer.Option(min=1, help="Prompts per task, length and depth.")] = 2
    targets: int = 64


DEFAULTS = Options()


def with_options_of(*records: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a typer command the annotated fields of dataclasses as options, which it receives as
    keywords: each option is named, bounded and explained once, where its value lives."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
        for name, hint, default in (each for record in records for each in _options(record)):
            parameters.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
                )
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def record_of(record: type, given: dict[str, Any]) -> Any:
    """Build the dataclass from what the command received."""
    return record(**{name: given[name] for name, _, _ in _options(record)})


def changed_options(given: Any) -> list[str]:
    """Return the options, as the command spells them, in which a record differs from its
    defaults."""
    names = []
    for name, hint, default in _options(type(given)):
        if getattr(given, name) != default:
            (option,) = (m for m in hint.__metadata__ if isinstance(m, OptionInfo))
            # In Annotated, a given option name comes first, where typer's default would be.
            said = option.default
            if not isinstance(said, str):
                said = "--" + name.replace("_", "-")
            names.append(said.replace("--", "--no-") if default is True else said)
    return names


def _options(record: type) -> list[tuple[str, Any, Any]]:
    """Name, annotation and default of each annotated field."""
    hints = get_type_hints(record, include_extras=True)
    return [
        (field.name, hints[field.name], field.default)
        for field in fields(record)
        if hasattr(hints[field.name], "__metadata__") and field.default is not MISSING
    ]
