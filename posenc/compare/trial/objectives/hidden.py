"""Test a model that predicts only some bytes of a window, at every length on the same bytes."""

import numpy as np
import torch
from torch import Tensor, nn

from posenc.compare.results import LengthScore, PositionScore
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.evaluate import BUCKETS, TOKENS_AT_ONCE, bits, cannot, length_score
from posenc.compare.trial.objectives.objective import Objective, Scores
from posenc.compare.trial.windows import held_out_windows
from posenc.encodings import PositionEncoding


@torch.no_grad()
def evaluate_asked(
    objective: Objective, model: nn.Module, symbols: np.ndarray, config: TrialConfig
) -> Scores:
    """Return bits per target byte by window length, by position inside the longest window, and by
    length of text up to the end of the same targets, like `evaluate_lengths`."""
    model.eval()
    whole, hidden = held_out = objective.ask_held_out(held_out_windows(symbols, config))
    encoding: PositionEncoding = model.encoding  # type: ignore[assignment]
    targets = max(1, config.train_length // 2)
    by_length, by_position, by_context = [], (), []
    for length in config.test_lengths:
        reason = cannot(encoding, objective.longest_part(length))
        if reason:
            by_length.append(LengthScore(length, None, reason))
            continue
        parts = [
            (_losses(objective, model, rows, asked, config), asked)
            for rows, asked in objective.cut(held_out, length)
            if asked.any()
        ]
        by_length.append(length_score(length, [(losses, a.double()) for losses, a in parts], whole))
        by_position = _by_position(*parts[0])
    alone = {targets} if len(objective.stacks) == 1 else set()  # an encoder needs some input
    for length in sorted({*alone, *config.test_lengths}):
        reason = cannot(encoding, objective.longest_part(length, targets))
        if reason:
            by_context.append(LengthScore(length, None, reason))
            continue
        # Mask bytes among the targets only: masks before them would remove context.
        asked = hidden[:, -length:].clone()
        asked[:, :-targets] = False
        losses = _losses(objective, model, whole[:, -length:], asked, config)
        by_context.append(LengthScore(length, bits((losses.sum() / asked.sum()).item())))
    return tuple(by_length), by_position, tuple(by_context)


def _losses(
    objective: Objective, model: nn.Module, rows: Tensor, asked: Tensor, config: TrialConfig
) -> Tensor:
    """Return (rows, length) nats in float64 on the CPU, 0 where there is no target."""
    at_once = max(1, TOKENS_AT_ONCE // rows.shape[1])
    found = torch.zeros(rows.shape, dtype=torch.float64)
    pieces = zip(rows.split(at_once), asked.split(at_once), strict=True)
    parts = [objective.losses(model, piece, config).double().cpu() for piece in pieces]
    found[asked] = torch.cat(parts)
    if not found.isfinite().all():
        raise FloatingPointError(f"the loss is not finite at test length {rows.shape[1]}")
    return found


def _by_position(losses: Tensor, asked: Tensor) -> tuple[PositionScore, ...]:
    width = max(1, -(-losses.shape[1] // BUCKETS))
    sums, counts = (t.double().sum(0).split(width) for t in (losses, asked))
    return tuple(
        PositionScore(i * width, i * width + len(one), bits((one.sum() / count.sum()).item()))
        for i, (one, count) in enumerate(zip(sums, counts, strict=True))
        if count.sum() > 0
    )
