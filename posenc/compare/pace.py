"""How long a comparison will take, from steps that are measured before it starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from posenc.compare import evaluate, splits, train
from posenc.compare.cost import START_SECONDS, seconds_of
from posenc.compare.trial import TrialConfig

STEPS = 2
"""Steps that are timed, after one that is not."""
WORTH = 30
"""Seconds: of what is expected to be shorter nothing is measured."""
VALIDATIONS = 20


def expected_seconds(trials: Sequence[TrialConfig], folder: Path, workers: int) -> int:
    """Seconds that these trials, whose text lies in `folder`, take on as many workers.

    Each encoding is measured, as many at a time as trials will run: cores share what they read.
    """
    if not trials:
        return 0
    rough = seconds_of(trials[0], len(trials), workers)
    if trials[0].device != "cpu" or rough < WORTH:
        return rough
    one_each = list({trial.encoding: trial for trial in trials}.values())
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            each = dict(
                zip(
                    (trial.encoding for trial in one_each),
                    pool.map(lambda trial: _seconds_of_one(trial, folder), one_each),
                    strict=True,
                )
            )
    finally:
        torch.set_num_threads(threads)
    return round(sum(each[trial.encoding] for trial in trials) / workers)


def _seconds_of_one(trial: TrialConfig, folder: Path) -> float:
    try:
        model = train.build_decoder(trial)
        symbols = splits.read_split(folder, "train", trial.corpus)
        step = _seconds_per_step(model, trial, symbols)
        return START_SECONDS + trial.steps * step + _seconds_without_gradients(model, trial)
    except Exception:  # of torch, of an encoding: the trial itself will say so
        return seconds_of(trial, 1, 1)


def _seconds_per_step(model: train.Decoder, trial: TrialConfig, symbols: np.ndarray) -> float:
    optimizer = train.optimizer_for(model, trial)
    train.take_step(model, optimizer, trial, symbols, 0)
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        train.take_step(model, optimizer, trial, symbols, step)
    return (time.perf_counter() - began) / STEPS


@torch.no_grad()
def _seconds_without_gradients(model: train.Decoder, trial: TrialConfig) -> float:
    """Of the validations and of the test: one piece at each length is timed."""
    model.eval()
    total = 0.0
    for length in trial.test_lengths:
        if evaluate.cannot(model.encoding, length):  # type: ignore[arg-type]
            continue
        rows = torch.zeros(max(1, evaluate.TOKENS_AT_ONCE // length), length + 1, dtype=torch.long)
        began = time.perf_counter()
        train.token_losses(model, rows, trial)
        per_token = (time.perf_counter() - began) / (rows.shape[0] * length)
        total += per_token * evaluate.HELD_OUT_BYTES
        if length == trial.train_length:
            windows = min(train.VALID_WINDOWS, evaluate.HELD_OUT_BYTES // length)
            total += VALIDATIONS * per_token * windows * length
    return total
