"""Train one trial with checkpoints; interruptions do not change the result, bit for bit on the CPU.

On CUDA gradients may be added in any order, so that no two runs need to be equal to the last bit.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from posenc.compare.results import TrainingPoint
from posenc.compare.trial import checkpoint
from posenc.compare.trial.checkpoint import Cursor
from posenc.compare.trial.config import COSINE, TrialConfig
from posenc.compare.trial.evaluate import TOKENS_AT_ONCE, target_loss, validation_bits
from posenc.compare.trial.objectives import objective_of
from posenc.compare.trial.task_of_trial import (
    objective_of_model,
    shape_length,
    task_of,
    vocabulary_size,
)
from posenc.compare.trial.windows import config_of_step, training_windows, validation_windows
from posenc.encodings import ModelShape, PositionEncoding, create
from posenc.models.config import DecoderConfig, Projections

COOLDOWN_SHARE = 0.2
"""Part of the steps over which "wsd" falls (arXiv:2405.18392: a fifth is enough)."""
WEIGHT_DECAY = 0.1
"""Of matrices only. Chosen as usual for decoders, not tuned."""
MAX_GRADIENT_NORM = 1.0
"""Gradients are scaled down to this norm. Chosen as usual for decoders, not tuned."""
BETAS = (0.9, 0.98)
"""Short trainings need a shorter average of squared gradients than 0.999."""
VALID_ROWS_AT_ONCE = 32
"""Number of validation windows in one pass, see `validation_rows`."""
REUSED_LOSS_TOLERANCE = 0.01
"""Bits by which the validation loss of reused weights may differ, on another CPU or GPU."""
NUM_VALIDATIONS = 10
"""Number of validations in a training; each takes about as long as a step."""
READ_EVERY = {"cpu": 1, "cuda": 20}
"""Steps between two reads of the losses. A read waits until the GPU has nothing left to do."""

Tell = Callable[..., None]
"""Called during training, for example tell("step", step=3, loss=2.5)."""

PROJECTIONS = get_args(Projections)


class TrialFailed(Exception):
    """The trial has no result; the message has the reason."""


def encoding_shape(config: TrialConfig, stack: int = -1) -> ModelShape:
    """Return the sizes that the encoding of one of the model's stacks is built for; `stack` is an
    index into the objective's stacks, by default the last."""
    return ModelShape(
        config.width,
        config.heads,
        config.kv_heads,
        config.architecture.head_dim,
        train_length=shape_length(config),
        causal=objective_of_model(config).causal_stacks[stack],
    )


def decoder_config(config: TrialConfig) -> DecoderConfig:
    """Return the sizes of the trial's model."""
    return DecoderConfig(
        vocabulary_size(config),
        config.width,
        config.layers,
        config.heads,
        config.kv_heads,
        projections=config.projections,  # type: ignore[arg-type]
        recompute=config.recompute,
        **vars(config.architecture),
    )


def build_model(config: TrialConfig) -> nn.Module:
    """Return the model with its initial weights, which are the same for all encodings of a seed."""
    objective = objective_of_model(config)
    torch.manual_seed(config.seed)
    shapes = [encoding_shape(config, stack) for stack in range(len(objective.causal_stacks))]
    encodings = [create(config.encoding, shape) for shape in shapes]
    torch.manual_seed(config.seed)  # again: encodings may have drawn numbers
    return objective.model_class(decoder_config(config), *encodings).to(config.device)


def compile_if_asked(model: nn.Module, config: TrialConfig) -> nn.Module:
    """Return the model that training steps call: compiled by torch.compile with --compile,
    otherwise the model itself."""
    return torch.compile(model, dynamic=False) if config.compile else model  # type: ignore[return-value]


def encoding_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the model's encodings, each once."""
    by_id: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            by_id |= {id(p): p for p in module.parameters()}
    return list(by_id.values())


def optimizer_for(model: nn.Module, config: TrialConfig) -> torch.optim.AdamW:
    """Return AdamW for the model, at the rate `config.lr`.

    Tables and scalars of encodings learn `config.encoding_lr` times as fast; their linear layers at
    the model's rate. Weight decay is WEIGHT_DECAY on matrices outside encodings, and 0 elsewhere.
    """
    ids_in_linear = {
        id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()
    }
    ids_in_encoding = {id(p) for p in encoding_parameters(model)}
    tables = []
    matrices = []
    vectors = []
    for p in model.parameters():
        if id(p) not in ids_in_encoding:
            (matrices if p.ndim > 1 else vectors).append(p)
        else:
            (vectors if id(p) in ids_in_linear else tables).append(p)
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY, "factor": 1.0},
        {"params": vectors, "weight_decay": 0.0, "factor": 1.0},
        {"params": tables, "weight_decay": 0.0, "factor": config.encoding_lr},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, fused=True)


