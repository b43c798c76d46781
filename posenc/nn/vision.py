"""Attention of timm's Vision Transformers with a position encoding."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posenc.arguments import explain_misfits
from posenc.attend.attention import attention
from posenc.attend.trial_weights import without_zero_weights
from posenc.encodings import PositionEncoding, encoding_of_all_layers, require_attention_encoding
from posenc.masks import Mask, causal
from posenc.positions.grids import grid, normalized_grid
from posenc.positions.tokens import as_tensor, consecutive_positions, has_no_place

_SEPARATE_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_SUBMODULES = (
    "qkv",
    *_SEPARATE_PROJECTIONS,
    "q_norm",
    "k_norm",
    "attn_drop",
    "norm",
    "gate",
    "proj",
    "proj_drop",
)
_BIASES = ("q_bias", "v_bias")
"""Parameters of Eva's attention, whose keys have no bias."""
_FORWARD_ARGUMENTS = ("self", "x", "attn_mask", "is_causal", "rope")
"""Names of the arguments of forward of timm's Attention, AttentionRope and EvaAttention."""


@dataclass(frozen=True)
class _GridPositions:
    """Compute the positions of a picture's tokens from patch_embed.grid_size.

    The size is read at each call, because the model's set_input_size changes it.
    """

    patch_embed: Any
    num_class_tokens: int
    normalized: bool

    def compute(self, device: torch.device | None = None) -> Tensor:
        """Return the position of each token, (len, 2): (row, column), or its coordinates from -1 to
        1 if `normalized`. Class tokens get NaN."""
        height, width = self.patch_embed.grid_size
        make_grid = normalized_grid if self.normalized else grid
        return make_grid(height, width, class_tokens=self.num_class_tokens, device=device)


class VisionAttention(nn.Module):
    """Replace timm's Attention, AttentionRope or EvaAttention by one with a position encoding.

    It uses the modules of `attention`, under the same names, so that the state dict stays the same.
    If `attention` rotates queries and keys, the encoding takes the place of that rotation.

    Args:
        attention: a timm.layers.Attention, or a module with the same submodules.
        encoding: the position encoding; None for none.
        positions: positions of the tokens, (len) or (len, axes); None counts tokens from 0.

    Raises: TypeError for a module with other submodules, parameters or arguments of forward;
    ValueError for one that has the same parts but computes something else.
    """

    qkv: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    q_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Any
    k_norm: Any
    attn_drop: Any
    norm: Any
    gate: Any
    proj: Any
    proj_drop: Any
    positions: Tensor | None

    @explain_misfits
    def __init__(
        self,
        attention: Any,
        encoding: PositionEncoding | None = None,
        positions: Tensor | None = None,
    ) -> None:
        super().__init__()
        if difference := _difference_from_timm(attention):
            raise TypeError(
                "VisionAttention: expected an attention like timm.layers.Attention, with one layer "
                f"qkv or three, got a {type(attention).__name__} {difference}."
            )
        for name in (*_SUBMODULES, *_BIASES):
            setattr(self, name, getattr(attention, name, None))
        self.num_heads = attention.num_heads
        self.num_kv_heads = getattr(attention, "num_kv_heads", attention.num_heads)
        self.scale = attention.scale
        self.encoding = PositionEncoding()
        self.register_buffer("positions", None, persistent=False)
        self._grid: _GridPositions | None = None
        self.training = attention.training
        if not isinstance(attention, VisionAttention):  # which has an encoding of its own
            _check_computes_same(attention, self)
        self.encoding = require_attention_encoding("VisionAttention", encoding)
        self.positions = positions

    @explain_misfits
    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Any = None,
    ) -> Tensor:
        """Return the output of attention for x (batch, len, dim), in the same shape. attn_mask:
        booleans, True for visible tokens. rope: the model's own rotation, which is not used."""
        q, k, v = self._project(x)
        q = self._apply_norm(self.q_norm, q)
        k = self._apply_norm(self.k_norm, k)
        positions = self._token_positions(x)
        state = self.encoding.state(x, as_tensor(positions, x.device))
        applies_dropout = self.training and isinstance(self.attn_drop, nn.Dropout)
        out = attention(
            q,
            k,
            v,
            self.encoding,
            q_positions=positions,
            kv_positions=positions,
            q_state=state,
            kv_state=state,
            mask=_mask_from_timm(attn_mask, is_causal),
            dropout_p=self.attn_drop.p if applies_dropout else 0.0,
            scale=self._attention_scale(q.shape[-1]),
        )
        assert isinstance(out, Tensor)
        out = self._apply_norm(self.norm, out.transpose(1, 2).flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        out = self.proj(out)
        return out if self.proj_drop is None else self.proj_drop(out)

    def _project(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values of x (batch, len, dim), each (batch, heads, len,
        head_dim)."""
        if self.qkv is None:
            parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        else:
            fused = self.qkv(x)
            if self.q_bias is not None and self.v_bias is not None:
                no_key_bias = torch.zeros_like(self.q_bias)
                fused = fused + torch.cat([self.q_bias, no_key_bias, self.v_bias])
            parts = list(fused.chunk(3, dim=-1))
        heads_of_parts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return [
            part.unflatten(-1, (num_heads, -1)).transpose(1, 2)
            for part, num_heads in zip(parts, heads_of_parts, strict=True)
        ]

    def _attention_scale(self, head_dim: int) -> float:
        """Return the factor of q . k: timm's, multiplied by the encoding's factor and divided by
        the usual one, 1 / sqrt(head_dim). So it is timm's for an encoding with the usual factor."""
        usual_scale = head_dim**-0.5
        return self.scale / usual_scale * self.encoding.scale(head_dim)

    def _token_positions(self, x: Tensor) -> Tensor | range:
        """Return the position of each token of x: from the grid of patches, or as given to the
        constructor, or 0, 1, 2, ... Raise ValueError if x has another number of tokens."""
        if self._grid is not None:
            positions = self._grid.compute(x.device)
        elif self.positions is not None:
            positions = self.positions
        else:
            return consecutive_positions(0, x.shape[1], x.device)
        if len(positions) != x.shape[1]:
            raise ValueError(
                f"VisionAttention: made for {len(positions)} tokens, got {x.shape[1]}: the "
                "picture has another size. Attach again with its positions."
            )
        return positions

    @staticmethod
    def _apply_norm(norm: nn.Module | None, x: Tensor) -> Tensor:
        """Return x after a norm, or as it is without one."""
        return x if norm is None else norm(x)


@explain_misfits
def attach_to_vit(
    model: Any, encoding: PositionEncoding | None, positions: Tensor | None = None
) -> Any:
    """Give all attentions of a Vision Transformer of timm the encoding, and return the model.

    The model's own position embeddings stay; build it with pos_embed="none" to have none. A
    rotation of its own (Eva, DINOv3) goes: the encoding takes its place, also if it is None.
    AxialRoPE.dinov3(head_dim) is the rotation of timm's DINOv3.

    Args:
        model: a model with `blocks`, each with an `attn` like timm's.
        encoding: the position encoding. One of scope "layer" is copied, with fresh parameters, for
            every block.
        positions: positions of the tokens. None counts tokens. For an encoding with two components
            None means the patches' rows and columns, or their normalized coordinates if the
            encoding claims these (AxialRoPE.dinov3), and NaN for class and register tokens; they
            follow the model's set_input_size.

    Raises: TypeError or ValueError, before anything is changed, for a model with other attention or
    with windows, and for one whose tokens have no fixed position: with pictures of any size or
    dropped patches.
    """
    blocks = list(getattr(model, "blocks", ()))
    if not blocks or not all(hasattr(block, "attn") for block in blocks):
        raise TypeError(
            f"attach_to_vit: {type(model).__name__} has no blocks with an attn, as timm's Vision "
            "Transformers have; those with windows, such as Swin, have stages."
        )
    model_encoding = encoding_of_all_layers(
        require_attention_encoding("attach_to_vit", encoding), len(blocks)
    )
    attentions = []
    for index, block in enumerate(blocks):
        attentions.append(
            _build_attention(block, model_encoding.for_layer(index), model, positions)
        )
    # All are built before the first is put in, so that an error changes nothing.
    for block, attn in zip(blocks, attentions, strict=True):
        block.attn = attn
    return model


def _build_attention(
    block: Any, encoding: PositionEncoding, model: Any, positions: Tensor | None
) -> VisionAttention:
    """Return the attention that replaces that of a block. Raise TypeError or ValueError if the
    encoding reads positions and the model's tokens have no fixed ones."""
    replacement = VisionAttention(block.attn, encoding, positions)
    has_several_axes = encoding.claims.num_axes > 1
    ignores_places = type(encoding) is PositionEncoding and not has_several_axes
    if not ignores_places:
        _check_token_places(model, encoding, positions)
    if has_several_axes and positions is None:
        is_normalized = encoding.claims.coordinates == "normalized"
        replacement._grid = _GridPositions(
            model.patch_embed, model.num_prefix_tokens, is_normalized
        )
    return replacement


def _difference_from_timm(attention: Any) -> str:
    """Return in words how a module differs from timm's Attention, such as "without qkv"; "" if it
    does not."""
    has_qkv = getattr(attention, "qkv", None) is not None
    projections = [getattr(attention, name, None) for name in _SEPARATE_PROJECTIONS]
    if not has_qkv and None in projections:
        return "without qkv"
    for name in ("proj", "num_heads", "scale"):
        if getattr(attention, name, None) is None:
            return f"without {name}"
    own_modules = ("encoding",) if isinstance(attention, VisionAttention) else ()
    for name, _ in attention.named_children():
        if name not in (*_SUBMODULES, *own_modules):
            return f"with {name}"
    for name in inspect.signature(type(attention).forward).parameters:
        if name not in _FORWARD_ARGUMENTS:
            return f"whose forward takes {name}"
    dropout_layer = getattr(attention, "attn_drop", None)
    if not isinstance(dropout_layer, nn.Dropout | nn.Identity | None):
        return f"whose attn_drop is a {type(dropout_layer).__name__}"
    own_parameters = [name for name, _ in attention.named_parameters(recurse=False)]
    if own_parameters not in ([], list(_BIASES)):
        return f"with parameters of its own, such as {own_parameters[0]}"
    return ""


@torch.no_grad()
def _check_computes_same(attention: nn.Module, replacement: VisionAttention) -> None:
    """Raise ValueError unless timm's module and its replacement compute the same from a few random
    tokens. Nothing is checked if the weights have no values yet (device "meta").

    attention: timm's module. replacement: built from it, still without an encoding.
    """
    first_projection = attention.q_proj if attention.qkv is None else attention.qkv
    width = getattr(first_projection, "in_features", None)
    weights = [p for p in attention.parameters() if p.is_floating_point()]
    if width is None or not weights or weights[0].is_meta:
        return
    x = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).to(weights[0])
    name = type(attention).__name__
    was_training = {module: module.training for module in attention.modules()}
    attention.eval()
    replacement.eval()
    try:
        # A last layer of zeros would make any two attentions equal.
        with without_zero_weights(attention):
            expected = attention.forward(x)
            actual = replacement(x)
    except Exception as error:
        raise ValueError(
            f"VisionAttention: a {name} cannot be called with tokens (batch, len, {width}), as "
            f"timm.layers.Attention is: {' '.join(str(error).split())[:200]}"
        ) from error
    finally:
        replacement.training = was_training[attention]
        for module, was_in_training in was_training.items():
            module.training = was_in_training
    # Roundings of other kernels, in low precision more; both numbers are chosen, not derived.
    max_fraction = max(1e-3, 50 * torch.finfo(x.dtype).eps)
    has_same_shape = actual.shape == expected.shape
    if not has_same_shape or not _is_near(actual, expected, max_fraction):
        raise ValueError(
            f"VisionAttention: a {name} has the parts of timm.layers.Attention and computes "
            "something else from them."
        )


def _is_near(actual: Tensor, expected: Tensor, max_fraction: float) -> bool:
    """Return True if no element differs by more than `max_fraction` of the largest expected
    element; False for NaN."""
    return bool((actual - expected).abs().max() <= max_fraction * expected.abs().max())


def _check_token_places(model: Any, encoding: PositionEncoding, positions: Tensor | None) -> None:
    """Raise TypeError or ValueError unless each token of the model has a fixed position that the
    encoding can read. positions: those that the caller gave, or None."""
    name = type(model).__name__
    if getattr(getattr(model, "patch_drop", None), "prob", 0):
        raise ValueError(
            f"attach_to_vit: {name} drops patches in training, and its attention does not see "
            "which are left. Build it with patch_drop_rate=0, or set model.patch_drop to "
            "torch.nn.Identity()."
        )
    patch_embed: Any = getattr(model, "patch_embed", None)
    has_grid = hasattr(patch_embed, "grid_size") and hasattr(model, "num_prefix_tokens")
    has_one_size = (
        has_grid and patch_embed.grid_size and getattr(patch_embed, "strict_img_size", True)
    )
    if positions is not None:
        _check_explicit_positions(
            model, encoding, positions, patch_embed.grid_size if has_one_size else None
        )
        return
    if not has_grid:
        raise TypeError(
            f"attach_to_vit: {name} has no patch_embed with a grid_size and no num_prefix_tokens, "
            "as timm's VisionTransformer has, so the places of its tokens are unknown. Give "
            "positions=, if all its pictures have one size."
        )
    num_axes = encoding.claims.num_axes
    if num_axes > 2:
        raise ValueError(
            f"attach_to_vit: {type(encoding).__name__} takes {num_axes} components, and a patch "
            "has a row and a column. Give positions=."
        )
    if num_axes == 2 and not has_one_size:
        raise ValueError(
            f"attach_to_vit: {name} takes pictures of any size, and its attention does not see the "
            "grid of patches. Build it with dynamic_img_size=False and call its set_input_size "
            "for another size."
        )


def _check_explicit_positions(
    model: Any, encoding: PositionEncoding, positions: Tensor, grid_size: Sequence[int] | None
) -> None:
    """Raise ValueError unless `positions` has the shape that the encoding reads, and a position for
    each token of the model. grid_size: (rows, columns) of patches; None: not fixed, so the number
    of positions is not checked."""
    num_axes = encoding.claims.num_axes
    expected_shape = f"(len, {num_axes})" if num_axes > 1 else "(len)"
    if positions.ndim != 1 + (num_axes > 1) or (num_axes > 1 and positions.shape[-1] != num_axes):
        raise ValueError(
            f"attach_to_vit: positions for {type(encoding).__name__} must have shape "
            f"{expected_shape}, got {tuple(positions.shape)}."
        )
    if grid_size is None:
        return
    num_tokens = model.num_prefix_tokens + math.prod(grid_size)
    if len(positions) != num_tokens:
        raise ValueError(
            f"attach_to_vit: {type(model).__name__} has {num_tokens} tokens, "
            f"{model.num_prefix_tokens} of them before the patches; got {len(positions)} positions."
        )
    if num_axes > 1 and has_no_place(positions[model.num_prefix_tokens :]).any():
        raise ValueError(
            f"attach_to_vit: the last {math.prod(grid_size)} tokens of {type(model).__name__} are "
            "patches, and some of them are without a place (NaN), as class tokens are. Those come "
            "first: posenc.positions.grid(height, width, "
            f"class_tokens={model.num_prefix_tokens})."
        )


def _mask_from_timm(attn_mask: Tensor | None, is_causal: bool) -> Mask | None:
    """Return timm's two arguments as one mask; None if all tokens see one another.

    attn_mask: booleans of up to four axes that broadcast to (batch, heads, len, len), True for
    visible tokens. Raises: ValueError for numbers.
    """
    if attn_mask is None:
        return causal if is_causal else None
    if attn_mask.dtype != torch.bool:
        raise ValueError(
            f"VisionAttention: attn_mask must be bool, True where a token is seen, got "
            f"{attn_mask.dtype}: numbers would be a bias, which only an encoding adds."
        )
    mask_of_four_axes = attn_mask.view(*(1,) * (4 - attn_mask.ndim), *attn_mask.shape)

    def is_visible(pairs: Any) -> Tensor:
        """Return True where the mask, and with is_causal the order, shows the key to the query."""
        batch = pairs.batch % mask_of_four_axes.shape[0]  # 0 where one mask is for all
        head = pairs.head % mask_of_four_axes.shape[1]
        q_idx = pairs.q_idx % mask_of_four_axes.shape[2]
        is_seen = mask_of_four_axes[batch, head, q_idx, pairs.kv_idx]
        return is_seen & (pairs.q_idx >= pairs.kv_idx) if is_causal else is_seen

    return Mask(is_visible)
