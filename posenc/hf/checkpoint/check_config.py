"""Refuse impossible values and contradictory rotary keys in config.json before building a model."""

import math
from pathlib import Path
from typing import Any

from posenc.frequencies.scalings.lookup import ROPE_TYPES
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.known.transformers5 import HUNYUAN_FAMILIES

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
"""By key, the type of its value, and the name of the type for messages. For another type
transformers raises an error about Python code or, before 5.12, reads any text as true, even
"false"."""
LARGEST_COUNT = 2**31 - 1
FULL_ATTENTION = "full_attention"
KNOWN_ROTARY_KEYS = frozenset(
    "rope_type type rope_theta partial_rotary_factor original_max_position_embeddings "
    "mrope_section mrope_interleaved".split()
).union(*((*rope_type.required, *rope_type.optional) for rope_type in ROPE_TYPES.values()))
KEYS_REQUIRED_BY_ROPE_TYPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "mrope": (),
    "su": ROPE_TYPES["longrope"].required,
    **{name: rope_type.required for name, rope_type in ROPE_TYPES.items()},
}
"""Keys that each known rope_type requires. "su" and "mrope" are old names."""
TYPES_WITH_ORIGINAL_LENGTH = [
    name for name, rope_type in ROPE_TYPES.items() if rope_type.has_original_length
]
POSITIVE_ROTARY_KEYS = tuple(
    "rope_theta partial_rotary_factor factor attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim short_mscale long_mscale low_freq_factor high_freq_factor alpha".split()
)


def read_text_config(path: Path) -> dict[str, Any]:
    """Read the part of a config.json that describes a text model.

    Raises: ValueError for a file that cannot be read, or a value that no model can have.
    """
    raw_config = read_json(path)
    inner_config = raw_config.get("text_config")
    raw_config = inner_config if isinstance(inner_config, dict) else raw_config
    check_config_values(raw_config, path)
    return raw_config


def check_config_values(raw_config: dict[str, Any], path: Path) -> None:
    """Raise ValueError, naming file and key, if config.json has a value that no model can have."""
    for key, value in raw_config.items():
        if value is not None:
            _check_value(key, value, path)
        elif key in REQUIRED_KEYS:
            raise _count_error(key, value, path)
    class_names = raw_config.get("architectures")
    if class_names is not None and not _is_list_of_names(class_names):
        raise ValueError(f"{path}: architectures must be a list of names, got {class_names!r}.")


def _check_value(key: str, value: Any, path: Path) -> None:
    """Raise ValueError for the value of a key, not null, that no model can have."""
    if key in COUNT_KEYS and not is_count(value):
        raise _count_error(key, value, path)
    expected_type, expected_in_words = TYPES_BY_KEY.get(key, (object, ""))
    if not isinstance(value, expected_type):
        raise ValueError(f"{path}: {key} must be {expected_in_words}, got {value!r:.60}.")
    if key in POSITIVE_KEYS and not is_positive(value):
        raise ValueError(f"{path}: {key} must be a positive number, got {value!r}.")


def _count_error(key: str, value: Any, path: Path) -> ValueError:
    """Return the error for a key that must be a whole number from 1 on."""
    return ValueError(
        f"{path}: {key} must be a whole number from 1 to {LARGEST_COUNT}, got {value!r}."
    )


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def check_layer_count(raw_config: dict[str, Any], num_tensors: int, path: Path) -> None:
    """Raise ValueError if the config asks for many more layers than there are tensors: a million
    layers would take hours to build before the missing weights are noticed."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        num_layers = raw_config.get(key) or 0
        # Up to 128 layers build fast; the missing weights are named then.
        if num_layers > max(128, num_tensors):
            raise ValueError(
                f"{path}: {key} is {num_layers}, but there are only {num_tensors} tensors."
            )


def is_count(value: Any) -> bool:
    """Return True for an integer of at least 1; booleans are no integers here."""
    return type(value) is int and 1 <= value <= LARGEST_COUNT


def is_positive(value: Any) -> bool:
    """Return True for a finite number above zero."""
    return type(value) in (int, float) and 0 < value and math.isfinite(value)


def check_rotary_keys(raw_config: dict[str, Any], path: Path = Path("config.json")) -> None:
    """Refuse a config.json whose rotary keys contradict each other or leave the frequencies open.

    Raises: ValueError naming the file, the keys and what to do.
    """
    rope_parameters = _read_object(raw_config, "rope_parameters", path)
    rope_scaling = _read_object(raw_config, "rope_scaling", path)
    comparable_parameters = _part_comparable_to_scaling(rope_parameters, rope_scaling)
    has_both = bool(rope_parameters and rope_scaling)
    if has_both and _canonical_keys(comparable_parameters) != _canonical_keys(rope_scaling):
        raise ValueError(
            f"{path} has rope_parameters and another rope_scaling, and transformers takes "
            "rope_scaling: delete the one that is wrong."
        )
    for layer_type, parameters in _keys_by_layer_type(rope_parameters or rope_scaling).items():
        _check_parameters(parameters, raw_config, path)
        if layer_type == FULL_ATTENTION:  # to whose layers the rope_theta outside belongs
            _check_thetas_agree(parameters, raw_config, path)
        if rope_parameters:
            _check_theta_given(parameters, raw_config, path)


def _read_object(raw_config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return the object under a key, {} if there is none. Raise ValueError for anything else."""
    value = raw_config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{path}: {key} must be an object or null, got {value!r}.")
    return value or {}


