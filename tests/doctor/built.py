"""Configs built from what a rule says, where no thread shows its config.

(what, config beyond BASE, the rule that must fire, its severity for all six runtimes)
"""

from __future__ import annotations

from tests.doctor.threads import (
    EIGHT,
    GLM4,
    ORIGINAL,
    PHI3,
    QWEN2,
    SHORT,
)

BUILT = [
    ("a Qwen 2 without a base", QWEN2 | {"rope_theta": None}, "PD004", "E"),
    ("no base and no scaling", {**QWEN2, "rope_theta": None, "rope_scaling": None}, "PD004", "E"),
    (
        "a factor alone",
        {"rope_theta": 10000.0, "rope_scaling": {"factor": 8.0}},
        "PD008", "E",
    ),
    (
        "two types",
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
        "half a pair",
        {
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024, "mscale": 0.7},
        },
        "PD019", "W",
    ),
    (
        "a temperature under longrope",
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
        "six factors for eight pairs",
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
        "half a head of a Llama",
        {
            "rope_theta": 10000.0,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            },
        },
        "PD028", "E",
    ),
    (
        "the share in the dict only",
        {
            **GLM4, "rope_theta": 10000.0,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
            },
        },
        "PD028", "E",
    ),
    (
        "sections under an old name",
        {**QWEN2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        "PD030", "W",
    ),
    (
        "unequal mscales in latent attention",
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
