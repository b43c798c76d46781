"""Facts about model families: what all runtimes share, and what each of them does.

families.json has one line per `model_type`: class defaults, the layout of pairs, kinds of layers.
Each runtime has a file of its own in known/, beside the emulator that reads it, such as
vllm.json: the releases of which it speaks, and a line per family with what this runtime's own
source says, and where (`read`: file and line in the release `read in`; paths start at the folder of
the models, of llama.cpp at the repository). A family under `has no` is none of that release's
models; one under `not read`, or nowhere, nobody has read. No line is copied from another family or
runtime.

The keys of families.json. A line has those in which its family differs from the usual decoder. A
fact that names a key of a config is missing, or "", where the family has no such key: no config has
a key "", so that looking it up finds nothing.

- `architecture`: the class that the family's configs name first in `architectures`.
- `defaults`: key of a config -> the default of the family's class in transformers 5.
- `names`: usual key of a config -> the family's own name for it.
- `keys`: further keys about positions that the family's code reads.
- `interleaved`: whether pairs are channels (2i, 2i + 1), not (i, i + d/2), in its checkpoints.
- `layout_key`: the key of a config that says whether they are, and wins over `interleaved`.
- `indexer`: of the indexer of sparse attention: `interleaved`, and `read`, the file and line.
- `heads`: the key that has the number of query heads, where a config has several.
- `width`: the key that has the width of the layers, where it is not hidden_size.
- `widening`: how many times the hidden size all query heads are wide together, if the config has no
  head_dim. Such a class divides the width of a head by it for its softmax scale.
- `even_heads`: true where a head has hidden_size / num_attention_heads channels, whatever
  head_dim says.
- `rotates_share`: true in families with MLA's keys whose rotary tables follow from a share of
  head_dim, not from qk_rope_head_dim.
- `latent_sum`: true where that head_dim is always qk_nope_head_dim + qk_rope_head_dim if the
  config has none, and the usual share is qk_rope_head_dim / that sum.
- `layers`: by which rule the kinds of layers follow each other, see `Model.layer_types`.
- `layer_codes`: key of a config -> code in its list -> the kind of layer for which it stands.
- `kind_sizes`: kind of layers -> key of a config -> the size of these layers instead: a number, or
  the key that has it.
- `rotates`: which layers rotate, see `Model.without_rotation`; `when`: key of a config -> its value
  without which no layer does.
- `theta_in`: the key of the dict in a config that has rope_theta.
- `original_field`: true where original_max_position_embeddings is a field of the class, with a
  default, so that a value is at the top level of every config after loading.

Of a family of several modalities, the keys are these:

- `text`: the family of its language model, or the usual one where `any` is there.
- `any`: true where the class takes a language model of any family.
- `inner`: the keys under one of which the language model's config is, if not text_config.
- `may_be_flat`: true where the language model's keys may stand at the top level instead.
- `read`: the file and line of transformers' models where this stands.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any


@lru_cache
def json_table(name: str) -> Any:
    """Return the content of a JSON file in or below this folder, such as "families"."""
    text = resources.files("posenc.runtimes").joinpath(f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


RUNTIME_FILES = {
    "transformers-4": "transformers4",
    "transformers-5": "transformers5",
    "vllm": "vllm",
    "sglang": "sglang",
    "mlx-lm": "mlx_lm",
    "llama.cpp": "llama_cpp",
}
"""Runtime -> the name of its two files in known/: NAME.json has its facts, NAME.py computes by
them. It is also the key of the runtime's facts in `all_families`."""


def facts_of_runtime(runtime: str) -> Any:
    """Return the content of a runtime's file of facts: its releases, and its families."""
    return json_table(f"known/{RUNTIME_FILES[runtime]}")


FAMILIES_WITHOUT_ROTATION = frozenset(json_table("without_rotation"))
"""model_types of models that rotate nothing in transformers 5.23: learned tables, biases on the
scores, recurrence. Their modeling files have no rotation, or none that is called (jamba,
nemotron_h)."""


