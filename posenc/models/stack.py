"""The layers of Encoder, Decoder and EncoderDecoder, stacks of them, and their initial weights."""

import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from posenc.attend.attention_layer import Attention
from posenc.attend.cache import KVCache
from posenc.encodings import (
    PositionEncoding,
    encoding_of_all_layers,
    require_encoding,
    validated_embedding_positions,
)
from posenc.masks import Mask, sliding_window
from posenc.masks.mask import check_mask
from posenc.models.config import DecoderConfig
from posenc.positions.tokens import Positions, as_tensor, consecutive_positions, positions_from_mask


def build_norm(config: DecoderConfig) -> nn.Module:
    """Return the norm that the config names: RMSNorm or LayerNorm."""
    norm_class = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return norm_class(config.embed_dim, eps=config.norm_eps)


def build_head(config: DecoderConfig) -> nn.Linear | None:
    """Build the layer from hidden states to logits; None if the token embeddings do that."""
    if config.tie_embeddings:
        return None
    return nn.Linear(config.embed_dim, config.vocab_size, bias=False)


def build_attention(config: DecoderConfig) -> Attention:
    """Build attention with the config's sizes; the encoding is passed in each call."""
    return Attention(
        config.embed_dim,
        config.num_heads,
        config.num_kv_heads,
        head_dim=config.head_dim,
        bias=config.attention_bias,
        output_bias=config.output_bias,
        projections=config.projections,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
        dropout=config.dropout,
        impl=config.impl,
    )


class FeedForward(nn.Module):
    """Widen each token, apply the activation, and project back.

    out = down_proj(act(up_proj(x))), or down_proj(act(gate_proj(x)) * up_proj(x)) with a gate,
    where act is silu for "swiglu" and gelu for "geglu_tanh"

    Each linear layer is called as a module: hooks, adapters and parametrizations see every call.

    Shapes: x (..., embed_dim) -> the same; the hidden width is config.ffn_dim.
    Source: Shazeer 2020, arXiv:2002.05202, equation 6.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        embed_dim = config.embed_dim
        ffn_dim = config.ffn_dim
        bias = config.ffn_bias
        assert ffn_dim is not None  # DecoderConfig replaces None
        self.activation = config.activation
        self.gate_proj = nn.Linear(embed_dim, ffn_dim, bias=bias) if config.has_gate else None
        self.up_proj = nn.Linear(embed_dim, ffn_dim, bias=bias)
        self.down_proj = nn.Linear(ffn_dim, embed_dim, bias=bias)

    def forward(self, x: Float[Tensor, "*batch embed_dim"]) -> Float[Tensor, "*batch embed_dim"]:
        activate = _ACTIVATION_FUNCTIONS[self.activation]
        if self.gate_proj is not None:
            return self.down_proj(activate(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(activate(self.up_proj(x)))


_gelu_tanh = partial(F.gelu, approximate="tanh")
_ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}
"""The function of each activation; that of a gated one acts on the gate."""


@dataclass(frozen=True)
class Context:
    """Hold the source sequence to which a decoder attends in addition to its own tokens."""

    hidden: Float[Tensor, "batch context_len embed_dim"]
    """The encoder's output."""
    positions: Positions
    """Positions of the source's tokens."""
    mask: Mask | None
    """Mask that hides padding of the source; None hides nothing."""
    encoding: PositionEncoding
    """Position encoding of the attention to the context."""

    def for_layer(self, index: int) -> "Context":
        """Return the context with the encoding of the layer at this index."""
        return replace(self, encoding=self.encoding.for_layer(index))


