"""The layer that Encoder, Decoder and EncoderDecoder are made of."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from posenc.cache import KVCache
from posenc.encoding import PositionEncoding
from posenc.masks import Mask
from posenc.models.config import DecoderConfig
from posenc.models.norms import RMSNorm
from posenc.multihead import Attention


def norm_layer(config: DecoderConfig) -> nn.Module:
    """The norm that the config asks for."""
    kind = RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.embed_dim, eps=config.norm_eps)


class FeedForward(nn.Module):
    """down(act(up(x))), or down(silu(gate(x)) * up(x)) for swiglu."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.ffn_dim
        assert width is not None
        self.activation = config.activation
        self.gate_proj = (
            nn.Linear(config.embed_dim, width, bias=False)
            if config.activation == "swiglu"
            else None
        )
        self.up_proj = nn.Linear(config.embed_dim, width, bias=False)
        self.down_proj = nn.Linear(width, config.embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is not None:
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        else:
            act = F.gelu if self.activation == "gelu" else F.relu
            hidden = act(self.up_proj(x))
        return self.down_proj(hidden)


class Layer(nn.Module):
    """Self-attention and a feed-forward, each normed and added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.pre = config.norm_position == "pre"
        self.dropout = config.dropout
        self.attention = Attention(
            config.embed_dim,
            config.num_heads,
            config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            dropout=config.dropout,
            impl=config.impl,
        )
        self.attention_norm = norm_layer(config)
        self.ffn = FeedForward(config)
        self.ffn_norm = norm_layer(config)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        encoding: PositionEncoding,
        mask: Mask | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        normed = self.attention_norm(x) if self.pre else x
        x = x + self._drop(
            self.attention(normed, positions, cache=cache, mask=mask, encoding=encoding)
        )
        x = x if self.pre else self.attention_norm(x)
        x = x + self._drop(self.ffn(self.ffn_norm(x) if self.pre else x))
        return x if self.pre else self.ffn_norm(x)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
