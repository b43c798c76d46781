"""Run T5 and BLOOM of transformers with biases computed by posenc, which does not materialize them:
memory grows linearly with the length."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from posenc.encodings import PositionEncoding
from posenc.hf.attachment.attach import attached


@contextmanager
def own_biases(model: Any) -> Iterator[nn.Module]:
    """Run the model with posenc's attention inside the block, with the same results.

    T5's table stays the model's parameter, so that it is trained. BLOOM's distances count tokens,
    as BLOOM does if padding is at one end.

    Raises: ValueError for a model that is neither T5 nor BLOOM.
    """
    kind = model.config.model_type
    if kind not in ("t5", "bloom"):
        raise ValueError(f"own_biases knows t5 and bloom, got a {kind} model.")
    with attached(model, PositionEncoding(), own="keep"):
        yield model
