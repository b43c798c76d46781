"""Test a trained model on every case of its task."""

from __future__ import annotations

import math

import torch
from torch import nn

from posenc.compare.forward import answers, target_loss
from posenc.compare.results import CaseScore
from posenc.compare.trial import TrialConfig
from posenc.encoding.base import PositionEncoding
from posenc.tasks.scoring import score_of
from posenc.tasks.task import Case, Task

SEQUENCES = 512
"""Of a case; the standard error of an exact match is at most 0.022."""
TOKENS_AT_ONCE = 1 << 13
VALID_SEQUENCES = 256


def score_cases(model: nn.Module, task: Task, config: TrialConfig) -> tuple[CaseScore, ...]:
    """The scores of every case, the training length first."""
    model.eval()
    return tuple(_score(model, task, case, config) for case in task.cases(config.test_lengths))


def cannot_run(encoding: PositionEncoding, task: Task, case: Case) -> str | None:
    """Why the encoding cannot run a case, or None."""
    limit = encoding.claims.max_positions
    needed = task.tokens(case) if task.num_axes == 1 else case.length
    if limit is None or needed <= limit:
        return None
    axis = "" if task.num_axes == 1 else " along an axis"
    return f"it has {limit:,} positions{axis}, and {needed:,} are needed"


@torch.no_grad()
def validation_bits(model: nn.Module, task: Task, config: TrialConfig) -> float:
    """Bits per target on held-out sequences like those of training."""
    model.eval()
    batch = task.valid_batch(VALID_SEQUENCES, config.train_length)
    bits = target_loss(model, batch, config).item() / math.log(2)
    model.train()
    return bits


def _score(model: nn.Module, task: Task, case: Case, config: TrialConfig) -> CaseScore:
    reason = cannot_run(model.encoding, task, case)  # type: ignore[arg-type]
    if reason is not None:
        return CaseScore(case.length, case.variant, cannot=reason)
    batch = task.test_batch(case, SEQUENCES, config.train_length)
    said, cut = answers(model, batch, config, task.end, max(1, TOKENS_AT_ONCE // task.tokens(case)))
    score = score_of(batch.targets, said, cut, task.end)
    return CaseScore(case.length, case.variant, **vars(score))
