"""Whose class a name in `architectures` is: some runtimes choose a model's code by it."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from posenc.dialects.families import WITHOUT_ROTATION, all_families, facts_of_family

CHOOSE_BY_CLASS = ("vllm", "sglang", "llama.cpp")
"""Runtimes that choose the code by the first class in architectures; the others by model_type."""

OTHER_ARCHITECTURES = {
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
    listed = config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    return first if isinstance(first, str) else None


def other_architecture(config: Mapping[str, Any], model_type: str) -> str | None:
    """Return what is known of a config's class that has another network than its model_type's usual
    class, in words; None for any other class."""
    return OTHER_ARCHITECTURES.get(model_type, {}).get(first_class(config) or "")


def families_of_class(name: str) -> list[str]:
    """Return the families with a class of this name, whatever its task is; also those that rotate
    nothing."""
    stem = _class_name_without_task(name)
    families = [
        model_type
        for model_type, facts in all_families().items()
        if "architecture" in facts and _class_name_without_task(facts["architecture"]) == stem
    ]
    return families + [name for name in WITHOUT_ROTATION if letters_and_digits(name) == stem]


def is_named_like(name: str, *families: str, exactly: bool) -> bool:
    """Return True if a class is named like one of these families; unless exactly, its name may go
    on, as those of classes for other tasks do, and lack the word "text", which is the family's own
    in "aria_text" (class AriaTextModel).

    >>> is_named_like("LlamaForCausalLMEagle3", "llama", exactly=False)
    True
    >>> is_named_like("LForCausalLM", "llama", exactly=False)
    False
    """
    stem = _class_name_without_task(name)
    right_stems = set()
    for model_type in families:
        family_class = (facts_of_family(model_type) or {}).get("architecture", "")
        right_stems |= {_class_name_without_task(family_class), letters_and_digits(model_type)}
    right_stems.discard("")
    if exactly:
        return stem in right_stems
    return any(stem.startswith(right) or f"{stem}text" == right for right in right_stems)


@lru_cache(maxsize=4096)
def _class_name_without_task(name: str) -> str:
    """Return a class name in small letters, without the task that it ends with.

    "LlamaForCausalLM" -> "llama".
    """
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
    outer = config.get("model_type")
    names = [model_type, *([outer] if isinstance(outer, str) else [])]
    return None if is_named_like(name, *names, exactly=False) else name
