"""Tiny random models of the families that an encoding is attached to, whose positions are felt."""

import sys
from typing import Any

import pytest
import torch

import posenc
from posenc.hf.rope_settings import head_dim_of, read_settings
from posenc.hf.transformers_compat import cache_argument_name
from tests.hf_models import COMMON, OTHERS, ROPE, transformers

TOKENS = torch.randint(5, 200, (2, 14), generator=torch.Generator().manual_seed(0))
_HEADS_OF_8 = COMMON | {"head_dim": 8}
_MASKED = {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}

INTERLEAVED: dict[str, dict[str, Any]] = {
    "cohere": COMMON,
    "ernie4_5": COMMON,
    "glm": _HEADS_OF_8,
    "glm4": _HEADS_OF_8,
    "helium": _HEADS_OF_8,
    "llama4_text": COMMON,
}
HALVES: dict[str, dict[str, Any]] = {
    **ROPE,
    "gemma3_text": _HEADS_OF_8
    | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "apertus": COMMON,
    "arcee": COMMON,
    "exaone4": COMMON,
    "gemma": _HEADS_OF_8,
    "granite": COMMON,
    "mixtral": COMMON | {"num_local_experts": 2},
    "modernbert": COMMON,
    "nemotron": COMMON,
    "olmo": COMMON,
    "olmo2": COMMON,
    "persimmon": COMMON,
    "phi": COMMON,
    "seed_oss": _HEADS_OF_8,
    "stablelm": COMMON,
    "starcoder2": COMMON,
}
ROTARY = HALVES | INTERLEAVED
"""Families that rotate: pairs of halves, and pairs of neighbours."""
TABLES = {
    name: OTHERS.get(name, ("AutoModelForMaskedLM", _MASKED))
    for name in ("gpt2", "opt", "bert", "roberta", "gpt_bigcode", "electra", "biogpt")
} | {"gpt_bigcode": OTHERS["gpt2"], "biogpt": ("AutoModelForCausalLM", _MASKED)}
"""Families with a learned table of positions."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": COMMON | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "granitemoehybrid": COMMON
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "shared_intermediate_size": 16,
    },
}
"""Families with layers that are no attention."""
_BOTH = {
    "vocab_size": 257,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}
_LATENT = COMMON | {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = dict.fromkeys(("deepseek_v2", "deepseek_v3"), ("AutoModelForCausalLM", _LATENT))
"""Families that compute keys and values from one latent, which some releases cache."""
TWO_STACKS = dict.fromkeys(("bart", "marian"), ("AutoModelForSeq2SeqLM", _BOTH))
"""Families with an encoder, a decoder, and a table in each that numbers its tokens itself."""


NEWLY_REPLACED = ("t5", "mt5", "umt5", "modernbert", "nemotron")
"""Families whose attention came to transformers' interface within its release 5."""


def skip_outside_the_interface(family: str, model: Any) -> None:
    """Skip the test where the installed transformers does not yet have this family's attention in
    its interface, by which an attention is replaced: the model's file does not import it."""
    file = sys.modules[type(model).__module__]
    if family in NEWLY_REPLACED and not hasattr(file, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"this transformers has the attention of {family} outside of its interface")


def build(family: str, **overrides: Any) -> Any:
    """A random model whose weights are wide enough for positions to be felt."""
    torch.manual_seed(0)
    auto = "AutoModelForMaskedLM" if family == "modernbert" else "AutoModelForCausalLM"
    sizes = (ROTARY | HYBRIDS).get(family, {})
    if family not in ROTARY | HYBRIDS:
        shape = "t5" if family in ("mt5", "umt5") else family
        auto, sizes = (TABLES | TWO_STACKS | LATENT).get(family) or OTHERS[shape]
    config = transformers.AutoConfig.for_model(family, **{**sizes, **overrides})
    model = getattr(transformers, auto).from_config(config).eval()
    skip_outside_the_interface(family, model)
    for name, parameter in model.named_parameters():
        if "norm" not in name.lower() and "ln_" not in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    return model


def own_rope(model: Any) -> posenc.PositionEncoding:
    """The rotation of the model's config, layer by layer."""
    config = model.config
    ropes = {
        setting.layer_type: posenc.RoPE(
            head_dim_of(config, setting.layer_type),
            setting.rope_theta,
            interleaved=config.model_type in INTERLEAVED,
            rotary_dim=setting.rotary_dim,
            scaling=setting.scaling,
        )
        for setting in read_settings(config)
    }
    if None not in ropes:
        return posenc.PerLayer([ropes[kind] for kind in config.layer_types])
    rotated = getattr(config, "no_rope_layers", None)
    if not rotated:
        return ropes[None]
    return posenc.PerLayer([ropes[None] if r else posenc.PositionEncoding() for r in rotated])


def with_cache(model: torch.nn.Module, cache: Any) -> dict[str, Any]:
    """Return the argument that hands a cache to the model's forward: releases name it otherwise."""
    name = cache_argument_name(model)
    assert name is not None
    return {name: cache}