def _keys_by_layer_type(rotary_keys: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary keys by layer type, without types that have none. If no key holds an object
    of a layer type, all count as those of full attention; otherwise keys beside such objects are
    left out."""
    nested_keys = {key: value for key, value in rotary_keys.items() if isinstance(value, dict)}
    by_layer_type = nested_keys or {FULL_ATTENTION: rotary_keys}
    return {key: parameters for key, parameters in by_layer_type.items() if parameters}


def _check_parameters(parameters: dict[str, Any], raw_config: dict[str, Any], path: Path) -> None:
    """Raise ValueError for a rope_type or keys that transformers does not read as written."""
    if "attn_factor" in parameters:
        raise ValueError(
            f"{path} gives attn_factor, which multiplies YaRN's temperature, where transformers "
            "reads attention_factor, which replaces it: write attention_factor with the product."
        )
    allowed_keys = KNOWN_ROTARY_KEYS | (
        {"alpha"} if raw_config.get("model_type") in HUNYUAN_FAMILIES else set()
    )
    unknown_keys = sorted(set(parameters) - allowed_keys)
    if unknown_keys:
        raise ValueError(
            f"{path}: unknown rotary keys {', '.join(unknown_keys)}; known are "
            f"{', '.join(sorted(allowed_keys))}."
        )
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in KEYS_REQUIRED_BY_ROPE_TYPE:
        raise ValueError(
            f"{path}: unknown rope_type {rope_type!r}; known are "
            f"{', '.join(sorted(KEYS_REQUIRED_BY_ROPE_TYPE))}."
        )
    _check_values(parameters, rope_type, path)
    has_original_length = bool(
        parameters.get("original_max_position_embeddings")
        or raw_config.get("original_max_position_embeddings")
    )
    if rope_type in TYPES_WITH_ORIGINAL_LENGTH and not has_original_length:
        raise ValueError(
            f"{path}: {rope_type} without original_max_position_embeddings; transformers would "
            "take the extended length for the trained one. Add the length the model was trained at."
        )


def _check_thetas_agree(parameters: dict[str, Any], raw_config: dict[str, Any], path: Path) -> None:
    """Raise ValueError for two different bases, one in the rotary keys and one outside of them."""
    inner_theta = parameters.get("rope_theta")
    outer_theta = raw_config.get("rope_theta")
    if (
        inner_theta is not None
        and outer_theta is not None
        and float(inner_theta) != float(outer_theta)
    ):
        raise ValueError(
            f"{path}: rope_theta is {outer_theta} outside and {inner_theta} inside of the "
            "rotary keys."
        )


def _check_theta_given(parameters: dict[str, Any], raw_config: dict[str, Any], path: Path) -> None:
    """Raise ValueError if neither the rotary keys nor the config has a base."""
    if parameters.get("rope_theta") is None and raw_config.get("rope_theta") is None:
        raise ValueError(
            f"{path}: rope_parameters without rope_theta; transformers would assume its default of "
            "10000. Add the base the model was trained with."
        )


def _check_values(parameters: dict[str, Any], rope_type: str, path: Path) -> None:
    """Raise ValueError for a key that the rope_type lacks, or a value that no model can have."""
    for key in KEYS_REQUIRED_BY_ROPE_TYPE[rope_type]:
        if parameters.get(key) is None:
            raise ValueError(f"{path}: {rope_type} without {key}.")
    _check_positive_numbers(parameters, path)
    length = parameters.get("original_max_position_embeddings")
    if length is not None and not is_count(length):
        raise ValueError(
            f"{path}: original_max_position_embeddings must be a whole number from 1 on, got "
            f"{length!r}."
        )
    for key in ("short_factor", "long_factor"):
        factors = parameters.get(key)
        if factors is not None and not _is_list_of_positive_numbers(factors):
            raise ValueError(f"{path}: {key} must be a list of positive numbers, got {factors!r}.")


def _check_positive_numbers(parameters: dict[str, Any], path: Path) -> None:
    """Raise ValueError for a number that is not above 0, or no number."""
    for key in POSITIVE_ROTARY_KEYS:
        value = parameters.get(key)
        means_none = value is None or (value == 0 and "mscale" in key)  # in transformers, too
        if not means_none and not is_positive(value):
            raise ValueError(f"{path}: {key} must be a positive number, got {value!r}.")


def _is_list_of_positive_numbers(value: Any) -> bool:
    """Return True for a list with at least one entry, all of them positive numbers."""
    return isinstance(value, list) and bool(value) and all(map(is_positive, value))


def _part_comparable_to_scaling(
    rope_parameters: dict[str, Any], rope_scaling: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of rope_parameters that can be compared with rope_scaling: the keys of full
    attention if rope_scaling has no layer types, else all."""
    is_nested = any(isinstance(value, dict) for value in rope_scaling.values())
    full_attention_keys = rope_parameters.get(FULL_ATTENTION)
    if isinstance(full_attention_keys, dict) and not is_nested:
        return full_attention_keys
    return rope_parameters


def _canonical_keys(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rename type to rope_type and remove rope_theta, so that equal settings compare equal."""
    renamed_parameters = {("rope_type" if k == "type" else k): v for k, v in parameters.items()}
    return {k: v for k, v in renamed_parameters.items() if k != "rope_theta"}
