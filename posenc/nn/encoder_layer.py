"""torch.nn.TransformerEncoderLayer with a position encoding."""

from typing import Any

from torch import Tensor, nn

from posenc.arguments import explain_misfits
from posenc.encodings import PositionEncoding
from posenc.nn.multihead import MultiheadAttention


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Replace torch.nn.TransformerEncoderLayer by one whose attention has a position encoding.

    Its state dict is torch's plus the encoding's parameters. In torch.nn.TransformerEncoder each
    layer gets a copy of the encoding. It never runs torch's fused inference kernel, which has no
    positions.

    Args:
        d_model, nhead, ...: torch's.
        encoding: the position encoding of the attention, or its name; None for none.

    >>> layer = posenc.nn.TransformerEncoderLayer(
    ...     64, 4, batch_first=True, encoding=posenc.ALiBi(num_heads=4))
    >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> encoder(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    @explain_misfits
    def __init__(
        self,
        d_model: int,
        nhead: int,
        *arguments: Any,
        encoding: PositionEncoding | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, nhead, *arguments, **options)
        torch_attention = self.self_attn
        self.self_attn = MultiheadAttention(
            d_model,
            nhead,
            dropout=torch_attention.dropout,
            bias=torch_attention.in_proj_bias is not None,
            batch_first=torch_attention.batch_first,
            device=torch_attention.out_proj.weight.device,
            dtype=torch_attention.out_proj.weight.dtype,
            encoding=encoding,
        )
        # Keeps TransformerEncoder from converting rows to nested tensors.
        self.activation_relu_or_gelu = 0

    @explain_misfits
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run the layer like torch's, with positions (len) or (batch, len). By default tokens are
        counted from 0, without padding."""

        def attend(x: Tensor) -> Tensor:
            """Return the output of self-attention for x, with dropout."""
            out, _ = self.self_attn(
                x,
                x,
                x,
                key_padding_mask=src_key_padding_mask,
                need_weights=False,
                attn_mask=src_mask,
                is_causal=is_causal,
                positions=positions,
            )
            return self.dropout1(out)

        def feed_forward(x: Tensor) -> Tensor:
            """Return the output of the feed-forward for x, with dropout."""
            hidden = self.dropout(self.activation(self.linear1(x)))
            return self.dropout2(self.linear2(hidden))

        if self.norm_first:
            src = src + attend(self.norm1(src))
            return src + feed_forward(self.norm2(src))
        src = self.norm1(src + attend(src))
        return self.norm2(src + feed_forward(src))
