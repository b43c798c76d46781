"""Configs of failures in public threads: the rotary values are the threads' own, and where a thread
leaves one out (a base, a length) its family's usual one; the model is a small one of the same
family.
"""

from typing import Any

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
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rope_theta": 10000.0,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 256,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
QWEN3_8B = {**QWEN3, "rope_theta": 1000000.0, "max_position_embeddings": 40960}
PHI35_SHORT = [1.0, 1.0, 1.01, 1.01, 1.02, 1.02, 1.03, 1.03]
PHI35_LONG = [1.0, 1.2, 2.4, 6.9, 18.0, 41.0, 60.3, 64.8]
PHI4_LISTS = {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.1, 2.0, 6.0, 20.0, 47.0]}
PHI4 = {**PHI3, "partial_rotary_factor": 0.75, "max_position_embeddings": 131072, ORIGINAL: 4096}


def seen(where: str, rule: str, severity: str, *parts: dict, **keys: Any) -> tuple:
    """A thread, its config beyond BASE, from whole parts and single keys, the rule that must fire
    and its severity for all six runtimes."""
    changes: dict[str, Any] = {}
    for part in (*parts, keys):
        changes |= part
    return where, changes, rule, severity


THREADS = [
    # saved by transformers 5, read by transformers 4 inside of vLLM; both names are in the thread
    seen(
        "vllm-project/vllm#44158",
        "PD001",
        "E",
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    # a merged Phi-4-mini saved with the new key only: the converter dropped its factors
    seen(
        "ggml-org/llama.cpp#24820",
        "PD001",
        "E",
        PHI4,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            ORIGINAL: 4096,
            **PHI4_LISTS,
        },
    ),
    # a Gemma 3 without scaling, nested: SGLang looked for a factor
    seen(
        "sgl-project/sglang#26013",
        "PD001",
        "E",
        GEMMA3,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        layer_types=[*["sliding_attention"] * 4, "full_attention", "full_attention"],
    ),
    # a class default of 10000 beside the 500000 inside
    seen(
        "THUDM/slime#1720",
        "PD003",
        "E",
        rope_theta=10000,
        rope_parameters={"rope_type": "default", "rope_theta": 500000},
    ),
    # asked for in review: nothing turns the base into a number
    seen(
        "InternLM/lmdeploy#4304",
        "PD005",
        "E",
        rope_parameters={"rope_type": "default", "rope_theta": "10000.0"},
    ),
    seen(
        "vllm-project/vllm#27505",
        "PD007",
        "W",
        QWEN2,
        rope_scaling={"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
    ),
    seen(
        "OpenNMT/CTranslate2#1685",
        "PD007",
        "W",
        PHI3,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "su", "short_factor": PHI35_SHORT, "long_factor": PHI35_LONG},
    ),
    # TeleChat3-36B: the largest length is the stretched one already
    seen(
        "vllm-project/vllm#55116",
        "PD007",
        "W",
        rope_theta=10000.0,
        max_position_embeddings=32768,
        rope_scaling={"rope_type": "telechat3-yarn", "factor": 4.0, ORIGINAL: 8192},
    ),
    # a way around an older vLLM that did not know Llama 3.1's type
    seen(
        "vllm-project/vllm#6692",
        "PD010",
        "W",
        rope_theta=500000.0,
        max_position_embeddings=131072,
        rope_scaling={
            "type": "yarn",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            ORIGINAL: 8192,
        },
    ),
    seen(
        "vllm-project/vllm#6692",
        "PD009",
        "E",
        rope_theta=500000.0,
        rope_scaling={"type": "dummy"},
    ),
    seen(
        "vllm-project/vllm#55910",
        "PD009",
        "E",
        rope_theta=10000.0,
        rope_scaling={"rope_type": "ntk", "factor": 4.0},
    ),
    seen(
        "hiyouga/LlamaFactory#8101",
        "PD011",
        "E",
        QWEN2,
        max_position_embeddings=32768,
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
    ),
    # Qwen3-8B trained with --rope_scaling and --max_model_len 122880
    seen(
        "modelscope/ms-swift#5146",
        "PD011",
        "E",
        QWEN3_8B,
        rope_scaling={"type": "yarn", "factor": 3.0},
    ),
    # Qwen3: 4 is asked for, and 40960 / 32768 was taken
    seen(
        "huggingface/transformers#38224",
        "PD013",
        "W",
        QWEN3_8B,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768},
    ),
    # Qwen3 from 32768 to 131072
    seen(
        "vllm-project/vllm-ascend#760",
        "PD015",
        "W",
        QWEN3,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768},
    ),
    # DeepSeek-V3's dict, with the length of pretraining for the largest one
    seen(
        "NVIDIA/Megatron-LM#1418",
        "PD015",
        "W",
        DEEPSEEK,
        max_position_embeddings=4096,
        rope_scaling={
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            ORIGINAL: 4096,
        },
    ),
    # LLaMA-2-7B-32K raised the largest length beside a linear factor of 8
    seen(
        "axolotl-ai-cloud/axolotl#343",
        "PD016",
        "W",
        rope_theta=10000.0,
        max_position_embeddings=32768,
        rope_scaling={"type": "linear", "factor": 8.0},
    ),
    # OLMo 3's factor, with the 1.0 that switches the temperature off
    seen(
        "ml-explore/mlx-lm#1507",
        "PD017",
        "E",
        rope_theta=500000.0,
        max_position_embeddings=65536,
        rope_scaling={"rope_type": "yarn", "factor": 8.0, ORIGINAL: 8192, "attention_factor": 1.0},
    ),
    # Laguna-XS.2
    seen(
        "vllm-project/vllm#46280",
        "PD017",
        "E",
        rope_theta=500000.0,
        max_position_embeddings=262144,
        rope_scaling={"rope_type": "yarn", "factor": 64, ORIGINAL: 4096, "attention_factor": 1.0},
    ),
    # Laguna S 2.1: the final temperature copied into what multiplies it
    seen(
        "sgl-project/sglang#33558",
        "PD018",
        "E",
        rope_theta=500000.0,
        max_position_embeddings=524288,
        rope_scaling={"rope_type": "yarn", "factor": 128, ORIGINAL: 4096, "attn_factor": 1.4852},
    ),
    # Phi-3.5-mini: one list up to 64.8, the other within 1.03
    seen(
        "lablup/mlxcel#1358",
        "PD021",
        "W",
        PHI3,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": PHI35_SHORT, "long_factor": PHI35_LONG},
    ),
    # Phi-4-mini in a context beyond 4096
    seen(
        "ggml-org/llama.cpp#24823",
        "PD021",
        "W",
        PHI4,
        rope_scaling={"type": "longrope", **PHI4_LISTS},
    ),
    # gpt-oss-20b: half-open ramp, factor 32, temperature 1.3466
    seen(
        "NVIDIA/TensorRT-Model-Connect#399",
        "PD024",
        "E",
        GPT_OSS,
        max_position_embeddings=131072,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            ORIGINAL: 4096,
        },
    ),
    # med42-70b as its user edited it
    seen(
        "vllm-project/vllm#2518",
        "PD025",
        "E",
        max_position_embeddings=2048,
        rms_norm_eps=1e-05,
        rope_scaling={"factor": 2.0, "type": "dynamic"},
    ),
    # from 8k to 128k by a dynamic factor of 8
    seen(
        "vllm-project/vllm#10537",
        "PD025",
        "E",
        rope_theta=500000.0,
        max_position_embeddings=8192,
        rope_scaling={"factor": 8.0, "type": "dynamic"},
    ),
    # nomic-embed's numbers
    seen(
        "vllm-project/vllm#52675",
        "PD025",
        "E",
        rope_theta=1000.0,
        max_position_embeddings=512,
        rope_scaling={"rope_type": "dynamic", "factor": 2, "max_trained_positions": 2048},
    ),
    seen(
        "vllm-project/vllm#41277",
        "PD025",
        "E",
        rope_theta=1000.0,
        max_position_embeddings=8192,
        rope_scaling={"rope_type": "dynamic", "factor": 2, "max_trained_positions": 2048},
    ),
    # what a conversion script wrote: linear(8) at 1e6, for all kinds of layers
    seen(
        "huggingface/transformers#41922",
        "PD026",
        "E",
        GEMMA3,
        rope_parameters={"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    ),
    # Gemma 3 from 4B on: linear(8) for the global layers only
    seen(
        "lablup/mlxcel#1340",
        "PD027",
        "E",
        GEMMA3,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    # the same inside of text_config
    seen(
        "Blaizzy/mlx-vlm#1709",
        "PD027",
        "E",
        model_type="gemma3",
        architectures=["Gemma3ForConditionalGeneration"],
        text_config={
            **GEMMA3,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    ),
    # the recipe's own line for --hf-overrides
    seen(
        "vllm-project/recipes#856",
        "PD032",
        "E",
        QWEN3,
        rope_theta=1000000.0,
        max_position_embeddings=262144,
        hf_overrides={"rope_parameters": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 262144}},
    ),
    # Ministral 3's defaults: factor 16, both mscales 1, the query's temperature inside
    seen(
        "vllm-project/vllm#48621",
        "PD033",
        "W",
        model_type="ministral3",
        architectures=["Ministral3ForCausalLM"],
        max_position_embeddings=262144,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            ORIGINAL: 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    # glm-4-9b-chat-hf names no share, and half of 128 channels is the class's
    seen(
        "ml-explore/mlx-lm#1698",
        "PD038",
        "E",
        model_type="glm",
        architectures=["GlmForCausalLM"],
        head_dim=128,
        rope_theta=10000.0,
        max_position_embeddings=131072,
    ),
    # both mscales 1.0: the ratio, or the usual temperature
    seen(
        "turboderp-org/exllamav3#259",
        "PD041",
        "E",
        rope_theta=1000000.0,
        max_position_embeddings=262144,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 16.0,
            ORIGINAL: 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    # Qwen2.5-7B-Instruct-1M's key
    seen(
        "vllm-project/vllm#49296",
        "PD042",
        "W",
        QWEN2,
        rope_theta=10000000.0,
        max_position_embeddings=1010000,
        dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192},
    ),
]


def full(changes: dict) -> dict:
    """BASE with the thread's own keys; None removes a key."""
    merged = {**BASE, **changes}
    if merged["model_type"] in ("phi3",):
        merged.pop("head_dim")
    return {k: v for k, v in merged.items() if v is not None}
