"""Windows of a text for training steps, validation and test."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.files import folder_of_text

VOCABULARY = 257
"""Number of symbols: the bytes, and the symbol after each file."""
VALID_WINDOWS = 64
"""Windows of the validation text that are read."""
HELD_OUT_BYTES = 1 << 16
"""Bytes of the test text that are read. Another stretch of Python source moves a level by about
0.09 bits per byte (standard error over windows), a difference of two encodings by much less."""


def read_split(folder: Path, split: str, corpus_hash: str) -> np.ndarray:
    """Return the symbols of one split of a text, mapped from the disk: bytes, and 256 after each
    file. folder: folder of the study."""
    return np.memmap(folder_of_text(folder, corpus_hash) / f"{split}.u16", dtype="<u2", mode="r")


def training_windows(symbols: np.ndarray, config: TrialConfig, step: int) -> Tensor:
    """Return a training step's windows and the symbol after each, (batch, train_length + 1), drawn
    from the training text. They depend only on the seed and the step."""
    random = np.random.Generator(np.random.Philox(key=[config.seed, step]))
    starts = random.integers(0, len(symbols) - config.train_length, size=config.batch)
    return windows_at(symbols, starts, config.train_length)


def validation_windows(symbols: np.ndarray, config: TrialConfig) -> Tensor:
    """Return windows and the symbol after each, (windows, train_length + 1), evenly spread over the
    validation text."""
    last = len(symbols) - config.train_length - 1
    count = min(VALID_WINDOWS, last // config.train_length + 1)
    return windows_at(symbols, np.linspace(0, last, count).astype(int), config.train_length)


def held_out_windows(symbols: np.ndarray, config: TrialConfig) -> Tensor:
    """Return windows of the longest test length and the symbol after each, (windows, longest + 1),
    evenly spread over the test text, without overlap."""
    longest = max(config.test_lengths)
    count = max(1, min(HELD_OUT_BYTES // longest, (len(symbols) - 1) // longest))
    starts = np.linspace(0, len(symbols) - longest - 1, count).astype(int)
    return windows_at(symbols, starts, longest)


def windows_at(symbols: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    """Return the windows that start at these indices, each with the symbol after it, (len(starts),
    length + 1)."""
    rows = np.stack([symbols[start : start + length + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64))
