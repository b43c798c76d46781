"""Translate vendors' names for rotary settings to transformers' keys, and decide which keys about
positions posenc understands: --fix touches no file with others."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from posenc.runtimes.computed_positions import LLAMA3_DEFAULTS
from posenc.runtimes.config_model import Model, with_language_model_keys_at_top
from posenc.runtimes.families import json_table

KEY_ABOUT_POSITIONS = re.compile(
    r"rope|rotary|rotate|yarn|theta|(?<!com)position|mscale|(?<!layer_)freq|ntk|alibi|swa_|nope|logn"
)
ROTATION_FLAG = re.compile(r"(\w+_)?(rope|rotary)(_pos\w*)?(_emb\w*)?")
"""Flags that turn the rotation itself off, so that false is no default."""
NOMIC_LENGTH_KEY = "max_trained_positions"
"""nomic-embed-text's key for the length of its training, in tokens, beside n_positions."""
USES_OTHER_THAN_READING = ("rotary", "text_config", "layer kinds", "layer types")
KEYS_BY_USE = json_table("position_keys")
KEYS_READ_BY_TYPE = {
    use: frozenset(keys) for use, keys in KEYS_BY_USE.items() if use not in USES_OTHER_THAN_READING
}
"""The keys that a type of rope dict reads, beyond the common ones."""
KEYS_OF_CONFIGS, KEYS_OF_ROPE_DICTS, KEYS_WITHOUT_EFFECT = (
    KEYS_READ_BY_TYPE.pop(use) for use in ("any", "rope dict", "no effect")
)
"""Keys of a config of any family; those of a rope dict of any type; those that a fix may drop,
since their effect is known, or is none."""

ROTARY_BASE_KEYS = ("rotary_emb_base", "rotary_base", "rope_base", "global_rope_theta")
ROTARY_SHARE_KEYS = ("rotary_pct", "rotary_percentage", "rope_pct", "rotary_emb_fraction")
NUMBER_KEYS = tuple(
    "rope_theta factor original_max_position_embeddings attention_factor attn_factor "
    "beta_fast beta_slow mscale mscale_all_dim low_freq_factor high_freq_factor "
    "partial_rotary_factor alpha short_mscale long_mscale rope_local_base_freq "
    "rotary_emb_base rotary_pct query_pre_attn_scalar attention_multiplier model_max_length".split()
)
POSITIVE_KEYS = tuple(
    "rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor "
    "beta_fast beta_slow attention_factor attn_factor rope_local_base_freq rotary_emb_base".split()
)
"""Keys that must be above zero."""
TRANSLATED_KEYS = {
    "meta": ("rope_theta", "use_scaled_rope", "rope_scaling_factor", "high_freq_factor"),
    "mistral": ("rope_theta", "max_position_embeddings", "yarn"),
    "deepseek": ("rope_theta", "rope_factor", "mscale", "qk_rope_head_dim", "qk_nope_head_dim"),
    "yarn": ("factor", "beta", "alpha", "original_max_position_embeddings", "apply_scale"),
}
"""The keys about positions that are read in other spellings, and in Mistral's yarn."""
KEYS_IN_CONFIGS = KEYS_OF_CONFIGS.union(
    KEYS_OF_ROPE_DICTS, KEYS_WITHOUT_EFFECT, *KEYS_READ_BY_TYPE.values()
)
FAMILIES_WITH_LISTS = ("step3p5", "step3p7")
"""Families whose base and rotated share are lists with a number for each layer."""
LIST_KEYS = ("short_factor", "long_factor", "mrope_section", "no_rope_layers")
WORD_KEYS = ("rope_type", "type", "model_type")
ROPE_DICT_KEYS = ("rope_scaling", "rope_parameters")
META_LENGTH = 2048
"""Tokens: max_seq_len of Meta's own code (llama/model.py, ModelArgs) where params.json has none."""
META_SCALED_LENGTH = 131072
"""Tokens that all of Meta's models with use_scaled_rope were trained for, Llama 3.1 with factor 8
and 3.2 with 32 (CONTEXT_LENGTH_FOR_VERSION in transformers' convert_llama_weights_to_hf.py). It is
not the original length times the factor, which is 65536 and 262144."""
DRAFT_LAYERS_KEY = "transformer_layer_config"
"""Where the config of a draft model of vLLM's speculators has the keys of its layers."""
LARGEST_NUMBER = 1e35
"""Larger values overflow float32 in the runtimes."""


