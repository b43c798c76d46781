"""Attach an encoding to a stock model of transformers, and detach it again.

`attach` changes three kinds of things and records them in an Attachment, from which
`_restore_model` restores the model: the attention implementation of its configs, hooks, and
attributes. Then each forward of the model runs like this (in hooks.py unless another file is
named; what it sets or reads is in forward_context.py):

    model            note_position_ids    sets CALLED_WITH_POSITION_IDS, if its own code may drop
                                          position_ids
    stack of layers  begin_stack          sets RUNNING_FORWARD: positions, prepared encoding
      embeddings     encode_embeddings    reads it: adds the encoding to token embeddings
      own positions  (builtin_positions.py)  gives an identity rotation, zeros of a table, no bias
      mask           attention.build_mask reads it and keeps it, for recomputed layers
      attention      enter_attention      reads it, sets RUNNING_ATTENTION: encoding, states
        cache        PositionedUpdate     (cached_positions.py) reads RUNNING_ATTENTION: stores
                                          positions and states with the keys, and writes those of
                                          all keys to it
        interface    attention.attend     reads RUNNING_ATTENTION: calls posenc.attention
                     leave_attention      clears RUNNING_ATTENTION, also after an exception; refuses
                                          an attention that posenc's did not compute
                     end_stack            clears RUNNING_FORWARD, also after an exception
                     forget_position_ids  clears CALLED_WITH_POSITION_IDS, so too

The three are context variables: each thread has its own. A cache gets its new `update` from
cached_positions.install_update, which enter_attention calls. stacks.recorded_attention sets
TRIAL_RECORD while `attach` tries the model: attention.attend then lists the calls that it gets.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from posenc.arguments import explain_misfits
from posenc.attend.trial_weights import without_zero_weights
from posenc.encodings import (
    ModelShape,
    PositionEncoding,
    create,
    encoding_of_all_layers,
    repr_in_one_line,
    require_encoding,
)
from posenc.hf.attachment import builtin_positions, hooks
from posenc.hf.attachment.attention import IMPLEMENTATION, register_attention
from posenc.hf.attachment.forward_context import (
    ATTACHMENT_ATTRIBUTE,
    ENCODING_MODULE,
    HOOKED_MODULES_ATTRIBUTE,
    LAYER_ATTRIBUTE,
    MIXES_TEXTS_ATTRIBUTE,
    NEEDS_POSITION_IDS_ATTRIBUTE,
)
from posenc.hf.attachment.proof import prove
from posenc.hf.attachment.save import hook_save_pretrained
from posenc.hf.attachment.stacks import (
    Stack,
    build_example,
    find_stacks,
    run_with_hooks,
    stack_shape,
)

ModelPositions = Literal["replace", "keep"]
"""What becomes of the positions that the model has by itself."""


@dataclass(eq=False)
class Attachment:
    """Record what `attach` changed, for `detach`. It is plain data, so that a copy of the model
    copies it, too.

    model_positions: whether the model's own positions are replaced or kept.
    stacks: the modules whose layers have an encoding; an encoder before its decoder.
    handles: of the hooks; each removes one.
    previous_implementations: each config of the model, with the attention implementation that it
    had.
    """

    model_positions: ModelPositions
    stacks: list[nn.Module] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    previous_implementations: list[tuple[Any, Any]] = field(default_factory=list)
    changed_attributes: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = field(
        default_factory=list
    )
    """Each changed module, its new attributes, and those that they replaced."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_attention()  # in a new process, a pickled model is the first to need it
        vars(self).update(state)


