"""What a comparison trains: the options as one trial for every task, checked before anything is
read or allocated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, get_args

import torch

from posenc.attend.multihead import Projections
from posenc.compare.budget import BUDGETS, SUITE_SIZES, SUITES, Budget
from posenc.compare.options import Options, check_options
from posenc.compare.plan.encodings import Compared
from posenc.compare.plan.learning_rate_search import check_rates
from posenc.compare.plan.sizes import sizes_of
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.material import content_hash
from posenc.compare.trial.objectives import OBJECTIVES, Objective
from posenc.encoding.shape import ModelShape
from posenc.registry import create
from posenc.report import machine
from posenc.tasks.known import TASKS, TEXT, task_named
from posenc.tasks.task import Task

TEXT_DEFAULTS = {"train_length": 128, "batch": 32}


def chosen(options: Options) -> Budget:
    """The budget that --budget names, with --seeds and --steps in place of its own.

    Raises: ValueError for an unknown name.
    """
    known = SUITES if options.suite else BUDGETS
    named = known.get(options.budget)
    if named is None:
        raise ValueError(f"--budget must be {', '.join(known)}, got {options.budget!r}.")
    return named._replace(
        seeds=named.seeds if options.seeds is None else options.seeds,
        steps=named.steps if options.steps is None else options.steps,
    )


def with_suite(options: Options) -> Options:
    """With `--suite` the options that it stands for, but for those that the user gave.

    Raises: ValueError for an unknown budget, or for tasks beside the suite's own.
    """
    if not options.suite:
        return options
    budget = chosen(options)
    if options.task:
        raise ValueError(
            f"--task: --suite brings its own ({', '.join(budget.tasks)}). Leave one of both out."
        )
    sizes = {} if options.config is not None else SUITE_SIZES
    return replace(
        options,
        task=list(budget.tasks),
        check_lr=options.check_lr or budget.check_lr,
        **{name: size for name, size in sizes.items() if getattr(options, name) is None},
    )


def plan_trials(options: Options, compared: Sequence[Compared]) -> tuple[TrialConfig, ...]:
    """One trial per task, of the first encoding and seed 0 and without its text's hash.

    Raises: ValueError if the options do not fit together, or an encoding does not fit a task.
    """
    check_options(options)
    names = list(dict.fromkeys(options.task or [TEXT]))
    for name in names:
        if name != TEXT:
            task_named(name)
    if len(names) > 1 and (options.train_length is not None or options.test_lengths is not None):
        option = "--train-length" if options.train_length is not None else "--test-lengths"
        raise ValueError(
            f"{option}: each task counts something else, and there are {len(names)} of them "
            f"({', '.join(names)}). Leave it out, or compare one task at a time."
        )
    if TEXT not in names and options.text:
        raise ValueError("--text: no task here reads a text. Add --task text, or leave it out.")
    objective = OBJECTIVES.get(options.objective)
    if objective is None:
        raise ValueError(
            f"--objective must be one of {', '.join(OBJECTIVES)}, got {options.objective!r}."
        )
    if not all(objective.stacks):
        _check_both_directions(objective, names, compared)
    shared = _shared(options, compared[0].text)
    planned = tuple(_of_task(name, options, shared) for name in names)
    for name in names:
        if name != TEXT and TASKS[name].num_axes > 1:
            _check_axes(TASKS[name], compared)
    return planned


def _shared(options: Options, encoding: str) -> dict[str, Any]:
    """What the trials of all tasks have in common."""
    device = machine.default_device() if options.device == "auto" else options.device
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {options.device!r}.")
    elsewhere = options.engine != "local" and not torch.cuda.is_available()
    if device == "cuda" and elsewhere and options.precision == "auto":
        raise ValueError(
            "--precision auto asks this machine, which has no CUDA device. Say float32 or bfloat16 "
            "for the machines that the trials run on."
        )
    if device == "cuda" and not elsewhere and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here. Use --device cpu.")
    precision = options.precision
    precision = machine.default_precision(device) if precision == "auto" else precision
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"--precision must be auto, float32 or bfloat16, got {precision!r}.")
    if not 0 < options.lr <= sys.float_info.max:
        raise ValueError(f"--lr must be a positive number, got {options.lr}.")
    if options.check_lr:
        check_rates(options.lr)
    sizes = sizes_of(options)
    if options.projections not in get_args(Projections):
        raise ValueError(
            f"--projections must be one of {', '.join(get_args(Projections))}, got "
            f"{options.projections!r}."
        )
    if options.projections in ("q=k", "none") and sizes["kv_heads"] != sizes["heads"]:
        raise ValueError(
            f"--projections {options.projections} needs as many key/value heads as query heads, "
            f"got {sizes['kv_heads']} and {sizes['heads']}."
        )
    names = {f.name for f in fields(TrialConfig)} & {f.name for f in fields(Options)}
    return {name: getattr(options, name) for name in names} | {
        "encoding": encoding,
        "seed": 0,
        "corpus": "",
        **sizes,
        "device": device,
        "precision": precision,
        "torch": torch.__version__,
    }


def _of_task(name: str, options: Options, shared: dict[str, Any]) -> TrialConfig:
    task = None if name == TEXT else TASKS[name]
    own: dict[str, Any] = TEXT_DEFAULTS | {"steps": chosen(options).steps}
    if task is not None:
        own = {key: getattr(task, key) for key in own}
    own = {key: value if shared[key] is None else shared[key] for key, value in own.items()}
    train_length = own["train_length"]
    if task is None:
        lengths = _lengths(options.test_lengths, train_length, [1, 2, 4, 8])
        return TrialConfig(**shared | own | {"task": TEXT, "test_lengths": lengths})
    lengths = tuple(length for length in task.test_lengths if length >= train_length)
    if options.test_lengths is not None or train_length != task.train_length:
        lengths = _lengths(options.test_lengths, train_length, [1, 2, 4])
    task.check(train_length, lengths)
    corpus = content_hash(task, train_length, lengths)
    return TrialConfig(**shared | own | {"task": name, "test_lengths": lengths, "corpus": corpus})


def _lengths(given: str | None, train_length: int, factors: Sequence[int]) -> tuple[int, ...]:
    if given is None:
        return tuple(train_length * factor for factor in factors)
    try:
        lengths = {int(part) for part in given.split(",")}
    except ValueError:
        raise ValueError(
            f"--test-lengths must be whole numbers separated by commas, got {given!r}."
        ) from None
    if min(lengths) < train_length:
        raise ValueError(
            f"--test-lengths: {min(lengths)} is below --train-length {train_length}. "
            "Test at the training length and beyond."
        )
    return tuple(sorted(lengths | {train_length}))


def _check_both_directions(
    objective: Objective, names: Sequence[str], compared: Sequence[Compared]
) -> None:
    """A text alone has what such an objective asks, and a stack that is not causal takes only
    encodings that are defined there."""
    if names != [TEXT]:
        drawn = next(name for name in names if name != TEXT)
        raise ValueError(
            f"--objective {objective.name}: the task {drawn} is asked of a causal decoder. Compare "
            "on text."
        )
    shape = ModelShape(embed_dim=128, num_heads=4, train_length=16, causal=False)
    for each in compared:
        if create(each.text, shape).claims.causal_only:
            raise ValueError(
                f"--objective {objective.name}: {each.label} works in causal attention only; where "
                "a byte sees the future too, it is undefined or blind to order. Leave it out."
            )


def _check_axes(task: Task, compared: Sequence[Compared]) -> None:
    shape = ModelShape(embed_dim=128, num_heads=4, train_length=16)  # axes do not depend on sizes
    for each in compared:
        claims = create(each.text, shape).claims
        if claims.places and claims.num_axes < task.num_axes:
            raise ValueError(
                f"--task {task.name}: {each.label} counts tokens one after the other, and this "
                "task asks for rows and columns. Compare those that have them, such as axial_rope "
                "or sincos_2d, and nope."
            )
