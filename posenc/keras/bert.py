"""BERT's input embeddings: word, segment and position embeddings."""

from typing import Any

import keras

from posenc.keras.learned import LearnedPositionEmbedding
from posenc.keras.position_layer import PositionLayer, at_least_float32, ops, restore_layer


@keras.saving.register_keras_serializable(package="posenc")
class BertEmbedding(PositionLayer):
    """Add word, segment and position embeddings and normalise the sum.

    dropout(LayerNorm(words[token] + segments[segment] + position))

    Args:
        vocab_size: number of tokens.
        embed_dim: width of the embeddings.
        encoding: SinusoidalPositionEncoding or LearnedPositionEmbedding; None means a learned table
            of 512 rows, as BERT's.
        num_segments: rows of the segment table; 0 means no segments.
        padding_idx: a token whose word embedding starts at zero and gets no gradient, and which the
            mask hides from later layers; None: no such token.
        dropout: probability of dropping a channel in training.
        eps: LayerNorm's epsilon.
        init_std: standard deviation of the initial values (normal, truncated at two deviations).

    Call: tokens, segments (batch, seq_len), positions (seq_len) or (batch, seq_len), by default
    start_index, start_index + 1, ... -> (batch, seq_len, embed_dim).
    Precision: float32. Raises: ValueError if segments are given to a layer without them.
    Source: Devlin et al. 2019, arXiv:1810.04805, section 3 and figure 2.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        encoding: Any = None,
        *,
        num_segments: int = 2,
        padding_idx: int | None = 0,
        dropout: float = 0.1,
        eps: float = 1e-12,
        init_std: float = 0.02,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.num_segments = num_segments
        self.padding_idx = padding_idx
        self.init_std = init_std
        self.dropout = dropout
        self.eps = eps
        if encoding is None:
            start = keras.initializers.TruncatedNormal(stddev=init_std)
            encoding = LearnedPositionEmbedding(512, initializer=start, dtype=self.dtype_policy)
        self.encoding = restore_layer(encoding)
        if not hasattr(self.encoding, "embed"):
            raise TypeError(
                "BertEmbedding: encoding must be a SinusoidalPositionEncoding or a "
                f"LearnedPositionEmbedding, got {type(encoding).__name__}."
            )
        self.norm = keras.layers.LayerNormalization(epsilon=eps, dtype=self.variable_dtype)
        self.drop = keras.layers.Dropout(dropout, dtype=self.variable_dtype)

    def build(self, input_shape) -> None:
        width = self.embed_dim
        start = keras.initializers.TruncatedNormal(stddev=self.init_std)
        shape = (self.vocab_size, width)
        self.words = self.add_float_weight("words", shape, self._draw_word_embeddings)
        if self.num_segments:
            self.segments = self.add_float_weight("segments", (self.num_segments, width), start)
        for layer in (self.encoding, self.norm, self.drop):
            if not layer.built:  # a loaded encoding is built already
                layer.build((*input_shape, width))

    def _draw_word_embeddings(self, shape: Any, dtype: Any = None) -> Any:
        """Draw the word embeddings, an initializer: truncated normal, zeros for padding_idx."""
        drawn = keras.initializers.TruncatedNormal(stddev=self.init_std)(shape, dtype)
        if self.padding_idx is None:
            return drawn
        is_padding = ops.arange(shape[0])[:, None] == self.padding_idx
        return ops.where(is_padding, ops.zeros_like(drawn), drawn)

    def call(self, tokens, segments=None, positions=None, start_index=0, training=None):
        tokens = ops.cast(tokens, "int32")
        x = ops.take(at_least_float32(self.words), tokens, axis=0)
        if self.padding_idx is not None:
            is_padding = ops.expand_dims(tokens == self.padding_idx, -1)
            x = ops.where(is_padding, ops.stop_gradient(x), x)
        if self.num_segments:
            segments = ops.zeros_like(tokens) if segments is None else ops.cast(segments, "int32")
            x = x + ops.take(at_least_float32(self.segments), segments, axis=0)
        elif segments is not None:
            raise ValueError("BertEmbedding: built with num_segments=0, and segments were given.")
        x = self.norm(self.encoding.embed(x, positions, start_index))
        return self.to_compute_dtype(self.drop(x, training=training))

    def compute_mask(self, inputs, previous_mask=None):
        """Return the mask that Keras hands to later layers: True where a token is not padding."""
        if self.padding_idx is None:
            return previous_mask
        return ops.not_equal(inputs, self.padding_idx)

    def compute_output_shape(self, input_shape):
        return (*input_shape, self.embed_dim)
