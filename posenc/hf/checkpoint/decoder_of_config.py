"""Read from a Hugging Face config what its layers are in words of posenc.DecoderConfig, and name
what is left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from posenc.runtimes.config_model import Model, model_of
from posenc.runtimes.meaning import meaning_of

Windows = Literal["none", "every layer", "by layer type", "after max_window_layers"]


@dataclass(frozen=True)
class _Family:
    """What the code of a family builds that its config does not say.

    norm: as in DecoderConfig. gated: True if the feed-forward has a gate. biases: of all linear
    layers. qkv_biases: of queries, keys and values only. qk_norm, tied: as in DecoderConfig, `tied`
    where the config does not say. windows: which layers have a window. not_built: parts that a
    Decoder has not.
    """

    norm: str = "rms"
    gated: bool = True
    biases: bool = False
    qkv_biases: bool = False
    qk_norm: bool = False
    tied: bool = False
    windows: Windows = "none"
    not_built: tuple[str, ...] = ()


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(windows="every layer"),
    "phi3": _Family(windows="every layer"),
    "qwen2": _Family(qkv_biases=True, windows="after max_window_layers"),
    "qwen3": _Family(qk_norm=True, windows="after max_window_layers"),
    "smollm3": _Family(tied=True, windows="by layer type"),
    "gpt2": _Family(norm="layer", gated=False, biases=True, tied=True),
    "gemma": _Family(tied=True, not_built=("the scale of embeddings",)),
    "gemma3_text": _Family(
        qk_norm=True,
        tied=True,
        windows="by layer type",
        not_built=("the scale of embeddings", "norms after sublayers"),
    ),
}
"""By model_type; read in transformers 5.24."""
_GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
_PLAIN_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""transformers' names of activations, with and without a gate, and those of DecoderConfig."""
_ACTIVATION_KEYS = ("hidden_activation", "hidden_act", "activation_function")
_EPS_KEYS = ("rms_norm_eps", "layer_norm_epsilon")
_FFN_KEYS = ("intermediate_size", "n_inner")
_DEFAULT_ACTIVATIONS = {"gpt2": "gelu_new", "gemma": "gelu_pytorch_tanh"}
_DEFAULT_ACTIVATIONS["gemma3_text"] = _DEFAULT_ACTIVATIONS["gemma"]
_DEFAULT_EPS = {"gpt2": 1e-5, "phi3": 1e-5}
"""What a class fills in where its config has no such key; others have silu and 1e-6."""
_DEFAULT_WINDOWS = {"mistral": 4096, "gemma3_text": 4096}
"""The window in tokens that a class fills in where its config has no sliding_window, not even a
null; others have none."""
SIZE_KEYS = frozenset(
    "hidden_size n_embd d_model num_hidden_layers n_layer n_layers num_layers num_attention_heads "
    "n_head n_heads num_heads num_key_value_heads num_kv_heads head_dim".split()
)
"""Keys of sizes, which compare reads in every family."""
_TAKEN_KEYS = SIZE_KEYS.union(
    *(_ACTIVATION_KEYS, _EPS_KEYS, _FFN_KEYS),
    "attention_bias mlp_bias tie_word_embeddings sliding_window use_sliding_window "
    "max_window_layers layer_types rope_theta".split(),
)
"""Keys that are taken in the families above."""
_KEYS_BESIDE_THE_ARCHITECTURE = frozenset(
    "architectures model_type torch_dtype dtype transformers_version bos_token_id eos_token_id "
    "pad_token_id use_cache initializer_range _name_or_path auto_map task_specific_params id2label "
    "label2id num_labels pretraining_tp quantization_config scale_attn_weights "
    "_attn_implementation return_dict output_attentions output_hidden_states "
    "tokenizer_class is_decoder is_encoder_decoder gradient_checkpointing summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj".split()
)
"""Keys of files, of training and of heads for other tasks; GPT-2's scale of the scores is ours."""


class DecoderOfConfig(NamedTuple):
    """What a config says of its layers.

    choices: fields of DecoderConfig, but for sizes of the residual stream. rope_theta: the base of
    its rotation, None if it has none or several. left_out: keys, and parts without a key, that are
    not taken.
    """

    choices: dict[str, Any]
    rope_theta: float | None
    left_out: tuple[str, ...]


