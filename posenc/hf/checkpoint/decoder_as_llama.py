"""Write posenc's own Decoder as a folder that transformers loads as Llama: config.json and
safetensors."""

import json
from collections.abc import Iterator
from pathlib import Path

from posenc.encodings import RoPE
from posenc.files.atomic import write_atomically
from posenc.files.opening import make_folder
from posenc.files.tensor_files import write_tensors
from posenc.models.decoder import Decoder

_LAYER_MODULES = {
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "ffn": "mlp",
    "ffn_norm": "post_attention_layernorm",
}
"""Name of each part of a layer in posenc and in transformers' Llama."""

_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "attention_bias": "attention_bias",
    "dropout": "attention_dropout",
}
"""Name of each field of DecoderConfig, and of Llama's config."""


def export_llama(
    model: Decoder, folder: str | Path, *, max_positions: int, stop_token: int | None = None
) -> None:
    """Write a decoder with half-split RoPE as a folder that transformers loads as Llama.

    Its logits are the same. Llama applies `dropout` to attention weights only.

    Args:
        model: the decoder.
        folder: folder to write, created if missing.
        max_positions: the training length in tokens.
        stop_token: the token that ends generation; None for none.

    Raises: ValueError, before anything is written, if Llama cannot express the model.
    """
    encoding = _require_llama_rope(model)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(model.tokens.weight.dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "mlp_bias": False,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": encoding.rope_theta},
        "rope_theta": encoding.rope_theta,  # where transformers 4 and mlx-lm look for it
        "bos_token_id": None,
        "eos_token_id": stop_token,
        **{theirs: getattr(model.config, ours) for ours, theirs in _CONFIG_KEYS.items()},
    }
    state = model.state_dict()
    weights = {theirs: state[ours] for ours, theirs in _weight_names(model)}
    folder = Path(folder)
    make_folder(folder)
    write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def can_export_llama(model: Decoder) -> bool:
    """Return True if `export_llama` can write the model."""
    try:
        _require_llama_rope(model)
    except ValueError:
        return False
    return True


def _weight_names(model: Decoder) -> Iterator[tuple[str, str]]:
    """Yield the name of each weight in posenc and in transformers' Llama."""
    yield "tokens.weight", "model.embed_tokens.weight"
    for name, _ in model.layers.named_parameters():
        index, part, *rest = name.split(".")
        yield f"layers.{name}", ".".join(["model.layers", index, _LAYER_MODULES[part], *rest])
    yield "norm.weight", "model.norm.weight"
    if not model.config.tie_embeddings:
        yield "head.weight", "lm_head.weight"


def _require_llama_rope(model: Decoder) -> RoPE:
    """Return the model's RoPE. Raise ValueError if Llama has no setting for what it, or another
    part of the model, computes."""
    config = model.config
    encoding = model.encoding
    for name, needed in (
        ("norm", "rms"),
        ("norm_position", "pre"),
        ("final_norm", True),
        ("ffn_bias", False),
        ("activation", "swiglu"),
        ("projections", "separate"),
        ("qk_norm", False),
        ("layer_windows", None),
    ):
        if getattr(config, name) != needed:
            raise ValueError(
                f"export_llama: Llama has {name}={needed!r} only, "
                f"this model has {getattr(config, name)!r}."
            )
    if config.output_bias not in (None, config.attention_bias):
        raise ValueError(
            "export_llama: Llama has a bias in all projections of attention or in none, this model "
            f"has attention_bias={config.attention_bias} and output_bias={config.output_bias}."
        )
    if type(encoding) is not RoPE or encoding.interleaved:
        class_name = type(encoding).__name__
        encoding_in_words = (
            f"{class_name}(interleaved=True)" if type(encoding) is RoPE else class_name
        )
        raise ValueError(
            f"export_llama: Llama has RoPE(interleaved=False) only, this model has "
            f"{encoding_in_words}."
        )
    if encoding.rotary_dim != encoding.head_dim or encoding.scaling is not None:
        raise ValueError(
            "export_llama: only RoPE over the whole head and without scaling is written, got "
            f"rotary_dim={encoding.rotary_dim} of {encoding.head_dim}, "
            f"scaling={encoding.scaling!r}."
        )
    return encoding
