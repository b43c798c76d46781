"""Decoupled rotary embeddings: one part of each head is rotated, the other is not."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.queries_keys.rotation import CosOrSin, Vectors
from posenc.frequencies.scalings.scaling import Scaling


class DecoupledRoPE(RoPE):
    """Rotate the last rotary_dim channels of q and k and leave the content channels unchanged.

    score = scale * (q_content . k_content + rotate(q_rotary) . rotate(k_rotary)),  scale =
    head_dim^-1/2

    In multi-head latent attention the content part is expanded from a compressed latent and all
    heads share one rotary key. `join` concatenates the parts; head_dim counts both.

    Args:
        head_dim: content and rotary channels together (DeepSeek-V2 and V3: 128 + 64).
        rope_theta: base of the geometric series of frequencies.
        interleaved: pairs are (2t, 2t+1) within the rotary part, as in DeepSeek's code; False: (t,
            t + rotary_dim/2).
        rotary_dim: number of rotated channels, even; None means a third of head_dim, as in
            DeepSeek.
        scaling: scaling of the frequencies for longer contexts, see RoPE.

    Shapes: q (batch, num_heads, q_len, head_dim), k (batch, num_kv_heads, kv_len, head_dim) -> the
    same.
    Units: positions in tokens, integer or real. Precision: exact angles, rotated in float32,
    rounded once; content channels are not changed.
    Raises: ValueError if rotary_dim is odd or not below head_dim.
    Source: DeepSeek-AI 2024, arXiv:2405.04434 (DeepSeek-V2), section 2.1.3, equations 14-19.

    >>> encoding = posenc.DecoupledRoPE(head_dim=24, interleaved=True, rotary_dim=8)
    >>> q, k = torch.randn(1, 4, 6, 24), torch.randn(1, 4, 6, 24)
    >>> v = torch.randn(1, 4, 6, 16)
    >>> p = torch.arange(6)
    >>> posenc.attention(q, k, v, encoding, q_positions=p, kv_positions=p).shape
    torch.Size([1, 4, 6, 16])
    """

    claims = replace(
        RoPE.claims, source="DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.3, equations 14-19"
    )

    rotates_last_channels = True

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 10000.0,
        *,
        interleaved: bool,
        rotary_dim: int | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        # A third of head_dim, rounded down to an even number.
        rotary_dim = max(2, head_dim // 6 * 2) if rotary_dim is None else rotary_dim
        if rotary_dim >= head_dim:
            raise ValueError(
                f"DecoupledRoPE: rotary_dim={rotary_dim} leaves no content channel of "
                f"head_dim={head_dim}; head_dim counts both parts. Without content, use RoPE."
            )
        super().__init__(
            head_dim, rope_theta, interleaved=interleaved, rotary_dim=rotary_dim, scaling=scaling
        )

    def rotate_channels(self, xs: Vectors, cos: CosOrSin, sin: CosOrSin) -> Vectors:
        content_dim = self.head_dim - self.rotary_dim
        rotated = super().rotate_channels([x[..., content_dim:] for x in xs], cos, sin)
        return [
            torch.cat([x[..., :content_dim], rotated_part], -1)
            for x, rotated_part in zip(xs, rotated, strict=True)
        ]


def join(
    content: Float[Tensor, "batch heads len content_dim"],
    rotary: Float[Tensor, "batch rotary_heads len rotary_dim"],
) -> Float[Tensor, "batch heads len {content.shape[-1]+rotary.shape[-1]}"]:
    """Concatenate content (batch, heads, len, c) and rotary channels (batch, heads or 1, len, r) to
    width c + r; one rotary head is used for all heads."""
    if rotary.shape[1] not in (1, content.shape[1]):
        raise ValueError(
            f"join: rotary must have 1 head or content's {content.shape[1]}, "
            f"got {rotary.shape[1]} (shape {tuple(rotary.shape)})."
        )
    return torch.cat([content, rotary.expand(-1, content.shape[1], -1, -1)], dim=-1)
