"""Find, lengthen and restore learned tables of absolute positions in a loaded model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posenc.encodings import grow


class TableOfFamily(NamedTuple):
    """Describe where the models of one family keep their position table, and how they count its
    rows."""

    path: str
    """End of the table's path in the model, with or without a head: its last names."""
    key: str
    """Config key of its length."""
    num_offset_rows: int | None
    """Leading rows without a position; None: those up to the padding token's."""
    num_counted_rows: int | None
    """How many of these the key counts, too; None: all."""


_BERT = TableOfFamily("embeddings.position_embeddings", "max_position_embeddings", 0, 0)
_ROBERTA = TableOfFamily("embeddings.position_embeddings", "max_position_embeddings", None, None)
_MODEL_TYPES_LIKE_BERT = (
    "albert bert bert-generation convbert distilbert electra ernie megatron-bert mobilebert "
    "rembert roc_bert squeezebert"
)
_MODEL_TYPES_LIKE_ROBERTA = (
    "camembert data2vec-text mpnet roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod"
)
TABLE_OF_MODEL_TYPE: dict[str, TableOfFamily] = {
    **dict.fromkeys(_MODEL_TYPES_LIKE_BERT.split(), _BERT),
    **dict.fromkeys(_MODEL_TYPES_LIKE_ROBERTA.split(), _ROBERTA),
    "biogpt": TableOfFamily("embed_positions", "max_position_embeddings", 2, 0),
    "gpt2": TableOfFamily("wpe", "n_positions", 0, 0),
    "gpt_bigcode": TableOfFamily("wpe", "n_positions", 0, 0),
    "opt": TableOfFamily("embed_positions", "max_position_embeddings", 2, 0),
}
"""The tables that can be lengthened, by model_type."""


class GrowthMethod(NamedTuple):
    """Describe a way to lengthen a table. lengthen: function of the table, the number of positions
    and offset_rows, see posenc.encodings.embeddings.grow."""

    summary: str
    lengthen: Callable[..., Tensor]


METHODS: dict[str, GrowthMethod] = {
    "interpolate": GrowthMethod(
        "linear interpolation between rows", partial(grow.interpolate, align_corners=True)
    ),
    "tile": GrowthMethod("the table repeated", grow.tile),
    "hierarchical": GrowthMethod("two digits, alpha 0.4; the first rows stay", grow.hierarchical),
}


@dataclass(frozen=True)
class PositionTable:
    """Describe a model's position table: its module, and how the config counts its rows.

    key: config key of its length. num_offset_rows: leading rows without a position.
    num_counted_rows: how many of these the config's length counts.
    """

    module: nn.Embedding
    key: str
    num_offset_rows: int
    num_counted_rows: int

    @property
    def length(self) -> int:
        """Return the number of positions in the table."""
        return self.module.weight.shape[0] - self.num_offset_rows


def growable_table(model: Any) -> PositionTable | None:
    """Return the position table of a model, which can be lengthened; None for a model whose type is
    not in TABLE_OF_MODEL_TYPE.

    Raises: ValueError for a BERT whose config asks for relative positions as well.
    """
    table = position_table(model)
    if table is None:
        return None
    position_type = getattr(model.config, "position_embedding_type", None) or "absolute"
    if position_type != "absolute":
        raise ValueError(
            f"position_embedding_type is {position_type!r}: growing only the table would leave its "
            "relative part short."
        )
    return table


def position_table(model: Any) -> PositionTable | None:
    """Return the position table of a model, even if it has other positions too; None for a model
    whose type is not in TABLE_OF_MODEL_TYPE."""
    if model.config.model_type not in TABLE_OF_MODEL_TYPE:
        return None
    table_of_family = TABLE_OF_MODEL_TYPE[model.config.model_type]
    for name, module in model.named_modules():
        if f".{name}".endswith(f".{table_of_family.path}") and isinstance(module, nn.Embedding):
            num_padding_rows = 0 if module.padding_idx is None else module.padding_idx + 1
            return PositionTable(
                module,
                table_of_family.key,
                num_padding_rows
                if table_of_family.num_offset_rows is None
                else table_of_family.num_offset_rows,
                num_padding_rows
                if table_of_family.num_counted_rows is None
                else table_of_family.num_counted_rows,
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
    num_rows_before = module.num_embeddings
    config = model.config
    max_positions_before = getattr(config, table.key)
    # Older GPT-2 configs say the length twice, and llama.cpp's converter reads the other one.
    length_keys = [
        key for key in (table.key, "n_ctx") if getattr(config, key, None) == max_positions_before
    ]
    with torch.no_grad():
        longer_weight = METHODS[method].lengthen(
            weight.detach(), length, offset_rows=table.num_offset_rows
        )
    length_before = table.length + table.num_counted_rows
    length_after = length + table.num_counted_rows
    buffers = _position_buffers(model, length_before)
    module.weight = nn.Parameter(longer_weight)
    module.num_embeddings = len(longer_weight)
    for key in length_keys:
        setattr(config, key, length_after)
    for owner, name, buffer in buffers:
        setattr(owner, name, _longer_buffer(name, buffer, length_after))
    try:
        yield model
    finally:
        module.weight = weight
        module.num_embeddings = num_rows_before
        for key in length_keys:
            setattr(config, key, max_positions_before)
        for owner, name, buffer in buffers:
            setattr(owner, name, buffer)


class _Buffer(NamedTuple):
    """Hold a buffer (..., positions), and where it is: the attribute `name` of the module
    `owner`."""

    owner: nn.Module
    name: str
    values: Tensor


def _position_buffers(model: nn.Module, length: int) -> list[_Buffer]:
    """Return the buffers (..., length) that BERT's family has for each position: position_ids and
    token_type_ids."""
    return [
        _Buffer(owner, name, buffer)
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name in ("position_ids", "token_type_ids") and buffer.shape[-1] == length
    ]


def _longer_buffer(name: str, buffer: Tensor, length: int) -> Tensor:
    """Return a buffer (1, length) to replace the buffer of this name: 0, 1, 2 ... for position_ids,
    zeros for token_type_ids."""
    if name == "position_ids":
        return torch.arange(length, device=buffer.device).expand(1, -1)
    return buffer.new_zeros(1, length)
