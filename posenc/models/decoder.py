"""A small causal language model that takes any position encoding, also limited to a window."""

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc import masks
from posenc.arguments import explain_misfits
from posenc.attend.cache import KVCache
from posenc.encodings import PositionEncoding, build_if_named, check_tokens
from posenc.masks import Mask
from posenc.models.config import DecoderConfig
from posenc.models.stack import Stack, build_head, check_caches, draw_initial_weights
from posenc.positions.tokens import Positions


class Decoder(Stack):
    """Predict each next token from the tokens before it.

    logits = head(norm(layers(encoding.embed(tokens))))

    The initial weights depend on the seed given to torch.manual_seed, not on the encoding. An
    encoding of scope "layer" is copied, with fresh parameters, for every layer.

    Args:
        config: sizes and choices.
        encoding: the position encoding, or its name as `posenc.create` reads it; None for none.

    Shapes: tokens (batch, len), positions (len) or (batch, len) -> logits (batch, len, vocab_size).
    Raises: ValueError if tokens and caches do not fit.

    >>> config = posenc.DecoderConfig(vocab_size=256, embed_dim=64, num_layers=2, num_heads=4)
    >>> model = posenc.Decoder(config, "rope")
    >>> model(torch.tensor([[5, 7, 9]])).shape
    torch.Size([1, 3, 256])
    """

    default_mask = masks.causal

    @explain_misfits
    def __init__(
        self, config: DecoderConfig, encoding: PositionEncoding | str | None = None
    ) -> None:
        super().__init__(
            config,
            build_if_named("Decoder", encoding, config.shape(), unknown_fields=("train_length",)),
        )
        self.tokens = nn.Embedding(config.vocab_size, config.embed_dim)
        self.head = build_head(config)
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw new initial weights, except those of the encoding."""
        draw_initial_weights(self, self.config, seed, tied_to=None if self.head else self.last_norm)

    def new_caches(self) -> list[KVCache]:
        """Return an empty cache for each layer."""
        return [KVCache() for _ in self.layers]

    @explain_misfits
    def forward(
        self,
        tokens: Int[Tensor, "batch len"],
        positions: Positions | None = None,
        *,
        caches: Sequence[KVCache] | None = None,
        mask: Mask | None = None,
        length: int | None = None,
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Return the logits of the next token after each token.

        Args:
            tokens: token ids.
            positions: their positions; by default they continue those in the caches, or start at 0.
            caches: one per layer, see `new_caches`; the tokens are appended to them.
            mask: which keys each query sees, by default masks.causal. It replaces the default, so
                combine it with masks.causal by `&`.
            length: the current length, for encodings whose frequencies depend on it.
        """
        check_tokens("Decoder", tokens, self.config.vocab_size)
        check_caches("Decoder", caches, len(self.layers))
        x = self.hidden_states(
            self.tokens(tokens),
            positions,
            self.default_mask if mask is None else mask,
            caches=caches,
            length=length,
        )
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)


def mask_of_documents(model: nn.Module, documents: Int[Tensor, "batch len"]) -> Mask:
    """Return the mask that a decoder or encoder has by default, without keys of other documents.

    documents: the number of each token's document in its row.

    >>> model = posenc.Decoder(posenc.DecoderConfig(256, 64, num_layers=1, num_heads=4), "rope")
    >>> mask_of_documents(model, torch.tensor([[0, 0, 1]])).tensor(3).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    return model.default_mask & masks.document(documents)  # type: ignore[operator]


class WindowedDecoder(nn.Module):
    """Run a decoder with every attention limited to the last `window` tokens, the query's own
    included.

    Nothing is trained, and positions stay as they are. A layer passes on what the layer below has
    read, so n layers reach back n * (window - 1) tokens.

    Shapes: tokens (batch, len) -> logits (batch, len, vocab_size).

    >>> model = posenc.Decoder(posenc.DecoderConfig(256, 64, num_layers=1, num_heads=4), "rope")
    >>> tokens = torch.tensor([[5, 7, 9, 1]])
    >>> near = WindowedDecoder(model, window=2)(tokens)[0, -1]
    >>> torch.allclose(near, model(tokens[:, 2:], range(2, 4))[0, -1], atol=1e-6)
    True
    """

    def __init__(self, model: Decoder, window: int) -> None:
        super().__init__()
        self.model = model
        self.default_mask = masks.causal & masks.sliding_window(window)

    @property
    def encoding(self) -> PositionEncoding:
        """Return the encoding of the decoder."""
        return self.model.encoding

    def forward(
        self,
        tokens: Int[Tensor, "batch len"],
        length: int | None = None,
        mask: Mask | None = None,
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Return the logits of the next token after each token. mask: replaces `default_mask`, so
        combine it with that by `&`."""
        return self.model(tokens, mask=self.default_mask if mask is None else mask, length=length)