def rotates_nothing(model_type: Any, config: Mapping[str, Any]) -> bool:
    """Return True if the family's class in transformers rotates nothing, and the config does not
    say that a vendor's own code rotates, as Jina's and MosaicML's do.

    model_type: of the language model. config: the outermost object of its config.json.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES_WITHOUT_ROTATION:
        return False
    attention_config = config.get("attn_config")
    if isinstance(attention_config, Mapping) and attention_config.get("rope") is True:
        return False
    return config.get("position_embedding_type") not in ("rotary", "rope")


FAMILIES_ALTERNATING_AXES = frozenset(
    """
    cosmos3_edge_text qwen3_5_text qwen3_5_moe_text qwen3_omni_moe_text
    qwen3_omni_moe_talker_text qwen3_vl_text qwen3_vl_moe_text qwen4_exp_text
    """.split()
)
"""Families of transformers with M-RoPE whose axes alternate from pair to pair. Their code does not
read mrope_interleaved."""
FAMILIES_OF_CONTIGUOUS_AXES = frozenset(
    """
    glm4v_text glm4v_moe_text glm_image_text glm_ocr_text paddleocr_vl_text qwen2_vl_text
    qwen2_5_vl_text qwen2_5_omni_text qwen2_5_omni_talker
    """.split()
)
"""Families whose sections follow each other, likewise."""
FAMILIES_ROTATING_BACKWARDS = frozenset({"nanochat"})
"""Families of transformers that rotate by minus the angle (nanochat/modeling_nanochat.py:59)."""


@lru_cache
def all_families() -> dict[str, dict[str, Any]]:
    """Return the facts about each model_type: its line of families.json, to which the facts of each
    runtime are added under the runtime's value in RUNTIME_FILES, such as "mlx_lm". These are None
    if the runtime has no such model, and empty or missing if nobody has read it."""
    families = {
        model_type: dict(facts_of_one)
        for model_type, facts_of_one in json_table("families").items()
    }
    for runtime, key in RUNTIME_FILES.items():
        file_of_facts = facts_of_runtime(runtime)
        facts_by_family = {
            **dict.fromkeys(file_of_facts["has no"]),
            **{model_type: {} for model_type in file_of_facts["not read"]},
            **file_of_facts["families"],
        }
        for model_type, facts_of_one in facts_by_family.items():
            families[model_type][key] = facts_of_one
    return families


def facts_of_family(model_type: str) -> dict[str, Any] | None:
    """Return the facts about one model_type; None if it is unknown."""
    return all_families().get(model_type)


def family_of_class(class_name: str) -> str | None:
    """Return the model_type whose models have a class such as LlamaForCausalLM.

    None if the class is unknown, or several families have it and none is named like it.
    """
    families = [m for m, f in all_families().items() if f.get("architecture") == class_name]
    named_like_class = [
        m for m in families if class_name.lower().startswith(f"{m.replace('_', '')}for")
    ]
    return next(iter(named_like_class if len(families) > 1 else families), None)


SERVERS = ("vllm", "sglang")
"""Runtimes that serve: they limit the length, and take overrides of a config."""
RUNTIMES_CHOOSING_BY_CLASS = ("vllm", "sglang", "llama.cpp")
"""Runtimes that choose the code by the first class in architectures; the others by model_type."""

CLASSES_OF_OTHER_NETWORKS = {
    "bailing_hybrid": {
        "BailingMoeV2_5ForCausalLM": "Ling 2.5 and 2.6: linear layers rotate a share of each head, "
        "the others 64 channels",
    },
}
"""model_type -> classes that have this model_type and another network than the one in
families.json, with what is known of them (vLLM 0.33.0, bailing_moe_linear.py:179)."""


# Every class of a config is compared with those of all families, several times for each runtime.
@lru_cache(maxsize=4096)
def letters_and_digits(name: str) -> str:
    """Return a name in small letters and digits only, so that spellings of it compare equal.

    >>> letters_and_digits("Rope-Theta")
    'ropetheta'
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


def first_class(config: Mapping[str, Any]) -> str | None:
    """Return the first name in a config's architectures; None where it has none. Of a multimodal
    config only the outermost list counts, as no runtime reads another."""
    architectures = config.get("architectures")
    first_name = architectures[0] if isinstance(architectures, list) and architectures else None
    return first_name if isinstance(first_name, str) else None


def other_architecture(config: Mapping[str, Any], model_type: str) -> str | None:
    """Return what is known of a config's class that has another network than its model_type's usual
    class, in words; None for any other class."""
    return CLASSES_OF_OTHER_NETWORKS.get(model_type, {}).get(first_class(config) or "")


def families_of_class(class_name: str) -> list[str]:
    """Return the families with a class of this name, whatever its task is; also those that rotate
    nothing."""
    stem = _class_name_without_task(class_name)
    families = [
        model_type
        for model_type, facts in all_families().items()
        if "architecture" in facts and _class_name_without_task(facts["architecture"]) == stem
    ]
    return families + [
        model_type
        for model_type in FAMILIES_WITHOUT_ROTATION
        if letters_and_digits(model_type) == stem
    ]


def is_named_like(name: str, *families: str, exactly: bool) -> bool:
    """Return True if a class is named like one of these families; unless exactly, its name may go
    on, as those of classes for other tasks do, and lack the word "text", which is the family's own
    in "aria_text" (class AriaTextModel).

    >>> is_named_like("LlamaForCausalLMEagle3", "llama", exactly=False)
    True
    >>> is_named_like("LForCausalLM", "llama", exactly=False)
    False
    """
    class_stem = _class_name_without_task(name)
    right_stems = set()
    for model_type in families:
        family_class = (facts_of_family(model_type) or {}).get("architecture", "")
        right_stems |= {_class_name_without_task(family_class), letters_and_digits(model_type)}
    right_stems.discard("")
    if exactly:
        return class_stem in right_stems
    return any(
        class_stem.startswith(right_stem) or f"{class_stem}text" == right_stem
        for right_stem in right_stems
    )


@lru_cache(maxsize=4096)
def _class_name_without_task(name: str) -> str:
    """Return a class name in small letters, without the task that it ends with.

    "LlamaForCausalLM" -> "llama".
    """
    # The task follows at least one letter, so that a name that is nothing else stays whole.
    return letters_and_digits(re.split(r"(?<=.)(?:For[A-Z]|LMHead|Model$|TextModel$)", name)[0])


def class_of_unknown_code(config: Mapping[str, Any], model_type: str) -> str | None:
    """Return the first class of a config if no family has it and it is not named like the config's
    own: what a runtime that chooses by the class does with it, nobody has read. None otherwise.

    model_type: of the language model, as posenc has read it. The name may be empty: compare the
    answer with None.
    """
    name = first_class(config)
    if name is None or families_of_class(name):
        return None
    outer_type = config.get("model_type")
    families = [model_type, *([outer_type] if isinstance(outer_type, str) else [])]
    return None if is_named_like(name, *families, exactly=False) else name
