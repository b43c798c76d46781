"""Tiny random models of the families that posenc.hf must read, built on the spot."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

LENGTH = 64
WORDS = [f"{i} the fox and the dog " * 12 for i in range(8)]
NUMBERS = [" ".join(str((7 * i + j) % 200 + 20) for j in range(400)) for i in range(8)]
"""Documents to extend on: in words, and in token ids."""
COMMON = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ROPE: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 8},
    "mistral": COMMON,
    "phi3": COMMON | {"original_max_position_embeddings": LENGTH},
    "gpt_neox": {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
    | {"num_attention_heads": 2},
    "gemma3_text": COMMON | {"head_dim": 8, "num_hidden_layers": 6, "sliding_window": 16},
    "smollm3": COMMON | {"num_hidden_layers": 4},
    "gpt_oss": COMMON
    | {
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": LENGTH // 2,
        },
    },
}


_TEXT = COMMON | {"head_dim": 8}
_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_QWEN = _IMAGES | {"depth": 1, "num_heads": 2, "out_hidden_size": COMMON["hidden_size"]}
_LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _IMAGES | {"model_type": "clip_vision_model"},
    },
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral"},
        "vision_config": _IMAGES | {"model_type": "pixtral", "head_dim": 8},
    },
    "gemma3": {
        "text_config": _TEXT | {"num_hidden_layers": 6, "sliding_window": 16},
        "vision_config": _IMAGES,
    },
    "qwen2_5_vl": {"text_config": _TEXT | {"rope_parameters": _SECTIONS}, "vision_config": _QWEN},
    "qwen3_vl": {
        "text_config": _TEXT | {"rope_parameters": _SECTIONS},
        "vision_config": _QWEN | {"deepstack_visual_indexes": [0]},
    },
    "glm4v": {
        "text_config": _TEXT
        | {
            "rope_parameters": _SECTIONS
            | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
        },
        "vision_config": _QWEN,
    },
    "qwen3_5": {
        "text_config": _TEXT
        | _LINEAR
        | {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 1.0}},
        "vision_config": _QWEN,
    },
}
"""Models of text and images, by model_type."""

_TOKENS = {k: v for k, v in COMMON.items() if k == "vocab_size" or k.endswith("_token_id")}
_MASKED = {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
_DEBERTA = _MASKED | {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("AutoModelForMaskedLM", _MASKED),
    "mpnet": ("AutoModelForMaskedLM", _MASKED),
    "gpt2": (
        "AutoModelForCausalLM",
        _TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    ),
    "opt": ("AutoModelForCausalLM", _MASKED | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": ("AutoModelForCausalLM", _TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "t5": (
        "AutoModelForSeq2SeqLM",
        _TOKENS
        | {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "mpt": (
        "AutoModelForCausalLM",
        _TOKENS | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": LENGTH},
    ),
    "gptj": (
        "AutoModelForCausalLM",
        _TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "rotary_dim": 4},
    ),
    "falcon": (
        "AutoModelForCausalLM",
        _TOKENS
        | {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": LENGTH,
        },
    ),
    "deberta": ("AutoModelForMaskedLM", _DEBERTA),
    "deberta-v2": (
        "AutoModelForMaskedLM",
        _DEBERTA | {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    ),
}
"""family: the class that loads it, and its sizes, for models without RoPE."""


ADDED_LATER = (
    "beam",
    "gemma4",
    "gemma4_text",
    "granite_swa",
    "nomic_bert",
    "qwen3_5",
    "qwen3_5_moe",
)
"""Families that came to transformers within its release 5."""


def skip_if_absent(family: str) -> None:
    """Skip the test where the installed transformers does not have this family yet."""
    if family in ADDED_LATER and family not in transformers.models.auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")


def skip_if_yarn_is_for_all_layers() -> None:
    """Skip the test where transformers' own check of YaRN stops at rotary keys of each kind of
    layers: it looks for the length in the keys of all."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    }
    kinds = {"full_attention": yarn, "sliding_attention": {"rope_type": "default"}}
    try:
        transformers.Gemma3TextConfig(rope_parameters=kinds)
    except KeyError as stopped:
        pytest.skip(f"this transformers' check of YaRN for a kind of layers stops: {stopped}")


def save(family: str, folder: Path, *, spread: float = 0.0, **overrides: Any) -> Path:
    """A random model of the family in `folder`, as transformers saves it; `spread` widens its
    weights, so that attention and positions are felt."""
    import torch

    skip_if_absent(family)
    torch.manual_seed(0)
    auto, sizes = OTHERS.get(family, ("AutoModelForCausalLM", ROPE.get(family, {})))
    config = transformers.AutoConfig.for_model(family, **{**sizes, **overrides})
    model = getattr(transformers, auto).from_config(config)
    for name, parameter in model.named_parameters():
        if spread and "norm" not in name.lower():
            parameter.data = spread * torch.randn_like(parameter)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder
