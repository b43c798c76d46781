"""Run a causal model on windows of a text or sequences of a task: losses and likeliest tokens."""

import contextlib

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.compare.trial.config import TrialConfig
from posenc.encodings import PositionEncoding
from posenc.positions import has_no_place, move_placeless_to_origin
from posenc.tasks.task import IGNORED_TARGET, Batch


def autocast(config: TrialConfig) -> contextlib.AbstractContextManager:
    """Return the autocast context for a trial's precision."""
    if config.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(config.device, dtype=torch.bfloat16)


def on_device(tensor: Tensor, config: TrialConfig) -> Tensor:
    """Return a tensor of the CPU on the trial's device. A copy to CUDA starts from pinned memory,
    so that the CPU does not wait for it."""
    if config.device == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(config.device, non_blocking=True)


def token_losses(model: nn.Module, rows: Tensor, config: TrialConfig) -> Tensor:
    """Return the cross-entropy in nats of each next symbol, (batch, length), in rows of length + 1
    symbols."""
    rows = on_device(rows, config)
    with autocast(config):
        logits = model(rows[:, :-1], length=rows.shape[1] - 1)
    losses = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses.view(rows.shape[0], -1)


def target_loss(model: nn.Module, batch: Batch, config: TrialConfig) -> Tensor:
    """Return the mean cross-entropy in nats over the targets of a batch."""
    logits = task_logits(model, batch, config)
    targets = on_device(torch.from_numpy(batch.targets), config)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET)


@torch.no_grad()
def likeliest_tokens(
    model: nn.Module, batch: Batch, config: TrialConfig, end: int | None, at_once: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the likeliest token after each token of the batch, (sequences, len), twice: among all
    tokens, and among all but `end` (None if `end` is).

    end: the token that ends an answer, for tasks that have one.
    at_once: number of sequences in one pass.
    Raises: FloatingPointError if a logit of a target is not finite.
    """
    likeliest = []
    likeliest_but_end = []
    for start in range(0, len(batch.tokens), at_once):
        part = slice(start, start + at_once)
        piece = Batch(batch.tokens[part], batch.targets[part], batch.positions)
        logits = task_logits(model, piece, config)
        is_target = on_device(torch.from_numpy(piece.targets != IGNORED_TARGET), config)
        if not logits[is_target].isfinite().all():
            raise FloatingPointError(
                f"the logits are not finite in sequences of {piece.tokens.shape[1]:,} tokens"
            )
        likeliest.append(logits.argmax(-1).cpu().numpy())
        if end is not None:
            logits[..., end] = -torch.inf
            likeliest_but_end.append(logits.argmax(-1).cpu().numpy())
    if not likeliest_but_end:
        return np.concatenate(likeliest), None
    return np.concatenate(likeliest), np.concatenate(likeliest_but_end)


def task_logits(model: nn.Module, batch: Batch, config: TrialConfig) -> Tensor:
    """Return the model's logits (batch, len, vocabulary) for a task's sequences, in float32."""
    tokens = on_device(torch.from_numpy(batch.tokens), config)
    positions = positions_for(model.encoding, batch, config)  # type: ignore[arg-type]
    length = tokens.shape[1] if positions is None else None
    with autocast(config):
        return model(tokens, positions, length=length).float()


def positions_for(encoding: PositionEncoding, batch: Batch, config: TrialConfig) -> Tensor | None:
    """Return the positions of a batch's tokens that an encoding takes: None for 0, 1, 2, ...; (row,
    column); or three axes as in multimodal RoPE, (time, row, column). There tokens before the grid
    are text at time 0, and the grid is an image at time 1 with rows and columns from 1 on."""
    axes = encoding.claims.num_axes
    if batch.positions is None or axes == 1:
        return None
    cells = on_device(torch.from_numpy(batch.positions), config)
    if axes == 2:
        return cells
    on_grid = ~has_no_place(cells)[:, None]
    return torch.cat([on_grid, move_placeless_to_origin(cells + 1)], dim=1).long()
