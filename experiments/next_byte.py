"""How well a trained model of either objective says the next byte from those before it.

-log2 p(x[t] | x[t-n+1], ..., x[t-1]), the mean over the same held-out bytes x[t] for all models

A causal decoder reads the n - 1 bytes and says what follows. An encoder of the masked objective
reads a window of n bytes whose last one is hidden: nothing stands behind it, so what it says there
depends on the same n - 1 bytes, which see each other from both sides as in training. One pass says
one byte. Under a causal mask, which it was not trained with, it could keep a cache as a decoder
does; that is measured too.

Source: the question is that of Artetxe et al. 2022, arXiv:2205.11726, who tell the two apart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from posenc import masks
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.evaluate import TOKENS_AT_ONCE, bits, cannot
from posenc.compare.trial.forward import autocast
from posenc.compare.trial.objectives.masked import MASK
from posenc.compare.trial.train import build_model
from posenc.compare.trial.windows import read_split, windows
from posenc.models import Decoder

TARGETS = 1024
"""Held-out bytes to say; their mean has a standard error of about 0.1 bits. Between two models it
is less, because they say the same ones."""
UNDER_CAUSAL = "under a causal mask"
Say = Callable[[Decoder, Tensor], Tensor]
"""From windows (rows, n) to the logits (rows, vocabulary) of the last byte of each."""


class Score(NamedTuple):
    """Bits per byte from windows of `length` bytes, that byte included; None where the encoding
    cannot read so far. way: how the model was run where it can be run in several ways."""

    way: str
    length: int
    bits_per_byte: float | None


def after_the_others(model: Decoder, rows: Tensor) -> Tensor:
    return model(rows[:, :-1], length=rows.shape[1] - 1)[:, -1]


def in_place_of_a_mask(model: Decoder, rows: Tensor) -> Tensor:
    return model(_last_hidden(rows), length=rows.shape[1])[:, -1]


def under_a_causal_mask(model: Decoder, rows: Tensor) -> Tensor:
    return model(_last_hidden(rows), mask=masks.causal, length=rows.shape[1])[:, -1]


WAYS: dict[str, dict[str, Say]] = {
    "causal": {"": after_the_others},
    "masked": {"": in_place_of_a_mask, UNDER_CAUSAL: under_a_causal_mask},
}
"""How the models of each objective are run."""


def score_next_byte(study: Path, config: TrialConfig) -> list[Score]:
    """Score a finished trial in the folder of its study at its test lengths.

    Raises: ValueError for an objective whose models have no way to say the next byte here.
    """
    if config.objective not in WAYS:
        raise ValueError(
            f"next_byte: expected the objective {' or '.join(WAYS)}, got {config.objective!r}."
        )
    model = build_model(config)
    assert isinstance(model, Decoder)
    model.load_state_dict(load_file(study / config.folder / "model.safetensors"))
    rows = held_out(read_split(study, "test", config.corpus), max(config.test_lengths))
    return [
        Score(way, length, mean_bits(model.eval(), say, rows[:, -length:], config))
        for way, say in WAYS[config.objective].items()
        for length in config.test_lengths
    ]


def held_out(symbols: np.ndarray, longest: int) -> Tensor:
    """(rows, longest) symbols that end in the bytes to say, evenly spread over the text."""
    starts = np.unique(np.linspace(0, len(symbols) - longest, TARGETS).astype(int))
    return windows(symbols, starts, longest - 1)


@torch.no_grad()
def mean_bits(model: Decoder, say: Say, rows: Tensor, config: TrialConfig) -> float | None:
    """Raises: FloatingPointError for a loss that is not finite."""
    length = rows.shape[1]
    if cannot(model.encoding, length):
        return None
    total = 0.0
    for part in rows.to(config.device).split(max(1, TOKENS_AT_ONCE // length)):
        with autocast(config):
            logits = say(model, part)
        total += F.cross_entropy(logits.float(), part[:, -1], reduction="sum").item()
    if not np.isfinite(total):
        raise FloatingPointError(f"{config.folder}: the loss is {total} at {length} bytes.")
    return bits(total / len(rows))


def _last_hidden(rows: Tensor) -> Tensor:
    return torch.cat([rows[:, :-1], torch.full_like(rows[:, -1:], MASK)], dim=1)
