"""Test a trained model at every length on the same held-out bytes, or on every case of its task."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from posenc.compare.results import CaseScore, LengthScore, PositionScore
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.forward import answers, target_loss, token_losses
from posenc.compare.trial.windows import held_out_windows
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


def cannot(encoding: PositionEncoding, length: int) -> str | None:
    """Return why the encoding cannot run at this length, or None."""
    limit = encoding.claims.max_positions
    if limit is not None and length > limit:
        return f"it has {limit} positions"
    return None


@torch.no_grad()
def evaluate_lengths(
    model: nn.Module, symbols: np.ndarray, config: TrialConfig
) -> tuple[tuple[LengthScore, ...], tuple[PositionScore, ...], tuple[LengthScore, ...]]:
    """Return bits per byte by window length, by position inside the longest window, and by length
    of context before the same targets. A separator counts as a byte."""
    model.eval()
    held_out = held_out_windows(symbols, config)
    encoding: PositionEncoding = model.encoding  # type: ignore[assignment]
    targets = max(1, config.train_length // 2)
    by_length, by_position, at_the_end = [], (), {}
    for length in config.test_lengths:
        reason = cannot(encoding, length)
        if reason:
            by_length.append(LengthScore(length, None, reason))
            continue
        losses = _non_overlapping(model, held_out, length, config)
        by_length.append(length_score(length, [(p, torch.ones_like(p)) for p in losses], held_out))
        by_position = _buckets(losses[0])
        at_the_end[length] = losses[-1][-len(held_out) :, -targets:]
    by_context = []
    for length in sorted({targets, *config.test_lengths}):
        reason = cannot(encoding, length)
        if reason:
            by_context.append(LengthScore(length, None, reason))
            continue
        last = at_the_end.get(length)  # reuse windows that end with the held-out text
        if last is None or (held_out.shape[1] - 1) % length:
            last = _losses(model, held_out[:, -(length + 1) :], config)[:, -targets:]
        by_context.append(LengthScore(length, bits(last.mean().item())))
    return tuple(by_length), by_position, tuple(by_context)


def length_score(length: int, parts: list[tuple[Tensor, Tensor]], held_out: Tensor) -> LengthScore:
    """The score of a length, in all and in each held-out window.

    parts: losses in nats and which of them count, (pieces * windows, length), the windows of a
        piece one after the other.
    """
    both = [[t.view(-1, len(held_out), t.shape[1]).sum((0, 2)) for t in part] for part in parts]
    losses, counts = (torch.stack(each).sum(0) for each in zip(*both, strict=True))
    windows = tuple(round(bits(each), 5) for each in (losses / counts).tolist())
    total = sum(each.sum().item() for each, _ in parts)
    return LengthScore(length, bits(total / sum(c.sum().item() for _, c in parts)), windows=windows)


def _non_overlapping(
    model: nn.Module, held_out: Tensor, length: int, config: TrialConfig
) -> list[Tensor]:
    """Return losses of windows of `length`, then of the shorter windows at the end of each held-out
    window."""
    longest = held_out.shape[1] - 1
    whole = longest // length * length
    rows = torch.cat([held_out[:, s : s + length + 1] for s in range(0, whole, length)])
    parts = [_losses(model, rows, config)]
    if whole < longest:
        parts.append(_losses(model, held_out[:, whole:], config))
    return parts


def _losses(model: nn.Module, rows: Tensor, config: TrialConfig) -> Tensor:
    """Return (rows, length) nats in float64, on the CPU."""
    at_once = max(1, TOKENS_AT_ONCE // (rows.shape[1] - 1))
    parts = [token_losses(model, part, config).double().cpu() for part in rows.split(at_once)]
    losses = torch.cat(parts)
    if not losses.isfinite().all():
        raise FloatingPointError(f"the loss is not finite at test length {rows.shape[1] - 1}")
    return losses


def _buckets(losses: Tensor) -> tuple[PositionScore, ...]:
    means = losses.mean(0)
    width = max(1, -(-len(means) // BUCKETS))
    return tuple(
        PositionScore(start, start + len(part), bits(part.mean().item()))
        for start, part in zip(range(0, len(means), width), means.split(width), strict=True)
    )


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
    axis = "" if task.num_axes == 1 else " along an axis"
    return f"it has {limit:,} positions{axis}, and {needed:,} are needed"


@torch.no_grad()
def validation_bits(model: nn.Module, task: Task, config: TrialConfig) -> float:
    """Return bits per target on held-out sequences like those of training."""
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
    said, cut = answers(
        model, batch, config, task.end, max(1, TASK_TOKENS_AT_ONCE // task.tokens(case))
    )
    score = score_of(batch.targets, said, cut, task.end)
    return CaseScore(case.length, case.variant, **vars(score))