def name_of_spelling(raw: Mapping[str, Any]) -> str:
    """Return whose spelling the file uses: transformers, speculators, meta, mistral or deepseek."""
    if "speculators_model_type" in raw and isinstance(raw.get(DRAFT_LAYERS_KEY), Mapping):
        return "speculators"
    if "model_type" in raw or "architectures" in raw:
        return "transformers"
    if "n_heads" in raw and "n_layers" in raw and "dim" in raw:
        if "rope_factor" in raw or "original_seq_len" in raw or "qk_rope_head_dim" in raw:
            return "deepseek"
        if "hidden_dim" in raw or "head_dim" in raw:
            return "mistral"
        return "meta"
    return "transformers"


def as_transformers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under transformers' keys. A file that already uses them stays as it is:
    what its runtimes read is what it says.

    Raises: ValueError where the rotary keys are no dicts, or no size of a model is given.
    """
    translators = {
        "meta": _translate_meta,
        "mistral": _translate_mistral,
        "deepseek": _translate_deepseek,
    }
    spelling = name_of_spelling(raw)
    if spelling == "speculators":
        return as_transformers(raw[DRAFT_LAYERS_KEY])
    if translate := translators.get(spelling):
        unread_items = _untranslated_keys(raw, spelling).items()
        return translate(raw) | {k: v for k, v in unread_items if KEY_ABOUT_POSITIONS.search(k)}
    _check_values(with_language_model_keys_at_top(raw))
    return dict(raw)


def _check_values(flat_config: Mapping[str, Any]) -> None:
    """Raise ValueError if a rotary key has a value of the wrong kind, or if no key says that the
    file is a model's config: a size of the model, or model_type."""
    if not any(
        size_key in flat_config
        for size_key in ("hidden_size", "n_embd", "d_model", "head_dim", "model_type")
    ):
        raise ValueError(
            "expected a model's config with hidden_size, head_dim or model_type, found the keys "
            f"{', '.join(sorted(flat_config)[:8]) or 'of an empty object'}."
        )
    keys_of_lists = (
        ("rope_theta", "partial_rotary_factor")
        if flat_config.get("model_type") in FAMILIES_WITH_LISTS
        else ()
    )
    for path_before_key, values in _config_and_rope_dicts(flat_config):
        for key in (*ROPE_DICT_KEYS, *NUMBER_KEYS, *LIST_KEYS, *WORD_KEYS, "layer_types"):
            value = values.get(key)
            if value is None or (not path_before_key and key in keys_of_lists):
                continue
            if what_it_must_be := _what_value_must_be(key, value):
                value_in_words = repr(value)[:60]
                raise ValueError(
                    f"config.json: {path_before_key}{key} must be {what_it_must_be}, got "
                    f"{value_in_words}."
                )


def _what_value_must_be(key: str, value: Any) -> str:
    """Return in words what the value of a rotary key must be; empty if it is right."""
    for keys, is_right, what_it_must_be in (
        (ROPE_DICT_KEYS, _is_dict, "an object or null"),
        (LIST_KEYS, _is_list_of_numbers, "a list of finite numbers"),
        (WORD_KEYS, _is_word, "a string"),
        (("layer_types",), _is_list_of_words, "a list of strings"),
    ):
        if key in keys:
            return "" if is_right(value) else what_it_must_be
    if key in POSITIVE_KEYS and (value == 0 or str(value).strip()[:1] == "-"):
        return "a positive number"
    is_number = isinstance(value, int | float) and abs(value) <= LARGEST_NUMBER
    # A number as text is reported by a rule, PD005.
    return "" if is_number or isinstance(value, str) else "a finite number"


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(_is_bounded_number(item) for item in value)


def _is_list_of_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_bounded_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= LARGEST_NUMBER


