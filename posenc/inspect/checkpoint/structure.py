"""Describe how a model is built: layers, heads, and parameters by part, counted from its
weights."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from posenc.hf.checkpoint.loading import text_config_of

PARTS = ("embeddings", "positions", "attention", "feed-forward", "norms", "head", "other")

_POSITIONS = tuple(
    "position wpe embed_positions relative_attention_bias rel_embeddings pos_proj "
    "pos_q_proj pos_key_proj pos_query_proj".split()
)
_FEED_FORWARD = tuple(
    "mlp fc1 fc2 intermediate output.dense densereludense feed_forward ffn".split()
)


@dataclass(frozen=True)
class Structure:
    """Sizes of a model. parts: trainable numbers by part; a head tied to the embeddings counts with
    those. decoder_layers: layers of the second stack, or None."""

    model_type: str
    layers: int
    decoder_layers: int | None
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocabulary: int
    tied: bool
    parts: dict[str, int]

    @property
    def parameters(self) -> int:
        """Return the number of trainable numbers of all parts."""
        return sum(self.parts.values())


def measure_structure(model: Any) -> Structure:
    """Read the structure of a loaded transformers model. Raises: ValueError where it has no
    heads."""
    config = text_config_of(model.config)
    if not getattr(config, "num_attention_heads", None):
        raise ValueError(f"A {config.model_type} model has no attention heads to look at.")
    heads, width = config.num_attention_heads, config.hidden_size
    decoders = getattr(config, "num_decoder_layers", None)
    head_dim = _head_dim(config) or getattr(config, "d_kv", None) or width // heads
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    return Structure(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        decoder_layers=decoders if config.is_encoder_decoder else None,
        heads=heads,
        kv_heads=_kv_heads(config),
        head_dim=head_dim,
        width=width,
        vocabulary=config.vocab_size,
        tied=head is not None and head.weight is embeddings.weight,
        parts=_parts(model, embeddings, head),
    )


def _head_dim(config: Any) -> int | None:
    """Return the head dimension, the first layer's where layers differ (Gemma 4); None where the
    config does not say it."""
    layers = getattr(config, "per_layer_config", None)
    return getattr(layers[0] if layers else config, "head_dim", None)


def _kv_heads(config: Any) -> int:
    """Return the number of key heads, by the names that families give it."""
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        return 1  # Falcon's first, GPT-BigCode
    named = ("num_key_value_heads", "num_kv_heads")
    counts = (getattr(config, name, None) for name in named)
    return next((heads for heads in counts if heads), config.num_attention_heads)


def _parts(model: nn.Module, embeddings: nn.Module, head: nn.Module | None) -> dict[str, int]:
    """Count the weights of each part of the model, shared ones once."""
    counts: dict[str, int] = dict.fromkeys(PARTS, 0)
    seen: set[int] = set()
    inside = {id(p) for p in embeddings.parameters()}
    of_head = {id(p) for p in head.parameters()} if head is not None else set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if id(parameter) in inside:
                part = "embeddings"
            elif id(parameter) in of_head:
                part = "head"
            else:
                part = _part(f"{path}.{name}".lower(), type(module).__name__.lower())
            counts[part] += parameter.numel()
    return counts


def _part(name: str, owner: str) -> str:
    """Return the part of a weight from its name and its module's class, both in lower case."""
    if any(word in name for word in _POSITIONS):
        return "positions"
    if name.startswith(("cls.", "lm_head", "lm_predictions", "predictions")):
        return "head"
    if "norm" in owner:
        return "norms"
    if "attn" in name or "attention" in name:
        return "attention"
    if any(word in name for word in _FEED_FORWARD):
        return "feed-forward"
    return "embeddings" if "embed" in name else "other"
