"""Run posenc's attention as an attention implementation of transformers, with any encoding."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.attend.attention import attention
from posenc.encodings import PositionEncoding
from posenc.hf.attachment.forward_context import (
    HOOKED_MODULES_ATTRIBUTE,
    LAYER_ATTRIBUTE,
    RUNNING_ATTENTION,
    RUNNING_FORWARD,
    TRIAL_RECORD,
    AttentionCall,
    RunningAttention,
    RunningForward,
)
from posenc.hf.transformers_compat import query_count_and_offset, requested_padding_mask
from posenc.masks import Mask, causal, document
from posenc.positions.tokens import as_range, consecutive_positions, num_tokens

IMPLEMENTATION = "posenc"


def register_attention() -> None:
    """Register `attn_implementation="posenc"` in transformers: attention and its masks.

    Modules without an attached encoding attend without positions, which is right if the model has
    rotated q and k itself.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attend)
    # Without a mask function of its own, transformers would silently drop padding.
    AttentionMaskInterface.register(IMPLEMENTATION, build_mask)


@dataclass(eq=False)
class LazyMask:
    """Hold a mask of transformers without materializing it; it is evaluated block by block.

    q_offset, kv_offset: what is added to the indices of queries and keys before `is_visible` sees
    them. running_forward: the forward that made it, for layers that gradient checkpointing
    recomputes.
    standard_mask: "causal" or "full" if that describes the whole mask.
    """

    is_visible: Callable[..., Tensor]
    """Function of the indices (batch, head, query, key) that returns True for visible keys."""
    q_offset: int | Tensor
    kv_offset: int | Tensor
    running_forward: RunningForward
    standard_mask: str | None = None
    _bound: tuple[Any, Any, Mask] | None = None

    def bind(self, q_positions: Tensor | range, kv_positions: Tensor | range) -> Mask:
        """Return the posenc mask for queries and keys at these positions. The last mask is kept for
        the next call, because all layers of a forward ask with the same positions."""
        if self._bound is not None:
            q, kv, mask = self._bound
            if q is q_positions and kv is kv_positions:
                return mask
        mask = Mask(
            lambda pairs: self.is_visible(
                pairs.batch, pairs.head, pairs.q_idx + self.q_offset, pairs.kv_idx + self.kv_offset
            )
        ).bind(q_positions, kv_positions)
        self._bound = q_positions, kv_positions, mask
        return mask


def build_mask(**request: Any) -> LazyMask | Tensor | None:
    """Build the mask that transformers passes to `attend`, as its mask interface requests it.

    None means plain causal attention or no mask, as in SDPA. Outside of a forward with an attached
    encoding the mask is SDPA's tensor: `generate` makes one there for a static cache, and passes it
    on to code that reads its shape.
    """
    from transformers import masking_utils as hf_masks

    running_forward = RUNNING_FORWARD.get()
    if running_forward is None:
        return hf_masks.sdpa_mask(**request)
    if request.get("use_vmap"):  # a user's mask, which may not accept indices that broadcast
        dense_mask = hf_masks.sdpa_mask(**request)
        if dense_mask is None:
            return None
        return LazyMask(lambda b, h, q, k: dense_mask[b, 0, q, k], 0, 0, running_forward)
    # A static cache hands out the tensor in which it counts its tokens, and counts on in place
    # before the first layer evaluates this mask.
    mask_function = request["mask_function"]
    kv_offset = _copy_of_offset(request.get("kv_offset", 0))
    q_length, q_offset = query_count_and_offset(request)
    q_offset = _copy_of_offset(q_offset)
    padding_mask = requested_padding_mask(request)
    standard_mask = None
    if padding_mask is not None and not bool(padding_mask.all()):
        mask_function = hf_masks.and_masks(
            mask_function, hf_masks.padding_mask_function(padding_mask)
        )
    elif mask_function is getattr(hf_masks, "bidirectional_mask_function", None):
        standard_mask = "full"
    elif mask_function is hf_masks.causal_mask_function and q_length == request["kv_length"]:
        standard_mask = "causal" if request.get("allow_is_causal_skip", True) else None
    return LazyMask(mask_function, q_offset, kv_offset, running_forward, standard_mask)