def _config_and_rope_dicts(
    flat_config: Mapping[str, Any],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the config and each rope dict in it, nested ones included, with the path before its
    keys: empty, "rope_scaling." or "rope_parameters.full_attention."."""
    yield "", flat_config
    for name in ROPE_DICT_KEYS:
        rope_dict = flat_config.get(name)
        if isinstance(rope_dict, Mapping):
            yield f"{name}.", rope_dict
            for kind, inner_dict in rope_dict.items():
                if isinstance(inner_dict, Mapping):
                    yield f"{name}.{kind}.", inner_dict


def with_vendors_keys_renamed(config: dict[str, Any], own_keys: Collection[str]) -> dict[str, Any]:
    """Set transformers' keys, where they are missing, to what vendors' keys such as rotary_emb_base
    have; return the config, which is changed in place.

    own_keys: keys that the family's own code reads, which are not copied.
    """
    for target, names in (
        ("rope_theta", ROTARY_BASE_KEYS),
        ("partial_rotary_factor", ROTARY_SHARE_KEYS),
    ):
        value = next(
            (config[n] for n in names if config.get(n) is not None and n not in own_keys), None
        )
        if value is not None and config.get(target) is None:
            config[target] = value
    ratio = config.get("rope_ratio")  # ChatGLM: how many times longer the base is
    if isinstance(ratio, int | float) and "rope_theta" not in config:
        config["rope_theta"] = 10000.0 * ratio
    return config


def _untranslated_keys(raw: Mapping[str, Any], spelling: str) -> dict[str, Any]:
    """Return the keys that no translation reads, for the rules that report them.

    A key that a config.json may have would be read there: it gets a name that says that the
    vendor's code does not read it, and its value becomes text.
    """
    untranslated = {k: v for k, v in raw.items() if k not in TRANSLATED_KEYS[spelling]}
    keys_read_in_configs = {
        f"{k}, which its code does not read": str(untranslated.pop(k))
        for k in KEYS_IN_CONFIGS & {*untranslated}
    }
    return {**untranslated, **keys_read_in_configs}


def _require_size(raw: Mapping[str, Any], name: str) -> int:
    """Return a size. Raises: ValueError for anything but an integer of at least 1."""
    value = raw[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"params.json: {name} must be an integer of at least 1, got {value!r}.")
    return value


def _require_positive(raw: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number, or the default. Raises: ValueError for anything that is no number above
    0."""
    value = raw.get(name, default)
    if not _is_bounded_number(value) or value <= 0:
        raise ValueError(f"params.json: {name} must be a positive number, got {value!r}.")
    return float(value)


def _translated_sizes(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return a config with the model_type and the sizes, under transformers' keys."""
    hidden_size, num_heads = _require_size(raw, "dim"), _require_size(raw, "n_heads")
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_hidden_layers": _require_size(raw, "n_layers"),
        "num_key_value_heads": raw.get("n_kv_heads", num_heads),
    }
    new_names = {"vocab_size": "vocab_size", "norm_eps": "rms_norm_eps"}
    return config | {new_names[key]: raw[key] for key in new_names if key in raw}


def _translate_meta(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that a params.json of Meta means, under transformers' keys."""
    config = _translated_sizes(raw, "llama")
    config["rope_theta"] = _require_positive(raw, "rope_theta", 10000.0)
    longest_length = META_LENGTH
    if raw.get("use_scaled_rope"):
        factor = _require_positive(raw, "rope_scaling_factor", 8.0)  # 32 of Llama 3.2
        high_freq_factor = _require_positive(raw, "high_freq_factor", 4.0)
        rope_dict = {"rope_type": "llama3", "factor": factor, "high_freq_factor": high_freq_factor}
        config["rope_scaling"] = {**LLAMA3_DEFAULTS, **rope_dict}
        longest_length = META_SCALED_LENGTH
    config["max_position_embeddings"] = raw.get("max_seq_len", longest_length)
    return config


def _translate_mistral(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that a params.json of Mistral means, under transformers' keys."""
    config = _translated_sizes(raw, "mistral")
    config["rope_theta"] = _require_positive(raw, "rope_theta", 10000.0)
    longest_length = raw.get("max_position_embeddings", raw.get("max_seq_len", 128000))
    config["max_position_embeddings"] = longest_length
    config |= {name: raw[name] for name in ("head_dim", "sliding_window") if name in raw}
    if raw.get("llama_4_scaling"):
        config["llama_4_scaling of positions"] = raw["llama_4_scaling"]
    yarn = raw.get("yarn") or {}
    if not isinstance(yarn, Mapping):
        raise ValueError(f"params.json: yarn must be an object or null, got {yarn!r}.")
    if yarn:
        new_names = {"beta": "beta_fast", "alpha": "beta_slow"}
        scaling = {new_names.get(k, k): yarn[k] for k in TRANSLATED_KEYS["yarn"] if k in yarn}
        if not scaling.pop("apply_scale", True):
            scaling["attention_factor"] = 1.0
        config["rope_scaling"] = {
            "rope_type": "yarn",
            **scaling,
            **_untranslated_keys(yarn, "yarn"),
        }
    return config


def _translate_deepseek(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that DeepSeek's inference config means, under transformers' keys.

    Its code applies YaRN beyond the original length and multiplies the softmax scale by the squared
    temperature, which transformers spells mscale = mscale_all_dim.
    """
    config = _translated_sizes(raw, "deepseek_v3")
    size_keys = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
    config |= {name: raw[name] for name in size_keys.split() if name in raw}
    original_length = int(_require_positive(raw, "original_seq_len", 4096))
    config["rope_theta"] = _require_positive(raw, "rope_theta", 10000.0)
    config["max_position_embeddings"] = int(_require_positive(raw, "max_seq_len", 4096 * 4))
    if config["max_position_embeddings"] > original_length:
        mscale = _require_positive(raw, "mscale", 1.0)
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": _require_positive(raw, "rope_factor", 40.0),
            "original_max_position_embeddings": original_length,
            "beta_fast": raw.get("beta_fast", 32),
            "beta_slow": raw.get("beta_slow", 1),
            "mscale": mscale,
            "mscale_all_dim": mscale,
        }
    return config


def unknown_keys(config: Mapping[str, Any], model: Model) -> list[str]:
    """Return the keys about positions that posenc does not understand in this family."""
    flat_config, keys_of_family = (
        with_language_model_keys_at_top(config),
        model.facts.get("keys", ()),
    )
    keys_not_understood = [
        key
        for key, value in flat_config.items()
        if KEY_ABOUT_POSITIONS.search(key)
        and key not in (*KEYS_OF_CONFIGS, NOMIC_LENGTH_KEY)
        and key not in keys_of_family
        and value is not None
        and (value is not False or ROTATION_FLAG.fullmatch(key))
    ]
    if config.get(key := model.facts.get("layout_key", "")) is False:
        keys_not_understood.append(key)  # not every runtime reads it
    return keys_not_understood + [
        key
        for name in ("rope_scaling", "rope_parameters")
        for key in _unread_keys_of_dict(flat_config.get(name), name)
    ]


def _unread_keys_of_dict(rope_dict: Any, path: str) -> Iterator[str]:
    """Yield the path of each key in a rope dict, and in the dicts in it, that no runtime reads.

    rope_dict: the rope dict, or any other value. path: its path.
    """
    if not isinstance(rope_dict, Mapping):
        return
    keys_of_all_types = (
        KEYS_OF_ROPE_DICTS | KEYS_WITHOUT_EFFECT | frozenset().union(*KEYS_READ_BY_TYPE.values())
    )
    for key, value in rope_dict.items():
        if isinstance(value, Mapping):
            yield from _unread_keys_of_dict(value, f"{path}.{key}")
        elif key not in keys_of_all_types and value is not None:
            yield f"{path}.{key}"


def require_understood_keys(config: Mapping[str, Any], model: Model) -> None:
    """Raise ValueError naming a key about positions that posenc does not understand."""
    if keys_not_understood := unknown_keys(config, model):
        raise ValueError(
            f"--fix: posenc does not know what {', '.join(keys_not_understood)} means for "
            f"{model.model_type}, so it writes nothing. Remove the key if it has no effect, or "
            "change the file by hand."
        )