@explain_misfits
def attach(
    model: Any,
    encoding: PositionEncoding | str | None,
    *,
    decoder: PositionEncoding | str | None = None,
    model_positions: ModelPositions = "replace",
    example: dict[str, Any] | None = None,
    check: bool = True,
) -> Any:
    """Attach `encoding` to a model, and return the same model.

    Its parameters become the model's: optimizers, Trainer and peft see them as `posenc_encoding`.
    The KV cache stores untransformed keys, with their positions. `model.save_pretrained` also
    writes the encoding, for `posenc.hf.load`. Then the model is compared with itself: a few tokens
    must give the same outputs read at once, in steps through the model's own cache and through a
    static one, where the model supports it, and next to padding on either side.

    Call `detach` before you exchange a module that carries positions (`set_input_embeddings`,
    `resize_position_embeddings`, another rotation): a forward without its hooks is refused. Compile
    the model after `attach`: torch.compile keeps the hooks that it has seen.

    Args:
        model: a transformers model whose attention uses the attention interface: text decoders
            and encoders, T5, BLOOM, Vision Transformers.
        encoding: an encoding, or its name as `posenc.create` reads it. In an encoder-decoder it
            goes into the encoder. One of scope "layer" is copied, with fresh parameters, for every
            layer.
        decoder: the encoding of an encoder-decoder's decoder.
        model_positions: "replace" removes the rotation, table or bias that the model has by itself.
            "keep" leaves it and adds the encoding: after the rotation, next to the bias.
        example: arguments of a small forward, for models that need more than tokens or an image.
        check: make this comparison, about fourteen forwards of five tokens. The logger "posenc.hf"
            warns of what cannot be compared.

    Raises: TypeError unless it is a transformers model. ValueError if the model's attention cannot
    be replaced, if its own positions cannot be removed, if the encoding does not fit, or if the
    comparison fails, with the installed releases. The model is then unchanged.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=90, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...     num_attention_heads=4)
    >>> model = posenc.hf.attach(LlamaForCausalLM(config), "alibi")
    >>> model(torch.arange(9)[None]).logits.shape
    torch.Size([1, 9, 90])
    >>> posenc.hf.detach(model)[0]
    ALiBi(num_heads=4)
    """
    return _attach_or_restore(model, encoding, decoder, model_positions, example, check=check)


def _attach_or_restore(
    model: Any,
    encoding: PositionEncoding | str | None,
    decoder: PositionEncoding | str | None,
    model_positions: ModelPositions,
    example: dict[str, Any] | None,
    *,
    allow_other_order: bool = False,
    check: bool = True,
) -> Any:
    """Attach the encodings and return the model, as `attach` does; after an exception the model is
    as it was.

    allow_other_order: do not raise if anything but the encoding, such as Mamba's layers, depends on
    the order of tokens. example: None for the input that `build_example` makes. The others are
    those of `attach`.
    """
    _check_arguments(model, model_positions, check)
    example = build_example(model) if example is None else example
    attachment = Attachment(model_positions)
    setattr(model, ATTACHMENT_ATTRIBUTE, attachment)
    trial = ExitStack()
    try:
        # A table of positions that is still zero would hide that the model has one.
        trial.enter_context(without_zero_weights(model))
        stacks = _replace_attention(model, attachment, example)
        encodings = _resolve_stack_encodings(model, stacks, encoding, decoder, example)
        # What is left of the model's own positions shows only before the encoding is hooked in.
        if model_positions == "replace":
            for stack in stacks:
                attachment.handles += builtin_positions.disable_positions(stack.module, model)
            if not allow_other_order:
                builtin_positions.refuse_remaining_order(model, stacks, example)
        else:
            for stack in stacks:
                _prepare_kept_positions(attachment, stack.module, model)
        for stack, stack_encoding in zip(stacks, encodings, strict=True):
            _attach_to_stack(
                attachment, stack, stack_encoding, _reads_tokens(stacks, stack, example)
            )
            _record_hooked_modules(attachment, stack, model)
        _hook_dropped_position_ids(attachment, model)
        run_with_hooks(model, example)  # a forward that fails with the hooks must fail now
        # Otherwise only attention depends on order: that is proved above.
        may_depend_on_order = model_positions == "keep" or allow_other_order
        if may_depend_on_order:
            for stack in stacks:
                _record_text_mixing(attachment, stack, model, example)
        if check:
            prove(model, example)
        hook_save_pretrained(model)
    except BaseException:
        _restore_model(model)
        raise
    finally:
        trial.close()
    return model


def _check_arguments(model: Any, model_positions: Any, check: Any) -> None:
    """Raise TypeError or ValueError for a model or an option that `attach` does not take, before
    anything is changed."""
    if not isinstance(check, bool):
        raise TypeError(f"attach: check must be True or False, got {check!r}.")
    if model_positions not in ("replace", "keep"):
        raise ValueError(
            f'attach: model_positions must be "replace" or "keep", got {model_positions!r}.'
        )
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(
            f"attach: {type(model).__name__} is no model of transformers. Other modules take "
            "posenc.Attention."
        )
    has_weights = any(not p.is_meta for p in model.parameters())
    if not has_weights and not hasattr(model, "hf_device_map"):
        raise ValueError(
            f"attach: the weights of {type(model).__name__} are on the meta device, where it "
            "cannot run. Load them first."
        )
    if hasattr(model, ATTACHMENT_ATTRIBUTE):
        raise ValueError(
            "attach: the model has an encoding already; call detach(model) first. To combine "
            "several, attach posenc.Compose(a, b)."
        )


