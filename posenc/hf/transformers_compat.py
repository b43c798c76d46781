"""Read what the installed transformers passes to a model's parts: its releases name and shape the
same arguments differently, and no other file knows how."""

from collections.abc import Iterable
from inspect import signature
from typing import Any

from torch import Tensor, nn

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of a forward's cache argument, the newest first."""


def is_cache(value: Any) -> bool:
    """Return True for a KV cache of transformers, whatever its class and its argument are named."""
    return hasattr(value, "get_seq_length") and not isinstance(value, nn.Module)


def find_cache(values: Iterable[Any]) -> Any:
    """Return the KV cache among the arguments of a forward; None if there is none."""
    return next((value for value in values if is_cache(value)), None)


def forward_takes(model: nn.Module, name: str) -> bool:
    """Return True if the model's forward has an argument of this name."""
    return name in signature(model.forward).parameters


def cache_argument_name(model: nn.Module) -> str | None:
    """Return the name under which the model's forward takes a KV cache; None if it takes none.

    >>> from transformers import GPT2Config, GPT2Model
    >>> gpt2 = GPT2Model(GPT2Config(vocab_size=90, n_embd=32, n_layer=1, n_head=4))
    >>> cache_argument_name(gpt2) in CACHE_ARGUMENTS
    True
    """
    return next((name for name in CACHE_ARGUMENTS if forward_takes(model, name)), None)


def arguments_for_next_step(model: nn.Module, out: Any) -> dict[str, Any]:
    """Return the arguments with which the model's next forward goes on from the cache in its output
    `out`. Empty if there is none, or the forward takes none."""
    argument_name = cache_argument_name(model)
    cache = find_cache(out.values())
    return (
        {} if argument_name is None or cache is None else {argument_name: cache, "use_cache": True}
    )


def counts_chunks_per_text() -> bool:
    """Return True if this transformers counts the chunks of chunked attention in each text of a
    packed row; others count them in the whole row."""
    from transformers import masking_utils

    return hasattr(masking_utils, "packed_sequence_compatibility_function")


def static_cache_argument(model: Any, length: int, source_length: int = 0) -> dict[str, Any]:
    """Return the argument {name: cache} with an empty cache for `length` tokens, as compiled
    generation makes it; {} if the model supports none. source_length: tokens that an encoder has
    read."""
    from transformers import EncoderDecoderCache, StaticCache

    argument_name = cache_argument_name(model)
    if argument_name is None or not getattr(model, "_can_compile_fullgraph", False):
        return {}
    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=length)
    if model.config.is_encoder_decoder:
        source_cache = StaticCache(config=config, max_cache_len=source_length)
        cache = EncoderDecoderCache(cache, source_cache)
    return {argument_name: cache}


def cache_update_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `Cache.update` that say where a static cache stores the new tokens.
    Empty from transformers 5.4 on, where a cache counts its tokens itself.

    Args:
        arguments: arguments of the attention that updates the cache.
    """
    cache_position = arguments.get("cache_position")
    return {} if cache_position is None else {"cache_kwargs": {"cache_position": cache_position}}


def query_count_and_offset(request: dict[str, Any]) -> tuple[int, Any]:
    """Return the number of queries for which a mask is requested, and the index of the first.
    request: arguments that transformers hands to a mask function."""
    if "cache_position" in request:  # before transformers 5.4: the index of every query
        indices = request["cache_position"]
        return len(indices), indices[0]
    return request["q_length"], request.get("q_offset", 0)


def requested_padding_mask(request: dict[str, Any]) -> Tensor | None:
    """Return the padding mask of a requested mask, (batch, keys), indexed from the first token on;
    None if there is none. request: arguments that transformers hands to a mask function."""
    from transformers.masking_utils import prepare_padding_mask

    # transformers 4 cuts off the tokens that have left a window, unless asked not to.
    slice_option = (
        {"_slice": False} if "_slice" in signature(prepare_padding_mask).parameters else {}
    )
    kv_length = request["kv_length"]
    offset = request.get("kv_offset", 0)
    return prepare_padding_mask(request.get("attention_mask"), kv_length, offset, **slice_option)


def validate_config(config: Any) -> None:
    """Make a config of transformers check itself; it raises for values that it does not take. Early
    releases of 5 check its rotary keys only."""
    (getattr(config, "validate", None) or config.validate_rope)()
