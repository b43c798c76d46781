"""A small bidirectional encoder with any position encoding that needs no causal mask."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc import masks
from posenc.arguments import explain_misfits
from posenc.encodings import PositionEncoding, build_if_named, check_tokens
from posenc.masks import Mask
from posenc.models.config import DecoderConfig
from posenc.models.layers import draw_initial_weights
from posenc.models.stack import Stack, require_bidirectional
from posenc.positions import Positions


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
        built = build_if_named(
            "Encoder", encoding, config.shape(causal=False), unknown=("train_length",)
        )
        require_bidirectional("Encoder", built)
        if config.tie_embeddings:
            raise ValueError("Encoder: tie_embeddings ties a head, and an encoder has none.")
        super().__init__(config, built)
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