def decoder_of_config(raw: Mapping[str, Any], path: Path) -> DecoderOfConfig:
    """Return what the config of a language model says of its layers. Of a family that is not among
    those above nothing but sizes is known.

    raw: the content of config.json at `path`, as `read_text_config` returns it.
    Raises: ValueError for values that no model can have.
    """
    family_name = str(raw.get("model_type"))
    family = _FAMILIES.get(family_name)
    if family is None:
        head_dim = {"head_dim": raw.get("head_dim")}
        return DecoderOfConfig(head_dim, None, _keys_left_out(raw, SIZE_KEYS))
    model = model_of(raw)
    activation = _first(raw, _ACTIVATION_KEYS, _DEFAULT_ACTIVATIONS.get(family_name, "silu"))
    names = _GATED_ACTIVATIONS if family.gated else _PLAIN_ACTIVATIONS
    attention_bias = family.biases or family.qkv_biases or bool(raw.get("attention_bias"))
    choices = {
        "head_dim": model.head_dim,
        "ffn_dim": _first(raw, _FFN_KEYS, None),
        "norm": family.norm,
        "norm_eps": _first(raw, _EPS_KEYS, _DEFAULT_EPS.get(family_name, 1e-6)),
        "activation": names.get(activation, "swiglu" if family.gated else "gelu"),
        "ffn_bias": family.biases or bool(raw.get("mlp_bias")),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", family.tied)),
        "attention_bias": attention_bias,
        "output_bias": False if family.qkv_biases else None,
        "qk_norm": family.qk_norm,
        "layer_windows": _windows(raw, model, family),
    }
    _check_choices(choices, path)
    keys_left_out = _keys_left_out(raw, _TAKEN_KEYS)
    rope_theta, rotary_left_out = _base_of_rotation(raw, model, family_name)
    left_out = [*keys_left_out, *rotary_left_out, *family.not_built]
    if activation not in names:
        left_out.append(f"the activation {activation}")
    return DecoderOfConfig(choices, rope_theta, tuple(dict.fromkeys(left_out)))


def _check_choices(choices: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError for a width of the feed-forward or a number of the norm that no model can
    have; others are checked where the config is read."""
    ffn_dim, eps = choices["ffn_dim"], choices["norm_eps"]
    if ffn_dim is not None and (type(ffn_dim) is not int or ffn_dim < 1):
        raise ValueError(
            f"{path}: {' or '.join(_FFN_KEYS)} must be a whole number from 1 on, got {ffn_dim!r}."
        )
    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise ValueError(f"{path}: {' or '.join(_EPS_KEYS)} must be a small number, got {eps!r}.")
    for window in choices["layer_windows"] or ():
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(
                f"{path}: sliding_window must be a whole number from 1 on, got {window!r}."
            )


def _windows(
    raw: Mapping[str, Any], model: Model, family: _Family
) -> tuple[int | None, ...] | None:
    """Return the window of each layer in tokens, the query's own included, and None for a layer
    without one; None for a model without windows."""
    window = raw.get("sliding_window", _DEFAULT_WINDOWS.get(model.model_type))
    if window is None or raw.get("use_sliding_window") is False or family.windows == "none":
        return None
    if family.windows == "every layer":
        return (window,) * model.num_layers
    layer_types = model.layer_types
    if family.windows == "after max_window_layers" and not raw.get("layer_types"):
        if not raw.get("use_sliding_window"):
            return None
        first = raw.get("max_window_layers", 28)  # the default of Qwen2Config and Qwen3Config
        return tuple(window if i >= first else None for i in range(model.num_layers))
    if len(layer_types) != model.num_layers:
        raise ValueError(
            f"config.json: layer_types names {len(layer_types)} layers, and there are "
            f"{model.num_layers}."
        )
    is_windowed = [kind == "sliding_attention" for kind in layer_types]
    return tuple(window if flag else None for flag in is_windowed) if any(is_windowed) else None


def _base_of_rotation(
    raw: Mapping[str, Any], model: Model, family_name: str
) -> tuple[float | None, list[str]]:
    """Return the base of the rotation of layers without a window, None for a model that does not
    rotate, and what else the config says about rotation."""
    if family_name == "gpt2":
        return None, ["its table of positions"]
    meaning = meaning_of(raw)
    rotary_keys = {kind: dict(keys) for kind, keys in meaning.parameters.items()}
    kind = "full_attention" if "full_attention" in rotary_keys else next(iter(rotary_keys))
    left_out = []
    for other, keys in rotary_keys.items():
        if keys["rope_type"] != "default":
            left_out.append(f"the rope_type {keys['rope_type']}")
        if other != kind and keys["rope_theta"] != rotary_keys[kind]["rope_theta"]:
            left_out.append(f"the base {keys['rope_theta']:g} of {other}")
        if keys.get("partial_rotary_factor", 1.0) != 1.0:
            left_out.append(f"partial_rotary_factor {keys['partial_rotary_factor']:g}")
    if model.without_rotation:
        left_out.append(f"{len(model.without_rotation)} layers without rotation")
    return float(rotary_keys[kind]["rope_theta"]), left_out


_ROTARY_KEYS = ("rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor")
"""Keys that are told by what they mean, see `_base_of_rotation`."""


def _keys_left_out(raw: Mapping[str, Any], taken: frozenset[str]) -> tuple[str, ...]:
    """Return the keys that may describe position or layers and are not taken, but for those that
    are null, false, 0 or empty."""
    told = taken | _KEYS_BESIDE_THE_ARCHITECTURE
    told = told.union(_ROTARY_KEYS) if taken is _TAKEN_KEYS else told
    return tuple(sorted(key for key, value in raw.items() if value and key not in told))


def _first(raw: Mapping[str, Any], keys: tuple[str, ...], default: Any) -> Any:
    """Return the value of the first of these keys that is there and not null, else the default."""
    return next((raw[key] for key in keys if raw.get(key) is not None), default)
