"""Options of `posenc extend`; torch and transformers load when it runs."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.command_line.options import (
    Figures,
    changed_options,
    option,
    record_of,
    with_options_of,
)
from posenc.command_line.progress import status_line_while_loading
from posenc.extend.options import Options
from posenc.frequencies.scalings.lookup import SCALINGS
from posenc.hf.tune_config import TuneConfig

_SCALINGS_IN_WORDS = ", ".join(
    scaling.extend_method.name for scaling in SCALINGS.values() if scaling.extend_method is not None
)
"""The methods that are one scaling each."""


@with_options_of(TuneConfig, Options)
def extend(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder with safetensors.")],
    to: Annotated[int, option("New length, in tokens; beyond the trained one.")],
    method: Annotated[
        str | None,
        option(
            f"One method instead of all: none, {_SCALINGS_IN_WORDS}, ntk-1.5x, ntk-2x, by-parts, "
            "yarn, proportional, clip, longrope-switch, search, drope to drop the rotation, "
            "dual-chunk for vLLM, or window to read the last tokens only; for learned tables "
            "none, window, interpolate, tile or hierarchical.",
            shown="try all, recommend",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "New folder for the extended checkpoint and extend.html.",
            shown="write nothing",
            panel="Output",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        option(
            "Text file to measure and tune on, UTF-8; <|endoftext|> separates documents; "
            "may be repeated.",
            shown="the source of Python's standard library",
            panel="Data",
        ),
    ] = None,
    as_bytes: Annotated[
        bool, option("Read text as bytes, without a tokenizer.", "--bytes", panel="Data")
    ] = False,
    as_ids: Annotated[
        bool,
        option("Text files hold token ids between spaces; no tokenizer.", "--ids", panel="Data"),
    ] = False,
    as_json: Annotated[
        bool, option("Print everything that was measured, for programs.", "--json", panel="Output")
    ] = False,
    plan: Annotated[
        bool,
        option(
            "Print the memory that this would take, from the config and the headers of the "
            "weights, and whether it fits; nothing is loaded.",
            "--plan",
            panel="Where",
        ),
    ] = False,
    cards: Annotated[
        str | None,
        option(
            "With --plan: GB of each device to plan for, as 80, 8x80 or 80,24.",
            shown="those of this machine",
            panel="Where",
        ),
    ] = None,
    server: Annotated[
        str | None,
        option(
            "Ask the tasks of a server that runs MODEL, at every depth of prompts up to --to "
            "tokens; its address has OpenAI-compatible completions. Nothing else is measured.",
            shown=False,
            metavar="URL",
        ),
    ] = None,
    report: Annotated[
        Path | None, option("Where to write the page.", shown="OUT/extend.html", panel="Output")
    ] = None,
    figures: Figures = None,
    **option_values: Any,
) -> None:
    """Give a trained checkpoint a longer context: try, measure, recommend, tune, export, prove."""
    with status_line_while_loading(
        f"{model.name}: loads it and reads one window, then says how long measuring takes"
    ):
        from posenc.extend.api import extend_and_show, plan_and_show

    tuning = record_of(TuneConfig, option_values)
    if ignored_options := [] if tuning.steps else changed_options(tuning):
        raise ValueError(f"{', '.join(ignored_options)}: nothing is tuned without --tune STEPS.")
    options = replace(record_of(Options, option_values), tune=tuning if tuning.steps else None)
    if server is not None:
        others = {
            "--method": method,
            "--out": out,
            "--plan": plan,
            "--cards": cards,
            "--bytes": as_bytes,
            "--ids": as_ids,
            "--report": report,
            "--figures": figures,
            "--tune": tuning.steps,
        }
        _ask_server(model, to, server, text or [], options, others, as_json=as_json)
        return
    if cards is not None and not plan:
        raise ValueError("--cards: nothing is planned without --plan.")
    if plan:
        _refuse_written_files({"--report": report, "--figures": figures})
        plan_and_show(
            model,
            to,
            text or [],
            cards,
            method=method,
            out=out,
            options=options,
            as_json=as_json,
            as_bytes=as_bytes,
            as_ids=as_ids,
        )
        return
    command = shlex.join(["posenc", *sys.argv[1:]])
    extend_and_show(
        model,
        to,
        text or [],
        command,
        report,
        method=method,
        out=out,
        options=options,
        as_json=as_json,
        as_bytes=as_bytes,
        as_ids=as_ids,
        figures_folder=figures,
    )


def _refuse_written_files(path_of_option: Mapping[str, Path | None]) -> None:
    """Raise ValueError if a file to write is named beside --plan, by option."""
    named_options = [option for option, path in path_of_option.items() if path is not None]
    if named_options:
        raise ValueError(
            f"{', '.join(named_options)}: --plan prints a table and writes no file; leave it out."
        )


def _ask_server(
    folder: Path,
    length: int,
    server: str,
    text_files: list[Path],
    options: Options,
    others: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Ask the server of --server the tasks. others: the options that say nothing to it, with their
    values. Raises: ValueError if one of these is given."""
    from posenc.extend.api import read_documents
    from posenc.extend.served.report import ask_and_show

    ignored_options = [name for name, value in others.items() if value]
    untuned = replace(options, tune=None, task=None, task_trials=Options.task_trials)
    ignored_options += changed_options(untuned)
    if ignored_options:
        raise ValueError(
            f"{', '.join(ignored_options)}: --server asks the tasks of a running server and does "
            "nothing else; leave it out."
        )
    documents = read_documents(text_files)
    ask_and_show(folder, length, server, documents, options, as_json=as_json)