def _copy_of_offset(offset: int | Tensor) -> int | Tensor:
    """Return a copy of an offset, which keeps its value when transformers adds to the tensor in
    place. The offset is copied and not read, because reading waits for the device and breaks a
    compiled graph."""
    return offset.clone() if isinstance(offset, Tensor) else offset


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LazyMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' interface requires: from (batch, heads, len, head_dim) to (batch,
    len, heads, head_dim), and no weights."""
    _refuse_unread_arguments(module, kwargs)
    # Under autocast, the model's own rotation by float32 angles leaves q and k in float32.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    running_attention = _running_attention(module, key)
    q_len = query.shape[2]
    if attention_mask is None and is_causal and 1 < q_len < key.shape[2]:
        # In transformers' interface no mask means that query i sees key i: the queries are the
        # first tokens of a static cache, and its other keys are still empty.
        key = key[:, :, :q_len]
        value = value[:, :, :q_len]
        if running_attention is not None:
            running_attention.keep_first_keys(q_len)
    kv_len = key.shape[2]
    if running_attention is None:
        inputs = _inputs_without_encoding(q_len, kv_len, query.device)
    else:
        inputs = _EncodingInputs(
            running_attention.encoding,
            running_attention.positions,
            running_attention.kv_positions,
            running_attention.state,
            running_attention.kv_state,
        )
    sizes = (query.shape[0], query.shape[1], q_len, kv_len)
    mask = _choose_mask(
        attention_mask,
        is_causal,
        inputs.q_positions,
        inputs.kv_positions,
        sizes,
        running_attention,
        module,
    )
    trial_record = TRIAL_RECORD.get()
    if trial_record is not None:
        call = AttentionCall(
            module,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[-1],
            q_len=q_len,
            kv_len=kv_len,
            causal=is_causal,
            positions=inputs.q_positions,
        )
        trial_record.calls.append(call)
        if trial_record.ignores_mask:
            mask = None
    out = attention(
        query,
        key,
        value,
        inputs.encoding,
        q_positions=inputs.q_positions,
        kv_positions=inputs.kv_positions,
        q_state=inputs.q_state,
        kv_state=inputs.kv_state,
        mask=mask,
        sinks=kwargs.get("s_aux"),
        dropout_p=dropout if module.training else 0.0,
        scale=_score_scale(inputs.encoding, scaling, query.shape[-1]),
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


class _EncodingInputs(NamedTuple):
    """An encoding, and the arguments of posenc.attention that it reads. q_positions, q_state: of
    the queries. kv_positions, kv_state: of the keys."""

    encoding: PositionEncoding
    q_positions: Tensor | range
    kv_positions: Tensor | range
    q_state: Tensor | None
    kv_state: Tensor | None


def _inputs_without_encoding(q_len: int, kv_len: int, device: torch.device) -> _EncodingInputs:
    """Return the inputs for a module without an encoding: tokens count from 0, and the queries are
    the last of them."""
    first_query = kv_len - q_len  # below 0 where a long text reads a short one by cross-attention
    kv_positions = consecutive_positions(0, kv_len, device)
    q_positions = (
        kv_positions if first_query == 0 else consecutive_positions(first_query, q_len, device)
    )
    return _EncodingInputs(PositionEncoding(), q_positions, kv_positions, None, None)


def _score_scale(encoding: PositionEncoding, scaling: float | None, head_dim: int) -> float:
    """Return the factor of q @ k: the encoding's own, times scaling * sqrt(head_dim), by which the
    model's differs from the usual 1 / sqrt(head_dim). scaling: the model's, None for the usual."""
    usual_scale = head_dim**-0.5
    scale = encoding.scale(head_dim)
    # A model with the encoding's own scale, as T5 has 1, must not get it twice.
    if scaling is None or math.isclose(scaling, usual_scale) or math.isclose(scaling, scale):
        return scale
    return scale * (scaling / usual_scale)


def _running_attention(module: nn.Module, key: Tensor) -> RunningAttention | None:
    """Return the record of this module's running attention, marked as computed by posenc; None if
    it has no encoding.

    Raises: ValueError if the module's hooks did not run, or the record has positions for another
    number of keys than `key` has.
    """
    if vars(module).get(LAYER_ATTRIBUTE) is None:
        _refuse_added_attention(module)
        return None
    running_attention = RUNNING_ATTENTION.get()
    if running_attention is None or running_attention.module is not module:
        raise ValueError(
            f"posenc: the forward of {type(module).__name__} was called directly, which bypasses "
            "the encoding attached to it. Call the module, not its forward."
        )
    num_positions = num_tokens(
        running_attention.kv_positions, running_attention.encoding.claims.num_axes
    )
    if num_positions != key.shape[2]:
        raise ValueError(
            f"posenc: {type(module).__name__} attends to {key.shape[2]} keys, and "
            f"{num_positions} positions are known: its keys come from a cache that "
            "transformers' Cache.update did not fill."
        )
    running_attention.computed_by_posenc = True
    return running_attention


def _refuse_added_attention(module: nn.Module) -> None:
    """Raise ValueError if an attention module without an encoding runs in a stack whose attentions
    of the same class have one: it was added after `attach`, and would attend without the
    encoding."""
    running_forward = RUNNING_FORWARD.get()
    if LAYER_ATTRIBUTE in vars(module) or running_forward is None or torch.compiler.is_compiling():
        return
    modules_with_encoding = [
        hooked.module
        for hooked in vars(running_forward.stack)[HOOKED_MODULES_ATTRIBUTE]
        if LAYER_ATTRIBUTE in vars(hooked.module)
    ]
    if any(type(hooked) is type(module) for hooked in modules_with_encoding):
        raise ValueError(
            f"posenc: a {type(module).__name__} was added to "
            f"{type(running_forward.stack).__name__} after "
            "attach, and knows nothing of the encoding. Call posenc.hf.detach(model), add it, and "
            "attach again."
        )


def _refuse_unread_arguments(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for arguments of transformers' interface that change the scores, or ask for
    weights, and that posenc's attention does not read."""
    if kwargs.get("softcap") is not None:
        raise ValueError("posenc attention: soft-capped scores are not supported.")
    bias = kwargs.get("position_bias")
    if bias is not None and bias.numel():
        raise ValueError(
            f"posenc attention: {type(module).__name__} adds a position_bias of its model's own to "
            "the scores. It can be taken out or kept in T5, mT5, UMT5 and BLOOM only."
        )
    if kwargs.get("output_attentions"):
        raise ValueError("posenc attention returns no weights: set output_attentions=False.")


