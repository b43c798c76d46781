"""Run hooks around each forward of a model with an encoding: they find positions, prepare the
encoding, and record for each attention which tokens it sees."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posenc.encodings import Compose, PositionEncoding
from posenc.hf.attachment.attention import IMPLEMENTATION, LazyMask
from posenc.hf.attachment.builtin_positions import refresh_table
from posenc.hf.attachment.cached_positions import (
    cached_positions,
    cached_states,
    install_update,
    self_attention_cache,
)
from posenc.hf.attachment.forward_context import (
    CALLED_WITH_POSITION_IDS,
    ENCODING_MODULE,
    HOOKED_MODULES_ATTRIBUTE,
    LAYER_ATTRIBUTE,
    MIXES_TEXTS_ATTRIBUTE,
    NEEDS_POSITION_IDS_ATTRIBUTE,
    RUNNING_ATTENTION,
    RUNNING_FORWARD,
    RunningAttention,
    RunningForward,
)
from posenc.hf.attachment.packed_rows import (
    document_numbers,
    drop_equal_rows,
    refuse_another_text,
    refuse_chunked_attention_in_packed_rows,
    refuse_mixed_texts,
    refuse_packed_text,
)
from posenc.hf.transformers_compat import find_cache
from posenc.positions.tokens import as_tensor, consecutive_positions, positions_from_mask


@dataclass(eq=False)
class AttachedLayer:
    """Hold the data of an attention module to which an encoding is attached.

    stack: the module whose forward knows the positions. index, cache_index: index of the layer for
    the encoding, and for the cache. builtin_bias: the bias that the model has by itself, if it is
    kept. has_positions: False in a Vision Transformer, whose forwards receive none.
    encoding_in_one_line: repr of the stack's encoding, which a cache keeps.
    """

    stack: nn.Module
    index: int
    cache_index: int
    encoding_in_one_line: str
    builtin_bias: PositionEncoding | None = None
    has_positions: bool = True


@dataclass
class HookedModule:
    """Describe a module that carries hooks, or a layer around it, and where it was when the
    encoding was attached: the attribute `name` of `parent`."""

    parent: nn.Module
    name: str
    module: nn.Module

    def is_still_there(self) -> bool:
        """Return True if the module is still there, or inside a module that was wrapped around it
        there."""
        current_module = getattr(self.parent, self.name, None)
        return isinstance(current_module, nn.Module) and any(
            m is self.module for m in current_module.modules()
        )


def locate_modules(model: nn.Module, modules: list[nn.Module]) -> list[HookedModule]:
    """Return for each of these modules where it is in the model: its parent and its name there. A
    module that several parents have is returned once for each."""
    module_ids = {id(module) for module in modules}
    return [
        HookedModule(parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if id(child) in module_ids
    ]


def takes_position_ids(model: nn.Module) -> bool:
    """Return True if the forward of a model names position_ids, and so hands them on."""
    return "position_ids" in inspect.signature(model.forward).parameters


def note_position_ids(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Note whether a model that may drop position_ids is called with them, before its forward."""
    CALLED_WITH_POSITION_IDS.set(kwargs.get("position_ids") is not None)


