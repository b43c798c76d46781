"""Configs that bit people in public threads, rebuilt at small size from the threads' own words.

(thread, config beyond BASE, the rule that must fire, its severity for all six runtimes)
"""

from __future__ import annotations

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "vocab_size": 300,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "head_dim": 16,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000.0}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "query_pre_attn_scalar": 16,
    "sliding_window": 256,
}
GLM4 = {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"]}
PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "rope_theta": 10000.0}
EIGHT = [1.0, 1.1, 1.4, 2.0, 2.8, 3.5, 3.9, 4.0]
SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0]
ORIGINAL = "original_max_position_embeddings"

THREADS = [
    # A checkpoint saved by transformers 5 and read by an older reader.
    (
        "vllm-project/vllm#44158",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "PD001", "E",
    ),
    (
        "marin-community/marin#7146",
        {**QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        "PD001", "E",
    ),
    (
        "sgl-project/sglang#26187",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, ORIGINAL: 2048,
            }
        },
        "PD001", "E",
    ),
    (
        "THUDM/slime#1720",
        {
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "PD003", "E",
    ),
    ("huggingface/transformers#45036", QWEN2 | {"rope_theta": None}, "PD004", "E"),
    ("ollama/ollama#2379", {**QWEN2, "rope_theta": None, "rope_scaling": None}, "PD004", "E"),
    (
        "InternLM/lmdeploy#4304",
        {"rope_theta": "10000.0"},
        "PD005", "E",
    ),
    (
        "runpod-workers/worker-vllm#257",
        {"rope_theta": 10000.0, "rope_scaling": {"factor": 8.0}},
        "PD008", "E",
    ),
    (
        "vllm-project/vllm#9481",
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "type": "linear", "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, ORIGINAL: 1024,
            },
        },
        "PD006", "E",
    ),
    (
        "OpenNMT/CTranslate2#1792",
        {
            **PHI3, ORIGINAL: 1024,
            "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": EIGHT},
        },
        "PD007", "W",
    ),
    (
        "unslothai/unsloth#2984",
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024, "finetuned": True,
            },
        },
        "PD010", "W",
    ),
    (
        "NVIDIA-NeMo/Automodel#2652",
        {
            "rope_theta": 500000.0, "max_position_embeddings": 8192,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        },
        "PD011", "E",
    ),
    (
        "huggingface/transformers#38224",
        {
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 2.0, ORIGINAL: 1024},
        },
        "PD013", "W",
    ),
    (
        "NVIDIA/Megatron-LM#1418",
        {
            "rope_theta": 10000.0, "max_position_embeddings": 1024 * 8,
            "rope_scaling": {"rope_type": "yarn", "factor": 40.0, ORIGINAL: 1024},
        },
        "PD013", "W",
    ),
    (
        "sgl-project/sglang#2943",
        {
            **QWEN2, "max_position_embeddings": 1024,
            "rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 1024},
        },
        "PD015", "W",
    ),
    (
        "QwenLM/Qwen3#1361",
        {
            **QWEN3, "rope_theta": 1000000.0, "max_position_embeddings": 1024,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024},
        },
        "PD015", "W",
    ),
    (
        "hiyouga/LLaMA-Factory#1298",
        {"rope_theta": 10000.0, "rope_scaling": {"factor": 4.0, "type": "linear"}},
        "PD016", "W",
    ),
    (
        "ml-explore/mlx-lm#1507",
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024, "attention_factor": 1.0,
            },
        },
        "PD017", "E",
    ),
    (
        "vllm-project/vllm#48351",
        {
            "rope_theta": 10000.0, "max_position_embeddings": 65536,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 64.0, ORIGINAL: 1024, "attention_factor": 1.0,
            },
        },
        "PD017", "E",
    ),
    (
        "sgl-project/sglang#33558",
        {
            "rope_theta": 10000.0, "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 128.0, ORIGINAL: 1024,
                "attn_factor": 1.4852030263919618,
            },
        },
        "PD018", "E",
    ),
    (
        "deepseek-ai/DeepSeek-R1#684",
        {
            **QWEN3, "rope_theta": 1000000.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024,
                "attn_factor": 0.8782488562869419,
            },
        },
        "PD018", "E",
    ),
    (
        "vllm-project/vllm#48621",
        {
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024, "mscale": 0.7},
        },
        "PD019", "W",
    ),
    (
        "ggml-org/llama.cpp#24820",
        {
            **PHI3, ORIGINAL: 1024,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": EIGHT,
                "long_factor": EIGHT, "factor": 4.0, "attention_factor": 1.3, ORIGINAL: 1024,
            },
        },
        "PD020", "E",
    ),
    (
        "vllm-project/vllm#27431",
        {
            **PHI3, ORIGINAL: 1024,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": EIGHT},
        },
        "PD021", "W",
    ),
    (
        "ggml-org/llama.cpp#12468",
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "longrope", "short_factor": SHORT[:6], "long_factor": EIGHT[:6],
                "factor": 4.0, ORIGINAL: 1024,
            },
        },
        "PD022", "E",
    ),
    (
        "vllm-project/vllm#41277",
        {
            "rope_theta": 10000.0, "max_position_embeddings": 2048,
            "rope_scaling": {"type": "dynamic", "factor": 4.0},
        },
        "PD025", "E",
    ),
    (
        "huggingface/optimum-executorch#245",
        {
            "rope_theta": 10000.0, "max_position_embeddings": 1024,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
        "PD025", "E",
    ),
    (
        "huggingface/transformers#41922",
        {**GEMMA3, "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
        "PD026", "E",
    ),
    (
        "lablup/mlxcel#1340",
        {
            **GEMMA3, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "PD027", "E",
    ),
    (
        "vllm-project/vllm#43770",
        {
            "rope_theta": 10000.0,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            },
        },
        "PD028", "E",
    ),
    (
        "InternLM/lmdeploy#3861",
        {
            **GLM4, "rope_theta": 10000.0,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
            },
        },
        "PD028", "E",
    ),
    (
        "QwenLM/Qwen2.5-Omni#373",
        {**QWEN2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        "PD030", "W",
    ),
    (
        "PrimeIntellect-ai/prime-rl#2681",
        {
            "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
            "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
            "v_head_dim": 16, "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn", "factor": 4.0, ORIGINAL: 1024, "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
        },
        "PD031", "W",
    ),
]  # fmt: skip


def full(changes: dict) -> dict:
    """BASE with the thread's own keys; None removes a key."""
    merged = {**BASE, **changes}
    if merged["model_type"] in ("phi3",):
        merged.pop("head_dim")
    return {k: v for k, v in merged.items() if v is not None}
