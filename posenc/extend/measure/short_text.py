"""Measure what a method costs on short texts: the same ones, each read by itself, before and
after."""

import numpy as np

from posenc.extend.measure.intervals import Estimate, estimate
from posenc.extend.measure.losses import Reader
from posenc.hf.checkpoint.text import Windows

MOST = 64
"""Short texts that are read, at most."""


def short_pieces(windows: Windows, trained: int) -> Windows:
    """Cut the windows into texts of the training length, equally many from every window."""
    pieces = windows.tokens.shape[1] // trained
    each = max(1, min(pieces, MOST // len(windows)))
    tokens = windows.tokens[:, : each * trained].reshape(-1, trained)
    documents = windows.documents[:, : each * trained].reshape(-1, trained)
    return Windows(tokens[:MOST], documents[:MOST])


def short_losses(reader: Reader, windows: Windows, trained: int) -> np.ndarray:
    """Return the loss of every token of the short texts in nats, NaN for tokens that are not
    predicted."""
    return reader.all_losses(short_pieces(windows, trained).tokens).numpy()


def regression(before: np.ndarray, after: np.ndarray, documents: np.ndarray) -> Estimate:
    """Return the mean rise of the loss over the same tokens, in nats per token, with a 95 %
    interval from resampled documents. Above 0, short texts got worse."""
    return estimate(after - before, documents)
