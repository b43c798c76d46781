"""A small bidirectional encoder, and one with a decoder that also attends to its output."""

from collections.abc import Sequence

from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from posenc import masks
from posenc.arguments import explain_misfits
from posenc.attend.attention_layer import check_cross_attention
from posenc.attend.cache import KVCache
from posenc.encodings import (
    PositionEncoding,
    build_if_named,
    check_tokens,
    encoding_of_all_layers,
    without_position,
)
from posenc.masks import Mask
from posenc.models.config import DecoderConfig
from posenc.models.stack import (
    Context,
    Stack,
    build_head,
    check_caches,
    default_positions,
    draw_initial_weights,
    require_bidirectional,
)
from posenc.positions.tokens import Positions


class Encoder(Stack):
    """Compute hidden states of tokens that all see one another.

    hidden = norm(layers(encoding.embed(tokens)))

    The initial weights depend on the seed given to torch.manual_seed, not on the encoding.

    Args:
        config: sizes and choices, without tie_embeddings.
        encoding: the position encoding, built with ModelShape(causal=False), or its name.

    Shapes: tokens (batch, len), positions (len) or (batch, len) -> (batch, len, embed_dim).
    Raises: ValueError for an encoding that needs causal attention. NoPE is one: without a causal
    mask and positions, the model cannot know the order of tokens.

    >>> config = posenc.DecoderConfig(vocab_size=256, embed_dim=64, num_layers=2, num_heads=4)
    >>> model = posenc.Encoder(config, posenc.create("t5", config.shape(causal=False)))
    >>> model(torch.tensor([[5, 7, 9]])).shape
    torch.Size([1, 3, 64])
    """

    default_mask = masks.full

    @explain_misfits
    def __init__(self, config: DecoderConfig, encoding: PositionEncoding | str) -> None:
        built_encoding = build_if_named(
            "Encoder", encoding, config.shape(causal=False), unknown_fields=("train_length",)
        )
        require_bidirectional("Encoder", built_encoding)
        if config.tie_embeddings:
            raise ValueError("Encoder: tie_embeddings ties a head, and an encoder has none.")
        super().__init__(config, built_encoding)
        self.tokens = nn.Embedding(config.vocab_size, config.embed_dim)
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw new initial weights, except those of the encoding."""
        draw_initial_weights(self, self.config, seed)

    @explain_misfits
    def forward(
        self,
        tokens: Int[Tensor, "batch len"],
        positions: Positions | None = None,
        *,
        mask: Mask | None = None,
        length: int | None = None,
    ) -> Float[Tensor, "batch len embed_dim"]:
        """Return the hidden states of the tokens.

        Args:
            tokens: token ids.
            positions: their positions, from 0 by default.
            mask: which keys each query sees, such as masks.padding(valid); None: all tokens see
                all.
            length: the current length, for encodings whose frequencies depend on it.
        """
        check_tokens("Encoder", tokens, self.config.vocab_size)
        x = self.tokens(tokens)
        mask = self.default_mask if mask is None else mask
        return self.hidden_states(x, positions, mask, length=length)


class EncoderDecoder(nn.Module):
    """Predict each next token from the tokens before it and from a source sequence.

    logits = head(decoder(embed(tokens), context=encoder(embed(source))))

    Source and target share the token embedding. The initial weights depend on the seed given to
    torch.manual_seed, and not on the encodings.

    Args:
        config: sizes and choices of both stacks.
        encoder_encoding: the encoder's position encoding, built with ModelShape(causal=False), or
            its name.
        decoder_encoding: the decoder's position encoding, or its name.
        cross_encoding: the position encoding of the attention to the source, or its name; None for
            none, as in the original Transformer and T5.

    Shapes: source (batch, source_len), tokens (batch, len) -> logits (batch, len, vocab_size).
    Raises: ValueError for an encoding that needs causal attention in the encoder or across.

    >>> config = posenc.DecoderConfig(vocab_size=256, embed_dim=64, num_layers=2, num_heads=4)
    >>> rope = posenc.RoPE(head_dim=16, interleaved=False)
    >>> model = posenc.EncoderDecoder(config, encoder_encoding=rope, decoder_encoding=rope)
    >>> model(source=torch.tensor([[5, 7, 9, 2]]), tokens=torch.tensor([[1, 4]])).shape
    torch.Size([1, 2, 256])
    """

    @explain_misfits
    def __init__(
        self,
        config: DecoderConfig,
        encoder_encoding: PositionEncoding | str,
        decoder_encoding: PositionEncoding | str | None = None,
        cross_encoding: PositionEncoding | str | None = None,
    ) -> None:
        bidirectional_shape = config.shape(causal=False)
        built_encoder_encoding = build_if_named(
            "EncoderDecoder",
            encoder_encoding,
            bidirectional_shape,
            unknown_fields=("train_length",),
        )
        built_cross_encoding = build_if_named(
            "EncoderDecoder", cross_encoding, bidirectional_shape, unknown_fields=("train_length",)
        )
        require_bidirectional("EncoderDecoder: encoder_encoding", built_encoder_encoding)
        if built_cross_encoding is not None:
            require_bidirectional("EncoderDecoder: cross_encoding", built_cross_encoding)
            check_cross_attention("EncoderDecoder: cross_encoding", built_cross_encoding)
            if 1 in built_cross_encoding.claims.places:
                raise ValueError(
                    f"EncoderDecoder: cross_encoding is {type(built_cross_encoding).__name__}, "
                    "which acts at the embeddings; give it to the encoder or the decoder."
                )
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.embed_dim)
        self.encoder = Stack(config, built_encoder_encoding)
        built_decoder_encoding = build_if_named(
            "EncoderDecoder", decoder_encoding, config.shape(), unknown_fields=("train_length",)
        )
        self.decoder = Stack(config, built_decoder_encoding, attends_to_context=True)
        if built_cross_encoding is None:
            # For the decoder's positions, whose components it does not read.
            built_cross_encoding = without_position(self.decoder.encoding.claims.num_axes)
        self.cross_encoding = encoding_of_all_layers(built_cross_encoding, config.num_layers)
        self.head = build_head(config)
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw new initial weights, except those of the encodings."""
        # Without a head of its own, the token embeddings read the output of the last norm.
        norm_before_tied_head = None if self.head else self.decoder.last_norm
        draw_initial_weights(self, self.config, seed, tied_to=norm_before_tied_head)

    @explain_misfits
    def conditioned_on(
        self,
        source: Int[Tensor, "batch source_len"],
        source_positions: Positions | None = None,
        *,
        source_valid: Shaped[Tensor, "batch source_len"] | None = None,
        length: int | None = None,
    ) -> "ConditionedDecoder":
        """Encode a source; return a language model for posenc.generate that continues it.

        Args:
            source: token ids.
            source_positions: their positions; by default from 0, without padding.
            source_valid: (batch, source_len), False for padding, on either side.
            length: the source's current length, for encodings whose frequencies depend on it.
        """
        check_tokens("EncoderDecoder", source, self.config.vocab_size)
        mask = masks.full if source_valid is None else masks.padding(source_valid)
        if source_positions is None:
            source_positions = default_positions(source, 0, self.encoder.encoding, source_valid)
        hidden = self.encoder.hidden_states(
            self.tokens(source), source_positions, mask, length=length
        )
        return ConditionedDecoder(self, hidden, source_positions, source_valid)

    @explain_misfits
    def forward(
        self,
        source: Int[Tensor, "batch source_len"],
        tokens: Int[Tensor, "batch len"],
        *,
        source_positions: Positions | None = None,
        source_valid: Shaped[Tensor, "batch source_len"] | None = None,
        positions: Positions | None = None,
        mask: Mask | None = None,
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Return the logits of the next token after each token; `mask` replaces masks.causal."""
        model = self.conditioned_on(source, source_positions, source_valid=source_valid)
        return model(tokens, positions, mask=mask)


class ConditionedDecoder:
    """Predict tokens from an encoded source: the result of EncoderDecoder.conditioned_on.

    Args:
        model: the model, whose decoder predicts.
        source_hidden: the encoder's output, (batch, source_len, embed_dim).
        source_positions: the positions of the source's tokens.
        source_valid: (batch, source_len), False for padding of the source; None if there is none.
    """

    @explain_misfits
    def __init__(
        self,
        model: EncoderDecoder,
        source_hidden: Float[Tensor, "batch source_len embed_dim"],
        source_positions: Positions,
        source_valid: Shaped[Tensor, "batch source_len"] | None,
    ) -> None:
        self.model = model
        self.source_hidden = source_hidden
        self.source_positions = source_positions
        self.source_valid = source_valid

    @property
    def encoding(self) -> PositionEncoding:
        """Return the position encoding of the decoder, which reads the positions of tokens."""
        return self.model.decoder.encoding

    def new_caches(self) -> list[KVCache]:
        """Return empty caches: one per layer for the decoder, then one per layer for the source."""
        return [KVCache() for _ in range(2 * self.model.config.num_layers)]

    def __call__(
        self,
        tokens: Int[Tensor, "batch len"],
        positions: Positions | None = None,
        *,
        caches: Sequence[KVCache] | None = None,
        mask: Mask | None = None,
        length: int | None = None,
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Return the logits of the next token after each token, see Decoder.forward.

        tokens may have a multiple of the source's rows; consecutive rows then share a source.
        """
        check_tokens("EncoderDecoder", tokens, self.model.config.vocab_size)
        num_layers = self.model.config.num_layers
        check_caches("EncoderDecoder", caches, 2 * num_layers)
        x = self.model.decoder.hidden_states(
            self.model.tokens(tokens),
            positions,
            masks.causal if mask is None else mask,
            caches=None if caches is None else caches[:num_layers],
            context=self._context(tokens.shape[0]),
            context_caches=None if caches is None else caches[num_layers:],
            length=length,
        )
        head = self.model.head
        return F.linear(x, self.model.tokens.weight) if head is None else head(x)

    def _context(self, batch: int) -> Context:
        """Return the source as a Context for `batch` rows of tokens. Each of its rows is repeated
        for the consecutive rows of tokens that share it. Raise ValueError if `batch` is no multiple
        of the number of sources."""
        num_rows = self.source_hidden.shape[0]
        if batch % num_rows:
            raise ValueError(
                f"EncoderDecoder: the rows of tokens must be a multiple of the source's "
                f"{num_rows}, got {batch}."
            )

        def repeat_rows(t: Tensor) -> Tensor:
            """Return t with each row repeated for the consecutive rows of tokens that share the
            source."""
            return t if batch == num_rows else t.repeat_interleave(batch // num_rows, dim=0)

        num_axes = self.model.encoder.encoding.claims.num_axes
        cross_encoding = self.model.cross_encoding
        positions = self.source_positions
        if not cross_encoding.claims.places:
            # Nothing reads them, and they may have other components.
            positions = default_positions(self.source_hidden, 0, cross_encoding)
        # Positions without a batch are those of all rows.
        elif isinstance(positions, Tensor) and positions.ndim != (1 if num_axes == 1 else 2):
            positions = repeat_rows(positions)
        mask = None
        if self.source_valid is not None:
            mask = masks.padding(repeat_rows(self.source_valid))
        return Context(repeat_rows(self.source_hidden), positions, mask, cross_encoding)
