"""Windows of a text for training steps, validation and test."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.files import path_of

VOCABULARY = 257
"""Number of symbols: the bytes, and the symbol after each file."""
VALID_WINDOWS = 64
HELD_OUT_BYTES = 1 << 16
"""Bytes of the test text that are read. Another stretch of Python source moves a level by about
0.09 bits per byte (standard error over windows), a difference of two encodings by much less."""


def read_split(folder: Path, split: str, corpus_hash: str) -> np.ndarray:
    """Map the symbols of one split of a text from disk."""
    return np.memmap(path_of(folder, corpus_hash) / f"{split}.u16", dtype="<u2", mode="r")


def batch_of(symbols: np.ndarray, config: TrialConfig, step: int) -> Tensor:
    """Return (batch, train_length + 1) symbols; they depend only on the seed and the step."""
    random = np.random.Generator(np.random.Philox(key=[config.seed, step]))
    starts = random.integers(0, len(symbols) - config.train_length, size=config.batch)
    return windows(symbols, starts, config.train_length)


def valid_windows(symbols: np.ndarray, config: TrialConfig) -> Tensor:
    """Return (windows, train_length + 1) symbols, evenly spread over the validation text."""
    last = len(symbols) - config.train_length - 1
    count = min(VALID_WINDOWS, last // config.train_length + 1)
    return windows(symbols, np.linspace(0, last, count).astype(int), config.train_length)


def held_out_windows(symbols: np.ndarray, config: TrialConfig) -> Tensor:
    """Return (windows, longest + 1) symbols, evenly spread over the test text, without overlap."""
    longest = max(config.test_lengths)
    count = max(1, min(HELD_OUT_BYTES // longest, (len(symbols) - 1) // longest))
    starts = np.linspace(0, len(symbols) - longest - 1, count).astype(int)
    return windows(symbols, starts, longest)


def windows(symbols: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    """Return (len(starts), length + 1): each window and the symbol after it."""
    rows = np.stack([symbols[start : start + length + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64))
