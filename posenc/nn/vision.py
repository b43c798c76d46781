"""Attention of timm's Vision Transformers with a position encoding."""

from typing import Any

import torch
from torch import Tensor, nn

from posenc.arguments import answered
from posenc.attend.attention import attention
from posenc.encodings import PositionEncoding, check_encoding, one_per_model
from posenc.masks import Mask, causal
from posenc.positions import counted, grid, tensor

_PARTS = ("qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop")


class VisionAttention(nn.Module):
    """Replace timm's Attention (one linear layer `qkv`) by one with a position encoding.

    It takes over the modules of `attention`, so that weights, names and state dict stay the same.

    Args:
        attention: a timm.layers.Attention, or a module with the same submodules.
        encoding: the position encoding; None for none.
        positions: positions of the tokens, (len) or (len, axes); None counts tokens from 0.

    Raises: TypeError for a module with other submodules.
    """

    qkv: Any
    q_norm: Any
    k_norm: Any
    attn_drop: Any
    norm: Any
    gate: Any
    proj: Any
    proj_drop: Any
    positions: Tensor | None

    @answered
    def __init__(
        self,
        attention: Any,
        encoding: PositionEncoding | None = None,
        positions: Tensor | None = None,
    ) -> None:
        super().__init__()
        missing = [n for n in ("qkv", "proj", "num_heads", "scale") if not hasattr(attention, n)]
        unknown = [n for n, _ in attention.named_children() if n not in _PARTS]
        if missing or unknown:
            what = f"without {missing[0]}" if missing else f"with {unknown[0]}"
            raise TypeError(
                f"VisionAttention: expected an attention like timm's, with one layer qkv, got a "
                f"{type(attention).__name__} {what}."
            )
        for name in _PARTS:
            setattr(self, name, getattr(attention, name, None))
        self.num_heads, self.scale = attention.num_heads, attention.scale
        self.encoding = check_encoding("VisionAttention", encoding)
        self.register_buffer("positions", positions, persistent=False)
        self.train(attention.training)

    @answered
    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend from x (batch, len, dim); attn_mask is bool, True for visible tokens."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        q, k = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
        positions = self.positions
        if positions is None:
            positions = counted(0, x.shape[1], x.device)
        elif len(positions) != x.shape[1]:
            raise ValueError(
                f"VisionAttention: made for {len(positions)} tokens, got {x.shape[1]}: the "
                "picture has another size. Attach again with its positions."
            )
        state = self.encoding.state(x, tensor(positions, x.device))
        dropout = 0.0 if self.attn_drop is None or not self.training else self.attn_drop.p
        out = attention(
            q,
            k,
            v,
            self.encoding,
            q_positions=positions,
            kv_positions=positions,
            q_state=state,
            kv_state=state,
            mask=_mask(attn_mask, is_causal),
            dropout_p=dropout,
            scale=self._scale(q.shape[-1]),
        )
        assert isinstance(out, Tensor)
        out = self._normed(self.norm, out.transpose(1, 2).flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        out = self.proj(out)
        return out if self.proj_drop is None else self.proj_drop(out)

    def _scale(self, head_dim: int) -> float:
        """Return the model's scale, times the encoding's factor of the usual one."""
        usual = head_dim**-0.5
        return self.scale / usual * self.encoding.scale(head_dim)

    @staticmethod
    def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
        return x if norm is None else norm(x)


@answered
def attach_to_vit(
    model: Any, encoding: PositionEncoding | None, positions: Tensor | None = None
) -> Any:
    """Put the encoding into all attentions of a Vision Transformer of timm, and return it.

    Its own position embeddings stay; build it with pos_embed="none" to have none.

    Args:
        model: a model with `blocks`, each with an `attn` like timm's.
        encoding: one of scope "layer" is copied, with fresh parameters, for every block.
        positions: positions of the tokens. None counts tokens; for an encoding with two components
            it uses rows and columns of the patches, with NaN for class and register tokens.

    Raises: TypeError or ValueError for a model with other attention.
    """
    blocks = list(getattr(model, "blocks", ()))
    if not blocks or not all(hasattr(block, "attn") for block in blocks):
        raise TypeError(
            f"attach_to_vit: {type(model).__name__} has no blocks with an attn, as timm's Vision "
            "Transformers have."
        )
    whole = one_per_model(check_encoding("attach_to_vit", encoding), len(blocks))
    if positions is None and whole.claims.num_axes > 1:
        height, width = model.patch_embed.grid_size
        positions = grid(height, width, class_tokens=model.num_prefix_tokens)
    made = [
        VisionAttention(block.attn, whole.for_layer(i), positions) for i, block in enumerate(blocks)
    ]
    for block, attn in zip(blocks, made, strict=True):
        block.attn = attn
    return model


def _mask(attn_mask: Tensor | None, is_causal: bool) -> Mask | None:
    if attn_mask is None:
        return causal if is_causal else None
    if attn_mask.dtype != torch.bool:
        raise ValueError(
            f"VisionAttention: attn_mask must be bool, True where a token is seen, got "
            f"{attn_mask.dtype}: numbers would be a bias, which only an encoding adds."
        )
    seen = attn_mask.view(*(1,) * (4 - attn_mask.ndim), *attn_mask.shape)

    def visible(sight: Any) -> Tensor:
        batch, head = sight.batch % seen.shape[0], sight.head % seen.shape[1]
        rows = sight.q_idx % seen.shape[2]
        shown = seen[batch, head, rows, sight.kv_idx]
        return shown & (sight.q_idx >= sight.kv_idx) if is_causal else shown

    return Mask(visible)