def forget_position_ids(model: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Forget what `note_position_ids` noted, after the forward, also after an exception."""
    CALLED_WITH_POSITION_IDS.set(False)


def refuse_position_ids(stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a stack that keeps its own position table, and numbers the tokens for it
    itself, is called with position_ids."""
    if kwargs.get("position_ids") is None:
        return
    raise ValueError(
        f"posenc: position_ids were given, and {type(stack).__name__} counts the positions of its "
        'own table itself, which model_positions="keep" has kept. Leave them out, with one text in '
        "a row."
    )


def begin_stack(
    stack: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Find positions and prepare the encoding before the forward of a stack; return its arguments,
    some of them changed.

    A forward pre-hook. Raises: ValueError for arguments with which the encoding would be wrong.
    """
    arguments = _arguments_by_name(stack, args, kwargs)
    if arguments.get("output_attentions"):
        raise ValueError("posenc attention returns no weights: set output_attentions=False.")
    if not torch.compiler.is_compiling():
        _refuse_exchanged_modules(stack)
    mask_argument = _mask_for_fractional_positions(arguments)
    arguments = arguments | mask_argument
    kwargs = kwargs | mask_argument
    encoding: Any = getattr(stack, ENCODING_MODULE)
    positions, document_of_token = _positions_and_documents(arguments, encoding.claims.num_axes)
    if document_of_token is not None and vars(stack).get(MIXES_TEXTS_ATTRIBUTE):
        refuse_mixed_texts(stack, document_of_token)
    if positions is None:
        prepared_encoding = encoding
    else:
        # Only these encodings change with the length. Reading it waits for a device.
        changes_with_length = not encoding.claims.cache_safe
        positions_tensor = as_tensor(positions)
        length = (
            int(positions_tensor.max()) + 1
            if changes_with_length and positions_tensor.numel()
            else None
        )
        prepared_encoding = encoding.prepare(positions, length)
    has_mask = arguments.get("attention_mask") is not None
    if _positions_skip_padding(positions, arguments) and vars(stack).get(
        NEEDS_POSITION_IDS_ATTRIBUTE
    ):
        # Transformers would count the padding, too. That turns all keys and queries of a row alike,
        # but an encoding that changes them after this rotation needs not commute with it.
        kwargs = {**kwargs, "position_ids": positions}
    running_forward = RunningForward(
        stack, prepared_encoding, positions, document_of_token, has_mask
    )
    running_forward.reset_token = RUNNING_FORWARD.set(running_forward)
    embeddings = kwargs.get("inputs_embeds")
    if 1 in encoding.claims.places and embeddings is not None:
        embeddings = _add_to_embeddings(running_forward, embeddings)
        kwargs = {**kwargs, "inputs_embeds": embeddings}
    return args, kwargs


def _positions_skip_padding(positions: Tensor | range | None, arguments: dict[str, Any]) -> bool:
    """Return True if posenc has counted these positions and skipped padding: then they are a tensor
    (batch, len). Without padding they are a range, or (len) where torch.compile reads the forward.
    arguments: those of the forward."""
    counted_here = arguments.get("position_ids") is None
    return counted_here and isinstance(positions, Tensor) and positions.ndim == 2


def end_stack(stack: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Clear the record of the running forward, also after an exception."""
    running_forward = RUNNING_FORWARD.get()
    if running_forward is not None and running_forward.stack is stack:
        RUNNING_FORWARD.reset(running_forward.reset_token)


def encode_embeddings(table: nn.Module, args: tuple, out: Tensor) -> Tensor:
    """Return token embeddings with the encoding added; a forward hook of the embeddings."""
    running_forward = RUNNING_FORWARD.get()
    if running_forward is None:
        raise ValueError(
            "posenc: the token embeddings were called outside of the model's forward, where "
            "positions are unknown."
        )
    return _add_to_embeddings(running_forward, out)


def _add_to_embeddings(running_forward: RunningForward, embeddings: Tensor) -> Tensor:
    """Return embeddings (batch, len, embed_dim) with the encoding added. Raise ValueError if the
    forward reads no tokens, and so has no positions."""
    if running_forward.positions is None:
        encoding_name = type(running_forward.encoding).__name__
        stack_name = type(running_forward.stack).__name__
        raise ValueError(
            f"posenc: {encoding_name} adds positions to the embeddings of tokens, and this forward "
            f"of {stack_name} got neither input_ids nor inputs_embeds."
        )
    return running_forward.encoding.embed(
        embeddings, as_tensor(running_forward.positions, embeddings.device)
    )


def enter_attention(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Record encoding, positions and states in RUNNING_ATTENTION before an attention module runs.

    Raises: ValueError if another attention implementation has been set since `attach`.
    """
    layer: AttachedLayer = vars(module)[LAYER_ATTRIBUTE]
    implementation = getattr(
        getattr(module, "config", None), "_attn_implementation", IMPLEMENTATION
    )
    if implementation != IMPLEMENTATION:
        reason = f"its implementation is {implementation!r}, no longer {IMPLEMENTATION!r}"
        raise _bypass_error(module, reason)
    hidden_states = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(hidden_states, Tensor):
        raise ValueError(
            f"posenc: {type(module).__name__} got no hidden_states, the tensor that it attends to: "
            "this model passes them in a way that attach does not know."
        )
    all_arguments = (*args, *kwargs.values())
    running_forward = _find_forward(module, layer, all_arguments)
    positions = running_forward.positions
    if positions is None:
        positions = consecutive_positions(0, hidden_states.shape[1], hidden_states.device)
    encoding = running_forward.encoding.for_layer(layer.index)
    if layer.builtin_bias is not None:
        refresh_table(module, layer.builtin_bias)
        adds_nothing = type(encoding) is PositionEncoding
        encoding = layer.builtin_bias if adds_nothing else Compose(layer.builtin_bias, encoding)
    running_attention = RunningAttention(
        module,
        running_forward,
        encoding,
        positions=positions,
        state=None,
        kv_positions=positions,
        kv_state=None,
        layer=layer,
    )
    earlier_states = None
    cache = find_cache(all_arguments)
    refuse_chunked_attention_in_packed_rows(
        module, running_forward, hidden_states.shape[1], cache is not None
    )
    if cache is not None:
        cache = self_attention_cache(cache)
        install_update(cache)
        earlier_states = cached_states(cache, running_attention, hidden_states.device)
    running_attention.state = encoding.state(
        hidden_states, as_tensor(positions, hidden_states.device), earlier_states
    )
    running_attention.kv_state = running_attention.state
    running_attention.reset_token = RUNNING_ATTENTION.set(running_attention)


def _find_forward(
    module: nn.Module, layer: AttachedLayer, arguments: tuple[Any, ...]
) -> RunningForward:
    """Return the forward of the stack in which this attention runs: the one that its mask records,
    because gradient checkpointing recomputes a layer outside of the stack's forward, or else the
    one in RUNNING_FORWARD. arguments: all of the module's."""
    for argument in arguments:
        if isinstance(argument, LazyMask) and argument.running_forward is not None:
            return argument.running_forward
    running_forward = RUNNING_FORWARD.get()
    if running_forward is not None:
        return running_forward
    if layer.has_positions:
        raise ValueError(
            f"posenc: {type(module).__name__} was called outside of "
            f"{type(layer.stack).__name__}, which knows the positions. Call the model, not its "
            "layers or its forward method (peft calls the method of the model that it wraps: "
            "wrap the model with its head)."
        )
    return RunningForward(layer.stack, getattr(layer.stack, ENCODING_MODULE), None)


def leave_attention(module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Clear the record of the running attention after its module returns or raises (out: None).

    Raises: ValueError if it returned without posenc's attention: another attention implementation
    has been set since `attach`, and the model's own positions are still removed.
    """
    running_attention = RUNNING_ATTENTION.get()
    if running_attention is None or running_attention.module is not module:
        return
    RUNNING_ATTENTION.reset(running_attention.reset_token)
    has_returned = out is not None
    if has_returned and not running_attention.computed_by_posenc:
        raise _bypass_error(module, "it did not call the attention interface of transformers")


def _bypass_error(module: nn.Module, reason: str) -> ValueError:
    """Return the error for an attention that runs without its encoding; `reason` says how we
    know."""
    return ValueError(
        f"posenc: {type(module).__name__} runs without the encoding attached to it: {reason}. Call "
        f"model.set_attn_implementation({IMPLEMENTATION!r}), or posenc.hf.detach(model) first."
    )


def _arguments_by_name(stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a stack's forward by name, the positional ones too."""
    if not args:
        return kwargs
    return dict(inspect.signature(stack.forward).bind_partial(*args, **kwargs).arguments) | kwargs


def _refuse_exchanged_modules(stack: nn.Module) -> None:
    """Raise ValueError if a module with hooks has been exchanged: the new one has none."""
    for hooked in vars(stack)[HOOKED_MODULES_ATTRIBUTE]:
        if not hooked.is_still_there():
            raise ValueError(
                f"posenc: {hooked.name} of {type(hooked.parent).__name__} was exchanged after "
                "attach, and the new module knows nothing of the encoding. Call "
                "posenc.hf.detach(model), exchange it, and attach again."
            )


def _mask_for_fractional_positions(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return {"attention_mask": ones (batch, len)}, which hides nothing, if the forward has
    floating-point position_ids and neither a mask nor a cache; else {}.

    Without a mask and a cache transformers takes every token whose position is not one more than
    the last one's for the first of a text, which would cut a text at each fraction. With a mask
    only `mask_of_text_beginnings` tells texts apart. arguments: those of the stack's forward.
    """
    position_ids = arguments.get("position_ids")
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    has_cache = find_cache(arguments.values()) is not None
    has_mask = arguments.get("attention_mask") is not None
    if (
        position_ids is None
        or not position_ids.is_floating_point()
        or tokens is None
        or has_cache
        or has_mask
    ):
        return {}
    return {"attention_mask": torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)}


def _positions_and_documents(
    arguments: dict[str, Any], num_axes: int
) -> tuple[Tensor | range | None, Tensor | None]:
    """Return the positions of the new tokens, and the document of each token in packed rows. The
    second is None for rows of one text each. Without tokens both are None.

    Positions are position_ids if given. Otherwise tokens are counted after those in the cache,
    without padding if there is an attention mask. arguments: those of the forward. num_axes:
    components of a position.
    """
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor):
        return None, None
    length = tokens.shape[1]
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim not in (2, 4):
        raise ValueError(
            "posenc: attention_mask must be (batch, len), which hides padding, or (batch, heads, "
            f"queries, keys), which says what each token sees, got shape {tuple(mask.shape)}."
        )
    cache = find_cache(arguments.values())
    num_cached = 0 if cache is None else int(self_attention_cache(cache).get_seq_length())
    position_ids = arguments.get("position_ids")
    if position_ids is None and CALLED_WITH_POSITION_IDS.get():
        raise ValueError(
            "posenc: position_ids were given, and this model's own code drops them (as BLOOM's "
            "does), so neither positions nor packed texts would be as they say. Leave them out, "
            "with one text in a row, or call the stack of layers with them, such as "
            "model.transformer(tokens, position_ids=ids)."
        )
    if position_ids is not None:
        return _positions_and_documents_of_ids(position_ids, num_axes, mask, cache, num_cached)
    if num_axes > 1:
        raise ValueError(
            f"posenc: the encoding takes positions of {num_axes} components: hand the model "
            f"position_ids of shape ({num_axes}, batch, len)."
        )
    if arguments.get("cu_seq_lens_q") is not None:
        raise ValueError("posenc: packed rows need position_ids, which restart in each document.")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool((mask != 0).all()):
        return consecutive_positions(num_cached, length, tokens.device), None
    positions = positions_from_mask(mask)[:, num_cached : num_cached + length]
    return positions.to(tokens.device), None


def _positions_and_documents_of_ids(
    position_ids: Tensor, num_axes: int, mask: Any, cache: Any, num_cached: int
) -> tuple[Tensor, Tensor | None]:
    """Return what `_positions_and_documents` returns, for position_ids of the caller.

    position_ids: the caller's. mask: attention_mask, or None. cache: the KV cache, or None.
    num_cached: tokens of a row that the cache has seen, also those that a window forgot.

    Raises: ValueError if the new tokens are not of the text that the cache holds, or if nothing
    says where a text of a packed row ends.
    """
    position_ids = _integers_unless_fractional(position_ids)
    token_numbers, position_ids = _split_token_numbers(position_ids, num_axes)
    positions = _positions_from_ids(position_ids, num_axes)
    if cache is not None and num_cached:
        cached_numbers = None
        if num_axes == 1:  # else the cache holds components, and not the numbers of its tokens
            cached_numbers = cached_positions(self_attention_cache(cache))
        refuse_another_text(position_ids, token_numbers, cached_numbers, mask, num_cached)
        return positions, None
    if token_numbers is None:
        refuse_packed_text(position_ids, mask)
        return positions, None
    return positions, document_numbers(token_numbers, mask)


def _split_token_numbers(position_ids: Tensor, num_axes: int) -> tuple[Tensor | None, Tensor]:
    """Split position_ids into the number of each token in its text and the positions.

    The numbers are None if position_ids do not have them. Where positions have several components,
    generate() puts the numbers before them: (num_axes + 1, batch, len).
    """
    if num_axes == 1:
        return (position_ids if position_ids.ndim <= 2 else None), position_ids
    if position_ids.ndim == 3 and position_ids.shape[0] == num_axes + 1:
        return position_ids[0], position_ids[1:]
    return None, position_ids


def _integers_unless_fractional(position_ids: Tensor) -> Tensor:
    """Return position_ids as integers, unless one has a fraction. In a compiled graph, which cannot
    look at them, their dtype stays."""
    if not position_ids.is_floating_point() or torch.compiler.is_compiling():
        return position_ids
    is_whole = position_ids.isfinite() & (position_ids == position_ids.round())
    return position_ids.long() if bool(is_whole.all()) else position_ids


def _positions_from_ids(position_ids: Tensor, num_axes: int) -> Tensor:
    """Convert position_ids to the shape that encodings read: (len) or (batch, len), and with
    several components (batch, len, num_axes) instead of (num_axes, batch, len)."""
    if position_ids.ndim == 3 or num_axes > 1:
        if position_ids.ndim != 3 or position_ids.shape[0] != num_axes:
            raise ValueError(
                f"posenc: the encoding takes positions of {num_axes} components, and position_ids "
                f"have shape {tuple(position_ids.shape)}."
            )
        return position_ids.movedim(0, -1).contiguous()
    return drop_equal_rows(position_ids)
