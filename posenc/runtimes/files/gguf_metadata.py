"""Read the keys and factor tensors of a GGUF file that decide positions."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from posenc.files.opening import open_ordinary
from posenc.runtimes.files.gguf_header import Header, read_floats, read_gguf_header

DEFAULT_FREQ_BASE = 10000.0
KEY_OF_FIELD = {
    "context_length": "context_length",
    "sliding_window": "attention.sliding_window",
    "freq_base": "rope.freq_base",
    "freq_base_swa": "rope.freq_base_swa",
    "dimension_count": "rope.dimension_count",
    "dimension_count_swa": "rope.dimension_count_swa",
    "scaling_type": "rope.scaling.type",
    "scaling_factor": "rope.scaling.factor",
    "original_length": "rope.scaling.original_context_length",
    "attn_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "yarn_attn_factor": "rope.scaling.yarn_attn_factor",
    "yarn_ext_factor": "rope.scaling.yarn_ext_factor",
    "log_multiplier": "rope.scaling.yarn_log_multiplier",
    "rotates": "rope.scaling.finetuned",
    "attention_scale": "attention.scale",
    "output_scale": "attention.output_scale",
    "window_pattern": "attention.sliding_window_pattern",
    "rope_pattern": "attention.rope_pattern",
    "num_leading_dense": "leading_dense_block_count",
}
"""Field -> its key, after the architecture's name and a dot."""
OLD_KEY_OF_FIELD = {"scaling_factor": "rope.scale_linear"}
"""Those that libllama reads where the newer one is missing."""
TENSOR_OF_FIELD = {
    "rope_freqs": "rope_freqs.weight",
    "factors_long": "rope_factors_long.weight",
    "factors_short": "rope_factors_short.weight",
}
FIELDS_THAT_MAY_BE_ZERO = (
    "sliding_window",
    "yarn_ext_factor",
    "log_multiplier",
    "original_length",
    "attention_scale",
    "window_pattern",
    "num_leading_dense",
)
"""0 is for no window, for none of the layers, and for a share or a multiplier that is off."""
INTEGER_FIELDS = (
    "context_length",
    "dimension_count",
    "dimension_count_swa",
    "sliding_window",
    "num_leading_dense",
)
FIELDS_OF_FLAGS = ("window_pattern", "rope_pattern")
"""Fields of Metadata that may be lists with a flag per layer."""
MOST_LAYERS = 2000
KEY_OF_PART_NUMBER = "split.no"
"""The key of a split file that says which of its parts this is, from 0 on."""


@dataclass(frozen=True)
class Metadata:
    """The keys and tensors of a GGUF file that decide positions; missing keys have libllama's
    defaults.

    num_layers: without those that only predict further tokens. width_per_head: the model's width
    divided by the number of heads, 0 where the file does not say them. window_pattern: of how many
    layers one has no window, or one flag per layer. rope_pattern: one flag per layer. rotates:
    False where rope.scaling.finetuned is false, by which Granite says that no layer rotates.
    """

    architecture: str
    context_length: int
    dimension_count: int
    head_dim: int
    num_layers: int = 0
    freq_base: float = DEFAULT_FREQ_BASE
    freq_base_swa: float | None = None
    dimension_count_swa: int | None = None
    scaling_type: str = "linear"
    scaling_factor: float = 1.0
    original_length: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float | None = None
    beta_slow: float | None = None
    yarn_attn_factor: float | None = None
    yarn_ext_factor: float | None = None
    log_multiplier: float | None = None
    sliding_window: int | None = None
    rotates: bool = True
    attention_scale: float | None = None
    output_scale: float | None = None
    window_pattern: int | tuple[int, ...] | None = None
    rope_pattern: tuple[int, ...] | None = None
    num_leading_dense: int = 0
    width_per_head: int = 0
    rope_freqs: tuple[float, ...] | None = None
    factors_long: tuple[float, ...] | None = None
    factors_short: tuple[float, ...] | None = None
    has_weights: bool = True
    """False for a file without tensors, such as a vocabulary; the first part of a split file may
    have none either."""
    given_fields: frozenset[str] = frozenset()
    """The fields that the file names."""

    def __post_init__(self) -> None:
        if not self.original_length:
            object.__setattr__(self, "original_length", float(self.context_length))

    @property
    def has_factor_lists(self) -> bool:
        """Return True if the file has one of longrope's lists of divisors."""
        return self.factors_long is not None or self.factors_short is not None

    @property
    def chooses_list_by_length(self) -> bool:
        """Return True if the frequencies depend on the context: longrope with two lists."""
        return self.factors_long != self.factors_short and self.rope_freqs is None

    @property
    def lost_factors(self) -> tuple[str, ...]:
        """Return the lists of divisors that longrope wants and the file does not have."""
        if self.scaling_type != "longrope" or self.rope_freqs is not None:
            return ()
        lists = {"factors_long": self.factors_long, "factors_short": self.factors_short}
        return tuple(name for name, divisors in lists.items() if divisors is None)


