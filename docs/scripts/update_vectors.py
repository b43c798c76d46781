"""Write posenc/runtimes/conformance.json, the conformance vectors.

python docs/scripts/update_vectors.py

The configs are those of tests/runtimes/known/vendors.json and the ones below, in the spelling of
published models at small width. tests/runtimes/test_vectors.py holds the numbers to transformers'
own modules.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "posenc/runtimes/conformance.json"
FROM_VENDORS = {
    "plain": "llama-2-7b llama-3-8b codellama-34b yi-34b-200k mistral-7b-v0.1 mistral-nemo "
    "mixtral-8x7b qwen1.5-7b qwen3-0.6b gemma-2b gemma-2-9b starcoder2-3b olmo-2-7b "
    "seed-oss-36b qwen3-saved-by-5",
    "interleaved": "command-r helium-1 ernie-4.5-0.3b glm-4-9b-0414",
    "partial": "phi-2 pythia-6.9b stablelm-2-1.6b glm-4.5-air minitron-4b persimmon-8b",
    "linear": "vicuna-7b-16k deepseek-coder-6.7b",
    "dynamic": "internlm2-as-llama hunyuan-7b",
    "yarn": "yarn-llama-2-7b-128k qwen2.5-7b-yarn-card qwen3-yarn arcee-afm gpt-oss-20b "
    "ministral3-8b",
    "longrope": "phi-3.5-mini phi-4-mini minicpm3-4b",
    "llama3": "llama-3.1-8b llama-3.2-1b nemotron-nano-8b apertus-8b llama-saved-by-5",
    "latent": "deepseek-v2-lite deepseek-v3 kimi-k2",
    "kinds": "gemma-3-1b gemma-3-4b-text gemma-3-saved-by-5 olmo-3-think",
    "no rotation": "smollm3-3b command-r7b exaone-4-32b",
}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "kinds": {
        "deepseek-v4": {
            "model_type": "deepseek_v4",
            **SMALL,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 1048576,
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "compress_ratios": [0, 0, 4, 128, 4, 0],
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 65536,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
        "modernbert-base": {
            "model_type": "modernbert",
            **SMALL,
            "max_position_embeddings": 8192,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
        },
        "mimo-v2-flash": {"model_type": "mimo_v2_flash", **SMALL, "head_dim": 192},
        "lfm3": {"model_type": "lfm3", **SMALL},
    },
    "partial": {
        "minimax-m2": {
            "model_type": "minimax_m2",
            **SMALL,
            "head_dim": 128,
            "rotary_dim": 64,
            "rope_theta": 5000000,
            "max_position_embeddings": 196608,
        },
        "moonshine-streaming": {"model_type": "moonshine_streaming"},
    },
    "sections": {
        "qwen2-vl-text": {
            "model_type": "qwen2_vl_text",
            **SMALL,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        "qwen3-vl-text": {
            "model_type": "qwen3_vl_text",
            **SMALL,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
    },
    "axial": {
        "qwen2.5-vl-vision": {
            "model_type": "qwen2_5_vl_vision",
            "hidden_size": 1280,
            "num_heads": 16,
            "depth": 4,
        },
        "glm-4.1v-vision": {"model_type": "glm4v_vision", "depth": 4},
        "minimax-m3-vision": {"model_type": "minimax_m3_vl_vision", "num_hidden_layers": 4},
    },
    "no rotation": {
        "beam": {
            "model_type": "beam",
            **SMALL,
            "head_dim": 16,
            "num_key_value_heads": 4,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "rope_parameters": {"sliding_attention": PLAIN, "full_attention": None},
        },
    },
}


def groups() -> dict[str, dict[str, dict[str, Any]]]:
    """group -> name -> config."""
    text = (ROOT / "tests/runtimes/known/vendors.json").read_text(encoding="utf-8")
    vendors = json.loads(text)
    found = {g: {n: vendors[n] for n in names.split()} for g, names in FROM_VENDORS.items()}
    for group, configs in OWN.items():
        found.setdefault(group, {}).update(configs)
    return found


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from posenc.runtimes.conformance import FORMAT_VERSION, frequencies

    lines = []
    for group, configs in sorted(groups().items()):
        for name, config in configs.items():
            lengths: tuple[int | None, ...] = (None,)
            if frequencies(config)["switch"] != "static":
                lengths = (64, None)
            for length in lengths:
                vector = {
                    "name": name if length is None else f"{name}, {length} tokens",
                    "group": group,
                    "config": config,
                    "length": length,
                    "expected": frequencies(config, length),
                }
                lines.append(json.dumps(vector))
    text = ",\n".join(lines)
    FILE.write_text(f'{{"version": {FORMAT_VERSION}, "vectors": [\n{text}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
