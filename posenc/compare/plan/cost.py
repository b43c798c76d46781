"""Refuse a comparison that the machine cannot run, and say what one will do."""

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from posenc.command_line.progress import readable_duration
from posenc.compare.defaults import TUNE_BATCH
from posenc.compare.plan.encodings import build_encoding
from posenc.compare.plan.splits import TextSplits
from posenc.compare.plan.time_estimate import kind_of_trial, measure_kinds
from posenc.compare.results import Study
from posenc.compare.trial.config import CAUSAL, COSINE, TrialConfig
from posenc.compare.trial.evaluate import (
    TOKENS_AT_ONCE,
    why_case_impossible,
    why_length_impossible,
)
from posenc.compare.trial.objectives import objective_of
from posenc.compare.trial.readings import can_be_tuned
from posenc.compare.trial.task_of_trial import (
    max_row_tokens,
    shape_length,
    task_of,
    vocabulary_size,
)
from posenc.compare.trial.train import decoder_config, encoding_shape, validation_rows
from posenc.encodings import PositionEncoding, create, parse
from posenc.hf.checkpoint.simulated_memory import (
    SimulatedMemory,
    bytes_of_weights,
    meta_device_like_others,
)
from posenc.machine import hardware
from posenc.machine.hardware import check_memory_or_disk, check_time, readable_size
from posenc.report.report import Report, Section, Table
from posenc.tasks.registry import TEXT
from posenc.tasks.task import Case

STEPS_PER_SECOND = 1000
"""No model takes more steps in a second, on any device: chosen, not measured."""
BYTES_PER_PARAMETER = 16
"""Weights, gradients and AdamW's two averages in float32."""
PROCESS_BYTES, TRITON_BYTES, CUDA_BUILD_BYTES = 340 << 20, 80 << 20, 200 << 20
"""Memory of a trial's process beside its model: Python, torch and posenc; what an installed Triton
adds, which torch imports; and what a torch adds that is built for CUDA, also without a GPU.
Measured on Linux with torch 2.13 (CPU), 2.11 and 2.6 (CUDA)."""
ALLOCATED_WHERE_FREED, ALLOCATED_WHERE_KEPT = 1.1, 1.5
"""Memory that the allocator holds for activations, in multiples of what they take: where it gives
freed memory back to the system, and where it keeps it, see `process.trial_environment`. Measured
with torch 2.13 on Linux. The second differs from process to process, between 1.3 and 1.9: freed
blocks lie elsewhere each time."""
LOGITS_OF_STEP, LOGITS_OF_TUNING, CHANNELS_OF_TUNING = 3.0, 7.5, 1.7
"""Floats that a step of a training and of a tuning keep of each symbol of the vocabulary, for each
token; and what a step of a tuning keeps of layers, in multiples of one of the training."""
BYTES_PER_TRIAL = 2000
"""Memory of a planned trial in this process."""


def check_cost(
    task_trials: Sequence[TrialConfig],
    encodings: Sequence[str],
    num_seeds: int,
    workers: int,
    yes: bool,
    local_workers: int | None = None,
) -> None:
    """Refuse a study that needs more memory than is available, or, unless `yes`, whose steps would
    take more than a week even at STEPS_PER_SECOND. Nothing is allocated or measured here; once
    steps were timed, call `check_seconds` with the measured time.

    task_trials: one for each task.
    workers: trials at a time.
    local_workers: those of them on this machine, None for all; they must fit into its memory.

    Raises: ValueError, also if an encoding cannot be built for this model or has too few positions
    for training.
    """
    trials_of_a_task = num_seeds * len(encodings)
    num_trials = trials_of_a_task * len(task_trials)
    check_memory_or_disk(
        f"{num_trials:,} trials",
        num_trials * BYTES_PER_TRIAL,
        hardware.memory_bytes(),
        "Take fewer --seeds.",
    )
    for trial in task_trials:
        # Check the model first: its sizes may exceed those of a tensor.
        _check_model_memory(trial, local_workers or workers, 0)
        most_parameters = 0
        for name in encodings:
            encoding = _build_encoding(trial, name)
            _check_positions(trial, name, encoding)
            most_parameters = max(most_parameters, sum(p.numel() for p in encoding.parameters()))
        _check_model_memory(trial, local_workers or workers, most_parameters)
    total_steps = sum(trials_of_a_task * trial.steps for trial in task_trials)
    least_seconds = total_steps // STEPS_PER_SECOND // workers
    _check_week(task_trials, num_trials, least_seconds, yes)


