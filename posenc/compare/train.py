"""Train one trial with checkpoints; interruptions do not change a single bit of the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.compare import checkpoint
from posenc.compare.checkpoint import Cursor
from posenc.compare.forward import autocast, target_loss
from posenc.compare.material import shape_length, task_of, vocabulary_of
from posenc.compare.ranks import Ranks
from posenc.compare.results import TrainingPoint
from posenc.compare.score_cases import validation_bits
from posenc.compare.trial import TrialConfig
from posenc.encoding.shape import ModelShape
from posenc.models import Decoder, DecoderConfig
from posenc.registry import create
from posenc.tasks.task import IGNORED

ENCODING_LR = 20.0
"""How many times faster than the model an encoding's tables and scalars learn. Its linear layers
learn at the model's rate. Neither has weight decay.

AdamW moves every number by about the learning rate per step, however large its gradient. A weight
in a matrix acts together with its whole row, but a bias in the scores acts by itself and must move
by several logits. At the model's rate it would still be close to its start when a short training
ends, and the comparison would measure that instead of the method. T5 on a novel, 200 steps,
float32, perplexity per byte at 128, 256, 512 and 1024: 7.54, 7.87, 8.72 and 9.86 with a factor of
8; 5.84, 5.85, 6.04 and 6.68 with 20 (RoPE, which learns nothing: 6.66, 7.14, 9.07 and 12.22).
"""
WEIGHT_DECAY = 0.1
CLIP = 1.0
BETAS = (0.9, 0.98)
"""Short trainings want a shorter memory of squared gradients than 0.999."""
VALID_WINDOWS = 64
VALIDATIONS = 10
"""How often a training is validated; each time takes about as long as a step."""

Event = Callable[..., None]
"""Called as training goes on, for example event("step", step=3, loss=2.5)."""


class TrialFailed(Exception):
    """The trial has no result; the message says why."""


def shape_of(config: TrialConfig) -> ModelShape:
    return ModelShape(
        config.width,
        config.heads,
        config.kv_heads,
        train_length=shape_length(config),
        causal=True,
    )


def build_decoder(config: TrialConfig) -> Decoder:
    """The model with its initial weights, which are the same for all encodings of a seed."""
    torch.manual_seed(config.seed)
    encoding = create(config.encoding, shape_of(config))
    sizes = DecoderConfig(
        vocabulary_of(config), config.width, config.layers, config.heads, config.kv_heads
    )
    torch.manual_seed(config.seed)
    return Decoder(sizes, encoding).to(config.device)


def optimizer_for(model: nn.Module, config: TrialConfig) -> torch.optim.AdamW:
    """AdamW with weight decay only on the model's matrices, and with `ENCODING_LR` for what an
    encoding learns."""
    in_linear = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()}
    encoding, matrices, vectors = [], [], []
    for name, p in model.named_parameters():
        if not name.startswith("encoding."):
            (matrices if p.ndim > 1 else vectors).append(p)
        else:
            (vectors if id(p) in in_linear else encoding).append(p)
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY, "factor": 1.0},
        {"params": vectors, "weight_decay": 0.0, "factor": 1.0},
        {"params": encoding, "weight_decay": 0.0, "factor": ENCODING_LR},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, fused=True)


def learning_rate(config: TrialConfig, step: int) -> float:
    """The rate at step 0, 1, ...: linear warm-up over the first twentieth of the steps, then a
    cosine down to a tenth of the peak."""
    warm_up = max(1, config.steps // 20)
    if step < warm_up:
        return config.lr * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, config.steps - warm_up)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def batch_of(symbols: np.ndarray, config: TrialConfig, step: int) -> Tensor:
    """(batch, train_length + 1) symbols, drawn from the seed and the step and nothing else."""
    random = np.random.Generator(np.random.Philox(key=[config.seed, step]))
    starts = random.integers(0, len(symbols) - config.train_length, size=config.batch)
    return windows(symbols, starts, config.train_length)


def windows(symbols: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    """(len(starts), length + 1): each window and the symbol after it."""
    rows = np.stack([symbols[start : start + length + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64))


def token_losses(model: nn.Module, rows: Tensor, config: TrialConfig) -> Tensor:
    """Cross-entropy in nats, (batch, length), of rows with length + 1 symbols."""
    rows = rows.to(config.device)
    with autocast(config):
        logits = model(rows[:, :-1], length=rows.shape[1] - 1)
    losses = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses.view(rows.shape[0], -1)


def train_decoder(
    config: TrialConfig,
    train_symbols: np.ndarray,
    valid_symbols: np.ndarray,
    folder: Path,
    event: Event,
    checkpoint_steps: int,
    ranks: Ranks | None = None,
) -> tuple[Decoder, Cursor]:
    """Train to the end, from the checkpoint in `folder` where there is one.

    A checkpoint is written every `checkpoint_steps` steps, which does not change the numbers.
    The symbols are those of a text; a task makes its own. With `ranks`, this process takes its rows
    of each batch.
    """
    model = build_decoder(config)
    optimizer = optimizer_for(model, config)
    try:
        cursor = checkpoint.restore_checkpoint(folder, config.hash, model, optimizer)
    except checkpoint.CorruptCheckpoint as error:
        event("note", text=f"the checkpoint is corrupt ({error}); starting this trial again")
        checkpoint.clear_checkpoint(folder)
        cursor = None
    cursor = cursor or Cursor(config.hash, 0)
    if ranks is not None:
        ranks.check_same("the step to go on from", str(cursor.step))
    every = max(1, config.steps // VALIDATIONS)
    model.train()
    while cursor.step < config.steps:
        began = time.perf_counter()
        loss = take_step(model, optimizer, config, train_symbols, cursor.step, ranks)
        step = cursor.step + 1
        seconds = cursor.train_seconds + time.perf_counter() - began
        cursor = replace(
            cursor,
            step=step,
            loss_sum=cursor.loss_sum + loss,
            loss_count=cursor.loss_count + 1,
            train_seconds=seconds,
        )
        event("step", step=step, loss=loss / math.log(2))
        if step % every == 0 or step == config.steps:
            valid = _validate(model, config, valid_symbols)
            if not math.isfinite(valid):
                raise TrialFailed(
                    f"the validation loss became {valid} at step {step}; try a lower --lr"
                )
            train = cursor.loss_sum / cursor.loss_count / math.log(2)
            point = TrainingPoint(step, train, valid)
            cursor = replace(cursor, loss_sum=0.0, loss_count=0, training=(*cursor.training, point))
        keep = step % checkpoint_steps == 0 or step == config.steps
        if keep and (ranks is None or ranks.first):
            checkpoint.write_checkpoint(folder, cursor, model, optimizer)
    return model, cursor


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrialConfig,
    symbols: np.ndarray,
    step: int,
    ranks: Ranks | None = None,
) -> float:
    """One step of the optimizer; the loss before it, in nats."""
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]
    loss = loss_of_step(model, config, symbols, step, ranks)
    value = loss.item() if ranks is None else ranks.total(loss.item())
    if not math.isfinite(value):
        raise TrialFailed(f"the loss became {value} at step {step + 1}; try a lower --lr")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if ranks is not None:
        ranks.sum_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return value


def loss_of_step(
    model: nn.Module,
    config: TrialConfig,
    symbols: np.ndarray,
    step: int,
    ranks: Ranks | None = None,
) -> Tensor:
    """The mean loss of a step's batch, in nats; with `ranks`, this one's part of that sum."""
    task = task_of(config)
    if task is None:
        rows = batch_of(symbols, config, step)
        if ranks is None:
            return token_losses(model, rows, config).mean()
        losses = token_losses(model, ranks.rows(rows), config)
        return losses.sum() / (rows.shape[0] * losses.shape[1])
    batch = task.train_batch(config.seed, step, config.batch, config.train_length)
    if ranks is None:
        return target_loss(model, batch, config)
    part = replace(batch, tokens=ranks.rows(batch.tokens), targets=ranks.rows(batch.targets))
    share = (part.targets != IGNORED).sum() / (batch.targets != IGNORED).sum()
    return target_loss(model, part, config) * float(share)


@torch.no_grad()
def _validate(model: nn.Module, config: TrialConfig, symbols: np.ndarray) -> float:
    task = task_of(config)
    if task is not None:
        return validation_bits(model, task, config)
    last = len(symbols) - config.train_length - 1
    count = min(VALID_WINDOWS, last // config.train_length + 1)
    rows = windows(symbols, np.linspace(0, last, count).astype(int), config.train_length)
    model.eval()
    sums = [token_losses(model, part, config).double().sum().item() for part in rows.split(32)]
    model.train()
    return sum(sums) / (rows.shape[0] * config.train_length) / math.log(2)
