"""A small causal language model that takes any position encoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc import masks
from posenc.cache import KVCache
from posenc.encoding import PositionEncoding
from posenc.masks import Mask
from posenc.models.blocks import Layer, norm_layer
from posenc.models.config import DecoderConfig
from posenc.models.initial import initialise
from posenc.per_layer import PerLayer


class Decoder(nn.Module):
    """Predict each next token from the tokens before it.

    logits = head(norm(layers(encoding.embed(tokens))))

    The initial weights depend on the seed given to torch.manual_seed, and not on the encoding. An
    encoding of scope "layer" is copied, with fresh parameters, for every layer.

    Args:
        config: sizes and choices.
        encoding: the position encoding; None for none.

    Shapes: tokens (batch, len), positions (len) or (batch, len) -> logits (batch, len, vocab_size).
    Raises: ValueError where tokens, positions and caches do not fit together.
    """

    def __init__(self, config: DecoderConfig, encoding: PositionEncoding | None = None) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.embed_dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = norm_layer(config) if config.norm_position == "pre" else None
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        )
        self.reset_parameters()
        encoding = PositionEncoding() if encoding is None else encoding
        if encoding.scope == "layer":
            encoding = PerLayer.replicate(encoding, config.num_layers)
        self.encoding = encoding

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the model's initial weights; the encoding's own are left as they are."""
        initialise(self, self.config, seed)
        if self.config.tie_embeddings:
            last = self.layers[-1].ffn_norm if self.norm is None else self.norm
            nn.init.constant_(last.weight, self.config.embed_dim**-0.75)  # type: ignore[arg-type]

    def new_caches(self) -> list[KVCache]:
        """An empty cache for each layer."""
        return [KVCache() for _ in self.layers]

    def forward(
        self,
        tokens: Int[Tensor, "batch len"],
        positions: Tensor | None = None,
        *,
        caches: Sequence[KVCache] | None = None,
        mask: Mask | None = None,
        length: int | None = None,
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Logits of the token after each token.

        Args:
            tokens: token ids.
            positions: their positions; by default they follow on what the caches hold, from 0.
            caches: one per layer, see `new_caches`; the tokens are appended to them.
            mask: who may look at whom, in place of masks.causal: combine with it by `&`.
            length: the current length, for encodings whose frequencies depend on it.
        """
        past = _past(tokens, caches, len(self.layers))
        positions = (
            default_positions(tokens, past, self.encoding) if positions is None else positions
        )
        encoding = self.encoding.prepare(positions, length)
        mask = bind(masks.causal if mask is None else mask, positions, past, encoding)
        x = encoding.embed(self.tokens(tokens), positions)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        for index, layer in enumerate(self.layers):
            cache = None if caches is None else caches[index]
            x = layer(x, positions, encoding.for_layer(index), mask, cache)
        x = x if self.norm is None else self.norm(x)
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)


def default_positions(tokens: Tensor, past: int, encoding: PositionEncoding) -> Tensor:
    """past, past + 1, ...: the same for every row, and for every component where there are
    several."""
    positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)
    if encoding.num_axes == 1:
        return positions
    return positions[:, None].expand(-1, encoding.num_axes).contiguous()


def bind(mask: Mask, positions: Tensor, past: int, encoding: PositionEncoding) -> Mask:
    """The mask bound once for all layers; left to the host where a cache holds earlier tokens.

    Positions of several components have no order: there a token's index is its position.
    """
    if mask.bound or past:
        return mask
    if encoding.num_axes > 1:
        positions = torch.arange(positions.shape[-2], device=positions.device)
    return mask.bind(positions, positions)


def _past(tokens: Tensor, caches: Sequence[KVCache] | None, num_layers: int) -> int:
    if tokens.ndim != 2:
        raise ValueError(f"Decoder: tokens must be (batch, len), got {tuple(tokens.shape)}.")
    if caches is None:
        return 0
    if len(caches) != num_layers:
        raise ValueError(
            f"Decoder: caches must be one per layer ({num_layers}), got {len(caches)}. "
            "Make them with new_caches()."
        )
    return caches[0].length
