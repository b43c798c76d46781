"""Keys of configs that transformers 5 takes for true or false, and refuses with any other value.

Its config classes check the type of every field, also for vLLM 0.33 and SGLang 0.5.23, which load
these families' configs by them. Run in 5.23.0: of the known families' keys about
attention and positions, all that are declared as bool. An integer for a number of layers and the
like is in families.json, under `values`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from posenc.dialects.computed import RefusedError
from posenc.dialects.model import Model


class Flag(NamedTuple):
    """A key of a config whose class declares it as bool.

    families: model_types with the key. may_be_null: model_types among them that take null, too.
    """

    key: str
    families: tuple[str, ...]
    may_be_null: tuple[str, ...] = ()


WINDOWED = (
    "deepseek_ocr2_encoder",
    "qwen2",
    "qwen2_5_omni_talker",
    "qwen2_5_omni_text",
    "qwen2_5_vl_text",
    "qwen2_moe",
    "qwen2_vl_text",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
LATENT = ("axk1", "deepseek_v3", "mistral4", "youtu")
FLAGS_OF_FAMILIES = (
    Flag("attn_temperature_tuning", ("llama4_text",)),
    Flag("use_qk_norm", ("cohere", "glm4_moe", "llama4_text", "sapiens2"), ("cohere",)),
    Flag("use_sliding_window", WINDOWED, ("qwen2_5_vl_text", "qwen2_vl_text")),
    Flag("rope_interleave", (*LATENT, "glm4_moe_lite"), LATENT),
    Flag("alibi", ("falcon",), ("falcon",)),
    Flag("altup_correct_scale", ("gemma3n_text",)),
    Flag("use_mem_rope", ("zamba2",)),
)


def refused_flags(config: Mapping[str, Any], model_type: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a language model's config that its class refuses, since they are
    neither true nor false."""
    for flag in FLAGS_OF_FAMILIES:
        if model_type not in flag.families or flag.key not in config:
            continue
        value = config[flag.key]
        accepts_null = value is None and model_type in flag.may_be_null
        if not (isinstance(value, bool) or accepts_null):
            yield flag.key, value


def refuse_flags(model: Model) -> None:
    """Raise RefusedError for the first value that is neither true nor false where the class of a
    model's config wants one of them."""
    for key, value in refused_flags(model.config, model.model_type):
        kind = type(value).__name__
        raise RefusedError(
            f"StrictDataclassFieldValidationError: Field {key!r} expected bool, got {kind} (value: "
            f"{value!r:.60})"
        )
