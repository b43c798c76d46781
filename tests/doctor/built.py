"""Configs built from what a rule says, where no thread shows its config."""

from tests.doctor.threads import EIGHT, GLM4, ORIGINAL, PHI3, QWEN2, SHORT, seen

BUILT = [
    seen("a Qwen 2 without a base", "PD004", "E", QWEN2, rope_theta=None),
    seen("no base and no scaling", "PD004", "E", QWEN2, rope_theta=None, rope_scaling=None),
    seen("a factor alone", "PD008", "E", rope_theta=10000.0, rope_scaling={"factor": 8.0}),
    seen(
        "two types", "PD006", "E",
        rope_theta=500000.0,
        rope_scaling={
            "type": "linear", "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, ORIGINAL: 1024,
        },
    ),
    seen(
        "half a pair", "PD019", "W",
        rope_theta=10000.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024, "mscale": 0.7},
    ),
    seen(
        "a temperature under longrope", "PD020", "E", PHI3,
        original_max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": EIGHT,
            "long_factor": EIGHT, "factor": 4.0, "attention_factor": 1.3, ORIGINAL: 1024,
        },
    ),
    seen(
        "six factors for eight pairs", "PD022", "E",
        rope_theta=10000.0,
        rope_scaling={
            "rope_type": "longrope", "short_factor": SHORT[:6], "long_factor": EIGHT[:6],
            "factor": 4.0, ORIGINAL: 1024,
        },
    ),
    seen(
        "half a head of a Llama", "PD028", "E",
        rope_theta=10000.0,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        },
    ),
    seen(
        "the share in the dict only", "PD028", "E", GLM4,
        rope_theta=10000.0,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        },
    ),
    seen(
        "sections under an old name", "PD030", "W", QWEN2,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
    ),
    seen(
        "unequal mscales in latent attention", "PD031", "W",
        model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], q_lora_rank=32,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        rope_theta=10000.0,
        rope_scaling={
            "type": "yarn", "factor": 4.0, ORIGINAL: 1024, "mscale": 1.0, "mscale_all_dim": 0.5,
        },
    ),
]  # fmt: skip