def check_seconds(trials: Sequence[TrialConfig], seconds: int, yes: bool) -> None:
    """Refuse trials that were measured to take more than a week, unless `yes`."""
    _check_week(trials, len(trials), seconds, yes)


def _check_week(trials: Sequence[TrialConfig], count: int, seconds: int, yes: bool) -> None:
    """Raise ValueError if `count` trials together take more than a week, unless `yes`.

    seconds: their expected time together. trials: those whose steps the message names.
    """
    check_time(
        f"{count:,} {'trial' if count == 1 else 'trials'} of {_describe_steps(trials)} steps",
        seconds,
        yes,
        "Take fewer --steps or --seeds or a smaller model, or add --yes to start all the same.",
    )


def expected_memory(trials: Sequence[TrialConfig]) -> int | None:
    """Return about how many bytes of memory the largest of these trials takes in its own
    process; None if one is not a decoder on text on the CPU, as others were not measured, or has an
    encoding that needs values. Autocast takes about as much: weights stay in float32, and are cast
    for each step.

    Of these phases the largest counts, with w bytes of weights:

        training    4 w (weights, gradients, AdamW's two averages) + activations
        validation  4 w + activations
        test        2 w + activations
        tuning      7 w + activations of its windows

    A checkpoint takes nothing more than the training: it is written tensor by tensor. Activations
    are counted on the meta device, by the code that will run.
    """
    sizes = [_expected_bytes(trial) for trial in dict.fromkeys(map(_as_in_memory, trials))]
    return None if None in sizes else max((size for size in sizes if size), default=None)


def _as_in_memory(trial: TrialConfig) -> TrialConfig:
    """Return a trial without what takes no other memory: seed, rates, text and the like."""
    return replace(
        trial,
        seed=0,
        lr=1.0,
        encoding_lr=1.0,
        warmup=0.0,
        schedule=COSINE,
        steps=1,
        corpus="",
        num_windows=0,
        test_window=0,
    )


@lru_cache
def _expected_bytes(trial: TrialConfig) -> int | None:
    """Return the memory of one trial, see `expected_memory`."""
    if trial.task != TEXT or (trial.objective, trial.device) != (CAUSAL, "cpu"):
        return None
    try:
        with torch.device("meta"):
            encoding = create(trial.encoding, encoding_shape(trial))
            model = objective_of(trial).model_class(decoder_config(trial), encoding)
        with meta_device_like_others():
            return _bytes_of_process() + _most_bytes_of_phases(trial, model)
    except Exception:  # an encoding that reads its own values may raise anything
        return None


def _bytes_of_process() -> int:
    """Return the memory of a process that has imported what a trial needs, and has no model."""
    num_bytes = PROCESS_BYTES
    if importlib.util.find_spec("triton") is not None:
        num_bytes += TRITON_BYTES
    if torch.version.cuda is not None:
        num_bytes += CUDA_BUILD_BYTES
    return num_bytes


