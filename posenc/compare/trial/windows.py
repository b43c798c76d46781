"""Windows of a text for training steps, validation and test."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.result_files import TOKENIZER_FILE, folder_of_text
from posenc.compare.trial.text_tokenizer import ByteTokenizer, TextTokenizer, read_tokenizer

VOCABULARY_SIZE = 257
"""Number of symbols of a text of bytes: these, and the symbol after each file."""
TOKEN_BYTES_FILE = "token_bytes"
"""File of a text of tokens, without suffix: how many bytes each token of the vocabulary covers."""
NUM_VALID_WINDOWS = 64
"""Windows of the validation text that are read."""
NUM_WINDOWS = 128
"""Windows of each test length, by default."""
NEAR_BYTES = 1 << 16
"""Bytes of the test text that are read at the training length, rounded down to a multiple of what
so many windows hold. Another stretch of Python source moves a level by about 0.09 bits per byte
(standard error over windows), a difference of two encodings by much less."""


def symbol_dtype(vocabulary: int) -> np.dtype:
    """Return the type of symbols on the disk: 16 bits, or 32 where tokens need them.

    vocabulary: number of different tokens; 0 for bytes."""
    return np.dtype("<u4" if vocabulary > 1 << 16 else "<u2")


def symbol_file(text_folder: Path, name: str, vocabulary: int) -> Path:
    """Return the path of a file of symbols in the folder of a text: `test.u16`, or `test.u32`.
    vocabulary: see `symbol_dtype`."""
    return text_folder / f"{name}.u{8 * symbol_dtype(vocabulary).itemsize}"


def read_split(folder: Path, split: str, corpus_hash: str, vocabulary: int = 0) -> np.ndarray:
    """Return the symbols of one split of a text, mapped from the disk: bytes, and 256 after each
    file; or tokens, and the trial's `document_end` after each document.

    folder: of the study. vocabulary: number of different tokens; 0 for bytes.
    """
    path = symbol_file(folder_of_text(folder, corpus_hash), split, vocabulary)
    return np.memmap(path, dtype=symbol_dtype(vocabulary), mode="r")


def read_token_bytes(folder: Path, config: TrialConfig) -> Tensor | None:
    """Return how many bytes each token of a trial's text covers, (vocabulary,) in float64; None
    where every symbol counts as one: in bytes, and in tokens without a tokenizer. folder: of the
    study."""
    if not config.tokenizer:
        return None
    text_folder = folder_of_text(folder, config.corpus)
    path = symbol_file(text_folder, TOKEN_BYTES_FILE, config.vocabulary)
    counts = np.fromfile(path, dtype=symbol_dtype(config.vocabulary))
    return torch.from_numpy(counts.astype(np.float64))


def tokenizer_of_text(folder: Path, config: TrialConfig) -> TextTokenizer | None:
    """Return the tokenizer of a trial's text: that of bytes, or the one that was kept with the
    tokens; None for a task, and for tokens that no tokenizer was given for. folder: of the
    study."""
    if not config.is_on_text or (config.vocabulary and not config.tokenizer):
        return None
    if not config.vocabulary:
        return ByteTokenizer()
    return read_tokenizer(folder_of_text(folder, config.corpus) / TOKENIZER_FILE)


def documents_of_tokens(tokens: Tensor, config: TrialConfig) -> Tensor | None:
    """Return the number of each token's document in its window, (batch, len); None where no
    document ends before the last token, or a text is bytes, whose files are not kept apart. The
    token that ends a document belongs to it.

        tokens      7 4 E 5 E 8      E: document_end
        documents   0 0 0 1 1 2
    """
    if config.document_end is None:
        return None
    is_end = tokens == config.document_end
    if not is_end[:, :-1].any():
        return None
    return is_end.cumsum(1) - is_end.long()


def config_of_step(config: TrialConfig, step: int) -> TrialConfig:
    """Return the trial as one of its steps is: with windows of the length that the step draws, each
    as likely as the others. It depends only on the seed and the step, so that all encodings of a
    seed have the same, and a training that goes on from a checkpoint, too. See
    `TrialConfig.at_length`.

    Source: windows of one length in a step and equally many tokens in all steps as in
    arXiv:2405.13226.
    """
    if not config.train_lengths:
        return config
    # Jumped twice: the same key draws the start of windows, and jumped once the masked bytes.
    generator = np.random.Generator(np.random.Philox(key=[config.seed, step]).jumped(2))
    return config.at_length(config.train_lengths[generator.integers(len(config.train_lengths))])


def training_windows(symbols: np.ndarray, config: TrialConfig, step: int) -> Tensor:
    """Return a training step's windows and the symbol after each, (batch, train_length + 1), drawn
    from the training text; of several training lengths see `config_of_step`. They depend only on
    the seed and the step."""
    config = config_of_step(config, step)
    generator = np.random.Generator(np.random.Philox(key=[config.seed, step]))
    starts = generator.integers(0, len(symbols) - config.train_length, size=config.batch)
    return windows_at(symbols, starts, config.train_length)


def validation_windows(symbols: np.ndarray, config: TrialConfig) -> Tensor:
    """Return windows and the symbol after each, (windows, train_length + 1), evenly spread over the
    validation text."""
    last_start = len(symbols) - config.train_length - 1
    num_windows = min(NUM_VALID_WINDOWS, last_start // config.train_length + 1)
    return windows_at(
        symbols, np.linspace(0, last_start, num_windows).astype(int), config.train_length
    )


def window_ends(num_symbols: int, length: int, config: TrialConfig) -> np.ndarray:
    """Return where the test windows of a length end, in a test text of `num_symbols` symbols: the
    index after their last symbol, rising.

    Windows end at the multiples of (num_symbols - 1) / num_windows; at the training length at finer
    multiples, for about NEAR_BYTES. Where they would overlap, only each second, third, ... of
    these ends is taken. So the ends depend on this length, not on the other lengths of the test,
    and windows of two lengths end at the same places as long as the text has room.

    """
    num_windows = config.num_windows or NUM_WINDOWS
    if length == config.train_length:
        num_windows *= max(1, NEAR_BYTES // (num_windows * length))
    last_symbol = num_symbols - 1  # the last symbol only follows a window
    stride = -(-length * num_windows // last_symbol)  # rounded up
    return np.arange(stride, num_windows + 1, stride) * last_symbol // num_windows


def held_out_windows(symbols: np.ndarray, length: int, config: TrialConfig) -> Tensor:
    """Return windows of one test length and the symbol after each, (windows, length + 1), without
    overlap, see `window_ends`. Raises ValueError for a text that is shorter than one."""
    ends = window_ends(len(symbols), length, config)
    if not len(ends):
        raise ValueError(f"no window of {length:,} symbols fits in {len(symbols):,} of test text")
    return windows_at(symbols, ends - length, length)


def windows_at(symbols: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    """Return the windows that start at these indices, each with the symbol after it, (len(starts),
    length + 1)."""
    rows = np.stack([symbols[start : start + length + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64))
