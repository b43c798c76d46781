"""Find a model's attention modules, and the stacks that contain them, by running it once."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from posenc.command_line.errors import one_line
from posenc.encodings import ModelShape
from posenc.hf.attachment.forward_context import TRIAL_RECORD, AttentionCall, AttentionRecord
from posenc.hf.transformers_compat import forward_takes

EXAMPLE_LENGTH, EXAMPLE_SOURCE_LENGTH = 5, 7
"""Tokens of a trial input, and tokens of the encoder input in an encoder-decoder."""
SMALLEST_VOCABULARY = 20
"""The tokens of a trial input are spread over the middle half of the vocabulary, far from special
tokens. In a smaller vocabulary too many of them would be the same."""
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Largest change of hidden states, relative to the largest, by another order of computation."""
HALF_PRECISION_TOLERANCE = 5e-2
"""The same for half-precision dtypes."""
REFUSAL = "posenc attention: "
"""How messages of posenc's attention begin that refuse what a model asks of it."""


@dataclass(eq=False)
class Stack:
    """Describe layers that share an encoding: the module that gets the positions, and its
    attentions.

    attentions: one call of each of its attention modules. embed_dim: width of its hidden states.
    cross_attentions: modules of its layers that read another stack, and get no encoding.
    """

    module: nn.Module
    attentions: list[AttentionCall]
    embed_dim: int
    cross_attentions: list[nn.Module] = field(default_factory=list)


def build_example(model: Any) -> dict[str, Tensor]:
    """Build a small input of the kind that the model takes: a few tokens, one image or one video.

    Raises: ValueError for a model that takes none of them, or has a very small vocabulary.
    """
    config = model.config.get_text_config()
    device = model.device
    image_size = getattr(model.config, "image_size", None)  # SigLIP 2 takes pictures of any size
    if model.main_input_name == "pixel_values" and image_size is not None:
        height, width = (
            image_size if isinstance(image_size, list | tuple) else (image_size, image_size)
        )
        shape = (1, model.config.num_channels, height, width)
        num_frames = getattr(config, "num_frames", None)
        if num_frames is not None:
            shape = (1, num_frames, *shape[1:])
        pixels = torch.linspace(-1, 1, math.prod(shape), device=device)
        return {"pixel_values": pixels.view(shape).to(model.dtype)}
    vocab_size = getattr(config, "vocab_size", None)
    if model.main_input_name != "input_ids" or not vocab_size:
        raise ValueError(
            f"attach: no example input is known for {type(model).__name__}, which takes "
            f"{model.main_input_name}. Give example=, the arguments of one small forward."
        )
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"attach: the vocabulary of {type(model).__name__} has {vocab_size} tokens, and an "
            f"example input is known for {SMALLEST_VOCABULARY} or more. Give example=, the "
            "arguments of one small forward."
        )
    ids = torch.linspace(
        vocab_size // 4, 3 * vocab_size // 4, EXAMPLE_LENGTH, device=device
    ).long()[None]
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids}
    source_ids = torch.linspace(
        vocab_size // 4, 3 * vocab_size // 4, EXAMPLE_SOURCE_LENGTH, device=device
    ).long()[None]
    return {"input_ids": source_ids, "decoder_input_ids": ids}