def _most_bytes_of_phases(trial: TrialConfig, model: nn.Module) -> int:
    """Return the memory of the largest phase of a trial, whose model is on the meta device."""
    weights = bytes_of_weights(model)
    step = max(
        _activations_of_step(trial.at_length(length), model) for length in trial.lengths_of_steps
    )
    validation = _activations_of_reading(trial, model, validation_rows(trial), trial.train_length)
    phases = [4 * weights + step, 4 * weights + validation]
    longest_length = max(trial.test_lengths)
    for length in {trial.train_length, longest_length}:
        rows = max(1, TOKENS_AT_ONCE // length)
        phases.append(2 * weights + _activations_of_reading(trial, model, rows, length))
    if trial.tune_steps and can_be_tuned(model):
        bytes_of_logits = 4 * vocabulary_size(trial)
        tokens_of_step = (trial.micro_batch or trial.batch) * trial.train_length
        layers = step / tokens_of_step - LOGITS_OF_STEP * bytes_of_logits
        kept = CHANNELS_OF_TUNING * max(0.0, layers) + LOGITS_OF_TUNING * bytes_of_logits
        phases.append(7 * weights + round(TUNE_BATCH * longest_length * kept))
    return max(phases)


def _activations_of_step(trial: TrialConfig, model: nn.Module) -> int:
    """Return the most bytes that a training step takes in addition to its gradients, of a trial
    whose windows have one length."""
    objective = objective_of(trial)
    rows = trial.micro_batch or trial.batch
    model.train()
    with SimulatedMemory(model) as memory:
        # The second piece of a step finds the gradients of the first.
        for _ in range(2 if rows < trial.batch else 1):
            windows = objective.training_targets(_windows(rows, trial.train_length), 0, 0)
            objective.losses(model, windows, trial).mean().backward()
    for parameter in model.parameters():
        parameter.grad = None
    activations = max(0, memory.peak - bytes_of_weights(model))
    if trial.precision == "bfloat16":  # logits and their gradients are there in 16 bits, too
        activations += 2 * 2 * vocabulary_size(trial) * rows * trial.train_length
    return _allocated(trial, activations)


@torch.no_grad()
def _activations_of_reading(trial: TrialConfig, model: nn.Module, rows: int, length: int) -> int:
    """Return the most bytes that activations of windows take that are read without training."""
    objective = objective_of(trial)
    model.eval()
    with SimulatedMemory(model) as memory:
        objective.losses(model, objective.held_out_targets(_windows(rows, length)), trial)
    return _allocated(trial, memory.peak)


def _allocated(trial: TrialConfig, activations: int) -> int:
    """Return the memory that the allocator holds for so many bytes of activations."""
    factor = ALLOCATED_WHERE_FREED if trial.saves_memory else ALLOCATED_WHERE_KEPT
    return round(factor * activations)


def _windows(rows: int, length: int) -> Tensor:
    """Return windows without values, and the symbol after each, (rows, length + 1)."""
    return torch.empty(rows, length + 1, dtype=torch.int64, device="meta")


def opening_sentence(study: Study, workers: int, folder: Path, seconds: int | None) -> str:
    """Return one sentence: what will run, on how much text, for how long if that was measured, and
    where results go."""
    trial = study.trials[0]
    corpus = study.corpus
    num_encodings = len(study.encodings)
    num_trials = len(study.trials)
    tasks = list(dict.fromkeys(t.task for t in study.trials))
    sequence_tasks = [task for task in tasks if task != TEXT]
    parts = [
        f"{num_trials} {'trial' if num_trials == 1 else 'trials'} (encodings: {num_encodings}, "
        f"seeds: {num_trials // num_encodings // len(tasks)}{', tasks: ' if sequence_tasks else ''}"
        f"{', '.join(sequence_tasks)}) of {_describe_steps(study.trials)} steps"
    ]
    if corpus is not None:
        parts[0] += (
            f" on {corpus.name}: {corpus.size_in_words('train')} to train on, "
            f"{corpus.size_in_words('test')} to test, split {corpus.split}"
        )
    if seconds is not None:
        workers_in_words = (
            f"{workers} {'worker' if workers == 1 else 'workers'} in {trial.precision}"
        )
        condition = "if the cores are free" if trial.device == "cpu" else f"on {trial.device}"
        parts.append(f"about {readable_duration(seconds)} on {workers_in_words} {condition}")
    parts += memory_in_words(study.trials)
    return "; ".join([*parts, f"results in {folder}"]) + "."


def memory_in_words(trials: Sequence[TrialConfig]) -> list[str]:
    """Return the expected memory of a worker in words, as a list of one clause; [] if unknown."""
    num_bytes = expected_memory(trials)
    return [] if num_bytes is None else [f"about {readable_size(num_bytes)} of memory a worker"]


def _describe_steps(trials: Sequence[TrialConfig]) -> str:
    """Return the steps of a trial as text, or the range over all trials: `200`, `200 to 1,000`."""
    steps = sorted({trial.steps for trial in trials})
    return f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"


def _count_matrix_parameters(trial: TrialConfig) -> int:
    """Count the parameters in the model's matrices, without those of the encoding: attention, a
    feed-forward network of two matrices or, with a gate, three, and one table of tokens."""
    config = decoder_config(trial)
    heads_in_and_out = 2 * config.num_heads + 2 * (config.num_kv_heads or 0)
    attention_parameters = trial.width * heads_in_and_out * (config.head_dim or 0)
    num_token_kinds = vocabulary_size(trial)
    matrices_of_ffn = 3 if config.has_gate else 2
    layer_parameters = attention_parameters + trial.width * matrices_of_ffn * (config.ffn_dim or 0)
    num_stacks = len(objective_of(trial).causal_stacks)
    # Each stack after the first has, in every layer, one more attention, to the first stack.
    num_cross_attentions = num_stacks - 1
    parameters_at_depth = (
        num_stacks * layer_parameters + num_cross_attentions * attention_parameters
    )
    return trial.layers * parameters_at_depth + num_token_kinds * trial.width


def _describe_rows(trial: TrialConfig) -> str:
    """Return in words what the rows of a batch are: `windows of 128 bytes`."""
    length = max_row_tokens(trial)
    if trial.task == TEXT:
        return f"windows of {length:,} {trial.length_unit}"
    return f"sequences of {length:,} tokens"


def _build_encoding(trial: TrialConfig, encoding: str) -> PositionEncoding:
    """Build the encoding for the trial's model, without allocating memory if possible."""
    try:
        with torch.device("meta"):
            return create(encoding, encoding_shape(trial))
    except Exception:
        if not any(part.attribute for part in parse(encoding).parts):
            raise
        # A user's constructor may read computed values, which tensors on "meta" do not have. If
        # that was not the reason, it fails again, and is named.
        return build_encoding(encoding, encoding_shape(trial))


def _check_positions(trial: TrialConfig, name: str, encoding: PositionEncoding) -> None:
    """Raise ValueError if the encoding has too few positions for training. Tests that are too long
    are reported with the results instead."""
    task = task_of(trial)
    if task is not None:
        why = why_case_impossible(encoding, task, Case(trial.train_length))
    else:
        needed = shape_length(trial)
        why = why_length_impossible(encoding, needed)
        why = None if why is None else f"{why}, and {needed:,} are needed"
    if why is not None:
        raise ValueError(
            f"{name} cannot be trained on {trial.task} at --train-length {trial.train_length}: "
            f"{why}. Use a shorter one, give the encoding more positions, or leave it out."
        )


def _check_model_memory(trial: TrialConfig, workers: int, num_encoding_parameters: int) -> None:
    """Raise ValueError if so many models at a time do not fit into the memory of the machine or,
    on CUDA, of its smallest GPU."""
    num_parameters = _count_matrix_parameters(trial) + num_encoding_parameters
    # The logits and their gradients, in float32.
    rows_at_once = trial.micro_batch or trial.batch
    logits_bytes = 2 * 4 * vocabulary_size(trial) * rows_at_once * max_row_tokens(trial)
    bytes_per_model = BYTES_PER_PARAMETER * num_parameters + logits_bytes
    available_bytes = hardware.memory_bytes()
    place_in_words = ""
    num_gpus = torch.cuda.device_count() if trial.device == "cuda" else 0
    if num_gpus:  # otherwise there is none, or on another machine
        available_bytes = min(
            torch.cuda.get_device_properties(i).total_memory for i in range(num_gpus)
        )
        workers = -(-workers // num_gpus)  # rounded up: those that share a GPU
        place_in_words = " on one GPU"
    check_memory_or_disk(
        f"{workers} {'worker' if workers == 1 else 'workers'}{place_in_words} at a model of "
        f"{num_parameters:,} parameters and {rows_at_once:,} {_describe_rows(trial)} "
        f"{'at a time' if trial.micro_batch else 'a step'}",
        workers * bytes_per_model,
        available_bytes,
        "Take a smaller --width, --layers, --train-length, --batch, --micro-batch or --workers.",
    )


def most_training_tokens(trial: TrialConfig) -> int:
    """Return the maximum number of tokens that a trial trains on: sequences of a task may be
    shorter than its longest."""
    return trial.steps * trial.batch * max_row_tokens(trial)


def dry_run(
    trials: Sequence[TrialConfig], splits: TextSplits | None, workers: int, local_workers: int
) -> Report:
    """Return the report of a run that is not started: trials, tokens and time, with a row for each
    encoding and task.

    workers, local_workers: trials at a time, and those of them on this machine. Times are from
    steps measured now, in as many processes like those of the trials. Nothing is left on disk.
    """
    with tempfile.TemporaryDirectory(prefix="posenc-") as scratch:
        folder = Path(scratch)
        if splits is not None:
            splits.write(folder)
        measured = measure_kinds(trials, folder, local_workers)
    seconds_by_kind = {kind: measured_kind.seconds for kind, measured_kind in measured.items()}
    trials_by_kind: dict[str, list[TrialConfig]] = {}
    for trial in trials:
        trials_by_kind.setdefault(kind_of_trial(trial), []).append(trial)
    total_seconds = None
    if seconds_by_kind.keys() == trials_by_kind.keys():
        seconds_of_all = sum(seconds_by_kind[kind_of_trial(trial)] for trial in trials)
        # No number of workers makes a trial faster.
        total_seconds = max(seconds_of_all / workers, *seconds_by_kind.values())
    headline = _sentence_on_trials(trials, total_seconds, workers)
    rows = []
    for kind, trials_of_kind in trials_by_kind.items():
        num_tokens = sum(map(most_training_tokens, trials_of_kind))
        time_in_words = (
            readable_duration(seconds_by_kind[kind]) if kind in seconds_by_kind else "not measured"
        )
        rows.append([kind, len(trials_of_kind), trials_of_kind[0].steps, num_tokens, time_in_words])
    header = ("trials of", "trials", "steps", "tokens", "time of one")
    table = Table(header, rows, "What would run", name="trials")
    return Report(
        "What would run",
        headline,
        {"seconds": total_seconds, "seconds_of_one": seconds_by_kind},
        [Section("", [table])],
    )


def _sentence_on_trials(trials: Sequence[TrialConfig], seconds: float | None, workers: int) -> str:
    """Return how many trials and tokens would run, and how long; `seconds`: None if unknown."""
    counts_in_words = (
        f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}, "
        f"{sum(map(most_training_tokens, trials)):,} tokens"
    )
    memory_clause = "".join(f"; {clause}" for clause in memory_in_words(trials))
    if seconds is None:
        return (
            f"{counts_in_words}; their steps cannot be measured here{memory_clause}. Nothing was "
            "trained."
        )
    device = trials[0].device
    workers_in_words = f"{workers} {'worker' if workers == 1 else 'workers'}"
    condition = "if the cores are free" if device == "cpu" else f"on {device}"
    return (
        f"{counts_in_words}, about {readable_duration(seconds)} on {workers_in_words} "
        f"{condition}, from steps measured now{memory_clause}. Nothing was trained."
    )
