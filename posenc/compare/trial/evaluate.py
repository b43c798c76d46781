"""Score a trained model on held-out bytes, and on every case of its task."""

import math

import torch
from torch import Tensor, nn

from posenc.compare.scores import CaseScore, LengthScore
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.forward import likeliest_tokens, target_loss
from posenc.encodings import PositionEncoding
from posenc.tasks.scoring import score_answers
from posenc.tasks.task import Case, Task

TOKENS_AT_ONCE = 1 << 11
"""Tokens in one pass: more take longer each, as their activations no longer fit into the caches of
a core, and a dense forward at length 1024 stays below 0.25 GB."""
MAX_POSITION_RUNS = 64
"""Points that a curve of the loss by position has at most."""
TEST_SEQUENCES = 512
"""Sequences of a case: the standard error of exact match is at most 0.022."""
TASK_TOKENS_AT_ONCE = 1 << 13
"""The same for a task, whose sequences are shorter."""
VALID_SEQUENCES = 256
"""Sequences of a task's validation."""


def why_length_impossible(encoding: PositionEncoding, length: int) -> str | None:
    """Return why the encoding cannot run at this length, for the report; None if it can."""
    limit = encoding.claims.max_positions
    if limit is not None and length > limit:
        return f"it has {limit} positions"
    return None


def score_length(length: int, losses: Tensor, is_target: Tensor) -> LengthScore:
    """Return the score of a length in bits per byte, over all targets and in each window.

    losses: in nats, 0 for a byte that is no target; with `is_target` (windows, length).
    """
    mean = nats_to_bits((losses.sum() / is_target.sum()).item())
    return LengthScore(length, mean, windows=bits_by_window(losses, is_target))


def bits_by_window(losses: Tensor, is_target: Tensor) -> tuple[float, ...]:
    """Return the mean loss in bits of each window that has a target. The arguments are those of
    `score_length`."""
    has_target = is_target.any(1)
    means = losses[has_target].sum(1) / is_target[has_target].sum(1)
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
    batch = task.valid_batch(VALID_SEQUENCES, config.train_length)
    bits = target_loss(model, batch, config).item() / math.log(2)
    model.train()
    return bits


def _score_case(model: nn.Module, task: Task, case: Case, config: TrialConfig) -> CaseScore:
    """Return the score of one case of a task, or why the encoding cannot run it."""
    reason = why_case_impossible(model.encoding, task, case)  # type: ignore[arg-type]
    if reason is not None:
        return CaseScore(case.length, case.variant, cannot=reason)
    batch = task.test_batch(case, TEST_SEQUENCES, config.train_length)
    likeliest, likeliest_but_end = likeliest_tokens(
        model, batch, config, task.end, max(1, TASK_TOKENS_AT_ONCE // task.max_tokens(case))
    )
    score = score_answers(batch.targets, likeliest, likeliest_but_end, task.end)
    return CaseScore(case.length, case.variant, **vars(score))
