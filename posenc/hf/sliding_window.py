"""Let every layer of a model attend to the last tokens only, as its config can say it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from posenc.hf.checkpoint.loading import Checkpoint, language_model_of, text_config_of
from posenc.runtimes.families import facts_of_runtime

WINDOW_KEY = "sliding_window"
WINDOWED = "sliding_attention"
_ATTRIBUTES = {WINDOW_KEY: None, "has_sliding_layers": True}
"""Attributes that modules take from the config when they are built, and that decide about windows.
Where the value is None, it is the length of the window."""
_KIND_ATTRIBUTES = ("attention_type", "layer_type")
"""Attributes with the kind of a layer."""
_TRIED_WINDOW = 3
"""Tokens of the window with which it is tried whether a model's code reads it."""


def why_no_window(checkpoint: Checkpoint) -> str | None:
    """Return why config.json cannot say that every layer of this model attends to the last tokens
    only; None if it can. Which families read sliding_window is in posenc's facts."""
    config = checkpoint.config
    model_type = config.model_type
    families = facts_of_runtime("transformers-5")["families"]
    checked_keys = families.get(model_type, {}).get("fields", {})
    if not any(WINDOW_KEY in keys for keys in checked_keys.values()):
        return f"a {model_type} config has no {WINDOW_KEY}"
    settings = checkpoint.rope_settings
    if len(settings) != 1 or settings[0].layer_type is not None:
        return "its kinds of layers rotate differently, so that no layer can become another kind"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types - {"full_attention"}:
        return "some of its layers have a window or a state already, of another length"
    if checkpoint.masked:
        return "a masked model reads both sides"
    if not checkpoint.has_head:
        return "a text whose vector is wanted is cut before it is read"
    return None


@contextmanager
def window_in_every_layer(model: Any, window_len: int, max_positions: int) -> Iterator[nn.Module]:
    """Yield the model with a window of `window_len` tokens, itself included, in every layer, by its
    config, which then allows `max_positions` tokens; both are put back after the block.

    model: that of a checkpoint for which `why_no_window` gives no reason.

    Raises: ValueError if the model's code takes no notice.
    """
    config = text_config_of(model.config)
    config_values: dict[str, Any] = {WINDOW_KEY: window_len}
    if hasattr(config, "use_sliding_window"):
        config_values["use_sliding_window"] = True
    if hasattr(config, "max_window_layers"):
        config_values["max_window_layers"] = 0  # the number of first layers without a window
    if getattr(config, "layer_types", None):
        config_values["layer_types"] = [WINDOWED] * len(config.layer_types)
    config_values["max_position_embeddings"] = max_positions
    changes = [(config, name, value) for name, value in config_values.items()]
    for module in language_model_of(model).modules():
        changes += [(module, name, value) for name, value in _module_values(module, window_len)]
    values_before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield model
    finally:
        for owner, name, value in values_before:
            setattr(owner, name, value)


def _module_values(module: nn.Module, window_len: int) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that decide about windows, with their new values."""
    for name, value in _ATTRIBUTES.items():
        if name in vars(module):
            yield name, window_len if value is None else value
    for name in _KIND_ATTRIBUTES:
        if vars(module).get(name) == "full_attention":
            yield name, WINDOWED


@torch.inference_mode()
def reads_window(model: Any) -> bool:
    """Return True if a window acts in the model: with one of a few tokens in every layer, the last
    of a row of tokens does not depend on the first, as it does without."""
    config = text_config_of(model.config)
    # Each layer sees window - 1 tokens further back.
    length = config.num_hidden_layers * (_TRIED_WINDOW - 1) + 2
    tokens = torch.arange(length, device=model.device)[None] % config.vocab_size
    other_tokens = tokens.clone()
    other_tokens[0, 0] = config.vocab_size - 1
    rows = (tokens, other_tokens)

    def last_logits_agree() -> bool:
        first, second = (model(row, use_cache=False).logits[0, -1] for row in rows)
        return bool(torch.equal(first, second))

    with window_in_every_layer(model, _TRIED_WINDOW, config.max_position_embeddings):
        agree_with_window = last_logits_agree()
    return agree_with_window and not last_logits_agree()
