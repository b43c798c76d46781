"""Facts about model families: what all runtimes share, and what each of them does.

families.json has one line per `model_type`: class defaults, the layout of pairs, kinds of layers.
Each runtime has a file of its own in runtimes/, beside the emulator that reads it, such as
vllm.json: the releases of which it speaks, and a line per family with what this runtime's own
source says, and where (`read`: file and line in the release `read in`; paths start at the folder of
the models, of llama.cpp at the repository). A family under `has no` is none of that release's
models; one under `not read`, or nowhere, nobody has read. No line is copied from another family or
runtime.

A line of families.json with `text` is of several modalities: `text` names the family of its
language model, or the usual one where `any` is read; `inner`: where its keys are, if not in
text_config; `flat` if they may be next to the other towers' instead.
"""

import json
from functools import lru_cache
from importlib import resources
from typing import Any


@lru_cache
def json_table(name: str) -> Any:
    """Return the content of a JSON file in or below this folder, such as "families"."""
    text = resources.files("posenc.dialects").joinpath(f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


RUNTIME_FILES = {
    "transformers-4": "transformers4",
    "transformers-5": "transformers5",
    "vllm": "vllm",
    "sglang": "sglang",
    "mlx-lm": "mlx_lm",
    "llama.cpp": "llama_cpp",
}
"""Runtime -> the name of its two files in runtimes/: NAME.json has its facts, NAME.py computes by
them. It is also the key of the runtime's facts in `all_families`."""


def facts_of_runtime(runtime: str) -> Any:
    """Return the content of a runtime's file of facts: its releases, and its families."""
    return json_table(f"runtimes/{RUNTIME_FILES[runtime]}")


WITHOUT_ROTATION = frozenset(json_table("without_rotation"))
"""model_types of models that rotate nothing in transformers 5.23: learned tables, biases on the
scores, recurrence. Their modeling files have no rotation, or none that is called (jamba,
nemotron_h)."""


ALTERNATING = frozenset(
    """
    cosmos3_edge_text qwen3_5_text qwen3_5_moe_text qwen3_omni_moe_text
    qwen3_omni_moe_talker_text qwen3_vl_text qwen3_vl_moe_text qwen4_exp_text
    """.split()
)
"""Families of transformers with M-RoPE whose axes alternate from pair to pair. Their code does not
read mrope_interleaved."""
CONTIGUOUS = frozenset(
    """
    glm4v_text glm4v_moe_text glm_image_text glm_ocr_text paddleocr_vl_text qwen2_vl_text
    qwen2_5_vl_text qwen2_5_omni_text qwen2_5_omni_talker
    """.split()
)
"""Families whose sections follow each other, likewise."""


@lru_cache
def all_families() -> dict[str, dict[str, Any]]:
    """Return the facts about every model_type: its line of families.json, and under each key of
    RUNTIME_FILES that runtime's. They are None if it has no such model, and empty or missing if
    nobody has read it."""
    families = {name: dict(line) for name, line in json_table("families").items()}
    for runtime, key in RUNTIME_FILES.items():
        file = facts_of_runtime(runtime)
        lines = {
            **dict.fromkeys(file["has no"]),
            **{name: {} for name in file["not read"]},
            **file["families"],
        }
        for name, line in lines.items():
            families[name][key] = line
    return families


def facts_of_family(model_type: str) -> dict[str, Any] | None:
    """Return the facts about one model_type; None if it is unknown."""
    return all_families().get(model_type)


def family_of_class(name: str) -> str | None:
    """Return the model_type whose models have a class such as LlamaForCausalLM.

    None if the class is unknown, or several families have it and none is named like it.
    """
    found = [m for m, f in all_families().items() if f.get("architecture") == name]
    own = [m for m in found if name.lower().startswith(f"{m.replace('_', '')}for")]
    return next(iter(own if len(found) > 1 else found), None)
