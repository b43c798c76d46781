"""Map positions into the training length without training, by posenc's attention."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posenc.command_line.errors import one_line
from posenc.encodings import DualChunk, PositionMap, ReRoPE, SelfExtend
from posenc.extend.variants.variant import Variant
from posenc.frequencies.scalings.registry import Linear
from posenc.hf.attachment.attach import attached
from posenc.hf.attachment.attention import attention_is_replaceable
from posenc.hf.checkpoint.loading import Checkpoint
from posenc.hf.rope.settings import head_dim_of

DUAL_CHUNK = "dual-chunk"
MAX_COMPARED_TOKENS = 128
"""Most tokens on which a map is compared with the model itself."""
TOLERANCE, LAST_BITS = 1e-3, 16
"""Largest allowed difference of a logit, relative to the largest logit, and in half precision at
least this many last bits. Rounding is far below, another rotation far above."""


def position_maps(checkpoint: Checkpoint, target: int) -> list[Variant]:
    """Return variants of this checkpoint that map positions up to `target` into the training
    length. Empty if layers differ in their rotation, or the attention cannot be replaced (Falcon).

    Whether a map rotates as the model does is not read from names: see `checked_map_attached`.
    """
    model = checkpoint.model
    # A map rotates all layers alike.
    is_alike = (
        len(checkpoint.rope_settings) == 1
        and checkpoint.rope_settings[0].layer_type is None
        and not getattr(checkpoint.config, "no_rope_layers", None)
    )
    if not is_alike or not attention_is_replaceable(model):
        return []
    setting = checkpoint.rope_settings[0]
    train_length = checkpoint.trained_length
    # Chosen, not derived.
    window = train_length // 2
    chunk = train_length * 3 // 4
    local = train_length // 16
    # The fewest tokens per group with which the last one is within the training length.
    group = max(2, -(-(target - window) // (train_length - window)))
    scaling = setting.scaling
    if scaling is None and setting.compression != 1.0:
        scaling = Linear(setting.compression)
    rope: dict[str, Any] = {
        "head_dim": head_dim_of(checkpoint.config),
        "rope_theta": setting.rope_theta,
        "interleaved": False,
        "rotary_dim": setting.rotary_dim,
        "scaling": scaling,
    }
    maps = {
        "self-extend": SelfExtend(**rope, window=window, group_size=group),
        "rerope": ReRoPE(**rope, window=window),
        DUAL_CHUNK: DualChunk(**rope, chunk_size=chunk, local_window=local),
    }
    summaries = {
        "self-extend": f"exact to {window} tokens, then groups of {group}",
        "rerope": f"distances stop at {window} tokens",
        DUAL_CHUNK: f"chunks of {chunk} tokens",
    }
    sizes = {"chunk_size": chunk, "local_size": local}
    server_keys = {DUAL_CHUNK: {"dual_chunk_attention_config": sizes}}
    return [
        Variant(
            name,
            summaries[name],
            lambda e=encoding: checked_map_attached(checkpoint, e, window),
            checkpoint.rope_settings,
            needs_special_runtime=True,
            server_keys=server_keys.get(name, {}),
        )
        for name, encoding in maps.items()
    ]


@contextmanager
def checked_map_attached(
    checkpoint: Checkpoint, encoding: PositionMap, window: int
) -> Iterator[nn.Module]:
    """Yield the model with a position map attached, after comparing the two on random tokens.
    Within its `window` of tokens a map must change nothing; it does if the model pairs other
    channels.

    Raises: ValueError with the difference, where there is one.
    """
    length = min(MAX_COMPARED_TOKENS, window)
    vocabulary = checkpoint.config.vocab_size
    tokens = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    expected = _logits(checkpoint.model, tokens)
    dtype = checkpoint.model.dtype
    half = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    with ExitStack() as stack:
        try:
            model = stack.enter_context(
                attached(checkpoint.model, encoding, allow_other_order=True)
            )
            logits = _logits(model, tokens)
        except ValueError:  # has a sentence for the user already
            raise
        except Exception as error:  # a family's code may raise anything with another attention
            attention = f"the attention of {type(checkpoint.model).__name__}"
            raise ValueError(f"{attention} cannot run with a map ({one_line(error)})") from error
        error = float((logits - expected).abs().max() / expected.abs().max())
        if not error <= max(TOLERANCE, LAST_BITS * half):
            raise ValueError(
                f"within its window it must change nothing, and it changes logits by {error:.1%}: "
                "this model rotates in another way than the map"
            )
        yield model


@torch.inference_mode()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits in float32, (batch, length, vocabulary), without a cache."""
    return model(tokens.to(model.device), use_cache=False).logits.float()