def find_stacks(model: Any, example: dict[str, Any]) -> list[Stack]:
    """Run the model on the example with posenc's attention, and return its stacks of attention
    modules, in the order in which they ran.

    Raises: ValueError if an attention module bypasses transformers' interface, or none calls it.
    """
    called_modules: set[nn.Module] = set()
    widths: dict[nn.Module, int] = {}

    def record_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        called_modules.add(module)
        hidden_states = kwargs.get("hidden_states", args[0] if args else None)
        if isinstance(hidden_states, Tensor):
            widths[module] = hidden_states.shape[-1]

    handles = [m.register_forward_pre_hook(record_call, with_kwargs=True) for m in model.modules()]
    try:
        with recorded_attention() as record:
            run_in_evaluation(model, example)
    except Exception as error:  # a family's code may raise anything
        model_name = type(model).__name__
        if str(error).startswith(REFUSAL):  # no other example would help
            reason = one_line(error).partition(REFUSAL)[2]
            raise ValueError(
                f"attach: the attention of {model_name} cannot be replaced: {reason}"
            ) from error
        raise ValueError(
            f"attach: {model_name} fails with {', '.join(example)} ({one_line(error)}). "
            "Give example=, the arguments of one small forward that runs."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    name_of_module = {module: name for name, module in model.named_modules()}
    _refuse_bypassing_attention(
        model, name_of_module, called_modules, {call.module for call in record.calls}
    )
    stacks: dict[nn.Module, Stack] = {}
    cross_attentions: list[nn.Module] = []
    for call in record.calls:
        if call.q_len != call.kv_len:
            cross_attentions.append(call.module)
            continue
        owner = _innermost_called_model(model, name_of_module[call.module], called_modules)
        stack = stacks.setdefault(owner, Stack(owner, [], widths[call.module]))
        if all(call.module is not other.module for other in stack.attentions):
            stack.attentions.append(call)
    for module in cross_attentions:
        owner = _innermost_called_model(model, name_of_module[module], called_modules)
        if owner in stacks:
            stacks[owner].cross_attentions.append(module)
    return list(stacks.values())


@contextmanager
def recorded_attention(*, ignores_mask: bool = False) -> Iterator[AttentionRecord]:
    """Record the calls of the attention interface inside the block. ignores_mask: True if attention
    is to ignore its mask there, so that every token sees every other."""
    record = AttentionRecord(ignores_mask)
    reset_token = TRIAL_RECORD.set(record)
    try:
        yield record
    finally:
        TRIAL_RECORD.reset(reset_token)


@torch.no_grad()
def run_in_evaluation(model: Any, example: dict[str, Any]) -> Any:
    """Return the model's output for the arguments `example`, computed in evaluation mode and
    without gradients; training flags are restored. It uses no cache, unless the example asks for
    one."""
    was_training = {module: module.training for module in model.modules()}
    options = {"use_cache": False} if forward_takes(model, "use_cache") else {}
    try:
        return model.eval()(**{**options, **example})
    finally:
        for module, mode_before in was_training.items():
            module.training = mode_before


class ForwardWithHooksFailed(ValueError):
    """A family's own code stopped in a forward with hooks; the cause has its exception."""


def run_with_hooks(model: Any, example: dict[str, Any]) -> None:
    """Run the model, with its hooks, on the arguments `example`. Raise ForwardWithHooksFailed if
    the family's code fails, or ValueError as posenc refuses."""
    try:
        with recorded_attention():
            run_in_evaluation(model, example)
    except ValueError:  # posenc's refusals are sentences
        raise
    except Exception as error:  # a family's code may raise anything
        raise ForwardWithHooksFailed(
            f"attach: {type(model).__name__} fails with the encoding attached ({one_line(error)})."
        ) from error


def rounding_tolerance(model: Any) -> float:
    """Return the largest difference of hidden states, relative to the largest of them, that
    rounding may explain: two orders of the same computation in the model's dtype differ by less."""
    device_type = model.device.type
    is_exact = torch.get_float32_matmul_precision() == "highest"
    is_coarse = (
        getattr(model, "is_quantized", False)
        or torch.is_autocast_enabled(device_type)
        or (model.dtype == torch.float32 and not is_exact)  # TF32
    )
    return (
        HALF_PRECISION_TOLERANCE
        if is_coarse
        else TOLERANCES.get(model.dtype, HALF_PRECISION_TOLERANCE)
    )


def stack_shape(stack: Stack, config: Any) -> ModelShape:
    """Return the sizes for which an encoding of this stack is built. If the config has no maximum
    length, the training length is 512, which is chosen and not derived."""
    first_call = stack.attentions[0]
    text_config = config.get_text_config()
    lengths = [
        getattr(text_config, name, None)
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
    ]
    positive_lengths = [n for n in lengths if isinstance(n, int) and n > 0]
    return ModelShape(
        embed_dim=stack.embed_dim,
        num_heads=first_call.num_heads,
        num_kv_heads=first_call.num_kv_heads,
        head_dim=first_call.head_dim,
        train_length=positive_lengths[0] if positive_lengths else 512,
        causal=first_call.causal,
    )


def _refuse_bypassing_attention(
    model: Any,
    name_of_module: dict[nn.Module, str],
    called_modules: set[nn.Module],
    calling_modules: set[nn.Module],
) -> None:
    """Raise ValueError if a module named Attention ran, and neither it nor a module inside or
    around it called transformers' interface.

    name_of_module: for all modules. called_modules: those that ran. calling_modules: those that
    called the interface.
    """
    names_of_callers = [name_of_module[module] for module in calling_modules]
    bypassing_names = [
        name
        for module, name in name_of_module.items()
        if module in called_modules
        and "Attention" in type(module).__name__
        and not any(
            _is_same_or_inside(name, other) or _is_same_or_inside(other, name)
            for other in names_of_callers
        )
    ]
    if not names_of_callers or bypassing_names:
        what_bypasses = f"its {bypassing_names[0]}" if bypassing_names else type(model).__name__
        raise ValueError(
            f"attach: the attention of {type(model).__name__} cannot be replaced: transformers "
            f"has {what_bypasses} outside its attention interface, where no encoding can reach it."
        )


def _is_same_or_inside(name: str, outer_name: str) -> bool:
    """Return True if the module `name` is the module `outer_name` or inside of it."""
    return name == outer_name or name.startswith(f"{outer_name}.")


def _innermost_called_model(model: Any, name: str, called_modules: set[nn.Module]) -> nn.Module:
    """Return the innermost transformers model that was called and contains the module `name`."""
    from transformers import PreTrainedModel

    innermost: nn.Module = model
    module: nn.Module = model
    for part in name.split("."):
        if isinstance(module, PreTrainedModel) and module in called_modules:
            innermost = module
        module = getattr(module, part)
    return innermost
