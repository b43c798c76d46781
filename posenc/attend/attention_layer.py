"""Multi-head attention as a module, `Attention`: projections, grouped queries, a cache."""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import (
    check_count,
    check_flag,
    check_number,
    check_probability,
    explain_misfits,
)
from posenc.attend.attention import attention
from posenc.attend.cache import KVCache, check_cache
from posenc.encodings import ModelShape, build_if_named
from posenc.encodings.base.check_inputs import (
    check_dtype,
    check_scale,
    require_attention_encoding,
    validated_embedding_positions,
)
from posenc.encodings.base.position_encoding import PositionEncoding
from posenc.encodings.numerics.precision import at_least_float32
from posenc.masks import Mask
from posenc.positions.tokens import (
    ContextPositions,
    MemoryPositions,
    QueryPositions,
    as_tensor,
    concatenate_positions,
)

Projections = Literal["separate", "k=v", "q=k", "none"]


class Attention(nn.Module):
    """Project to queries, keys and values, attend with a position encoding, project back.

    out = o_proj(attention(q_proj(x), k_proj(source), v_proj(source))), source = x by default

    Args:
        embed_dim: width of the input and output.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads, a divisor of num_heads; None means num_heads.
        encoding: the position encoding, or its name as `posenc.create` reads it; None for none.
        head_dim: size of one head; None means embed_dim / num_heads.
        bias: True if the projections have a bias.
        output_bias: the same for the last projection; None means as `bias`. False with bias=True is
            Qwen2's attention.
        projections: "separate"; "k=v" (values are the untransformed keys); "q=k" (one projection
            for queries and keys); "none" (all three are the input, split into heads). The output
            projection stays.
        qk_norm_eps: None, or the number that RMSNorm adds to the mean square of each head's
            channels, in queries and keys before the encoding acts. Heads share the gains, as in
            Qwen3.
        dropout: probability of dropping an attention weight in training.
        scale: factor of q . k before any bias; None for the encoding's, mostly 1/sqrt(head_dim).
        impl: implementation of attention, see posenc.attention.

    Shapes: x (batch, q_len, embed_dim), positions (q_len) or (batch, q_len) -> (batch, q_len,
    embed_dim).
    Raises: ValueError if the head counts do not fit each other or the projections.

    >>> layer = posenc.Attention(64, 4, encoding=posenc.RoPE(16, interleaved=False))
    >>> layer(torch.randn(2, 9, 64), torch.arange(9), mask=posenc.masks.causal).shape
    torch.Size([2, 9, 64])
    """

    @explain_misfits
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: PositionEncoding | str | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        projections: Projections = "separate",
        qk_norm_eps: float | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (
            ("embed_dim", embed_dim),
            ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads),
            ("head_dim", 1 if head_dim is None else head_dim),
        ):
            check_count("Attention", name, size)
        check_flag("Attention", "bias", bias)
        if output_bias is not None:
            check_flag("Attention", "output_bias", output_bias)
        if qk_norm_eps is not None:
            check_norm_eps("Attention", "qk_norm_eps", qk_norm_eps)
        check_probability("Attention", "dropout", dropout)
        if (head_dim is None and embed_dim % num_heads) or num_heads % num_kv_heads:
            raise ValueError(
                "Attention: num_heads must divide embed_dim and num_kv_heads divide num_heads, got "
                f"embed_dim={embed_dim}, num_heads={num_heads}, num_kv_heads={num_kv_heads}."
            )
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.projections = projections
        self._check_projections()
        shape = ModelShape(embed_dim, num_heads, num_kv_heads, self.head_dim)
        built_encoding = build_if_named(
            "Attention", encoding, shape, unknown_fields=("train_length", "causal")
        )
        self.encoding = require_attention_encoding("Attention", built_encoding)
        check_scale("Attention", scale)
        self.dropout = dropout
        self.scale = scale
        self.impl = impl

        def build_projection(num_output_heads: int, *kinds: Projections) -> nn.Linear | None:
            """Return a linear layer from embed_dim to this many heads; None unless `projections` is
            one of the `kinds`."""
            if projections not in kinds:
                return None
            return nn.Linear(embed_dim, num_output_heads * self.head_dim, bias=bias)

        self.q_proj = build_projection(num_heads, "separate", "k=v", "q=k")
        self.k_proj = build_projection(num_kv_heads, "separate", "k=v")
        self.v_proj = build_projection(num_kv_heads, "separate", "q=k")
        last_has_bias = bias if output_bias is None else output_bias
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=last_has_bias)
        has_norms = qk_norm_eps is not None
        self.q_norm = HeadNorm(self.head_dim, eps=qk_norm_eps) if has_norms else None
        self.k_norm = HeadNorm(self.head_dim, eps=qk_norm_eps) if has_norms else None

    @explain_misfits
    def forward(
        self,
        x: Float[Tensor, "batch q_len embed_dim"],
        positions: QueryPositions,
        *,
        context: Float[Tensor, "batch context_len embed_dim"] | None = None,
        context_positions: ContextPositions | None = None,
        memory: Float[Tensor, "batch memory_len embed_dim"] | None = None,
        memory_positions: MemoryPositions | None = None,
        cache: KVCache | None = None,
        mask: Mask | None = None,
        encoding: PositionEncoding | None = None,
    ) -> Float[Tensor, "batch q_len embed_dim"]:
        """Attend from x to itself, to `context` (cross-attention), or to `memory` and itself.

        Args:
            context, context_positions: tokens to attend to instead of x, and their positions.
            memory, memory_positions: hidden states of earlier segments, prepended to x among the
                keys (Transformer-XL).
            cache: this layer's earlier keys and values; x is appended to it. With a context it
                stores the context: the first call fills it, later ones read it.
            mask: which keys each query sees.
            encoding: this layer's encoding, prepared for the positions; None for the module's own.
        """
        encoding = require_attention_encoding(
            "Attention", self.encoding if encoding is None else encoding
        )
        positions = self._checked_positions(x, positions, encoding)
        check_dtype("Attention", x, getattr(self.o_proj, "weight", None))  # adapters may have none
        _check_sources(context, context_positions, memory, memory_positions)
        check_cache("Attention", cache)
        source, source_positions = self._key_source(
            x, positions, encoding, context, context_positions, memory, memory_positions, cache
        )
        past_state = None if cache is None or not cache.length else cache.state
        kv_state = encoding.state(source, as_tensor(source_positions, x.device), past_state)
        if kv_state is not None and context is not None:  # no query is among the keys
            q_state = encoding.state(x, as_tensor(positions, x.device))
        else:
            q_state = kv_state
        if q_state is not None:  # queries are the last tokens
            q_state = q_state[:, :, q_state.shape[2] - x.shape[1] :]
        q, k, v = self._project(x, source)
        out = attention(
            q,
            k,
            v,
            encoding,
            q_positions=positions,
            kv_positions=source_positions,
            q_state=q_state,
            kv_state=kv_state,
            mask=mask,
            cache=cache,
            impl=self.impl,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
        )
        assert isinstance(out, Tensor)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _checked_positions(
        self, x: Tensor, positions: Any, encoding: PositionEncoding, name: str = "x"
    ) -> Tensor | range:
        """Return the positions of the tokens x (batch, len, embed_dim). Raise TypeError or
        ValueError if tokens and positions do not fit the layer and the encoding. name: what the
        message calls the tokens, such as "context"."""
        return validated_embedding_positions(
            "Attention",
            x,
            positions,
            embed_dim=self.embed_dim,
            num_axes=encoding.claims.num_axes,
            name=name,
        )

    def _key_source(
        self,
        x: Tensor,
        positions: Tensor | range,
        encoding: PositionEncoding,
        context: Tensor | None,
        context_positions: Tensor | range | None,
        memory: Tensor | None,
        memory_positions: Tensor | range | None,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor | range]:
        """Return the hidden states from which new keys and values are projected, (batch, len,
        embed_dim), and their positions, one for each of `len`.

        They are those of `context` in cross-attention, or none (len 0) if the cache has it already;
        those of `memory` followed by x; or else those of x. positions: of x.

        Raises: as `_checked_positions`, and ValueError for an encoding that has no
        cross-attention.
        """
        token_axis = -1 if encoding.claims.num_axes == 1 else -2
        if context is not None:
            check_cross_attention("Attention", encoding)
            checked_positions = self._checked_positions(
                context, context_positions, encoding, "context"
            )
            if cache is None or not cache.length:
                return context, checked_positions
            # The cache has the context already: append nothing.
            return x[:, :0], as_tensor(checked_positions, x.device).narrow(token_axis, 0, 0)
        if memory is not None:
            checked_positions = self._checked_positions(
                memory, memory_positions, encoding, "memory"
            )
            source_positions = concatenate_positions(
                checked_positions, positions, token_axis, x.shape[0], x.device
            )
            return torch.cat([memory, x], dim=1), source_positions
        return x, positions

    def _project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to q, and source to k and v, each (batch, heads, len, head_dim); normalize q
        and k if the layer has norms for them."""
        q = self._split_heads(x if self.q_proj is None else self.q_proj(x))
        if self.k_proj is not None:
            k = self._split_heads(self.k_proj(source))
        elif source is x:
            k = q
        else:
            k = self._split_heads(source if self.q_proj is None else self.q_proj(source))
        v = k if self.v_proj is None else self._split_heads(self.v_proj(source))
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q), self.k_norm(k), v
        return q, k, v

    def _split_heads(self, x: Tensor) -> Tensor:
        """Split (batch, len, heads * head_dim) into (batch, heads, len, head_dim)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _check_projections(self) -> None:
        """Raise ValueError for an unknown kind of projections, or one that the numbers of heads do
        not allow."""
        projections = self.projections
        num_heads = self.num_heads
        num_kv_heads = self.num_kv_heads
        if projections not in get_args(Projections):
            raise ValueError(
                f"Attention: projections must be one of {', '.join(get_args(Projections))}, "
                f"got {projections!r}."
            )
        if projections in ("q=k", "none") and num_kv_heads != num_heads:
            raise ValueError(
                f"Attention: projections={projections!r} needs equal numbers of key/value and "
                f"query heads, got {num_kv_heads} and {num_heads}."
            )
        if projections == "none" and num_heads * self.head_dim != self.embed_dim:
            raise ValueError(
                f"Attention: projections='none' needs num_heads * head_dim = embed_dim, "
                f"got {num_heads} * {self.head_dim} and {self.embed_dim}."
            )