class Layer(nn.Module):
    """Apply self-attention, attention to a context if `attends_to_context`, and a feed-forward,
    each with a norm.

    x + f(norm(x)) for norm_position "pre", norm(x + f(x)) for "post"

    Shapes: x (batch, len, embed_dim) -> the same.
    """

    def __init__(self, config: DecoderConfig, *, attends_to_context: bool = False) -> None:
        super().__init__()
        self.norm_first = config.norm_position == "pre"
        self.dropout = config.dropout
        self.attention = build_attention(config)
        self.attention_norm = build_norm(config)
        self.cross_attention = build_attention(config) if attends_to_context else None
        self.cross_norm = build_norm(config) if attends_to_context else None
        self.ffn = FeedForward(config)
        self.ffn_norm = build_norm(config)

    def forward(
        self,
        x: Float[Tensor, "batch len embed_dim"],
        positions: Positions,
        encoding: PositionEncoding,
        mask: Mask | None,
        cache: KVCache | None = None,
        context: Context | None = None,
        context_cache: KVCache | None = None,
    ) -> Float[Tensor, "batch len embed_dim"]:
        """Return x after the layer's sublayers.

        Args:
            positions: positions of the tokens.
            encoding: the encoding of this layer's self-attention.
            mask: which keys a query sees; None for all.
            cache: keys and values of earlier calls, to which those of x are appended.
            context: the source to attend to; None leaves out attention to a source.
            context_cache: keys and values of the source. The first call fills it, and later calls
                read it.
        """
        y = self._sublayer_input(self.attention_norm, x)
        y = self.attention(y, positions, cache=cache, mask=mask, encoding=encoding)
        x = self._add_sublayer_output(self.attention_norm, x, y)
        if context is not None:
            assert self.cross_attention is not None and self.cross_norm is not None
            y = self.cross_attention(
                self._sublayer_input(self.cross_norm, x),
                positions,
                context=context.hidden,
                context_positions=context.positions,
                cache=context_cache,
                mask=context.mask,
                encoding=context.encoding,
            )
            x = self._add_sublayer_output(self.cross_norm, x, y)
        return self._add_sublayer_output(
            self.ffn_norm, x, self.ffn(self._sublayer_input(self.ffn_norm, x))
        )

    def _sublayer_input(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return the input of a sublayer: norm(x) with pre-norm, otherwise x."""
        return norm(x) if self.norm_first else x

    def _add_sublayer_output(self, norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Add the output y of a sublayer, with dropout, to x; with post-norm apply the norm."""
        if self.dropout:
            y = F.dropout(y, self.dropout, self.training)
        return x + y if self.norm_first else norm(x + y)


class Stack(nn.Module):
    """Compute hidden states from embedded tokens.

    hidden = norm(layers(encoding.embed(x)))

    An encoding of scope "layer" is copied, with fresh parameters, for every layer.
    """

    default_mask: ClassVar[Mask]
    """Mask of a call that is given none."""

    def __init__(
        self,
        config: DecoderConfig,
        encoding: PositionEncoding | None,
        *,
        attends_to_context: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            Layer(config, attends_to_context=attends_to_context) for _ in range(config.num_layers)
        )
        self.norm = build_norm(config) if config.final_norm else None
        self.encoding = encoding_of_all_layers(encoding, config.num_layers)

    @property
    def last_norm(self) -> nn.Module:
        """Return the norm whose output is that of the stack."""
        return self.layers[-1].ffn_norm if self.norm is None else self.norm  # type: ignore[return-value]

    def hidden_states(
        self,
        x: Float[Tensor, "batch len embed_dim"],
        positions: Positions | None,
        mask: Mask,
        *,
        caches: Sequence[KVCache] | None = None,
        context: Context | None = None,
        context_caches: Sequence[KVCache] | None = None,
        length: int | None = None,
    ) -> Float[Tensor, "batch len embed_dim"]:
        """Return the hidden states (batch, len, embed_dim) of token embeddings x without positions.

        Args:
            positions: positions of the tokens; None: they continue those in the caches, or start at
                0.
            mask: which keys each query sees.
            caches: a cache for each layer, to which the tokens are appended.
            context: the source to attend to; None for none.
            context_caches: keys and values of the source, a cache for each layer.
            length: the current length, for encodings whose frequencies depend on it.
        """
        caller = type(self).__name__
        num_cached = caches[0].length if caches else 0
        check_mask(caller, mask, x.shape[0], x.shape[1], num_cached + x.shape[1])
        if positions is None:
            positions = default_positions(x, num_cached, self.encoding)
        _check_whole_length(caller, length)
        positions = validated_embedding_positions(
            caller, x, positions, num_axes=self.encoding.claims.num_axes
        )
        encoding = self.encoding.prepare(positions, length)
        mask_by_layer = self._mask_by_layer(mask, positions, num_cached, encoding)
        x = encoding.embed(x, as_tensor(positions, x.device))
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        cache_by_layer = _caches_by_layer(caches, len(self.layers))
        context_cache_by_layer = _caches_by_layer(context_caches, len(self.layers))
        # A cache would be filled twice.
        has_caches = caches is not None or context_caches is not None
        recomputes = self.config.recompute and torch.is_grad_enabled() and not has_caches
        with ExitStack() as restoring_on_error:  # if a layer fails, all caches are restored
            for cache in (*(caches or ()), *(context_caches or ())):
                restoring_on_error.enter_context(cache.unchanged_on_error())
            for index, layer in enumerate(self.layers):
                run = partial(checkpoint, layer, use_reentrant=False) if recomputes else layer
                x = run(
                    x,
                    positions,
                    encoding.for_layer(index),
                    mask_by_layer[index],
                    cache_by_layer[index],
                    None if context is None else context.for_layer(index),
                    context_cache_by_layer[index],
                )
        return x if self.norm is None else self.norm(x)

    def _mask_by_layer(
        self, mask: Mask, positions: Tensor | range, num_cached: int, encoding: PositionEncoding
    ) -> list[Mask]:
        """Return the mask of each layer, with its window in it, bound as `bind_mask` does. Layers
        with the same window share one."""
        windows = self.config.layer_windows or [None] * len(self.layers)
        mask_by_window: dict[int | None, Mask] = {}
        for window in set(windows):
            mask_in_window = mask if window is None else mask & sliding_window(window)
            mask_by_window[window] = bind_mask(mask_in_window, positions, num_cached, encoding)
        return [mask_by_window[window] for window in windows]


def _check_whole_length(caller: str, length: Any) -> None:
    """Raise TypeError unless `length` is None, an int, or the torch.SymInt that torch.compile makes
    of one."""
    if not isinstance(length, int | torch.SymInt | None):
        raise TypeError(f"{caller}: length must be a whole number of tokens, got {length!r}.")


def _caches_by_layer(caches: Sequence[KVCache] | None, num_layers: int) -> Sequence[KVCache | None]:
    """Return the cache of each layer. If `caches` is None, return a None for each layer."""
    return [None] * num_layers if caches is None else caches


def default_positions(
    tokens: Shaped[Tensor, "batch len *channels"],
    num_cached: int,
    encoding: PositionEncoding,
    valid: Shaped[Tensor, "batch len"] | None = None,
) -> Int[Tensor, "len *axes"] | Int[Tensor, "batch len *axes"] | range:
    """Return the positions num_cached, num_cached + 1, ... of tokens. If the encoding reads several
    components, all are equal. Rows have the same positions, unless `valid` is given.

    tokens: (batch, len, ...), of which only the sizes and the device are read.
    num_cached: number of tokens in the caches, which come before these.
    valid: (batch, len), False for padding, which is not counted.
    """
    if valid is None:
        positions = consecutive_positions(num_cached, tokens.shape[1], tokens.device)
    else:
        positions = positions_from_mask(valid, start=num_cached)
    num_axes = encoding.claims.num_axes
    if num_axes == 1:
        return positions
    positions = as_tensor(positions, tokens.device)[..., None]
    return positions.expand(*positions.shape[:-1], num_axes).contiguous()


def bind_mask(
    mask: Mask, positions: Tensor | range, num_cached: int, encoding: PositionEncoding
) -> Mask:
    """Return the mask bound to the tokens' positions, so that layers need not do that in each call.

    Return it unchanged if tokens are in a cache, and for positions of several components, which
    have no order that a mask could compare: attention then binds it in each call.
    """
    if mask.bound or num_cached or encoding.claims.num_axes > 1:
        return mask
    return mask.bind(positions, positions)


def check_caches(caller: str, caches: Sequence[KVCache] | None, num_needed: int) -> None:
    """Raise TypeError unless `caches` is None or a list of KVCaches, ValueError unless these are
    `num_needed` many. caller: the model, for the message."""
    if caches is None:
        return
    if not isinstance(caches, Sequence) or not all(isinstance(c, KVCache) for c in caches):
        raise TypeError(
            f"{caller}: caches must be a list of KVCaches. Make them with new_caches()."
        )
    if len(caches) != num_needed:
        raise ValueError(
            f"{caller}: caches must be one per layer ({num_needed}), got {len(caches)}. "
            "Make them with new_caches()."
        )


def require_bidirectional(caller: str, encoding: PositionEncoding) -> None:
    """Raise ValueError for an encoding that needs causal attention."""
    if require_encoding(caller, encoding).claims.causal_only:
        raise ValueError(
            f"{caller}: {type(encoding).__name__} works in causal attention only: if a query "
            "sees later tokens, it is undefined or ignores their order. Use another encoding, "
            "or build it with ModelShape(causal=False) if it has a bidirectional form."
        )


def draw_initial_weights(
    model: nn.Module,
    config: DecoderConfig,
    seed: int | None = None,
    *,
    tied_to: nn.Module | None = None,
) -> None:
    """Draw all weights of `model` except those of position encodings.

    Each parameter is drawn on the CPU by its own generator, seeded with the seed and the
    parameter's name, so that models with different encodings, or on different devices, start from
    the same weights.

    Token embeddings have unit variance, like sinusoids and the output of layers. If the head is
    tied to them, the last norm's gain starts at embed_dim^-3/4, so that logits start small; only a
    token's own logit, which its embedding in the residual stream favours, starts at embed_dim^1/4.
    The forward pass needs no multiplier. q and k get a standard deviation of fan_in^-1/2
    head_dim^-1/4: scores start at size 1 without a division by sqrt(head_dim), as with
    T5Bias(unscaled=True), and below 1 with it. Layers that add to the residual stream are divided
    by the square root of the number of additions.

    Args:
        model: the model, whose parameters are set.
        config: its sizes and choices.
        seed: None means the one given to torch.manual_seed.
        tied_to: the last norm, if the head is tied to the token embeddings; None if it is not.
    """
    seed = torch.initial_seed() if seed is None else seed
    std_factors = {
        "q_proj": config.shape().head_dim ** -0.25,  # type: ignore[operator]
        "k_proj": config.shape().head_dim ** -0.25,  # type: ignore[operator]
        "o_proj": (2 * config.num_layers) ** -0.5,
        "down_proj": (2 * config.num_layers) ** -0.5,
        # The last norm gives numbers of size 1, so logits start with a standard deviation of 1/4:
        # the first loss is near that of equal probabilities, log(vocab_size). 1/4 is chosen, not
        # derived.
        "head": 0.25,
    }
    # Encodings draw their own parameters, in their reset_parameters.
    skipped_prefixes = tuple(
        f"{name}." for name, m in model.named_modules() if isinstance(m, PositionEncoding)
    )
    for name, module in model.named_modules():
        if f"{name}.".startswith(skipped_prefixes):
            continue
        if isinstance(module, nn.Linear):
            # A variance of 1 / fan_in keeps the size of numbers; `gains` has what differs.
            std = std_factors.get(name.rpartition(".")[2], 1.0) * module.in_features**-0.5
            _fill_weight(module.weight, std, f"{name}.weight", seed)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif name.rpartition(".")[2] == "tokens":
            _fill_weight(module.weight, 1.0, f"{name}.weight", seed)  # type: ignore[arg-type]
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.reset_parameters()
    if tied_to is not None:
        nn.init.constant_(tied_to.weight, config.embed_dim**-0.75)  # type: ignore[arg-type]


def _fill_weight(weight: Tensor, std: float, name: str, seed: int) -> None:
    """Fill a weight with normal numbers of mean 0 and standard deviation `std`. They depend only on
    its name, its shape and the seed, so that models with different encodings begin with the same
    weights."""
    if weight.is_meta:  # it has no memory yet; `reset_parameters` is called once it has
        return
    # A checksum, because torch's CPU generator reads 32 bits of its seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
    with torch.no_grad():
        weight.copy_(values * std)
