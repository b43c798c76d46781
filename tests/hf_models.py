"""Tiny random models of the families that posenc.hf must read, built on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

LENGTH = 64
COMMON = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

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
        "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 8.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": LENGTH // 2,
        },
    },
}  # fmt: skip


def save(family: str, folder: Path, **overrides: Any) -> Path:
    """A random model of the family in `folder`, as transformers saves it."""
    import torch

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**ROPE.get(family, {}), **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder
