"""Score a trained model on held-out bytes, and on every case of its task."""

import math

import torch
from torch import Tensor, nn

from posenc.compare.results import CaseScore, LengthScore
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.forward import answers, target_loss
from posenc.encodings import PositionEncoding
from posenc.tasks.scoring import score_of
from posenc.tasks.task import Case, Task

TOKENS_AT_ONCE = 1 << 12
"""Tokens in one pass: a dense forward at length 1024 stays below 0.5 GB."""
BUCKETS = 64
SEQUENCES = 512
"""Sequences of a case: the standard error of exact match is at most 0.022."""
TASK_TOKENS_AT_ONCE = 1 << 13
VALID_SEQUENCES = 256
CANNOT = (
    "it has {limit} positions",
    "it has {limit} positions, and {needed} are needed",
    "it has {limit} positions along an axis, and {needed} are needed",
)
"""Why an encoding cannot run: stored in English, shown by `posenc.sentence.retold`."""


def cannot(encoding: PositionEncoding, length: int) -> str | None:
    """Return why the encoding cannot run at this length, or None."""
    limit = encoding.claims.max_positions
    if limit is not None and length > limit:
        return CANNOT[0].format(limit=limit)
    return None


def length_score(length: int, parts: list[tuple[Tensor, Tensor]], held_out: Tensor) -> LengthScore:
    """Return the score of a length, in all and in each held-out window.

    parts: losses in nats and which of them count, (pieces * windows, length), the windows of a
        piece one after the other.
    """
    num_windows = len(held_out)
    losses = torch.stack([_by_window(part_losses, num_windows) for part_losses, _ in parts]).sum(0)
    counts = torch.stack([_by_window(part_counts, num_windows) for _, part_counts in parts]).sum(0)
    windows = tuple(round(bits(nats), 5) for nats in (losses / counts).tolist())
    total_loss = sum(part_losses.sum().item() for part_losses, _ in parts)
    total_count = sum(part_counts.sum().item() for _, part_counts in parts)
    return LengthScore(length, bits(total_loss / total_count), windows=windows)


def _by_window(values: Tensor, num_windows: int) -> Tensor:
    """Return the sum in each window of values (pieces * windows, length), (windows)."""
    return values.view(-1, num_windows, values.shape[1]).sum((0, 2))


def bits(nats: float) -> float:
    """Convert nats to bits."""
    return nats / math.log(2)


def score_cases(model: nn.Module, task: Task, config: TrialConfig) -> tuple[CaseScore, ...]:
    """Return the scores of every case, the training length first."""
    model.eval()
    return tuple(_score(model, task, case, config) for case in task.cases(config.test_lengths))


def cannot_run(encoding: PositionEncoding, task: Task, case: Case) -> str | None:
    """Return why the encoding cannot run a case, or None."""
    limit = encoding.claims.max_positions
    needed = task.tokens(case) if task.num_axes == 1 else case.length
    if limit is None or needed <= limit:
        return None
    return CANNOT[1 if task.num_axes == 1 else 2].format(limit=f"{limit:,}", needed=f"{needed:,}")


@torch.no_grad()
def validation_bits(model: nn.Module, task: Task, config: TrialConfig) -> float:
    """Return bits per target on held-out sequences like those of training."""
    model.eval()
    batch = task.valid_batch(VALID_SEQUENCES, config.train_length)
    bits = target_loss(model, batch, config).item() / math.log(2)
    model.train()
    return bits


def _score(model: nn.Module, task: Task, case: Case, config: TrialConfig) -> CaseScore:
    """Return the score of one case of a task, or why the encoding cannot run it."""
    reason = cannot_run(model.encoding, task, case)  # type: ignore[arg-type]
    if reason is not None:
        return CaseScore(case.length, case.variant, cannot=reason)
    batch = task.test_batch(case, SEQUENCES, config.train_length)
    likeliest, likeliest_but_end = answers(
        model, batch, config, task.end, max(1, TASK_TOKENS_AT_ONCE // task.tokens(case))
    )
    score = score_of(batch.targets, likeliest, likeliest_but_end, task.end)
    return CaseScore(case.length, case.variant, **vars(score))