@explain_misfits
def detach(model: Any) -> tuple[PositionEncoding, ...]:
    """Restore the model and return its encodings: one, or the encoder's and the decoder's.

    Raises: ValueError if no encoding is attached.
    """
    if not hasattr(model, ATTACHMENT_ATTRIBUTE):
        raise ValueError("detach: the model has no encoding attached.")
    encodings = tuple(
        getattr(s, ENCODING_MODULE) for s in getattr(model, ATTACHMENT_ATTRIBUTE).stacks
    )
    _restore_model(model)
    return encodings


@explain_misfits
@contextmanager
def attached(
    model: Any,
    encoding: PositionEncoding | None,
    model_positions: ModelPositions = "replace",
    *,
    allow_other_order: bool = False,
) -> Iterator[nn.Module]:
    """Attach the encoding inside the block and detach it after. An encoder-decoder gets it in both
    stacks. Decoding and padding are not compared, as `attach` does with check=True.

    allow_other_order: True to accept layers that depend on the order of tokens, such as Mamba's;
    the caller must then compare the model with the original.
    """
    has_two_stacks = model.config.is_encoder_decoder
    _attach_or_restore(
        model,
        encoding,
        encoding if has_two_stacks else None,
        model_positions,
        None,
        allow_other_order=allow_other_order,
        check=False,
    )
    try:
        yield model
    finally:
        detach(model)


@explain_misfits
def shape_of(
    model: Any, *, encoder: bool = False, example: dict[str, Any] | None = None
) -> ModelShape:
    """Return the sizes that encodings for this model need: those of the decoder, or of the encoder.

    Raises: as `attach`.

    >>> from transformers import GPT2Config, GPT2Model
    >>> gpt2 = GPT2Model(GPT2Config(vocab_size=90, n_embd=32, n_layer=1, n_head=4))
    >>> posenc.hf.shape_of(gpt2).num_heads
    4
    """
    example = build_example(model) if example is None else example
    previous_attachment = getattr(model, ATTACHMENT_ATTRIBUTE, None)
    attachment = Attachment("keep")
    setattr(model, ATTACHMENT_ATTRIBUTE, attachment)
    try:
        stacks = _replace_attention(model, attachment, example)
        return stack_shape(stacks[0 if encoder else -1], model.config)
    finally:
        _restore_model(model)
        if previous_attachment is not None:
            setattr(model, ATTACHMENT_ATTRIBUTE, previous_attachment)


def _replace_attention(model: Any, attachment: Attachment, example: dict[str, Any]) -> list[Stack]:
    """Set the model's attention implementation to posenc's, and return its stacks of layers.

    Raises: ValueError if the attention cannot be replaced, or if there are more stacks than
    expected.
    """
    register_attention()
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    attachment.previous_implementations = [(c, c._attn_implementation) for c in configs.values()]
    for module, new_attributes in builtin_positions.attributes_that_omit_bias(model):
        replaced_attributes = {
            name: vars(module)[name] for name in new_attributes if name in vars(module)
        }
        attachment.changed_attributes.append((module, new_attributes, replaced_attributes))
        vars(module).update(new_attributes)
    if model.config.model_type == "bloom":
        # transformers ignores the request for BLOOM, whose own code bypasses its interface.
        for config in configs.values():
            config._attn_implementation = IMPLEMENTATION
    else:
        model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f"attach: the attention of {type(model).__name__} cannot be replaced: transformers "
            "has it outside its attention interface."
        )
    stacks = find_stacks(model, example)
    # The encoder of an encoder-decoder by itself has its config, and one stack.
    num_stacks = (1, 2) if model.config.is_encoder_decoder else (1,)
    if len(stacks) not in num_stacks:
        stacks_in_words = ", ".join(type(stack.module).__name__ for stack in stacks)
        raise ValueError(
            f"attach: {type(model).__name__} has {len(stacks)} stacks that attend "
            f"({stacks_in_words}), and one was expected: attach to one of them."
        )
    return stacks


def _resolve_stack_encodings(
    model: Any,
    stacks: Sequence[Stack],
    encoding: PositionEncoding | str | None,
    decoder: PositionEncoding | str | None,
    example: dict[str, Any],
) -> list[PositionEncoding]:
    """Return one encoding for each stack, built from its name if it is a string. One of scope
    "layer" comes as a PerLayer, with a copy for each attention.

    encoding, decoder: as in `attach`. Raises: ValueError if one does not fit its stack, or if
    `decoder` is missing or there is no decoder for it.
    """
    if (decoder is not None) != (len(stacks) == 2):
        expected_in_words = (
            "two stacks: give decoder= too" if len(stacks) == 2 else "one stack: no decoder="
        )
        raise ValueError(f"attach: {type(model).__name__} has {expected_in_words}.")
    encodings = []
    # Not strict: a single stack leaves `decoder` over, which is None here.
    for stack, chosen in zip(stacks, (encoding, decoder), strict=False):
        if isinstance(chosen, str):
            chosen = create(chosen, stack_shape(stack, model.config))
        stack_encoding = require_encoding("attach", chosen)
        _refuse_unfit_encoding(stack_encoding, stack, model, _reads_tokens(stacks, stack, example))
        encodings.append(encoding_of_all_layers(stack_encoding, len(stack.attentions)))
    return encodings


