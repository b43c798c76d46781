"""A trained decoder whose attention is limited to a window when it is read."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc import masks
from posenc.encodings import PositionEncoding
from posenc.models.decoder import Decoder


class InWindow(nn.Module):
    """Read a decoder with every attention limited to the last `window` tokens, itself included.

    Nothing is trained, and positions stay as they are. A layer passes on what the layer below has
    read, so n layers reach back n * (window - 1) tokens.

    Shapes: tokens (batch, len) -> logits (batch, len, vocab_size).

    >>> model = posenc.Decoder(posenc.DecoderConfig(256, 64, num_layers=1, num_heads=4), "rope")
    >>> tokens = torch.tensor([[5, 7, 9, 1]])
    >>> near = InWindow(model, window=2)(tokens)[0, -1]
    >>> torch.allclose(near, model(tokens[:, 2:], range(2, 4))[0, -1], atol=1e-6)
    True
    """

    def __init__(self, model: Decoder, window: int) -> None:
        super().__init__()
        self.model = model
        self.mask = masks.causal & masks.sliding_window(window)

    @property
    def encoding(self) -> PositionEncoding:
        """Return the encoding of the decoder."""
        return self.model.encoding

    def forward(
        self, tokens: Int[Tensor, "batch len"], length: int | None = None
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Return the logits of the next token after each token."""
        return self.model(tokens, mask=self.mask, length=length)