def _mask_from_tensor(tensor: Tensor, sizes: tuple[int, int, int, int], module: nn.Module) -> Mask:
    """Return the posenc mask of a tensor (#batch, #heads, #q_len, #kv_len) that the caller
    gave the model. Raise ValueError for other sizes, which would hide other keys than were meant.

    sizes: (batch, heads, q_len, kv_len) of this attention.
    """
    has_fitting_shape = tensor.ndim == 4 and all(
        size in (1, expected_size) for size, expected_size in zip(tensor.shape, sizes, strict=True)
    )
    if not has_fitting_shape:
        raise ValueError(
            f"posenc attention: attention_mask has shape {tuple(tensor.shape)}, and "
            f"{type(module).__name__} attends with (batch, heads, queries, keys) = {sizes}. Each "
            "must be that or 1. A layer with a window keeps its last keys only, and a static cache "
            "has room for keys to come."
        )
    visible = _visible_keys(tensor).expand(-1, -1, sizes[2], sizes[3])
    is_for_all_rows = tensor.shape[0] == 1
    is_for_all_heads = tensor.shape[1] == 1

    def sees(pairs: Any) -> Tensor:
        batch = 0 if is_for_all_rows else pairs.batch
        head = 0 if is_for_all_heads else pairs.head
        return visible[batch, head, pairs.q_idx, pairs.kv_idx]

    return Mask(sees)


def _cut_unseen_keys(mask: Tensor, kv_len: int) -> Tensor:
    """Cut keys that no query sees from the end of a mask that the model itself has made.

    In early transformers 5 some families (StableLM, Persimmon) make room for one key more than
    there are, which their own attention cuts off. A layer with a window may have fewer keys than
    its mask for another reason; then a query sees the last of them, and the mask stays.
    """
    if mask.shape[-1] <= kv_len:  # nothing to read, which would break a compiled graph
        return mask
    mask_of_extra_keys = mask[..., kv_len:]
    return mask if bool(_visible_keys(mask_of_extra_keys).any()) else mask[..., :kv_len]


