"""Multi-head attention as a module: projections, grouped queries, cache, and the host in the
middle."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.cache import KVCache
from posenc.encoding import PositionEncoding
from posenc.host import attention
from posenc.masks import Mask


class Attention(nn.Module):
    """Project to queries, keys and values, attend with a position encoding, project back.

    Args:
        embed_dim: width of the input and output.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads, a divisor of num_heads; None means num_heads.
        encoding: the position encoding; None for none.
        head_dim: size of one head; None means embed_dim / num_heads.
        bias: whether the projections have a bias.
        dropout: probability of dropping an attention weight in training.
        impl: which implementation of attention, "auto" or by name.

    Shapes: x (batch, q_len, embed_dim), positions (q_len) or (batch, q_len) -> (batch, q_len,
    embed_dim).
    Raises: ValueError where the head counts do not fit.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: PositionEncoding | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if (head_dim is None and embed_dim % num_heads) or num_heads % num_kv_heads:
            raise ValueError(
                f"Attention: num_heads must divide embed_dim and num_kv_heads divide num_heads, got "
                f" embed_dim={embed_dim}, num_heads={num_heads}, num_kv_heads={num_kv_heads}."
            )
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.encoding = PositionEncoding() if encoding is None else encoding
        self.dropout, self.impl = dropout, impl
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "batch q_len embed_dim"],
        positions: Tensor,
        *,
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
        memory: Tensor | None = None,
        memory_positions: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Mask | None = None,
        encoding: PositionEncoding | None = None,
    ) -> Float[Tensor, "batch q_len embed_dim"]:
        """Attend from x to itself, to `context` instead (cross-attention), or to `memory` before
        it.

        Args:
            context, context_positions: tokens to attend to instead of x, and their positions.
            memory, memory_positions: hidden states of earlier segments, put before x among the keys
            (Transformer-XL).
            cache: this layer's earlier keys and values; x is appended to it.
            mask: who may look at whom.
            encoding: this layer's encoding, prepared for the positions; the module's own if None.
        """
        encoding = self.encoding if encoding is None else encoding
        source, source_positions = (
            (x, positions) if context is None else (context, context_positions)
        )
        if source_positions is None:
            raise ValueError("Attention: context needs context_positions.")
        if memory is not None:
            if memory_positions is None:
                raise ValueError("Attention: memory needs memory_positions.")
            source = torch.cat([memory, source], dim=1)
            source_positions = torch.cat([memory_positions, source_positions], dim=-1)
        past = None if cache is None or not cache.length else cache.state
        kv_state = encoding.token_state(source, source_positions, past)
        q_state = (
            kv_state[:, :, -x.shape[1] :] if context is None and kv_state is not None else None
        )
        if context is not None and kv_state is not None:
            q_state = encoding.token_state(x, positions)
        out = attention(
            self._heads(self.q_proj(x)),
            self._heads(self.k_proj(source)),
            self._heads(self.v_proj(source)),
            encoding,
            q_positions=positions,
            kv_positions=source_positions,
            q_state=q_state,
            kv_state=kv_state,
            mask=mask,
            cache=cache,
            dropout_p=self.dropout if self.training else 0.0,
            impl=self.impl,
        )
        assert isinstance(out, Tensor)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, len, heads * head_dim) -> (batch, heads, len, head_dim)"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