def _refuse_unfit_encoding(
    encoding: PositionEncoding, stack: Stack, model: Any, reads_tokens: bool
) -> None:
    """Raise ValueError if the encoding cannot work in this stack; reads_tokens: True if the stack
    reads tokens, not images or sound."""
    is_causal = all(call.causal for call in stack.attentions)
    has_effect = bool(encoding.claims.places)
    # Without places, as NoPE, it only takes the model's own positions away, in any stack.
    if encoding.claims.causal_only and has_effect and not is_causal:
        raise ValueError(
            f"attach: {type(encoding).__name__} works in causal attention only, and "
            f"{type(stack.module).__name__} looks at the future too."
        )
    if not reads_tokens:
        _refuse_encoding_of_tokens(encoding, stack.module)
    has_three_components = any(hasattr(m, "get_rope_index") for m in model.modules())
    if encoding.claims.num_axes == 1 and has_three_components:
        raise ValueError(
            f"attach: {type(model).__name__} gives its text positions of three components, and "
            f"{type(encoding).__name__} takes one. Attach posenc.MRoPE, with an example= whose "
            "position_ids have shape (3, batch, len), or attach to the text model by itself."
        )


def _reads_tokens(stacks: Sequence[Stack], stack: Stack, example: dict[str, Any]) -> bool:
    """Return True if the stack reads tokens, which have positions, and no images or sound. The
    second of two stacks is the decoder, which has arguments of its own."""
    argument_names = {"input_ids", "inputs_embeds"}
    if len(stacks) == 2 and stack is stacks[-1]:
        argument_names = {"decoder_input_ids", "decoder_inputs_embeds"}
    return bool(argument_names & set(example))


def _refuse_encoding_of_tokens(encoding: PositionEncoding, stack: nn.Module) -> None:
    """Raise ValueError if the encoding needs the positions of tokens, and the stack has none."""
    encoding_name = type(encoding).__name__
    stack_name = type(stack).__name__
    if 1 in encoding.claims.places:
        raise ValueError(
            f"attach: {encoding_name} adds positions to the embeddings of tokens, and {stack_name} "
            "reads images or sound. Attach an encoding of queries and keys, of scores or of "
            "values: posenc list names their places."
        )
    if encoding.claims.num_axes > 1:
        raise ValueError(
            f"attach: {encoding_name} takes positions of {encoding.claims.num_axes} components, "
            f"and {stack_name} gives its patches none. posenc.nn.attach_to_vit gives timm's Vision "
            "Transformers coordinates."
        )


def _attach_to_stack(
    attachment: Attachment, stack: Stack, encoding: PositionEncoding, has_positions: bool
) -> None:
    """Register the encoding as a part of the stack's module, and hooks on the module, on its token
    embeddings if the encoding acts there, and on each attention. has_positions: False where the
    stack's forward gets none, see hooks.AttachedLayer."""
    module = stack.module
    first_parameter = next(module.parameters())
    module.add_module(ENCODING_MODULE, encoding.to(first_parameter.device))
    attachment.stacks.append(module)
    attachment.handles += [
        module.register_forward_pre_hook(hooks.begin_stack, with_kwargs=True),
        module.register_forward_hook(hooks.end_stack, with_kwargs=True, always_call=True),
    ]
    if 1 in encoding.claims.places:
        token_embeddings = module.get_input_embeddings()  # type: ignore[operator]
        attachment.handles.append(token_embeddings.register_forward_hook(hooks.encode_embeddings))
    for cross_attention in stack.cross_attentions:
        attachment.changed_attributes.append((cross_attention, {LAYER_ATTRIBUTE: None}, {}))
        vars(cross_attention)[LAYER_ATTRIBUTE] = None
    encoding_in_one_line = repr_in_one_line(encoding)
    for index, call in enumerate(stack.attentions):
        attention: Any = call.module
        builtin_bias = None
        if attachment.model_positions == "keep":
            builtin_bias = builtin_positions.bias_as_encoding(attention)
        # The module itself updates the cache by this index.
        cache_index = getattr(attention, "layer_idx", None)
        if cache_index is None:
            cache_index = index
        attached_layer = hooks.AttachedLayer(
            module, index, cache_index, encoding_in_one_line, builtin_bias, has_positions
        )
        attachment.changed_attributes.append((attention, {LAYER_ATTRIBUTE: attached_layer}, {}))
        vars(attention)[LAYER_ATTRIBUTE] = attached_layer
        attachment.handles += [
            attention.register_forward_pre_hook(hooks.enter_attention, with_kwargs=True),
            attention.register_forward_hook(
                hooks.leave_attention, with_kwargs=True, always_call=True
            ),
        ]


