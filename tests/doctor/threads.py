"""Configs that bit people in public threads: the rotary values are the threads' own, and where a
thread leaves one out (a base, a length) its family's usual one; the model is a small one of the
same family.

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

DEEPSEEK = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "rope_theta": 10000.0,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "head_dim": 64,
    "hidden_size": 256, "rope_theta": 150000.0, "sliding_window": 128, "num_local_experts": 2,
    "num_experts_per_tok": 1,
}  # fmt: skip
QWEN3_8B = {**QWEN3, "rope_theta": 1000000.0, "max_position_embeddings": 40960}
PHI35_SHORT = [1.0, 1.0, 1.01, 1.01, 1.02, 1.02, 1.03, 1.03]
PHI35_LONG = [1.0, 1.2, 2.4, 6.9, 18.0, 41.0, 60.3, 64.8]
PHI4_LISTS = {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.1, 2.0, 6.0, 20.0, 47.0]}
PHI4 = {**PHI3, "partial_rotary_factor": 0.75, "max_position_embeddings": 131072, ORIGINAL: 4096}

THREADS = [
    # saved by transformers 5, read by transformers 4 inside of vLLM; both names are in the thread
    (
        "vllm-project/vllm#44158",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "PD001", "E",
    ),
    # a merged Phi-4-mini saved with the new key only: the converter dropped its factors
    (
        "ggml-org/llama.cpp#24820",
        {
            **PHI4,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
                ORIGINAL: 4096, **PHI4_LISTS,
            },
        },
        "PD001", "E",
    ),
    # a Gemma 3 without scaling, nested: SGLang looked for a factor
    (
        "sgl-project/sglang#26013",
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "layer_types": [*["sliding_attention"] * 4, "full_attention", "full_attention"],
        },
        "PD001", "E",
    ),
    # a class default of 10000 beside the 500000 inside
    (
        "THUDM/slime#1720",
        {
            "rope_theta": 10000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000},
        },
        "PD003", "E",
    ),
    # asked for in review: nothing turns the base into a number
    (
        "InternLM/lmdeploy#4304",
        {"rope_parameters": {"rope_type": "default", "rope_theta": "10000.0"}},
        "PD005", "E",
    ),
    (
        "vllm-project/vllm#27505",
        {
            **QWEN2,
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        "PD007", "W",
    ),
    (
        "OpenNMT/CTranslate2#1685",
        {
            **PHI3, "max_position_embeddings": 131072, ORIGINAL: 4096,
            "rope_scaling": {"type": "su", "short_factor": PHI35_SHORT, "long_factor": PHI35_LONG},
        },
        "PD007", "W",
    ),
    # TeleChat3-36B: the largest length is the stretched one already
    (
        "vllm-project/vllm#55116",
        {
            "rope_theta": 10000.0, "max_position_embeddings": 32768,
            "rope_scaling": {"rope_type": "telechat3-yarn", "factor": 4.0, ORIGINAL: 8192},
        },
        "PD007", "W",
    ),
    # a way around an older vLLM that did not know Llama 3.1's type
    (
        "vllm-project/vllm#6692",
        {
            "rope_theta": 500000.0, "max_position_embeddings": 131072,
            "rope_scaling": {
                "type": "yarn", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                ORIGINAL: 8192,
            },
        },
        "PD010", "W",
    ),
    (
        "vllm-project/vllm#6692",
        {"rope_theta": 500000.0, "rope_scaling": {"type": "dummy"}},
        "PD009", "E",
    ),
    (
        "vllm-project/vllm#55910",
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
        "PD009", "E",
    ),
    (
        "hiyouga/LlamaFactory#8101",
        {
            **QWEN2, "max_position_embeddings": 32768,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        },
        "PD011", "E",
    ),
    # Qwen3-8B trained with --rope_scaling and --max_model_len 122880
    (
        "modelscope/ms-swift#5146",
        {**QWEN3_8B, "rope_scaling": {"type": "yarn", "factor": 3.0}},
        "PD011", "E",
    ),
    # Qwen3: 4 is asked for, and 40960 / 32768 was taken
    (
        "huggingface/transformers#38224",
        {
            **QWEN3_8B,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768},
        },
        "PD013", "W",
    ),
    # Qwen3 from 32768 to 131072
    (
        "vllm-project/vllm-ascend#760",
        {
            **QWEN3, "rope_theta": 1000000.0, "max_position_embeddings": 32768,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768},
        },
        "PD015", "W",
    ),
    # DeepSeek-V3's dict, with the length of pretraining for the largest one
    (
        "NVIDIA/Megatron-LM#1418",
        {
            **DEEPSEEK, "max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                "mscale_all_dim": 1.0, ORIGINAL: 4096,
            },
        },
        "PD015", "W",
    ),
    # LLaMA-2-7B-32K raised the largest length beside a linear factor of 8
    (
        "axolotl-ai-cloud/axolotl#343",
        {
            "rope_theta": 10000.0, "max_position_embeddings": 32768,
            "rope_scaling": {"type": "linear", "factor": 8.0},
        },
        "PD016", "W",
    ),
    # OLMo 3's factor, with the 1.0 that switches the temperature off
    (
        "ml-explore/mlx-lm#1507",
        {
            "rope_theta": 500000.0, "max_position_embeddings": 65536,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 8.0, ORIGINAL: 8192, "attention_factor": 1.0,
            },
        },
        "PD017", "E",
    ),
    # Laguna-XS.2
    (
        "vllm-project/vllm#46280",
        {
            "rope_theta": 500000.0, "max_position_embeddings": 262144,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 64, ORIGINAL: 4096, "attention_factor": 1.0,
            },
        },
        "PD017", "E",
    ),
    # Laguna S 2.1: the final temperature copied into what multiplies it
    (
        "sgl-project/sglang#33558",
        {
            "rope_theta": 500000.0, "max_position_embeddings": 524288,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 128, ORIGINAL: 4096, "attn_factor": 1.4852,
            },
        },
        "PD018", "E",
    ),
    # Phi-3.5-mini: one list up to 64.8, the other within 1.03
    (
        "lablup/mlxcel#1358",
        {
            **PHI3, "max_position_embeddings": 131072, ORIGINAL: 4096,
            "rope_scaling": {
                "type": "longrope", "short_factor": PHI35_SHORT, "long_factor": PHI35_LONG,
            },
        },
        "PD021", "W",
    ),
    # Phi-4-mini in a context beyond 4096
    (
        "ggml-org/llama.cpp#24823",
        {**PHI4, "rope_scaling": {"type": "longrope", **PHI4_LISTS}},
        "PD021", "W",
    ),
    # gpt-oss-20b: half-open ramp, factor 32, temperature 1.3466
    (
        "NVIDIA/TensorRT-Model-Connect#399",
        {
            **GPT_OSS, "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, ORIGINAL: 4096,
            },
        },
        "PD024", "E",
    ),
    # med42-70b as its user edited it
    (
        "vllm-project/vllm#2518",
        {
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 2.0, "type": "dynamic"},
        },
        "PD025", "E",
    ),
    # from 8k to 128k by a dynamic factor of 8
    (
        "vllm-project/vllm#10537",
        {
            "rope_theta": 500000.0, "max_position_embeddings": 8192,
            "rope_scaling": {"factor": 8.0, "type": "dynamic"},
        },
        "PD025", "E",
    ),
    # nomic-embed's numbers
    (
        "vllm-project/vllm#52675",
        {
            "rope_theta": 1000.0, "max_position_embeddings": 512,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2, "max_trained_positions": 2048},
        },
        "PD025", "E",
    ),
    (
        "vllm-project/vllm#41277",
        {
            "rope_theta": 1000.0, "max_position_embeddings": 8192,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2, "max_trained_positions": 2048},
        },
        "PD025", "E",
    ),
    # what a conversion script wrote: linear(8) at 1e6, for all kinds of layers
    (
        "huggingface/transformers#41922",
        {
            **GEMMA3,
            "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
        "PD026", "E",
    ),
    # Gemma 3 from 4B on: linear(8) for the global layers only
    (
        "lablup/mlxcel#1340",
        {
            **GEMMA3, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "PD027", "E",
    ),
    # the same inside of text_config
    (
        "Blaizzy/mlx-vlm#1709",
        {
            "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                **GEMMA3, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        },
        "PD027", "E",
    ),
    # the recipe's own line for --hf-overrides
    (
        "vllm-project/recipes#856",
        {
            **QWEN3, "rope_theta": 1000000.0, "max_position_embeddings": 262144,
            "hf_overrides": {
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 262144},
            },
        },
        "PD032", "E",
    ),
    # Ministral 3's defaults: factor 16, both mscales 1, the query's temperature inside
    (
        "vllm-project/vllm#48621",
        {
            "model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"],
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, ORIGINAL: 16384,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
        "PD033", "W",
    ),
    # glm-4-9b-chat-hf names no share, and half of 128 channels is the class's
    (
        "ml-explore/mlx-lm#1698",
        {
            "model_type": "glm", "architectures": ["GlmForCausalLM"], "head_dim": 128,
            "rope_theta": 10000.0, "max_position_embeddings": 131072,
        },
        "PD038", "E",
    ),
    # both mscales 1.0: the ratio, or the usual temperature
    (
        "turboderp-org/exllamav3#259",
        {
            "rope_theta": 1000000.0, "max_position_embeddings": 262144,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 16.0, ORIGINAL: 16384, "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        "PD041", "E",
    ),
    # Qwen2.5-7B-Instruct-1M's key
    (
        "vllm-project/vllm#49296",
        {
            **QWEN2, "rope_theta": 10000000.0, "max_position_embeddings": 1010000,
            "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
        },
        "PD042", "W",
    ),
]  # fmt: skip


def full(changes: dict) -> dict:
    """BASE with the thread's own keys; None removes a key."""
    merged = {**BASE, **changes}
    if merged["model_type"] in ("phi3",):
        merged.pop("head_dim")
    return {k: v for k, v in merged.items() if v is not None}
