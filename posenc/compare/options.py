"""The options of `posenc compare`: name, type, range, default and help, each in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from posenc.compare.budget import BUDGETS, SUITES, Budget
from posenc.report.machine.options import Figures

DEFAULT_ENCODINGS = ("nope", "sinusoidal", "learned", "rope", "alibi", "t5")
DEFAULT_BIDIRECTIONAL = ("sinusoidal", "learned", "rope", "alibi", "t5", "deberta")
"""NoPE has no order without a causal mask."""


_EXPECTED: dict[Any, tuple[Any, str]] = {
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    bool: (bool, "True or False"),
    str: (str, "text"),
    Path: (str | Path, "a path"),
    list[str]: (list | tuple, "a list of texts"),
}
"""For each type of an option what a value may be, and how a message calls that."""


def _said(budgets: dict[str, Budget]) -> str:
    return "; ".join(f"{name}: {budget}" for name, budget in budgets.items())


@dataclass(frozen=True)
class Options:
    """What the user asks for. The command line is made from these fields, and a `TrialConfig` takes
    over those of the same name."""

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
            "flip_flop, offset, or, for encodings of rows and columns, grid. A task brings its own "
            "lengths, steps and batch. See docs/compare.md.  ",
            show_default="text",
        ),
    ] = None
    suite: Annotated[
        bool,
        typer.Option(
            "--suite",
            help="Which encoding for what: text and tasks together, in a small decoder. --budget "
            f"{_said(SUITES)}.",
        ),
    ] = False
    objective: Annotated[
        str,
        typer.Option(
            help="causal: the next byte or token, in a decoder. masked: 15 % of the bytes, hidden, "
            "in an encoder that reads from both sides. seq2seq: the second half of a window, in a "
            "decoder that attends to an encoder of the first. The last two are for text, and for "
            "encodings that are defined in both directions."
        ),
    ] = "causal"
    train_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Length of a training window, in bytes; of a task, the longest in training.",
            show_default="128 for text",
        ),
    ] = None
    test_lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths of the test windows, in bytes, separated by commas; the training length "
            "is always among them.",
            show_default="1, 2, 4 and 8 times the training length for text",
        ),
    ] = None
    budget: Annotated[
        str,
        typer.Option(
            help=f"{_said(BUDGETS)}. Of --suite see there.",
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
            help="Which projections of attention are one: separate (none), k=v, q=k, or none (no "
            "projection at all)."
        ),
    ] = "separate"
    config: Annotated[
        Path | None,
        typer.Option(
            help="A Hugging Face config.json, or its folder, whose sizes the decoder takes where "
            "no other option gives them.",
            show_default="none",
        ),
    ] = None
    small: Annotated[
        bool,
        typer.Option(
            "--small",
            help="Of the --config keep how many query heads share a key/value head, in at most 4 "
            "layers, about 4 heads, and 64 channels a head.",
        ),
    ] = False
    lr: Annotated[float, typer.Option(help="Peak learning rate, per step of AdamW.")] = 2e-3
    check_lr: Annotated[
        bool,
        typer.Option(
            "--check-lr",
            help="First train every encoding on every task with half of --lr, with it and with "
            "twice of it, one seed each, and go on with the rate of the lowest validation loss. "
            "Nothing beyond the training length is measured for that.",
        ),
    ] = False
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    precision: Annotated[
        str,
        typer.Option(
            help="auto, float32 or bfloat16 (autocast). auto: bfloat16 where the hardware "
            "multiplies it."
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
            help="Of the Ray cluster: ray://HOST:PORT, HOST:PORT, or auto.",
            show_default="one begun on this machine",
        ),
    ] = None
    storage: Annotated[
        str | None,
        typer.Option(
            help="Where the machines of a Ray cluster meet, such as s3://bucket/run.",
            show_default="the folder --out, which they must share",
        ),
    ] = None
    partition: Annotated[
        str | None, typer.Option(help="Of Slurm.", show_default="Slurm's own default")
    ] = None
    max_parallel: Annotated[
        int | None,
        typer.Option(
            min=1, help="Trials at a time on ray or slurm.", show_default="what there is room for"
        ),
    ] = None
    checkpoint_steps: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = (
        50
    )
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.html, results.csv, study.json and the trials.  ",
            show_default="a folder below runs/ that the options name",
        ),
    ] = None
    figures: Figures = None
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Write the losses for TensorBoard too, into --out/tensorboard."
        ),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Measure a few steps, say how many trials, tokens and minutes it would be, and "
            "stop.",
        ),
    ] = False
    unchecked: Annotated[
        bool,
        typer.Option(
            "--unchecked",
            help="Compare also an encoding of yours that sees later tokens, gives NaN, or depends "
            "on how it is called; the report says so.",
        ),
    ] = False
    yes: Annotated[
        bool, typer.Option("--yes", help="Start also what is expected to take over a week.")
    ] = False


def check_options(options: Options) -> None:
    """Hold every option to its type and its minimum, as typer does for those of the command line.

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