class _Training(NamedTuple):
    """A trial's training: model, optimizer, and the cursor that says how far it is."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    cursor: Cursor


def train_model(
    config: TrialConfig,
    train_symbols: np.ndarray,
    valid_symbols: np.ndarray,
    folder: Path,
    tell: Tell,
    checkpoint_steps: int,
    token_bytes: Tensor | None = None,
) -> tuple[nn.Module, Cursor]:
    """Train a trial's model to the last step, from the checkpoint in `folder` if there is one.
    Return the model and the cursor after the last step.

    Writes a checkpoint every `checkpoint_steps` steps, or by time if that is 0, and after the last
    step; this does not change the numbers.

    train_symbols, valid_symbols: of a text; tasks ignore them.
    token_bytes: the bytes of each token, by which losses are told and recorded; None where each
        symbol counts as one.
    """
    model, optimizer, cursor = _begin_or_resume(config, valid_symbols, folder, tell, token_bytes)
    model.train()
    compiled_model = compile_if_asked(model, config)
    validation_steps = max(1, config.steps // NUM_VALIDATIONS)
    checkpoint_times = checkpoint.CheckpointTimes(checkpoint_steps)
    unread_losses: list[Tensor] = []
    while cursor.step < config.steps:
        began = time.perf_counter()
        loss = take_step(compiled_model, optimizer, config, train_symbols, cursor.step)
        unread_losses.append(
            loss / _bytes_per_target(config, train_symbols, cursor.step, token_bytes)
        )
        step = cursor.step + 1
        is_last = step == config.steps
        is_validated = step % validation_steps == 0 or is_last
        is_saved = checkpoint_times.is_due(step) or is_last
        losses: list[float] = []
        if is_validated or is_saved or len(unread_losses) == READ_EVERY[config.device]:
            losses = torch.stack(unread_losses).tolist()
            unread_losses = []
        seconds = time.perf_counter() - began
        cursor = _cursor_after_step(cursor, losses, seconds, tell)
        if is_validated:
            valid_loss = _validate(model, config, valid_symbols, token_bytes)
            cursor = _cursor_after_validation(cursor, valid_loss)
        if is_saved:
            began = time.perf_counter()
            checkpoint.write_checkpoint(folder, cursor, model, optimizer)
            checkpoint_times.count_written(time.perf_counter() - began)
    return model, cursor


def _begin_or_resume(
    config: TrialConfig,
    valid_symbols: np.ndarray,
    folder: Path,
    tell: Tell,
    token_bytes: Tensor | None,
) -> _Training:
    """Return the training of the checkpoint in `folder`, or a new one if there is no checkpoint or
    it is corrupt. token_bytes: see `train_model`."""
    model = build_model(config)
    optimizer = optimizer_for(model, config)
    try:
        cursor = checkpoint.restore_checkpoint(folder, config.hash, model, optimizer)
        if cursor and cursor.reused_from:
            recorded_loss = cursor.training[-1].valid
            measured_loss = _validate(model, config, valid_symbols, token_bytes)
            if not abs(measured_loss - recorded_loss) < REUSED_LOSS_TOLERANCE:  # NaN fails, too
                raise checkpoint.CorruptCheckpoint(
                    f"its loss is {measured_loss:.3f}, not {recorded_loss:.3f}"
                )
    except checkpoint.CorruptCheckpoint as error:
        tell("note", text=f"the checkpoint is corrupt ({error}); starting this trial again")
        checkpoint.delete_checkpoint(folder)
        model = build_model(config)
        optimizer = optimizer_for(model, config)
        cursor = None
    return _Training(model, optimizer, cursor or Cursor(config.hash, 0))


def _cursor_after_step(
    cursor: Cursor, losses: Sequence[float], seconds: float, tell: Tell
) -> Cursor:
    """Return the cursor one step later, and send an event with each loss that was read from the
    device.

    losses: the losses in nats per byte, or target, of this step and of those before it that were
        not read yet, or none.
    seconds: duration of the step.

    Raises: TrialFailed for a loss that is not finite.
    """
    step = cursor.step + 1
    loss_sum = cursor.loss_sum
    for step_of_loss, loss in enumerate(losses, step + 1 - len(losses)):
        if not math.isfinite(loss):
            raise TrialFailed(f"the loss became {loss} at step {step_of_loss}; try a lower --lr")
        loss_sum += loss
        tell("step", step=step_of_loss, loss=loss / math.log(2))
    return replace(
        cursor,
        step=step,
        loss_sum=loss_sum,
        loss_count=cursor.loss_count + len(losses),
        train_seconds=cursor.train_seconds + seconds,
    )


def _cursor_after_validation(cursor: Cursor, valid_loss: float) -> Cursor:
    """Return the cursor with another point of the training curve: the validation loss and the
    mean training loss since the point before, in bits.

    Raises: TrialFailed for a loss that is not finite.
    """
    if not math.isfinite(valid_loss):
        raise TrialFailed(
            f"the validation loss became {valid_loss} at step {cursor.step}; try a lower --lr"
        )
    train_loss = cursor.loss_sum / cursor.loss_count / math.log(2)
    point = TrainingPoint(cursor.step, train_loss, valid_loss)
    return replace(cursor, loss_sum=0.0, loss_count=0, training=(*cursor.training, point))


def learning_rate(config: TrialConfig, step: int) -> float:
    """Return the rate at step 0, 1, ...: `config.lr` times a factor that rises in a line to 1 over
    the warm-up, and then depends on how far p, from 0 to 1, the rest of the steps is:

        cosine     falls as a cosine to 0.1
        linear     1 - p
        constant   1
        wsd        1, and from the last fifth of all steps on in a line to 0

    Source: cosine arXiv:2005.14165, linear arXiv:2502.15938, wsd (warm-up, stable, decay)
    arXiv:2404.06395 and arXiv:2405.18392.
    """
    warmup_steps = config.warmup_steps
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    steps_left = config.steps - step
    progress = (step - warmup_steps) / max(1, config.steps - warmup_steps)
    if config.schedule == COSINE:
        return config.lr * (0.55 + 0.45 * math.cos(math.pi * progress))
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    if config.schedule == "wsd":
        cooldown_steps = max(1, math.floor(COOLDOWN_SHARE * config.steps))
        return config.lr * min(1.0, steps_left / cooldown_steps)
    return config.lr


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrialConfig,
    symbols: np.ndarray,
    step: int,
) -> Tensor:
    """Take one step of the optimizer; return the loss before it, in nats, on the device."""
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]
    if config.micro_batch:
        optimizer.zero_grad(set_to_none=True)
        loss = _add_up_gradients(model, config, symbols, step)
    else:
        loss = loss_of_step(model, config, symbols, step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    return loss.detach()


def _add_up_gradients(
    model: nn.Module, config: TrialConfig, symbols: np.ndarray, step: int
) -> Tensor:
    """Add the gradients of a step's loss to those of the model, `micro_batch` windows at a time, or
    as many shorter ones as have no more tokens. Return the loss, see `loss_of_step`, on the
    device."""
    config = config_of_step(config, step)
    objective = objective_of(config)
    rows = training_windows(symbols, config, step)
    windows = objective.training_targets(rows, config.seed, step)
    num_targets = windows[1].sum().item()
    losses = []
    for piece in zip(*(tensor.split(config.micro_batch) for tensor in windows), strict=True):
        loss = objective.losses(model, piece, config).sum() / num_targets
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def loss_of_step(model: nn.Module, config: TrialConfig, symbols: np.ndarray, step: int) -> Tensor:
    """Return the mean loss of a step's batch, in nats. symbols: the training text; a task ignores
    it."""
    task = task_of(config)
    if task is None:
        objective = objective_of(config)
        rows = training_windows(symbols, config, step)
        windows = objective.training_targets(rows, config.seed, step)
        return objective.losses(model, windows, config).mean()
    batch = task.train_batch(config.seed, step, config.batch, config.train_length)
    return target_loss(model, batch, config)


def _bytes_per_target(
    config: TrialConfig, symbols: np.ndarray, step: int, token_bytes: Tensor | None
) -> float:
    """Return the mean of the bytes that the targets of a step's batch cover; 1 without
    `token_bytes`, see `train_model`."""
    if token_bytes is None:
        return 1.0
    objective = objective_of(config)
    rows = training_windows(symbols, config, step)
    windows = objective.training_targets(rows, config.seed, step)
    num_bytes = objective.target_bytes(windows, token_bytes).sum()
    return (num_bytes / windows[1].sum()).item()


def validation_rows(config: TrialConfig) -> int:
    """Return the number of validation windows in one pass. Where a step trains on its windows in
    pieces, as memory is short, a pass has no more tokens than one of the tests."""
    if not config.micro_batch:
        return VALID_ROWS_AT_ONCE
    return max(1, min(VALID_ROWS_AT_ONCE, TOKENS_AT_ONCE // config.train_length))


@torch.no_grad()
def _validate(
    model: nn.Module,
    config: TrialConfig,
    symbols: np.ndarray,
    token_bytes: Tensor | None = None,
) -> float:
    """Return the mean loss of validation windows of the text in bits per byte, or of held-out
    sequences of a task in bits per target. token_bytes: see `train_model`."""
    task = task_of(config)
    if task is not None:
        return validation_bits(model, task, config)
    objective = objective_of(config)
    windows = objective.held_out_targets(validation_windows(symbols, config))
    model.eval()
    parts = zip(*(tensor.split(validation_rows(config)) for tensor in windows), strict=True)
    sums = [objective.losses(model, part, config).double().sum().item() for part in parts]
    model.train()
    num_bytes = objective.target_bytes(windows, token_bytes).sum().item()
    return sum(sums) / num_bytes / math.log(2)