def read_metadata(path: Path) -> Metadata:
    """Read what decides positions in a GGUF file.

    Raises: ValueError where the file is damaged or lacks the keys.
    """
    with open_ordinary(path) as file:
        header = read_gguf_header(file, path)
        factors = _read_factor_tensors(file, path, header)
    value_by_key = {name: field.value for name, field in header.fields.items()}
    _require_keys_of_language_model(path, value_by_key)
    architecture = value_by_key.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"{path}: the GGUF file has no general.architecture.")
    settings = {name: v for name, v in value_by_key.items() if name.startswith(f"{architecture}.")}
    fields: dict[str, Any] = {}
    for name, key in KEY_OF_FIELD.items():
        old_key = f"{architecture}.{OLD_KEY_OF_FIELD.get(name, key)}"
        value = settings.get(f"{architecture}.{key}", settings.get(old_key))
        if value is not None:
            fields[name] = _require_valid(path, f"{architecture}.{key}", name, value)
    fields.setdefault("context_length", 0)
    if not fields["context_length"]:
        raise ValueError(f"{path}: the GGUF file has no {architecture}.context_length.")
    fields |= factors
    head_dim = _head_dim(settings, architecture, path)
    given_fields = frozenset(fields)
    fields.setdefault("dimension_count", head_dim)
    return Metadata(
        architecture,
        head_dim=head_dim,
        num_layers=_num_layers(settings, architecture, path),
        width_per_head=_width_per_head(settings, architecture) or 0,
        has_weights=bool(header.tensors) or KEY_OF_PART_NUMBER in value_by_key,
        given_fields=given_fields,
        **fields,
    )


def _require_keys_of_language_model(path: Path, value_by_key: dict[str, Any]) -> None:
    """Raise ValueError for a later part of a split file, which has no keys, and for the encoder of
    pictures and sounds beside a language model. value_by_key: the file's keys with their values."""
    part_number = value_by_key.get(KEY_OF_PART_NUMBER)
    if isinstance(part_number, int) and part_number > 0:
        raise ValueError(
            f"{path}: is part {part_number + 1} of a split GGUF file; the keys are in the first "
            "part."
        )
    if value_by_key.get("general.architecture") == "clip":
        raise ValueError(
            f"{path}: is the encoder (mmproj) of a multimodal model; give the GGUF file of its "
            "language model."
        )


def _num_layers(settings: dict[str, Any], architecture: str, path: Path) -> int:
    """Return the number of layers, without those that predict further tokens, which come last
    (llama-hparams.cpp:348)."""
    num_layers = settings.get(f"{architecture}.block_count", 0)
    if not isinstance(num_layers, int) or not 0 <= num_layers <= MOST_LAYERS:
        raise ValueError(
            f"{path}: {architecture}.block_count must be between 0 and {MOST_LAYERS}, got "
            f"{num_layers!r}."
        )
    predicting_key = f"{architecture}.nextn_predict_layers"
    num_predicting = settings.get(predicting_key, 0)
    if not isinstance(num_predicting, int) or not 0 <= num_predicting <= num_layers:
        raise ValueError(
            f"{path}: {predicting_key} must be between 0 and {num_layers}, got "
            f"{num_predicting!r:.60}."
        )
    return num_layers - num_predicting


