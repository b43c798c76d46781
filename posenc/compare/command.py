"""`posenc compare` and `posenc report`: their options; torch and the rest load when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Names = Annotated[
    list[str] | None,
    typer.Argument(
        help="Names from `posenc list`.",
        show_default="nope sinusoidal learned rope alibi t5",
    ),
]


def compare(
    encodings: Names = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="File, folder or glob to train and test on, read as bytes; may be repeated.  ",
            show_default="the source of Python's standard library",
        ),
    ] = None,
    train_length: Annotated[
        int, typer.Option(min=2, help="Length of a training window, in bytes.")
    ] = 128,
    test_lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths of the test windows, in bytes, separated by commas; the training length "
            "is always among them.",
            show_default="1, 2, 4 and 8 times the training length",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, each a trial.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each trial.")] = 400,
    batch: Annotated[int, typer.Option(min=1, help="Training windows per step.")] = 32,
    width: Annotated[int, typer.Option(min=1, help="Width of the decoder, in channels.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Number of query heads.")] = 4,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of key/value heads.",
            show_default="as many as --heads",
        ),
    ] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate, per step of AdamW.")] = 2e-3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[
        str,
        typer.Option(
            help="auto, float32 or bfloat16 (autocast). auto: bfloat16 where the hardware "
            "multiplies it."
        ),
    ] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Trials at a time, one process each.",
            show_default="one per core; 1 on cuda",
        ),
    ] = None,
    checkpoint_steps: Annotated[
        int, typer.Option(min=1, help="Steps between two checkpoints.")
    ] = 50,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.html, results.csv, study.json and the trials.  ",
            show_default="a folder below runs/ that the options name",
        ),
    ] = None,
) -> None:
    """Train each encoding short, test it long, and say which one to use.

    The same command goes on with what an interrupted one has left, and skips what is done.
    """  # fmt: skip
    from posenc.compare import study as study

    study.compare(
        study.Options(
            encodings=tuple(encodings or study.DEFAULT_ENCODINGS),
            text=tuple(text or ()),
            train_length=train_length,
            test_lengths=test_lengths,
            seeds=seeds,
            steps=steps,
            batch=batch,
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            lr=lr,
            device=device,
            precision=precision,
            workers=workers,
            checkpoint_steps=checkpoint_steps,
            out=out,
        )
    )


def report(
    folder: Annotated[Path, typer.Argument(help="What `posenc compare` wrote, finished or not.")],
) -> None:
    """Write report.html and results.csv again from the trials in a folder, and print the table."""
    from posenc.compare import study as study

    study.report(folder)
