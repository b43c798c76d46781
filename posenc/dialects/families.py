"""Facts about model families in each runtime, read from the runtimes' own sources.

families.json has one line per `model_type`: class defaults, the layout of pairs, and a cell per
runtime with where they read theta and the scaling. `read` is the file and line of the runtime's
own source at the version of `running.VERSIONS` that posenc was read from; paths start at the folder
of the models (llama.cpp: of the repository). A cell is null if that version has no such model, and
missing if nobody has read it. No cell is copied from another family or runtime.

A line of several modalities names the `text` family of its language model, or the usual one where
`any` is read; `inner`: where its keys are, if not in text_config; `flat` if they may be next to the
other towers' instead.
"""

import json
from functools import lru_cache
from importlib import resources
from typing import Any


@lru_cache
def json_table(name: str) -> Any:
    """Return the content of the JSON file of this folder with this name, such as "families"."""
    text = resources.files("posenc.dialects").joinpath(f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


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


def all_families() -> dict[str, dict[str, Any]]:
    """Return the facts of families.json about every model_type."""
    return json_table("families")


def facts_of_family(model_type: str) -> dict[str, Any] | None:
    """Return the facts of families.json about one model_type; None if it is unknown."""
    return all_families().get(model_type)


def family_of_class(name: str) -> str | None:
    """Return the model_type whose models have a class such as LlamaForCausalLM.

    None if the class is unknown, or several families have it and none is named like it.
    """
    found = [m for m, f in all_families().items() if f.get("architecture") == name]
    own = [m for m in found if name.lower().startswith(f"{m.replace('_', '')}for")]
    return next(iter(own if len(found) > 1 else found), None)
