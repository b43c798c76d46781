"""Sizes and choices that describe a model, except its position encoding."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from posenc.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_probability,
    explain_constructor_misfits,
)
from posenc.attend.attention_layer import Projections, check_norm_eps
from posenc.encodings import ModelShape

Activation = Literal["swiglu", "geglu_tanh", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rms", "layer"]
NormPosition = Literal["pre", "post"]

_CHOICES = {
    "activation": Activation,
    "norm": Norm,
    "norm_position": NormPosition,
    "projections": Projections,
}

_FLAGS = ("ffn_bias", "tie_embeddings", "attention_bias", "qk_norm", "recompute")


@explain_constructor_misfits
@dataclass(frozen=True)
class DecoderConfig:
    """Describe a stack of Transformer layers, for Decoder, Encoder and EncoderDecoder.

    Args:
        vocab_size: number of tokens.
        embed_dim: width of the residual stream.
        num_layers: number of layers (of each stack, in an EncoderDecoder).
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; None means num_heads.
        head_dim: size of one head; None means embed_dim / num_heads.
        ffn_dim: hidden width of the feed-forward; None means 8/3 embed_dim rounded up to a multiple
            of 32 for a gated activation, 4 embed_dim otherwise.
        norm: "rms" (RMSNorm) or "layer" (LayerNorm).
        norm_position: "pre" (before each sublayer) or "post" (after each sum).
        final_norm: True for one more norm at the end; None means True with "pre", else False.
        norm_eps: number that the norm adds to the variance.
        activation: "swiglu" or "geglu_tanh" (Gemma's), which have a gate; "gelu", "gelu_tanh"
            (GPT-2's approximation) or "relu".
        ffn_bias: True if the feed-forward has biases.
        tie_embeddings: use the token embedding as the head.
        attention_bias: True if the projections of attention have a bias.
        output_bias: the same for the last of them; None means as `attention_bias`.
        qk_norm: True if each head's queries and keys are normalized, see posenc.Attention.
        layer_windows: for each layer, how many of the last tokens it attends to, the query's own
            included, or None for all; None: all layers attend to all. An encoding may have a window
            of its own besides.
        projections: which of q, k and v share a projection, see posenc.Attention.
        dropout: probability of dropping an attention weight, and a channel of the embeddings and of
            each sublayer's output.
        impl: implementation of attention, see posenc.attention.
        recompute: True if the backward pass computes each layer again instead of keeping its
            activations (activation checkpointing, Chen et al. 2016, arXiv:1604.06174): training
            takes less memory and more time, and gives the same numbers.

    Raises: ValueError for a size or a choice that does not fit.

    >>> config = posenc.DecoderConfig(vocab_size=256, embed_dim=64, num_layers=2, num_heads=4)
    >>> config.head_dim, config.ffn_dim
    (16, 192)
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_dim: int | None = None
    norm: Norm = "rms"
    norm_position: NormPosition = "pre"
    final_norm: bool | None = None
    norm_eps: float = 1e-6
    activation: Activation = "swiglu"
    ffn_bias: bool = False
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool | None = None
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] | None = None
    projections: Projections = "separate"
    dropout: float = 0.0
    impl: str = "auto"
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads"):
            check_count("DecoderConfig", name, getattr(self, name))
        for name in ("num_kv_heads", "head_dim", "ffn_dim"):
            if getattr(self, name) is not None:
                check_count("DecoderConfig", name, getattr(self, name))
        for name in _FLAGS:
            check_flag("DecoderConfig", name, getattr(self, name))
        for name in ("output_bias", "final_norm"):
            if getattr(self, name) is not None:
                check_flag("DecoderConfig", name, getattr(self, name))
        self._check_windows()
        check_norm_eps("DecoderConfig", "norm_eps", self.norm_eps)
        for name, choices in _CHOICES.items():
            check_choice("DecoderConfig", name, getattr(self, name), get_args(choices))
        check_probability("DecoderConfig", "dropout", self.dropout)
        # Defaults that depend on other sizes. The class is frozen, so they are set past its check.
        shape = self.shape()
        object.__setattr__(self, "num_kv_heads", shape.num_kv_heads)
        object.__setattr__(self, "head_dim", shape.head_dim)
        if self.final_norm is None:
            object.__setattr__(self, "final_norm", self.norm_position == "pre")
        if self.ffn_dim is None:
            # A gate makes three matrices of two, so 2/3 of the usual width 4 embed_dim keeps the
            # number of parameters (Shazeer 2020, section 3). Llama rounds this up to a multiple of
            # 256; 32 is chosen, not derived.
            gated_width = math.ceil(8 * self.embed_dim / (3 * 32)) * 32
            width = gated_width if self.has_gate else 4 * self.embed_dim
            object.__setattr__(self, "ffn_dim", width)

    @property
    def has_gate(self) -> bool:
        """Return True if the feed-forward has a third matrix, the gate."""
        return self.activation in ("swiglu", "geglu_tanh")

    def _check_windows(self) -> None:
        """Raise TypeError or ValueError unless `layer_windows` is None, or a tuple with a window or
        None for each layer."""
        windows = self.layer_windows
        if windows is None:
            return
        if not isinstance(windows, tuple) or len(windows) != self.num_layers:
            raise ValueError(
                "DecoderConfig: layer_windows must be a tuple with a window, or None, for each of "
                f"the {self.num_layers} layers, got {windows!r}."
            )
        for window in windows:
            if window is not None:
                check_count("DecoderConfig", "a window of layer_windows", window)

    def shape(self, train_length: int = 2048, causal: bool = True) -> ModelShape:
        """Return the sizes from which posenc.create builds an encoding for this model.

        train_length: the training length in tokens; 2048 is an example of one, not a limit.
        causal: False for an encoder, whose tokens see later ones.
        """
        return ModelShape(
            self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim, train_length, causal
        )