def _hook_dropped_position_ids(attachment: Attachment, model: Any) -> None:
    """Register hooks that note a call with position_ids on a model whose forward does not name
    them: its own code may drop them before they reach the stack."""
    if hooks.takes_position_ids(model):
        return
    attachment.handles += [
        model.register_forward_pre_hook(hooks.note_position_ids, with_kwargs=True),
        model.register_forward_hook(hooks.forget_position_ids, with_kwargs=True, always_call=True),
    ]


def _record_hooked_modules(attachment: Attachment, stack: Stack, model: Any) -> None:
    """Record on the stack which modules carry hooks, and where, for `hooks.begin_stack` to find
    them again. A layer that is exchanged takes its attention along, so that the layers are
    recorded, too."""
    module = stack.module
    name_of_module = {child: name for name, child in module.named_modules()}
    hooked_modules: list[nn.Module] = []
    for call in stack.attentions:
        name_parts = name_of_module[call.module].split(".")
        paths = [".".join(name_parts[:depth]) for depth in range(1, len(name_parts) + 1)]
        hooked_modules += [module.get_submodule(path) for path in paths]
    if attachment.model_positions == "replace":
        hooked_modules += builtin_positions.rotation_modules(module)
        hooked_modules += builtin_positions.position_tables(module, model)
    if 1 in getattr(module, ENCODING_MODULE).claims.places:
        hooked_modules.append(module.get_input_embeddings())  # type: ignore[operator]
    located_modules = hooks.locate_modules(model, hooked_modules)
    attachment.changed_attributes.append((module, {HOOKED_MODULES_ATTRIBUTE: located_modules}, {}))
    vars(module)[HOOKED_MODULES_ATTRIBUTE] = located_modules


def _prepare_kept_positions(attachment: Attachment, stack: nn.Module, model: Any) -> None:
    """Record on the stack whether its own rotation must be handed position_ids
    (NEEDS_POSITION_IDS_ATTRIBUTE), and make its forward refuse position_ids if it has a table that
    ignores them."""
    has_tables = bool(builtin_positions.position_tables(stack, model))
    takes_ids = hooks.takes_position_ids(stack)
    if has_tables and not takes_ids:
        handle = stack.register_forward_pre_hook(hooks.refuse_position_ids, with_kwargs=True)
        attachment.handles.append(handle)
    # A table that counts padding is another matter: without posenc the model reads it so, too.
    keeps_rotation = not has_tables and bool(builtin_positions.rotation_modules(stack))
    needs_ids = takes_ids and keeps_rotation
    attachment.changed_attributes.append((stack, {NEEDS_POSITION_IDS_ATTRIBUTE: needs_ids}, {}))
    vars(stack)[NEEDS_POSITION_IDS_ATTRIBUTE] = needs_ids


def _record_text_mixing(
    attachment: Attachment, stack: Stack, model: Any, example: dict[str, Any]
) -> None:
    """Record on the stack whether its layers hand one text of a packed row on to the next, for
    `hooks.begin_stack` to refuse such rows."""
    mixes_texts = builtin_positions.mixes_packed_texts(model, stack, example)
    attachment.changed_attributes.append((stack.module, {MIXES_TEXTS_ATTRIBUTE: mixes_texts}, {}))
    vars(stack.module)[MIXES_TEXTS_ATTRIBUTE] = mixes_texts


def _restore_model(model: Any) -> None:
    """Restore everything that `attach` changed; attributes in the reverse order, because one may
    have been changed twice."""
    attachment: Attachment = getattr(model, ATTACHMENT_ATTRIBUTE)
    for handle in attachment.handles:
        handle.remove()
    for module, new_attributes, old_attributes in reversed(attachment.changed_attributes):
        for name in new_attributes:
            vars(module).pop(name, None)
        vars(module).update(old_attributes)
    for stack in attachment.stacks:
        delattr(stack, ENCODING_MODULE)
    for config, implementation in attachment.previous_implementations:
        config._attn_implementation = implementation
    delattr(model, ATTACHMENT_ATTRIBUTE)
