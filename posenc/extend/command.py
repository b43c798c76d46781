"""`posenc extend`: its options; torch and transformers load when it runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def extend(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder with safetensors.")],
    to: Annotated[int, typer.Option(help="New length, in tokens; beyond the trained one.")],
    method: Annotated[
        str | None,
        typer.Option(
            help="One method instead of all: none, linear, ntk, ntk-1.5x, ntk-2x, by-parts, "
            "yarn, llama3, proportional, dynamic, longrope-switch or search.",
            show_default="try all, recommend",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New folder for the extended checkpoint and extend.html.",
            show_default="write nothing",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file to measure and tune on, UTF-8; <|endoftext|> separates documents; "
            "may be repeated.",
            show_default="the source of Python's standard library",
        ),
    ] = None,
    tune: Annotated[int, typer.Option(min=0, help="Steps of fine-tuning before the export.")] = 0,
    lora: Annotated[
        int, typer.Option(min=0, help="Rank of LoRA adapters; 0 tunes all weights.")
    ] = 0,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of the tuning.",
            show_default="2e-5, more for models below 1e9 parameters",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Windows of the new length per tuning step.")
    ] = 4,
    distill: Annotated[
        bool,
        typer.Option(
            help="Within the trained length, tune on what the model as it was predicts, so that "
            "short texts lose nothing; takes a copy of the weights."
        ),
    ] = True,
    windows: Annotated[
        int, typer.Option(min=1, help="Windows of the new length to measure on.")
    ] = 32,
    search_minutes: Annotated[
        float,
        typer.Option(min=0, help="Minutes to search for frequencies; 0 leaves the search out."),
    ] = 3.0,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder where search and tuning keep what a restart needs.",
            show_default="beside --out",
        ),
    ] = None,
    as_bytes: Annotated[
        bool, typer.Option("--bytes", help="Read text as bytes, without a tokenizer.")
    ] = False,
    as_ids: Annotated[
        bool,
        typer.Option("--ids", help="Text files hold token ids between spaces; no tokenizer."),
    ] = False,
    allow_cache_unsafe: Annotated[
        bool, typer.Option(help="Also write methods whose frequencies change with the length.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Where to write the page.", show_default="OUT/extend.html")
    ] = None,
) -> None:
    """Give a trained checkpoint a longer context: try, measure, recommend, tune, export, prove."""
    from posenc.extend.options import Options
    from posenc.extend.terminal import run
    from posenc.extend.tune.tuning import TuneConfig

    options = Options(
        windows=windows,
        search_minutes=search_minutes,
        allow_cache_unsafe=allow_cache_unsafe,
        tune=TuneConfig(tune, batch, lr, lora_rank=lora or None, distill=distill) if tune else None,
        state=state,
    )
    command = shlex.join(["posenc", *sys.argv[1:]])
    run(model, to, method, out, text or [], options, as_bytes, as_ids, report, command)