def _choose_mask(
    attention_mask: LazyMask | Tensor | None,
    is_causal: bool,
    q_positions: Tensor | range,
    kv_positions: Tensor | range,
    sizes: tuple[int, int, int, int],
    running_attention: RunningAttention | None,
    module: nn.Module,
) -> Mask | None:
    """Return posenc's mask for this call of the interface, None if every key is visible. A causal
    mask goes by the order in memory and not by positions, which may restart in a packed row.

    sizes: (batch, heads, q_len, kv_len). running_attention: None for an attention without an
    encoding.
    """
    _, _, q_len, kv_len = sizes
    has_several_axes = (
        running_attention is not None and running_attention.encoding.claims.num_axes > 1
    )
    if has_several_axes:  # positions with several components have no order
        device = kv_positions.device if isinstance(kv_positions, Tensor) else None
        kv_positions = consecutive_positions(0, kv_len, device)
        q_positions = consecutive_positions(kv_len - q_len, q_len, device)
    document_mask = _document_mask(running_attention, q_len, kv_len) if is_causal else None
    if isinstance(attention_mask, LazyMask) and attention_mask.standard_mask is None:
        return _combine_masks(attention_mask.bind(q_positions, kv_positions), document_mask)
    if isinstance(attention_mask, Tensor):
        if _mask_is_from_model(running_attention):
            attention_mask = _cut_unseen_keys(attention_mask, kv_len)
        tensor_mask = _mask_from_tensor(attention_mask, sizes, module).bind(
            q_positions, kv_positions
        )
        # A family's own code may have made it (OPT's of early transformers 5): it knows of no
        # packed rows. Beside a caller's mask of four dimensions there are no documents.
        return _combine_masks(tensor_mask, document_mask)

    # Here the mask is None, or a LazyMask that says what plain one it equals.
    shows_all = attention_mask is not None and attention_mask.standard_mask == "full"
    if q_len == 1 or not is_causal or shows_all:
        return None
    are_consecutive = as_range(q_positions) is not None and as_range(kv_positions) is not None
    if has_several_axes or are_consecutive:
        return _combine_masks(causal, document_mask)
    causal_mask_by_index = Mask(lambda pairs: pairs.q_idx + (kv_len - q_len) >= pairs.kv_idx)
    return _combine_masks(causal_mask_by_index, document_mask).bind(q_positions, kv_positions)


def _combine_masks(mask: Mask, document_mask: Mask | None) -> Mask:
    """Return the mask that hides what `mask` hides and, in a packed row, other documents;
    document_mask: the mask that hides these, or None."""
    return mask if document_mask is None else mask & document_mask


def _mask_is_from_model(running_attention: RunningAttention | None) -> bool:
    """Return True if a mask of four dimensions comes from the model's code and not from the caller:
    while `attach` tries the model out, and in a forward that was called without a mask."""
    if running_attention is None:
        return TRIAL_RECORD.get() is not None
    return not running_attention.running_forward.has_mask


def _document_mask(
    running_attention: RunningAttention | None, q_len: int, kv_len: int
) -> Mask | None:
    """Return the mask that separates the documents of a packed row; None if there is only one."""
    if running_attention is None or running_attention.running_forward.document_of_token is None:
        return None
    # Only a forward without earlier tokens has documents: more keys than queries are those that a
    # static cache has not filled, and belong to none.
    document_of_token = running_attention.running_forward.document_of_token
    return document(document_of_token, F.pad(document_of_token, (0, kv_len - q_len), value=-1))


def _visible_keys(mask: Tensor) -> Tensor:
    """Convert a mask to booleans, True for visible keys. The mask has booleans already, or 0 for
    visible keys and large negative numbers for hidden ones.

    Raises: ValueError for other numbers, which would be a bias. They are looked for on the CPU
    only, except while `attach` tries the model, and not in a compiled graph, which reading them
    would break.
    """
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    is_trial = TRIAL_RECORD.get() is not None
    is_near = mask.device.type == "cpu" or is_trial
    can_be_read = is_near and not torch.compiler.is_compiling()
    has_bias = can_be_read and not bool((visible | (mask < -1000)).all())
    if has_bias or not mask.is_floating_point():
        raise ValueError(
            "posenc attention: attention_mask must hold bools, or 0 and numbers below -1000 that "
            "hide keys: others are a bias, as Swin and BEiT add one of their own. It would be lost."
        )
    return visible


def attention_is_replaceable(model: Any) -> bool:
    """Return True if posenc can replace the model's attention. transformers silently ignores the
    request if the model's code bypasses its interface (Falcon)."""
    register_attention()
    previous_implementation = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    is_replaced = model.config._attn_implementation == IMPLEMENTATION
    model.set_attn_implementation(previous_implementation)
    return is_replaced
