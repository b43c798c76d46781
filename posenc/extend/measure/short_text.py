"""What a method costs on short texts: the same ones, each read by itself, before and after."""

from __future__ import annotations

import numpy as np

from posenc.extend.measure.intervals import Estimate, estimate
from posenc.extend.measure.losses import Reader
from posenc.hf.checkpoint.text import Windows

MOST = 64
"""Short texts that are read, at most."""


def short_pieces(windows: Windows, trained: int) -> Windows:
    """The windows cut into texts of the trained length, the same number of every window."""
    pieces = windows.tokens.shape[1] // trained
    each = max(1, min(pieces, MOST // len(windows)))
    tokens = windows.tokens[:, : each * trained].reshape(-1, trained)
    documents = windows.documents[:, : each * trained].reshape(-1, trained)
    return Windows(tokens[:MOST], documents[:MOST])


def short_losses(reader: Reader, windows: Windows, trained: int) -> np.ndarray:
    """Loss of every token of the short texts in nats, NaN where a token is not predicted."""
    return reader.all_losses(short_pieces(windows, trained).tokens).numpy()


def regression(before: np.ndarray, after: np.ndarray, documents: np.ndarray) -> Estimate:
    """Mean rise of the loss in nats per token, over the same tokens, with a 95 % interval from
    resampled documents: above 0 short texts got worse."""
    return estimate(after - before, documents)
