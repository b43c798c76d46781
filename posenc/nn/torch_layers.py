"""torch.nn.MultiheadAttention and TransformerEncoderLayer with a position encoding."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import check_count, check_probability, explain_misfits
from posenc.attend.attention import attention, attention_weights
from posenc.encodings import (
    ModelShape,
    PositionEncoding,
    build_if_named,
    require_attention_encoding,
)
from posenc.masks import Mask, causal, padding
from posenc.positions.tokens import as_range, as_tensor, consecutive_positions, positions_from_mask


def _do_nothing_before_call(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Do nothing. A forward pre-hook: torch's encoder layer calls an attention that has one,
    instead of only reading its weights."""


class MultiheadAttention(nn.MultiheadAttention):
    """Replace torch.nn.MultiheadAttention by attention with a position encoding.

    Parameters have the same names and shapes, so that a state dict of torch's layer loads; the
    encoding adds its own. Without an encoding the results are torch's.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: torch's.
        encoding: the position encoding, or its name as `posenc.create` reads it; None for none.

    It differs from torch's layer in two ways: a query that sees no key gives zeros, not NaN, and
    returned weights are those before dropout.

    Raises: ValueError for add_bias_kv and add_zero_attn, whose keys have no position.

    >>> stock = torch.nn.MultiheadAttention(64, 4)
    >>> mine = posenc.nn.MultiheadAttention(64, 4, encoding=posenc.RoPE(16, interleaved=False))
    >>> mine.load_state_dict(stock.state_dict())
    <All keys matched successfully>
    """

    @explain_misfits
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        encoding: PositionEncoding | str | None = None,
    ) -> None:
        if add_bias_kv or add_zero_attn:
            raise ValueError(
                "MultiheadAttention: add_bias_kv and add_zero_attn append a key that has no "
                "position; leave them out."
            )
        check_count("MultiheadAttention", "embed_dim", embed_dim)
        check_count("MultiheadAttention", "num_heads", num_heads)
        check_probability("MultiheadAttention", "dropout", dropout)
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        shape = ModelShape(embed_dim, num_heads)
        built_encoding = build_if_named(
            "MultiheadAttention", encoding, shape, unknown_fields=("train_length", "causal")
        )
        self.encoding = require_attention_encoding("MultiheadAttention", built_encoding)
        # In evaluation without gradients torch's own encoder layer computes from the weights of its
        # attention and never calls it, unless hooks are attached.
        self.register_forward_pre_hook(_do_nothing_before_call)

    @explain_misfits
    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        positions: Tensor | range | None = None,
        key_positions: Tensor | range | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend like torch's layer: return the output and the weights, in torch's shapes.

        If key is the same tensor as query, this is self-attention, and key_positions default to
        `positions`. Otherwise both are counted from 0. Tokens that key_padding_mask hides are not
        counted: keys, and in self-attention queries. With is_causal, attn_mask is assumed to be
        causal and not read.

        Args:
            positions, key_positions: positions of queries and of keys, (len) or (batch, len).
        """
        if any(x.is_nested for x in (query, key, value)):
            raise ValueError("MultiheadAttention: nested tensors are not supported; pad the rows.")
        is_batched = query.ndim == 3
        is_self_attention = key is query
        query = self._to_batch_first(query, is_batched)
        key = self._to_batch_first(key, is_batched)
        value = self._to_batch_first(value, is_batched)
        if key_padding_mask is not None and not is_batched:
            key_padding_mask = key_padding_mask[None]
        if positions is None:
            positions = _positions_without_padding(
                query, key_padding_mask if is_self_attention else None
            )
        if key_positions is None:
            key_positions = (
                positions
                if is_self_attention
                else _positions_without_padding(key, key_padding_mask)
            )
        sizes = (query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        mask = self._build_mask(
            attn_mask, key_padding_mask, sizes, is_causal, positions, key_positions
        )
        out, weights = self._attend(
            query, key, value, positions, key_positions, mask, is_self_attention, need_weights
        )
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.to(out.dtype)
            weights = weights if is_batched else weights[0]
        return self._to_call_layout(out, is_batched), weights

    def _to_batch_first(self, x: Tensor, is_batched: bool) -> Tensor:
        """Return query, key or value of a call, in torch's layouts, as (batch, len, dim). batched:
        False for (len, dim)."""
        if not is_batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _to_call_layout(self, out: Tensor, is_batched: bool) -> Tensor:
        """Return an output (batch, len, embed_dim) in the layout of the call, the inverse of
        `_to_batch_first`."""
        if not is_batched:
            return out[0]
        return out if self.batch_first else out.transpose(0, 1)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor | range,
        key_positions: Tensor | range,
        mask: Mask | None,
        is_self_attention: bool,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (batch, len, embed_dim) of attention for query, key and value (batch,
        len, dim), and the weights of each head (batch, heads, q_len, kv_len), or None unless
        `need_weights`."""
        kv_state = self.encoding.state(key, as_tensor(key_positions, key.device))
        if is_self_attention and key_positions is positions:
            q_state = kv_state
        else:
            q_state = self.encoding.state(query, as_tensor(positions, query.device))
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        attention_arguments: dict[str, Any] = {
            "q_positions": positions,
            "kv_positions": key_positions,
            "q_state": q_state,
            "kv_state": kv_state,
            "mask": mask,
        }
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, self.encoding, dropout_p=dropout, **attention_arguments)
        assert isinstance(out, Tensor)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        weights = (
            attention_weights(q, k, self.encoding, **attention_arguments) if need_weights else None
        )
        return out, weights

    def _build_mask(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        sizes: tuple[int, int, int, int],
        is_causal: bool,
        positions: Tensor | range,
        key_positions: Tensor | range,
    ) -> Mask | None:
        """Return the mask of a call, or None if nothing is hidden. It is bound to the positions,
        unless they have several components.

        sizes: batch, num_heads, q_len, kv_len.
        """
        q_range = as_range(positions)
        positions_follow_order = q_range is not None and q_range == as_range(key_positions)
        mask = mask_from_torch(
            attn_mask, key_padding_mask, sizes, is_causal, positions_follow_order
        )
        if mask is not None and self.encoding.claims.num_axes == 1:
            return mask.bind(positions, key_positions)
        return mask

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (batch, len, embed_dim), by one matrix product if all
        three are projected from one tensor."""
        if self._qkv_same_embed_dim:
            if key is query and value is query:
                return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            weights: tuple[Tensor, ...] = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projections = zip((query, key, value), weights, biases, strict=True)
        return tuple(F.linear(x, weight, bias) for x, weight, bias in projections)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Split (batch, len, embed_dim) into (batch, num_heads, len, head_dim)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


def _positions_without_padding(x: Tensor, padding: Tensor | None) -> Tensor | range:
    """Return the positions of the tokens of x (batch, len, embed_dim): 0, 1, ... in each row,
    without counting padding. padding: (batch, len), True or -inf for padding; None for none."""
    if padding is None:
        return consecutive_positions(0, x.shape[1], x.device)
    is_no_padding = padding == 0 if padding.is_floating_point() else ~padding
    if bool(is_no_padding.all()):
        return consecutive_positions(0, x.shape[1], x.device)
    return positions_from_mask(is_no_padding)


def mask_from_torch(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sizes: tuple[int, int, int, int],
    is_causal: bool,
    positions_follow_order: bool = True,
) -> Mask | None:
    """Return torch's two masks as one posenc mask; None if nothing is hidden.

    attn_mask: (q_len, kv_len) or (batch * num_heads, q_len, kv_len); key_padding_mask: (batch,
    kv_len). In both True or -inf hides a key. With is_causal, attn_mask is assumed to be causal and
    not read.
    sizes: batch, num_heads, q_len, kv_len. positions_follow_order: True if positions grow with the
    index of tokens, so that a causal mask may compare them.
    """
    batch, _, q_len, kv_len = sizes
    masks_given: list[Mask] = []
    if is_causal:
        if q_len != kv_len:
            raise ValueError(f"is_causal needs as many queries as keys, got {q_len} and {kv_len}.")
        causal_by_index = Mask(lambda pairs: pairs.q_idx >= pairs.kv_idx, separates_documents=False)
        masks_given.append(causal if positions_follow_order else causal_by_index)
    elif attn_mask is not None:
        masks_given.append(_mask_from_attn_mask(attn_mask, sizes))
    if key_padding_mask is not None:
        if key_padding_mask.shape != (batch, kv_len):
            raise ValueError(
                f"key_padding_mask must be ({batch}, {kv_len}), got "
                f"{tuple(key_padding_mask.shape)}."
            )
        masks_given.append(padding(~_hidden_keys("key_padding_mask", key_padding_mask)))
    if len(masks_given) == 2:
        return masks_given[0] & masks_given[1]
    return masks_given[0] if masks_given else None


def _mask_from_attn_mask(attn_mask: Tensor, sizes: tuple[int, int, int, int]) -> Mask:
    """Return attn_mask (q_len, kv_len) or (batch * num_heads, q_len, kv_len), in which True or -inf
    hides a key, as a Mask. sizes: batch, num_heads, q_len, kv_len."""
    batch, num_heads, q_len, kv_len = sizes
    visible = ~_hidden_keys("attn_mask", attn_mask)
    if visible.shape == (q_len, kv_len):
        return Mask(lambda pairs: visible[pairs.q_idx, pairs.kv_idx])
    if visible.shape != (batch * num_heads, q_len, kv_len):
        raise ValueError(
            f"attn_mask must be ({q_len}, {kv_len}) or ({batch * num_heads}, {q_len}, {kv_len}), "
            f"got {tuple(attn_mask.shape)}."
        )
    visible_by_head = visible.view(batch, num_heads, q_len, kv_len)
    return Mask(lambda pairs: visible_by_head[pairs.batch, pairs.head, pairs.q_idx, pairs.kv_idx])


def _hidden_keys(name: str, mask: Tensor) -> Tensor:
    """Return a mask of bools, or of 0 and -inf, as bools, True for hidden keys.

    Raises: ValueError for other numbers, which would be a bias; the message begins with `name`.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be bool or float, got {mask.dtype}.")
    is_hidden = mask == -torch.inf
    if not bool((is_hidden | (mask == 0)).all()):
        raise ValueError(
            f"{name} has numbers other than 0 and -inf: a bias, which would be lost. Pass it as an "
            "encoding, such as posenc.DistanceBias."
        )
    return is_hidden


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Replace torch.nn.TransformerEncoderLayer by one whose attention has a position encoding.

    Its state dict is torch's plus the encoding's parameters. In torch.nn.TransformerEncoder each
    layer gets a copy of the encoding. It never runs torch's fused inference kernel, which has no
    positions.

    Args:
        d_model, nhead, ...: torch's.
        encoding: the position encoding of the attention, or its name; None for none.

    >>> layer = posenc.nn.TransformerEncoderLayer(
    ...     64, 4, batch_first=True, encoding=posenc.ALiBi(num_heads=4))
    >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> encoder(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    @explain_misfits
    def __init__(
        self,
        d_model: int,
        nhead: int,
        *arguments: Any,
        encoding: PositionEncoding | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, nhead, *arguments, **options)
        torch_attention = self.self_attn
        self.self_attn = MultiheadAttention(
            d_model,
            nhead,
            dropout=torch_attention.dropout,
            bias=torch_attention.in_proj_bias is not None,
            batch_first=torch_attention.batch_first,
            device=torch_attention.out_proj.weight.device,
            dtype=torch_attention.out_proj.weight.dtype,
            encoding=encoding,
        )
        # Keeps TransformerEncoder from converting rows to nested tensors.
        self.activation_relu_or_gelu = 0

    @explain_misfits
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run the layer like torch's. positions: (len) or (batch, len); by default tokens are
        counted from 0, without padding."""

        def attend(x: Tensor) -> Tensor:
            """Return the output of self-attention for x, with dropout."""
            out, _ = self.self_attn(
                x,
                x,
                x,
                key_padding_mask=src_key_padding_mask,
                need_weights=False,
                attn_mask=src_mask,
                is_causal=is_causal,
                positions=positions,
            )
            return self.dropout1(out)

        def feed_forward(x: Tensor) -> Tensor:
            """Return the output of the feed-forward for x, with dropout."""
            hidden = self.dropout(self.activation(self.linear1(x)))
            return self.dropout2(self.linear2(hidden))

        if self.norm_first:
            src = src + attend(self.norm1(src))
            return src + feed_forward(self.norm2(src))
        src = self.norm1(src + attend(src))
        return self.norm2(src + feed_forward(src))
