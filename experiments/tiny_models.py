"""A tiny random model of any of transformers' families, with a tokenizer of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

LENGTH, VOCABULARY = 64, 257
HIDDEN, HEADS, KV_HEADS, LAYERS, HEAD_DIM, EXPERTS = 32, 4, 2, 2, 8, 4
LARGEST = 5_000_000
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "tgt_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_dim",
            "dim",
            "embedding_size",
            "hidden_dim",
            "emb_dim",
            "word_embed_proj_dim",
            "attention_hidden_size",
            "lru_width",
            "input_embedding_size",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "d_ff",
            "d_inner",
            "ffn_hidden_size",
            "dff",
            "n_inner",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "expert_ffn_hidden_size",
            "dense_intermediate_size",
            "intermediate_size_mlp",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "mlp_intermediate_size",
            "prefix_dense_intermediate_size",
        ),
        2 * HIDDEN,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
            "num_encoder_layers",
        ),
        LAYERS,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), KV_HEADS),
    **dict.fromkeys(
        (
            "head_dim",
            "v_head_dim",
            "qk_nope_head_dim",
            "attention_head_dim",
            "d_kv",
            "global_head_dim",
            "swa_head_dim",
        ),
        HEAD_DIM,
    ),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), HEAD_DIM // 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "dim_head", "attention_rank"), HIDDEN // 2),
    **dict.fromkeys(
        (
            "num_local_experts",
            "n_routed_experts",
            "num_experts",
            "moe_num_experts",
            "num_routed_experts",
        ),
        EXPERTS,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_k", "n_group", "topk_group", "num_expert_group"), 1
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "max_sequence_length",
            "max_target_positions",
        ),
        LENGTH,
    ),
    **dict.fromkeys(
        (
            "sliding_window",
            "local_attention",
            "attention_chunk_size",
            "attention_window_size",
            "window_size",
        ),
        16,
    ),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "state_size": 8,
}
"""Sizes by every name that a family has for them; taken where its config has the key."""
SPECIAL: dict[str, dict[str, Any]] = {
    "roberta": {"max_position_embeddings": LENGTH + 2, "pad_token_id": 1},
    "xlm-roberta": {"max_position_embeddings": LENGTH + 2, "pad_token_id": 1},
    "camembert": {"max_position_embeddings": LENGTH + 2, "pad_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "phi3": {"original_max_position_embeddings": LENGTH},
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": LENGTH // 2,
        }
    },
    "bamba": {"attn_layer_indices": [1]},
    "bert-generation": {"is_decoder": True},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "layers_block_type": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
    },
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma3n_text": {"num_hidden_layers": 4},
    "longcat_flash": {"head_dim": HEAD_DIM // 2, "num_experts_per_tok": 2},
    "mamba2": {"num_heads": 8},
    "zamba2": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD_DIM},
    "luke": {"entity_vocab_size": VOCABULARY},
    "smollm3": {"num_hidden_layers": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    # As in what is published since Mistral 7B 0.2: no window.
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
}
"""What a family needs besides."""
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
SPECIAL |= {
    family: {"rope_parameters": {**SECTIONS, **more}}
    for family, more in {
        "qwen2_vl_text": {},
        "qwen2_5_vl_text": {},
        "qwen3_vl_text": {},
        "qwen3_vl_moe_text": {},
        "qwen3_5_text": {"partial_rotary_factor": 1.0},
        "qwen3_5_moe_text": {"partial_rotary_factor": 1.0},
        "glm4v_text": {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
        "glm4v_moe_text": {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
    }.items()
}
"""Sections of channels for time, height and width that fit tiny heads."""
SPECIAL["qwen3_vl_moe_text"]["sliding_window"] = None
IMAGES = {
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_hidden_layers": 1,
    "out_hidden_size": HIDDEN,
    "deepstack_visual_indexes": [0],
}
"""Sizes of the part of a model that reads images."""
SPECIAL_IDS = {"<s>": 1, "</s>": 2, "<pad>": 0, "<unk>": 3, "<mask>": 4}


def tiny_config(family: str) -> Any:
    """Return the family's config with tiny sizes, also of its parts for text and images. Raises:
    what its class raises against them."""
    kind = transformers.CONFIG_MAPPING[family]
    plain = kind()
    text_config = getattr(plain, "text_config", None)
    if text_config is None:
        return _tiny_part(kind, family)
    parts = {"text_config": _tiny_part(type(text_config), text_config.model_type).to_dict()}
    for name in ("vision_config", "audio_config"):
        if (part := getattr(plain, name, None)) is not None:
            known = {key: value for key, value in IMAGES.items() if hasattr(part, key)}
            parts[name] = {**_tiny_part(type(part), part.model_type).to_dict(), **known}
    return kind(**parts)


def _tiny_part(kind: Any, family: str) -> Any:
    """Return a config of the class `kind` with tiny sizes; `family` is its model_type."""
    plain = kind()
    names = set(plain.to_dict()) | set(getattr(kind, "attribute_map", {}))
    taken = {name: value for name, value in SIZES.items() if name in names}
    layers = SPECIAL.get(family, {}).get("num_hidden_layers", LAYERS)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(plain, name, None)
        written = getattr(kind, "attribute_map", {}).get(name, name)
        if isinstance(kinds, list) and not isinstance(getattr(kind, written, None), property):
            taken[name] = [*dict.fromkeys(kinds), *kinds][:layers]
    if "qk_rope_head_dim" in names:
        taken.pop("head_dim", None)  # it is the rotary part there
        taken["num_key_value_heads"] = HEADS
    if isinstance(rope := getattr(plain, "rope_parameters", None), dict):
        taken["rope_parameters"] = _trained_at(rope, LENGTH // 2)
    special = SPECIAL.get(family, {})
    return kind(**{**taken, **special})


def _trained_at(rope: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the family's own rotary keys, with the lengths of a tiny model in them."""
    return {
        key: _trained_at(value, length)
        if isinstance(value, dict)
        else length
        if key == "original_max_position_embeddings"
        else value
        for key, value in rope.items()
    }


def tiny_folder(family: str, auto: Any, folder: Path) -> Path:
    """Write a random model of the family, and a tokenizer with a word for every token. Return its
    folder.

    auto: the class of transformers that makes it from a config.
    Raises: ValueError for a family whose tiny config has more than LARGEST parameters.
    """
    torch.manual_seed(0)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = tiny_config(family)
    with torch.device("meta"):  # without memory, whatever sizes it keeps
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters: its config keeps sizes under names unknown here")
    model = auto.from_config(config)
    model.save_pretrained(folder)
    save_words(folder)
    return folder


def save_words(folder: Path) -> None:
    """Write a tokenizer of the words w5, w6, ... and five special tokens into a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {**SPECIAL_IDS, **{f"w{i}": i for i in range(5, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        mask_token="<mask>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(folder)
