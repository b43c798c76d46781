"""Run T5 and BLOOM of transformers with their biases computed by posenc. No bias is
materialized, and memory grows linearly with the length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from posenc.encodings import PositionEncoding
from posenc.hf.attachment.attach import attached


@contextmanager
def own_biases(model: Any) -> Iterator[nn.Module]:
    """Run the model on posenc's attention inside the block, with the same results.

    T5's table is shared, so that it keeps learning. BLOOM's distances count tokens, as BLOOM does
    when padding is at one end.

    Raises: ValueError for a model that is neither.
    """
    kind = model.config.model_type
    if kind not in ("t5", "bloom"):
        raise ValueError(f"own_biases knows t5 and bloom, got a {kind} model.")
    with attached(model, PositionEncoding(), own="keep"):
        yield model
