"""Encodings of the embeddings: sinusoidal, learned, and BERT's input embeddings."""

from typing import Any

import keras

from posenc.encodings.numerics.slopes_and_buckets import check_hierarchical, rows_to_interpolate
from posenc.frequencies.series import sinusoidal_frequencies
from posenc.keras.position_layer import (
    Int32Frequencies,
    PositionLayer,
    at_least_float32,
    is_inferring_shapes,
    numbers_if_readable,
    ops,
    require_integers,
    restore_layer,
    token_positions,
)


@keras.saving.register_keras_serializable(package="posenc")
class SinusoidalPositionEncoding(PositionLayer):
    """Add sines and cosines of geometrically spaced wavelengths to the embeddings.

    x[p, 2t] += sin(p w_t);  x[p, 2t+1] += cos(p w_t);  w_t = base^(-2t/embed_dim)

    Args:
        base: timescale (period / 2 pi) of the slowest pair, or just beyond it.
        order: "interleaved" (the paper), "concatenated" (all sines, then all cosines) or "fairseq"
            (concatenated, ending at 1/base exactly); see posenc.Sinusoidal.
        min_timescale: timescale of the fastest pair.
        padding_idx: a position that gets zeros.

    Call: x (batch, seq_len, embed_dim), positions (seq_len) or (batch, seq_len), by default
    start_index, start_index + 1, ... -> like x.
    Precision: see posenc.keras.position_layer.Int32Frequencies; added in float32.
    Raises: ValueError as posenc.Sinusoidal does, when the layer is built.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    def __init__(
        self,
        *,
        base: float = 10000.0,
        order: str = "interleaved",
        min_timescale: float = 1.0,
        padding_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.base = base
        self.order = order
        self.min_timescale = min_timescale
        self.padding_idx = padding_idx
        sinusoidal_frequencies(2, base, order, min_timescale)  # raises now for invalid arguments

    def build(self, input_shape) -> None:
        self.embed_dim = input_shape[-1]
        self._frequencies = Int32Frequencies(
            sinusoidal_frequencies(self.embed_dim, self.base, self.order, self.min_timescale)
        )

    def vectors(self, positions: Any) -> Any:
        """Return the vector to add at each position, float32 (*positions.shape, embed_dim)."""
        cos, sin = self._frequencies.cos_sin(positions)
        if self.order == "interleaved":
            shape = (*positions.shape, self.embed_dim)
            rows = ops.reshape(ops.stack([sin, cos], axis=-1), shape)
        else:
            rows = ops.concatenate([sin, cos], axis=-1)
            if self.embed_dim % 2:
                rows = ops.concatenate([rows, ops.zeros_like(rows[..., :1])], axis=-1)
        if self.padding_idx is None:
            return rows
        return ops.where(ops.expand_dims(positions == self.padding_idx, -1), 0.0, rows)

    def embed(self, x: Any, positions: Any, start_index: Any) -> Any:
        """Return x with the embeddings added, not yet rounded to the compute dtype. positions=None
        means start_index, start_index + 1, ..."""
        positions = token_positions(self.name, ops.shape(x)[1], positions, start_index)
        return at_least_float32(x) + self.vectors(positions)

    def call(self, x, positions=None, start_index=0):
        return self.to_compute_dtype(self.embed(x, positions, start_index))


GROWTHS = (None, "interpolate", "hierarchical")


@keras.saving.register_keras_serializable(package="posenc")
class LearnedPositionEmbedding(PositionLayer):
    """Add one learned vector per position to the embeddings.

    x[p] += weight[p], or with `growth` a combination of rows of weight

    The weights of a layer trained without growth fit one with growth (`set_weights`, or
    `load_weights` of a model with the same layers), which can be trained further.

    Args:
        max_positions: rows of the table.
        growth: None; "interpolate": read between the rows; "hierarchical": Su's two digits in base
            max_positions, which keep the first rows unchanged (encodings.embeddings.grow).
        num_positions: number of positions with growth; without it, max_positions.
        align_corners: required for "interpolate", see encodings.embeddings.grow.
        alpha: for "hierarchical", the weight of the higher digit.
        initializer: initializer of the table; None means normal with a standard deviation of 0.02.

    Call: x (batch, seq_len, embed_dim), whole positions (seq_len) or (batch, seq_len), by default
    start_index, start_index + 1, ... -> like x. weight (max_positions, embed_dim).
    Precision: added in float32.
    Raises: ValueError for options that do not fit, and for positions outside of the table. In
    compiled code these are not checked and give NaN. Otherwise the check waits for an accelerator.
    Source: Devlin et al. 2019, arXiv:1810.04805; Su 2020, kexue.fm/archives/7947 for the hierarchy.
    """

    def __init__(
        self,
        max_positions: int,
        *,
        growth: str | None = None,
        num_positions: int | None = None,
        align_corners: bool | None = None,
        alpha: float = 0.4,
        initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if max_positions < 1:
            raise ValueError(
                f"LearnedPositionEmbedding: max_positions must be at least 1, got {max_positions}."
            )
        if growth not in GROWTHS:
            raise ValueError(
                f"LearnedPositionEmbedding: growth must be one of {GROWTHS}, got {growth!r}."
            )
        if (growth is None) != (num_positions is None):
            raise ValueError(
                "LearnedPositionEmbedding: growth and num_positions go together, "
                f"got growth={growth!r} and num_positions={num_positions}."
            )
        if (growth == "interpolate") != (align_corners is not None):
            raise ValueError(
                "LearnedPositionEmbedding: growth='interpolate', and only it, needs align_corners "
                f"True or False, got growth={growth!r} and align_corners={align_corners}."
            )
        self.max_positions = max_positions
        self.growth = growth
        self.align_corners = align_corners
        self.num_positions = num_positions
        self.alpha = alpha
        # The positions that the layer has a vector for: 0 to num_usable_positions - 1.
        self.num_usable_positions = max_positions if num_positions is None else num_positions
        if self.num_usable_positions < 1:
            raise ValueError(
                "LearnedPositionEmbedding: num_positions must be at least 1, "
                f"got {self.num_usable_positions}."
            )
        if growth == "hierarchical":
            check_hierarchical(max_positions, self.num_usable_positions, alpha)
        if align_corners is not None:
            self._source_rows = rows_to_interpolate(
                max_positions, self.num_usable_positions, align_corners
            )
        if initializer is None:
            initializer = keras.initializers.RandomNormal(stddev=0.02)
        self.initializer = keras.initializers.get(initializer)

    def build(self, input_shape) -> None:
        shape = (self.max_positions, input_shape[-1])
        self.weight = self.add_float_weight("weight", shape, self.initializer)

    def vectors(self, positions: Any) -> Any:
        """Return the vector to add at each position, (*positions.shape, embed_dim)."""
        positions = ops.convert_to_tensor(positions)
        require_integers("LearnedPositionEmbedding", positions)
        known_positions = numbers_if_readable(positions)
        if known_positions is not None and known_positions.size:
            self._check_inside_table(int(known_positions.min()), int(known_positions.max()))
        return self._vectors_at(positions)

    def _check_inside_table(self, first: int, last: int) -> None:
        """Raise ValueError unless the layer has vectors for the positions `first` to `last`."""
        if first < 0 or last >= self.num_usable_positions:
            raise ValueError(
                "LearnedPositionEmbedding: positions must be 0 to "
                f"{self.num_usable_positions - 1}, got {first} to {last}. "
                "Use growth and num_positions, or shorten the input."
            )

    def _vectors_at(self, positions: Any) -> Any:
        """Return the vector to add at each position, (*positions.shape, embed_dim); NaN at
        positions outside of the table."""
        is_inside = (positions >= 0) & (positions < self.num_usable_positions)
        index = ops.clip(positions, 0, self.num_usable_positions - 1)
        weight = at_least_float32(self.weight)
        if self.growth is None:
            rows = ops.take(weight, index, axis=0)
        elif self.growth == "interpolate":
            lower, upper, upper_weights = self._source_rows
            lower_index = ops.take(ops.convert_to_tensor(lower, "int32"), index)
            upper_index = ops.take(ops.convert_to_tensor(upper, "int32"), index)
            upper_weights = ops.convert_to_tensor(upper_weights, weight.dtype)
            upper_weight = ops.take(upper_weights, index)[..., None]
            lower_row = ops.take(weight, lower_index, axis=0)
            upper_row = ops.take(weight, upper_index, axis=0)
            rows = (1 - upper_weight) * lower_row + upper_weight * upper_row
        else:
            digit_vectors = (weight - self.alpha * weight[:1]) / (1 - self.alpha)
            vectors_of_high_digit = ops.take(digit_vectors, index // self.max_positions, axis=0)
            vectors_of_low_digit = ops.take(digit_vectors, index % self.max_positions, axis=0)
            rows = self.alpha * vectors_of_high_digit + (1 - self.alpha) * vectors_of_low_digit
        return ops.where(ops.expand_dims(is_inside, -1), rows, float("nan"))

    def embed(self, x: Any, positions: Any, start_index: Any) -> Any:
        """Return x with the embeddings added, not yet rounded to the compute dtype. positions=None
        means start_index, start_index + 1, ..."""
        length = ops.shape(x)[1]
        callers_positions = positions
        positions = token_positions(self.name, length, positions, start_index)
        if callers_positions is not None or not isinstance(start_index, int):
            return at_least_float32(x) + self.vectors(positions)
        if isinstance(length, int) and not is_inferring_shapes():  # jax's symbolic length is no int
            self._check_inside_table(start_index, start_index + length - 1)
        return at_least_float32(x) + self._vectors_at(positions)

    def call(self, x, positions=None, start_index=0):
        return self.to_compute_dtype(self.embed(x, positions, start_index))


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
            initializer = keras.initializers.TruncatedNormal(stddev=init_std)
            encoding = LearnedPositionEmbedding(
                512, initializer=initializer, dtype=self.dtype_policy
            )
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
        initializer = keras.initializers.TruncatedNormal(stddev=self.init_std)
        shape = (self.vocab_size, width)
        self.words = self.add_float_weight("words", shape, self._draw_word_embeddings)
        if self.num_segments:
            self.segments = self.add_float_weight(
                "segments", (self.num_segments, width), initializer
            )
        for layer in (self.encoding, self.norm, self.drop):
            if not layer.built:  # a loaded encoding is built already
                layer.build((*input_shape, width))

    def _draw_word_embeddings(self, shape: Any, dtype: Any = None) -> Any:
        """Return initial word embeddings of this shape: truncated normal, and zeros for
        padding_idx. An initializer."""
        drawn_rows = keras.initializers.TruncatedNormal(stddev=self.init_std)(shape, dtype)
        if self.padding_idx is None:
            return drawn_rows
        is_padding = ops.arange(shape[0])[:, None] == self.padding_idx
        return ops.where(is_padding, ops.zeros_like(drawn_rows), drawn_rows)

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