def _read_factor_tensors(
    file: BinaryIO, path: Path, header: Header
) -> dict[str, tuple[float, ...]]:
    """Return the elements of the factor tensors that the file has, by their names in Metadata. A
    tensor may stand by itself or in the first block."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    factors: dict[str, tuple[float, ...]] = {}
    for name, tensor_name in TENSOR_OF_FIELD.items():
        tensor = tensors.get(tensor_name, tensors.get(f"blk.0.{tensor_name}"))
        if tensor is None:
            continue
        factors[name] = read_floats(file, path, header, tensor)
        for value in factors[name]:
            if not 0 < value < math.inf:
                raise ValueError(f"{path}: {tensor.name} must be numbers above 0, got {value:g}.")
    return factors


def _require_valid(path: Path, key: str, name: str, value: Any) -> Any:
    """Return the value of a field as Metadata holds it: a tuple for a list, an int where one is
    due.

    Raises: ValueError for a value that the field cannot have.
    """
    if name in FIELDS_OF_FLAGS and isinstance(value, list):
        what_it_must_be = "" if all(_is_flag(item) for item in value) else "a list of flags"
        value = tuple(value)
    else:
        what_it_must_be = _what_value_must_be(name, value)
    if what_it_must_be:
        raise ValueError(f"{path}: {key} must be {what_it_must_be}, got {value!r:.60}.")
    return int(value) if name in INTEGER_FIELDS else value


def _what_value_must_be(name: str, value: Any) -> str:
    """Return in words what the value of this field must be; empty if it is right."""
    if name == "rope_pattern":
        return "a list of flags"
    if name == "rotates":
        return "" if isinstance(value, bool) else "true or false"
    if name == "scaling_type":
        return "" if isinstance(value, str) else "a word"
    if name == "window_pattern":
        is_integer = type(value) is int and value >= 0
        return "" if is_integer else "an integer, or a list of flags"
    return _what_number_must_be(name, value)


def _what_number_must_be(name: str, value: Any) -> str:
    """Return in words what the value of a field of numbers must be; empty if it is right."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "a number above 0"
    is_allowed_zero = value == 0 and name in FIELDS_THAT_MAY_BE_ZERO
    if not (value > 0 or is_allowed_zero):
        return "a number above 0"
    if name in INTEGER_FIELDS and value != int(value):
        return "a whole number"
    return ""


def _is_flag(value: Any) -> bool:
    """Return True for true, false, 1 and 0: files hold flags as bools or as integers."""
    return isinstance(value, int) and value in (0, 1)


def _head_dim(settings: dict[str, Any], architecture: str, path: Path) -> int:
    """Return the width of a key head: of latent attention's, else the stated one, else the model's
    width per head.

    Raises: ValueError where the file says none of them, or no number above 0.
    """
    head_dim = settings.get(f"{architecture}.attention.key_length_mla")
    if head_dim is None:
        head_dim = settings.get(f"{architecture}.attention.key_length")
    if head_dim is None:
        head_dim = _width_per_head(settings, architecture)
        if head_dim is None:
            raise ValueError(f"{path}: the GGUF file has neither key_length nor head counts.")
    if type(head_dim) is not int or head_dim < 1:
        raise ValueError(f"{path}: {architecture}'s key_length must be a number above 0.")
    return head_dim


def _width_per_head(settings: dict[str, Any], architecture: str) -> int | None:
    """Return the model's width divided by the heads of its first layer; None where the file does
    not say both."""
    model_width = settings.get(f"{architecture}.embedding_length")
    num_heads = settings.get(f"{architecture}.attention.head_count")
    num_heads = num_heads[0] if isinstance(num_heads, list) and num_heads else num_heads
    if (
        type(model_width) is not int
        or type(num_heads) is not int
        or not 0 < num_heads <= model_width
    ):
        return None
    return model_width // num_heads
