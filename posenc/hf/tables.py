"""Find, lengthen and restore learned tables of absolute positions in a loaded model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posenc.encodings import grow

BERT = ("embeddings.position_embeddings", "max_position_embeddings", 0, 0)
AFTER_PADDING = ("embeddings.position_embeddings", "max_position_embeddings", None, None)
_LIKE_BERT = (
    "albert bert bert-generation convbert distilbert electra ernie megatron-bert mobilebert "
    "rembert roc_bert squeezebert"
)
_LIKE_ROBERTA = (
    "camembert data2vec-text mpnet roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod"
)
FAMILIES: dict[str, tuple[str, str, int | None, int | None]] = {
    **dict.fromkeys(_LIKE_BERT.split(), BERT),
    **dict.fromkeys(_LIKE_ROBERTA.split(), AFTER_PADDING),
    "biogpt": ("biogpt.embed_positions", "max_position_embeddings", 2, 0),
    "gpt2": ("transformer.wpe", "n_positions", 0, 0),
    "gpt_bigcode": ("transformer.wpe", "n_positions", 0, 0),
    "opt": ("decoder.embed_positions", "max_position_embeddings", 2, 0),
}
"""By model_type: path of the table, config key of its length, number of leading rows without a
position (None: up to the padding token's), and how many of these the key counts (None: all)."""

METHODS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "interpolate": (
        "linear interpolation between rows",
        lambda table, rows, **kept: grow.interpolate(table, rows, align_corners=True, **kept),
    ),
    "tile": ("the table repeated", grow.tile),
    "hierarchical": ("two digits, alpha 0.4; the first rows stay", grow.hierarchical),
}


@dataclass(frozen=True)
class PositionTable:
    """Describe a model's position table: its module, and how the config counts its rows.

    key: config key of its length. offset_rows: leading rows without a position. counted_rows: how
    many of these the config's length counts.
    """

    module: nn.Embedding
    key: str
    offset_rows: int
    counted_rows: int

    @property
    def length(self) -> int:
        """Return the number of positions in the table."""
        return self.module.weight.shape[0] - self.offset_rows


def growable_table(model: Any) -> PositionTable | None:
    """Return the position table of a model of FAMILIES, which can be lengthened; None for others.

    Raises: ValueError for a BERT whose config asks for relative positions as well.
    """
    table = position_table(model)
    if table is None:
        return None
    kind = getattr(model.config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise ValueError(
            f"position_embedding_type is {kind!r}: growing only the table would leave its "
            "relative part short."
        )
    return table


def position_table(model: Any) -> PositionTable | None:
    """Return the position table of a model of FAMILIES, even if it has other positions too."""
    if model.config.model_type not in FAMILIES:
        return None
    path, key, offset_rows, counted_rows = FAMILIES[model.config.model_type]
    for name, module in model.named_modules():
        if name.endswith(path) and isinstance(module, nn.Embedding):
            padding = 0 if module.padding_idx is None else module.padding_idx + 1
            return PositionTable(
                module,
                key,
                padding if offset_rows is None else offset_rows,
                padding if counted_rows is None else counted_rows,
            )
    return None


@contextmanager
def lengthened_table(model: Any, method: str, length: int) -> Iterator[nn.Module]:
    """Lengthen the model's table to `length` positions inside the block, by a method of METHODS,
    and restore it after. The config and buffers with a column for each position follow it."""
    table = growable_table(model)
    assert table is not None
    module = table.module
    weight = module.weight
    rows = module.num_embeddings
    config = model.config
    maximum = getattr(config, table.key)
    # Older GPT-2 configs say the length twice, and llama.cpp's converter reads the other one.
    keys = [key for key in (table.key, "n_ctx") if getattr(config, key, None) == maximum]
    lengthen = METHODS[method][1]
    with torch.no_grad():
        longer = lengthen(weight.detach(), length, offset_rows=table.offset_rows)
    before = table.length + table.counted_rows
    after = length + table.counted_rows
    buffers = _position_buffers(model, before)
    module.weight = nn.Parameter(longer)
    module.num_embeddings = len(longer)
    for key in keys:
        setattr(config, key, after)
    for owner, name, buffer in buffers:
        setattr(owner, name, _longer_buffer(name, buffer, after))
    try:
        yield model
    finally:
        module.weight = weight
        module.num_embeddings = rows
        for key in keys:
            setattr(config, key, maximum)
        for owner, name, buffer in buffers:
            setattr(owner, name, buffer)


class _Buffer(NamedTuple):
    """A buffer (..., positions) and where it is: the attribute `name` of the module `owner`."""

    owner: nn.Module
    name: str
    values: Tensor


def _position_buffers(model: nn.Module, length: int) -> list[_Buffer]:
    """Return the buffers with one column per position, as in BERT."""
    return [
        _Buffer(owner, name, buffer)
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name in ("position_ids", "token_type_ids") and buffer.shape[-1] == length
    ]


def _longer_buffer(name: str, buffer: Tensor, length: int) -> Tensor:
    """Return a buffer (1, length) for the buffer of this name: positions 0, 1, ..., or token type 0
    everywhere."""
    if name == "position_ids":
        return torch.arange(length, device=buffer.device).expand(1, -1)
    return buffer.new_zeros(1, length)
