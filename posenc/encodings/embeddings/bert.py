"""BERT's input embeddings: words, segments and positions."""

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor, nn

from posenc.arguments import explain_misfits
from posenc.encodings.base.check_inputs import check_tokens
from posenc.encodings.base.position_encoding import PositionEncoding, require_encoding
from posenc.encodings.embeddings.learned import Learned


class BertEmbedding(nn.Module):
    """Add word, segment and position embeddings and normalise the sum.

    dropout(LayerNorm(words[token] + segments[segment] + position))

    Args:
        vocab_size: number of tokens.
        embed_dim: width of the embeddings.
        encoding: an encoding of the embeddings; None means a learned table of 512 rows, as in BERT.
        num_segments: rows of the segment table; 0 means no segments.
        padding_idx: a token whose word embedding starts at zero and gets no gradient.
        dropout: probability of dropping a channel in training.
        eps: LayerNorm's epsilon.
        init_std: standard deviation of the initial values (normal, truncated at two deviations).

    Shapes: tokens, segments (batch, seq_len); positions (seq_len) or (batch, seq_len) -> (batch,
    seq_len, embed_dim). RoBERTa's positions: positions_from_mask(valid, start=padding_idx + 1).
    Raises: ValueError for an encoding that acts in attention, or for segments if num_segments=0.
    Source: Devlin et al. 2019, arXiv:1810.04805, section 3 and figure 2.

    >>> bert = posenc.BertEmbedding(vocab_size=100, embed_dim=64)
    >>> bert(torch.tensor([[5, 7, 9]]), torch.arange(3)).shape
    torch.Size([1, 3, 64])
    """

    @explain_misfits
    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        encoding: PositionEncoding | None = None,
        *,
        num_segments: int = 2,
        padding_idx: int | None = 0,
        dropout: float = 0.1,
        eps: float = 1e-12,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.init_std = init_std
        self.words = nn.Embedding(vocab_size, embed_dim, padding_idx=padding_idx)
        self.segments = nn.Embedding(num_segments, embed_dim) if num_segments else None
        if encoding is None:
            encoding = Learned(512, embed_dim, init="truncated_normal", init_std=init_std)
        if set(require_encoding("BertEmbedding", encoding).claims.places) - {1}:
            raise ValueError(
                f"BertEmbedding: {type(encoding).__name__} acts in attention, not at the "
                "embeddings. Pass it to the attention layers."
            )
        self.encoding = encoding
        self.norm = nn.LayerNorm(embed_dim, eps=eps)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.words, self.segments):
            if table is not None:
                std = self.init_std
                nn.init.trunc_normal_(table.weight, std=std, a=-2 * std, b=2 * std)
        if self.words.padding_idx is not None:
            with torch.no_grad():
                self.words.weight[self.words.padding_idx] = 0
        self.norm.reset_parameters()
        self.encoding.reset_parameters()

    @explain_misfits
    def forward(
        self,
        tokens: Int[Tensor, "batch seq_len"],
        positions: Real[Tensor, "..."],
        segments: Int[Tensor, "batch seq_len"] | None = None,
    ) -> Float[Tensor, "batch seq_len embed_dim"]:
        """Return the normalised sum of embeddings, (batch, seq_len, embed_dim). All tokens are in
        the first segment if `segments` is None."""
        check_tokens("BertEmbedding", tokens, self.words.num_embeddings)
        x = self.words(tokens)
        if self.segments is not None:
            segments = torch.zeros_like(tokens) if segments is None else segments
            check_tokens("BertEmbedding", segments, self.segments.num_embeddings, "segments")
            x = x + self.segments(segments)
        elif segments is not None:
            raise ValueError("BertEmbedding: built with num_segments=0, but segments were given.")
        return self.dropout(self.norm(self.encoding.embed(x, positions)))
