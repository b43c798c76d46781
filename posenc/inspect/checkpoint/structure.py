"""Describe how a model is built: layers, heads, and parameters by part, counted from its
weights."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from posenc.hf.checkpoint.loading import text_config_of

PARTS = ("embeddings", "positions", "attention", "feed-forward", "norms", "head", "other")
"""Parts of a model by which its weights are counted."""

_POSITION_NAMES = tuple(
    "position wpe embed_positions relative_attention_bias rel_embeddings pos_proj "
    "pos_q_proj pos_key_proj pos_query_proj".split()
)
# Parts of the names of weights in transformers' families, as those of tables above.
_FEED_FORWARD_NAMES = tuple(
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
        """Return the number of trainable parameters of all parts together."""
        return sum(self.parts.values())


def measure_structure(model: Any) -> Structure:
    """Return the structure of a loaded transformers model, from its config and weights.

    Raises: ValueError where it has no attention heads.
    """
    config = text_config_of(model.config)
    if not getattr(config, "num_attention_heads", None):
        raise ValueError(f"A {config.model_type} model has no attention heads to look at.")
    heads = config.num_attention_heads
    width = config.hidden_size
    decoders = getattr(config, "num_decoder_layers", None)
    head_dim = _head_dim(config) or getattr(config, "d_kv", None) or width // heads
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
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
        parts=_weights_by_part(model, embeddings, head),
    )


def _head_dim(config: Any) -> int | None:
    """Return the head dimension, the first layer's where layers differ (Gemma 4); None where the
    config does not say it."""
    layers = getattr(config, "per_layer_config", None)
    return getattr(layers[0] if layers else config, "head_dim", None)


def _kv_heads(config: Any) -> int:
    """Return the number of key heads, which configs name in several ways; without such a name, that
    of query heads."""
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        return 1  # Falcon's first, GPT-BigCode
    names_of_families = ("num_key_value_heads", "num_kv_heads")
    counts = (getattr(config, name, None) for name in names_of_families)
    return next((heads for heads in counts if heads), config.num_attention_heads)


def _weights_by_part(
    model: nn.Module, embeddings: nn.Module, head: nn.Module | None
) -> dict[str, int]:
    """Return the number of weights in each of PARTS, shared weights counted once, and then with the
    embeddings."""
    counts: dict[str, int] = dict.fromkeys(PARTS, 0)
    seen: set[int] = set()
    of_embeddings = {id(p) for p in embeddings.parameters()}
    of_head = {id(p) for p in head.parameters()} if head is not None else set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if id(parameter) in of_embeddings:
                part = "embeddings"
            elif id(parameter) in of_head:
                part = "head"
            else:
                part = _part_of_weight(f"{path}.{name}".lower(), type(module).__name__.lower())
            counts[part] += parameter.numel()
    return counts


def _part_of_weight(name: str, owner: str) -> str:
    """Return to which of PARTS a weight belongs, from its path in the model and its module's class,
    both in lower case."""
    if any(word in name for word in _POSITION_NAMES):
        return "positions"
    if name.startswith(("cls.", "lm_head", "lm_predictions", "predictions")):
        return "head"
    if "norm" in owner:
        return "norms"
    if "attn" in name or "attention" in name:
        return "attention"
    if any(word in name for word in _FEED_FORWARD_NAMES):
        return "feed-forward"
    return "embeddings" if "embed" in name else "other"