class HeadNorm(nn.RMSNorm):
    """Normalize the channels of each head to a mean square of 1, times a gain for each channel.

    Computed in float32 at least, since under autocast heads are in 16 bits and gains are not.

    Shapes: x (..., head_dim) -> the same.
    """

    def forward(self, x: Float[Tensor, "*heads head_dim"]) -> Float[Tensor, "*heads head_dim"]:
        dtype = at_least_float32(x.dtype)
        gains = self.weight.to(dtype)
        normalized = F.rms_norm(x.to(dtype), tuple(self.normalized_shape), gains, self.eps)
        return normalized.to(x.dtype)


def check_norm_eps(caller: str, name: str, eps: Any) -> None:
    """Raise TypeError or ValueError unless `eps`, the argument of this name, is a finite number of
    at least 0."""
    check_number(caller, name, eps)
    if eps < 0:
        raise ValueError(f"{caller}: {name} must not be negative, got {eps}.")


def check_cross_attention(caller: str, encoding: PositionEncoding) -> None:
    """Raise ValueError for an encoding that cannot act in cross-attention, because it reads the
    order of the tokens between a key and its query (CoPE, FoX)."""
    if not encoding.claims.permutation_invariant:
        raise ValueError(
            f"{caller}: {type(encoding).__name__} reads the order of the tokens between a key and "
            "its query, and in cross-attention they stand in two sequences. Use another encoding "
            "there."
        )


def _check_sources(
    context: Any, context_positions: Any, memory: Any, memory_positions: Any
) -> None:
    """Raise ValueError if context or memory comes without its positions, or positions without it,
    or if both context and memory are given."""
    context_fits = (context is None) == (context_positions is None)
    memory_fits = (memory is None) == (memory_positions is None)
    has_both = context is not None and memory is not None
    if has_both or not context_fits or not memory_fits:
        raise ValueError(
            "Attention: context needs context_positions, or memory needs memory_positions."
        )
