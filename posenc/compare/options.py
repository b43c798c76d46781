"""Options of `posenc compare`: name, type, range, default and help, each in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from posenc.compare.budget import BUDGETS, SUITES, Budget
from posenc.report.machine.options import Figures

DEFAULT_ENCODINGS = ("nope", "sinusoidal", "learned", "rope", "alibi", "t5")
DEFAULT_BIDIRECTIONAL = ("sinusoidal", "learned", "rope", "alibi", "t5", "deberta")
"""Without NoPE, which is blind to order without a causal mask."""


_EXPECTED: dict[Any, tuple[Any, str]] = {
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    bool: (bool, "True or False"),
    str: (str, "text"),
    Path: (str | Path, "a path"),
    list[str]: (list | tuple, "a list of texts"),
}
"""For each type of an option: the accepted types of a value, and their name in messages."""


def _said(budgets: dict[str, Budget]) -> str:
    return "; ".join(f"{name}: {budget}" for name, budget in budgets.items())


@dataclass(frozen=True)
class Options:
    """Options of the user. The command line is made from these fields; a `TrialConfig` copies those
    of the same name."""

    encodings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names from `posenc list`, module:Class or file.py:Class; each with options as in "
            "yarn:factor=8, together as in rope+alibi, by layer as in 'rope/nope every 4', or with "
            "a label as in mine=./my.py:Mine. See docs/grammar.md.",
            show_default=" ".join(DEFAULT_ENCODINGS),
        ),
    ] = None
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="File, folder or glob to train and test on, read as bytes; may be repeated.  ",
            show_default="the source of Python's standard library",
        ),
    ] = None
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="What to learn; may be repeated: text, copy, copy_512, reverse, recall, "
            "flip_flop, offset, or, for encodings of rows and columns, grid. A task has its own "
            "lengths, steps and batch. See docs/compare.md.  ",
            show_default="text",
        ),
    ] = None
    suite: Annotated[
        bool,
        typer.Option(
            "--suite",
            help=f"Compare on text and all tasks, with a small decoder. --budget {_said(SUITES)}.",
        ),
    ] = False
    objective: Annotated[
        str,
        typer.Option(
            help="causal: predict the next byte or token, in a decoder. masked: predict 15 % of "
            "the bytes, which are masked, in an encoder. seq2seq: predict the second half of a "
            "window, in a decoder that attends to an encoder of the first. The last two are for "
            "text, and for encodings that are defined without a causal mask."
        ),
    ] = "causal"
    train_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Length of a training window, in bytes; for a task, the longest in training.",
            show_default="128 for text",
        ),
    ] = None
    test_lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths of the test windows, in bytes, separated by commas; the training length "
            "is always included.",
            show_default="1, 2, 4 and 8 times the training length for text",
        ),
    ] = None
    budget: Annotated[
        str,
        typer.Option(
            help=f"{_said(BUDGETS)}. For budgets of --suite see --suite.",
        ),
    ] = "standard"
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of seeds, each a trial.", show_default="those of the budget"
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Optimizer steps of each trial.",
            show_default="those of the budget for text",
        ),
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Training windows per step.", show_default="32 for text"),
    ] = None
    width: Annotated[
        int | None,
        typer.Option(min=1, help="Width of the decoder, in channels.", show_default="128"),
    ] = None
    layers: Annotated[
        int | None, typer.Option(min=1, help="Number of layers.", show_default="4")
    ] = None
    heads: Annotated[
        int | None, typer.Option(min=1, help="Number of query heads.", show_default="4")
    ] = None
    kv_heads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of key/value heads.",
            show_default="as many as --heads",
        ),
    ] = None
    projections: Annotated[
        str,
        typer.Option(
            help="Projections of attention: separate, k=v or q=k (shared), or none at all (none)."
        ),
    ] = "separate"
    config: Annotated[
        Path | None,
        typer.Option(
            help="A Hugging Face config.json, or its folder: the decoder gets its sizes unless "
            "other options set them.",
            show_default="none",
        ),
    ] = None
    small: Annotated[
        bool,
        typer.Option(
            "--small",
            help="Shrink the model of --config to at most 4 layers, about 4 heads and 64 channels "
            "per head; keeps the number of query heads per key/value head.",
        ),
    ] = False
    lr: Annotated[float, typer.Option(help="Peak learning rate, per step of AdamW.")] = 2e-3
    check_lr: Annotated[
        bool,
        typer.Option(
            "--check-lr",
            help="First train every encoding on every task with 0.5, 1 and 2 times --lr, one seed "
            "each, and use the rate with the lowest validation loss. Only the training length is "
            "measured for this.",
        ),
    ] = False
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    precision: Annotated[
        str,
        typer.Option(
            help="auto, float32 or bfloat16 (autocast). auto: bfloat16 if the hardware multiplies "
            "it."
        ),
    ] = "auto"
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Trials at a time on this machine, one process each.",
            show_default="one per core; 1 on cuda",
        ),
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            help="Where trials run: local (processes of this machine), ray or slurm. See "
            "docs/scale.md."
        ),
    ] = "local"
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of the Ray cluster: ray://HOST:PORT, HOST:PORT, or auto.",
            show_default="a new one on this machine",
        ),
    ] = None
    storage: Annotated[
        str | None,
        typer.Option(
            help="Storage shared by the machines of a Ray cluster, such as s3://bucket/run.",
            show_default="the folder --out, which they must share",
        ),
    ] = None
    partition: Annotated[
        str | None, typer.Option(help="Slurm's partition.", show_default="Slurm's own default")
    ] = None
    max_parallel: Annotated[
        int | None,
        typer.Option(
            min=1, help="Trials at a time on ray or slurm.", show_default="as many as fit"
        ),
    ] = None
    checkpoint_steps: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = (
        50
    )
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.html, results.csv, study.json and the trials.  ",
            show_default="a folder below runs/ named by the options",
        ),
    ] = None
    figures: Figures = None
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Also write the losses for TensorBoard, into --out/tensorboard."
        ),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Measure a few steps, print the number of trials and tokens and the time, and "
            "stop.",
        ),
    ] = False
    unchecked: Annotated[
        bool,
        typer.Option(
            "--unchecked",
            help="Also compare your own encoding if it sees later tokens, gives NaN, or depends on "
            "how it is called; the report has a note.",
        ),
    ] = False
    yes: Annotated[
        bool, typer.Option("--yes", help="Start even if it is expected to take over a week.")
    ] = False


def check_options(options: Options) -> None:
    """Check the type and minimum of every option, as typer does on the command line.

    Raises: ValueError.
    """
    for name, hint in get_type_hints(Options, include_extras=True).items():
        annotated, declared = get_args(hint)
        kind, *or_none = get_args(annotated) or (annotated,)
        value, least = getattr(options, name), declared.min
        if value is None and or_none:
            continue
        if not _is(value, kind) or (least is not None and value < least):
            option = name if name == "encodings" else f"--{name.replace('_', '-')}"
            limit = "" if least is None else f" of at least {least}"
            raise ValueError(f"{option} must be {_EXPECTED[kind][1]}{limit}, got {value!r}.")


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if not isinstance(value, _EXPECTED[kind][0]):
        return False
    return kind != list[str] or all(isinstance(each, str) for each in value)
