"""Run a model on windows of a text or sequences of a task: losses, likeliest tokens, and scores."""

import contextlib
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.compare.scores import CaseScore, LengthScore
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.windows import documents_of_tokens
from posenc.encodings import PositionEncoding
from posenc.models.decoder import mask_of_documents
from posenc.positions.tokens import has_no_place, move_placeless_to_origin
from posenc.tasks.scoring import score_answers
from posenc.tasks.task import IGNORED_TARGET, Batch, Case, Task


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


def symbol_logits(
    model: nn.Module, tokens: Tensor, config: TrialConfig, documents: Tensor | None
) -> Tensor:
    """Return the logits (batch, length, vocabulary) of a model on windows of a text, in float32.

    documents: of the tokens, which attention does not cross, see `documents_of_tokens`.
    """
    own_mask = {}
    if documents is not None:
        own_mask["mask"] = mask_of_documents(model, on_device(documents, config))
    with autocast(config):
        logits = model(on_device(tokens, config), length=tokens.shape[1], **own_mask)
    return logits.float()


def token_losses(model: nn.Module, rows: Tensor, config: TrialConfig) -> Tensor:
    """Return the cross-entropy in nats of each next symbol, (batch, length), in rows of length + 1
    symbols, which are on the CPU."""
    tokens = rows[:, :-1]
    logits = symbol_logits(model, tokens, config, documents_of_tokens(tokens, config))
    following = on_device(rows[:, 1:], config)
    losses = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
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
        row_range = slice(start, start + at_once)
        piece = Batch(batch.tokens[row_range], batch.targets[row_range], batch.positions)
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
    num_axes = encoding.claims.num_axes
    if batch.positions is None or num_axes == 1:
        return None
    cells = on_device(torch.from_numpy(batch.positions), config)
    if num_axes == 2:
        return cells
    on_grid = ~has_no_place(cells)[:, None]
    return torch.cat([on_grid, move_placeless_to_origin(cells + 1)], dim=1).long()


TOKENS_AT_ONCE = 1 << 11
"""Tokens in one pass: their activations still fit into the caches of a core. Measured on one core,
rope, t5 and alibi: 0.76 to 0.91 of the time with twice as many."""
MAX_POSITION_RUNS = 64
"""Points that a curve of the loss by position has at most."""
NUM_TEST_SEQUENCES = 512
"""Sequences of a case: the standard error of exact match is at most 0.022."""
TASK_TOKENS_AT_ONCE = 1 << 13
"""The same for a task, whose sequences are shorter."""
NUM_VALID_SEQUENCES = 256
"""Sequences of a task's validation."""


def why_length_impossible(encoding: PositionEncoding, length: int) -> str | None:
    """Return why the encoding cannot run at this length, for the report; None if it can."""
    limit = encoding.claims.max_positions
    if limit is not None and length > limit:
        return f"it has {limit} positions"
    return None


def score_length(length: int, losses: Tensor, target_bytes: Tensor) -> LengthScore:
    """Return the score of a length in bits per byte, over all targets and in each window.

        bits per byte = bits of all targets / bytes that these targets cover

    losses: in nats, 0 for a symbol that is no target. target_bytes: the bytes of each target, 0
        for no target. Both are (windows, length).
    """
    mean = nats_to_bits((losses.sum() / target_bytes.sum()).item())
    return LengthScore(length, mean, windows=bits_by_window(losses, target_bytes))


def bits_by_window(losses: Tensor, target_bytes: Tensor) -> tuple[float, ...]:
    """Return the bits per byte of each window whose targets cover any. The arguments are those of
    `score_length`."""
    bytes_of_windows = target_bytes.sum(1)
    has_target = bytes_of_windows > 0
    means = losses[has_target].sum(1) / bytes_of_windows[has_target]
    return tuple(round(nats_to_bits(nats), 5) for nats in means.tolist())


def nats_to_bits(nats: float) -> float:
    """Convert nats to bits."""
    return nats / math.log(2)


def score_cases(model: nn.Module, task: Task, config: TrialConfig) -> tuple[CaseScore, ...]:
    """Return the scores of a model on every case of its task, the training length first."""
    model.eval()
    return tuple(_score_case(model, task, case, config) for case in task.cases(config.test_lengths))


def why_case_impossible(encoding: PositionEncoding, task: Task, case: Case) -> str | None:
    """Return why the encoding cannot run a case of a task, for the report; None if it can."""
    limit = encoding.claims.max_positions
    # With rows and columns, positions go up to the length of a side.
    needed = task.max_tokens(case) if task.num_axes == 1 else case.length
    if limit is None or needed <= limit:
        return None
    along_an_axis = "" if task.num_axes == 1 else " along an axis"
    return f"it has {limit:,} positions{along_an_axis}, and {needed:,} are needed"


@torch.no_grad()
def validation_bits(model: nn.Module, task: Task, config: TrialConfig) -> float:
    """Return bits per target on held-out sequences like those of training."""
    model.eval()
    batch = task.valid_batch(NUM_VALID_SEQUENCES, config.train_length)
    bits = target_loss(model, batch, config).item() / math.log(2)
    model.train()
    return bits


def _score_case(model: nn.Module, task: Task, case: Case, config: TrialConfig) -> CaseScore:
    """Return the score of one case of a task, or why the encoding cannot run it."""
    reason = why_case_impossible(model.encoding, task, case)  # type: ignore[arg-type]
    if reason is not None:
        return CaseScore(case.length, case.variant, cannot=reason)
    batch = task.test_batch(case, NUM_TEST_SEQUENCES, config.train_length)
    likeliest, likeliest_but_end = likeliest_tokens(
        model, batch, config, task.end_token, max(1, TASK_TOKENS_AT_ONCE // task.max_tokens(case))
    )
    score = score_answers(batch.targets, likeliest, likeliest_but_end, task.end_token)
    return CaseScore(case.length, case.variant, **vars(score))
