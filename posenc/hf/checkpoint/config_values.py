"""Refuse impossible values in config.json before anything is built."""

import math
from pathlib import Path
from typing import Any

from posenc.runtimes.files.json_object import read_json

REQUIRED_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Keys that must not be null if the config has them."""
COUNT_KEYS = (
    *REQUIRED_KEYS,
    *"num_key_value_heads num_kv_heads head_dim max_position_embeddings "
    "original_max_position_embeddings n_positions n_ctx n_embd n_head n_heads n_layer "
    "n_layers d_model num_heads num_layers max_seq_len rotary_dim".split(),
)
POSITIVE_KEYS = tuple(
    "rope_theta rotary_emb_base rope_local_base_freq partial_rotary_factor rotary_pct".split()
)
TYPES_BY_KEY: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(
        ("auto_map", "id2label", "label2id", "quantization_config"), (dict, "an object")
    ),
    **dict.fromkeys(("torch_dtype", "dtype", "hidden_act", "problem_type"), (str, "a name")),
    **dict.fromkeys(("layer_types", "no_rope_layers"), (list, "a list")),
    **dict.fromkeys(("num_labels",), (int, "a whole number")),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), ((int, float), "a number")),
    **dict.fromkeys(
        (
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            "use_sliding_window",
            "use_cache",
            "is_decoder",
            "is_encoder_decoder",
        ),
        (bool, "true or false"),
    ),
}
"""Keys at whose other values transformers stops with words about Python, or, before 5.12, takes
any text, "false" too, for true."""
LARGEST_COUNT = 2**31 - 1


def read_text_config(path: Path) -> dict[str, Any]:
    """Read the part of a config.json that describes a text model.

    Raises: ValueError for a file that cannot be read, or a value that no model can have.
    """
    raw = read_json(path)
    inner = raw.get("text_config")
    raw = inner if isinstance(inner, dict) else raw
    check_config_values(raw, path)
    return raw


def check_config_values(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError, naming file and key, if config.json has a value that no model can have."""
    for key, value in raw.items():
        if value is not None:
            _check_value(key, value, path)
        elif key in REQUIRED_KEYS:
            raise _count_error(key, value, path)
    names = raw.get("architectures")
    if names is not None and not _is_list_of_names(names):
        raise ValueError(f"{path}: architectures must be a list of names, got {names!r}.")


def _check_value(key: str, value: Any, path: Path) -> None:
    """Raise ValueError for the value of a key, not null, that no model can have."""
    if key in COUNT_KEYS and not is_count(value):
        raise _count_error(key, value, path)
    expected_type, expected = TYPES_BY_KEY.get(key, (object, ""))
    if not isinstance(value, expected_type):
        raise ValueError(f"{path}: {key} must be {expected}, got {value!r:.60}.")
    if key in POSITIVE_KEYS and not is_positive(value):
        raise ValueError(f"{path}: {key} must be a positive number, got {value!r}.")


def _count_error(key: str, value: Any, path: Path) -> ValueError:
    """Return the error for a key that must be a whole number from 1 on."""
    return ValueError(
        f"{path}: {key} must be a whole number from 1 to {LARGEST_COUNT}, got {value!r}."
    )


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def check_layer_count(raw: dict[str, Any], num_tensors: int, path: Path) -> None:
    """Raise ValueError if the config asks for many more layers than there are tensors: a million
    layers would take hours to build before the missing weights are noticed."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        layers = raw.get(key) or 0
        # Up to 128 layers build fast; the missing weights are named then.
        if layers > max(128, num_tensors):
            raise ValueError(
                f"{path}: {key} is {layers}, but there are only {num_tensors} tensors."
            )


def is_count(value: Any) -> bool:
    """Return True for an integer of at least 1; booleans are no integers here."""
    return type(value) is int and 1 <= value <= LARGEST_COUNT


def is_positive(value: Any) -> bool:
    """Return True for a finite number above zero."""
    return type(value) in (int, float) and 0 < value and math.isfinite(value)
