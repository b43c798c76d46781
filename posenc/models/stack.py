"""A stack of layers with one position encoding, base class of Encoder and of decoders."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.attend.cache import KVCache
from posenc.encodings import (
    PositionEncoding,
    encoding_of_all_layers,
    require_encoding,
    validated_embedding_positions,
)
from posenc.masks import Mask, check_mask
from posenc.models.config import DecoderConfig
from posenc.models.layers import Context, Layer, build_norm
from posenc.positions import Positions, as_tensor, consecutive_positions, positions_from_mask


class Stack(nn.Module):
    """Compute hidden states from embedded tokens.

    hidden = norm(layers(encoding.embed(x)))

    An encoding of scope "layer" is copied, with fresh parameters, for every layer.
    """

    default_mask: ClassVar[Mask]
    """Mask that is used if a call gives none."""

    def __init__(
        self,
        config: DecoderConfig,
        encoding: PositionEncoding | None,
        *,
        attends_to_context: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            Layer(config, attends_to_context=attends_to_context) for _ in range(config.num_layers)
        )
        self.norm = build_norm(config) if config.final_norm else None
        self.encoding = encoding_of_all_layers(encoding, config.num_layers)

    @property
    def last_norm(self) -> nn.Module:
        """Return the norm that computes the output of the stack."""
        return self.layers[-1].ffn_norm if self.norm is None else self.norm  # type: ignore[return-value]

    def hidden_states(
        self,
        x: Float[Tensor, "batch len embed_dim"],
        positions: Positions | None,
        mask: Mask,
        *,
        caches: Sequence[KVCache] | None = None,
        context: Context | None = None,
        context_caches: Sequence[KVCache] | None = None,
        length: int | None = None,
    ) -> Float[Tensor, "batch len embed_dim"]:
        """Return hidden states from the token embeddings x, to which positions are applied here."""
        caller = type(self).__name__
        num_cached = caches[0].length if caches else 0
        check_mask(caller, mask, x.shape[0], x.shape[1], num_cached + x.shape[1])
        if positions is None:
            positions = default_positions(x, num_cached, self.encoding)
        _check_whole_length(caller, length)
        positions = validated_embedding_positions(
            caller, x, positions, num_axes=self.encoding.claims.num_axes
        )
        encoding = self.encoding.prepare(positions, length)
        mask = bind_mask(mask, positions, num_cached, encoding)
        x = encoding.embed(x, as_tensor(positions, x.device))
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        cache_of_layer = _caches_by_layer(caches, len(self.layers))
        context_cache_of_layer = _caches_by_layer(context_caches, len(self.layers))
        with ExitStack() as unchanged:  # if a layer fails, all caches are restored
            for cache in (*(caches or ()), *(context_caches or ())):
                unchanged.enter_context(cache.unchanged_on_error())
            for index, layer in enumerate(self.layers):
                x = layer(
                    x,
                    positions,
                    encoding.for_layer(index),
                    mask,
                    cache_of_layer[index],
                    None if context is None else context.for_layer(index),
                    context_cache_of_layer[index],
                )
        return x if self.norm is None else self.norm(x)


def _check_whole_length(caller: str, length: Any) -> None:
    """Raise TypeError unless `length` is None or a whole number, which torch.compile may trace."""
    if not isinstance(length, int | torch.SymInt | None):
        raise TypeError(f"{caller}: length must be a whole number of tokens, got {length!r}.")


def _caches_by_layer(caches: Sequence[KVCache] | None, num_layers: int) -> Sequence[KVCache | None]:
    """Return the cache of each layer. If `caches` is None, return a None for each layer."""
    return [None] * num_layers if caches is None else caches


def default_positions(
    tokens: Shaped[Tensor, "batch len *channels"],
    num_cached: int,
    encoding: PositionEncoding,
    valid: Shaped[Tensor, "batch len"] | None = None,
) -> Int[Tensor, "len *axes"] | Int[Tensor, "batch len *axes"] | range:
    """Return positions num_cached, num_cached + 1, ..., equal in all components of the encoding's
    positions. Rows have the same positions, unless `valid` is given.

    tokens: (batch, len, ...), of which only the sizes and the device are read.
    num_cached: number of tokens in the caches, which come before these.
    valid: (batch, len), False for padding, which is not counted.
    """
    if valid is None:
        positions = consecutive_positions(num_cached, tokens.shape[1], tokens.device)
    else:
        positions = positions_from_mask(valid, start=num_cached)
    axes = encoding.claims.num_axes
    if axes == 1:
        return positions
    positions = as_tensor(positions, tokens.device)[..., None]
    return positions.expand(*positions.shape[:-1], axes).contiguous()


def bind_mask(
    mask: Mask, positions: Tensor | range, num_cached: int, encoding: PositionEncoding
) -> Mask:
    """Return the mask bound to the tokens' positions, once for all layers.

    Return it unchanged in two cases, in which attention binds it in each call: with tokens in a
    cache, and for positions of several components, which have no order that a mask could compare.
    """
    if mask.bound or num_cached or encoding.claims.num_axes > 1:
        return mask
    return mask.bind(positions, positions)


def check_caches(caller: str, caches: Sequence[KVCache] | None, num_needed: int) -> None:
    """Raise TypeError unless `caches` is None or a list of KVCaches, ValueError unless these are
    `num_needed` many. caller: the model, for the message."""
    if caches is None:
        return
    if isinstance(caches, KVCache) or not all(isinstance(c, KVCache) for c in caches):
        raise TypeError(
            f"{caller}: caches must be a list of KVCaches. Make them with new_caches()."
        )
    if len(caches) != num_needed:
        raise ValueError(
            f"{caller}: caches must be one per layer ({num_needed}), got {len(caches)}. "
            "Make them with new_caches()."
        )


def require_bidirectional(caller: str, encoding: PositionEncoding) -> None:
    """Raise ValueError for an encoding that needs causal attention."""
    if require_encoding(caller, encoding).claims.causal_only:
        raise ValueError(
            f"{caller}: {type(encoding).__name__} works in causal attention only: if a query "
            "sees later tokens, it is undefined or ignores their order. Use another encoding, "
            "or build it with ModelShape(causal=False) if it has a bidirectional form."
        )
