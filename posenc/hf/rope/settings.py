"""Read a checkpoint's rotary settings from its transformers config."""

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from posenc.dialects.meaning import is_length
from posenc.dialects.model import TRAINED_KEY
from posenc.dialects.runtimes.transformers5 import ALPHA
from posenc.encodings import rope_scaling as rs

EXTENDED_LAYERS = ("full_attention",)
"""Layer types without a window, the only ones in which distances grow with the context."""


@dataclass(frozen=True)
class RopeSetting:
    """Describe the rotation of one kind of layer (layer_type None: of all layers).

    compression: divisor of all frequencies in addition to `scaling`. It is that of a linear scaling
    without a shorter original length, with which the checkpoint was trained; extending keeps it.

    mscale, mscale_all_dim: YaRN's temperatures in the rotary keys, None if absent. All attentions
    compute the factor of cos and sin from both. DeepSeek's also multiplies its scores by a factor
    computed from the second.
    """

    layer_type: str | None
    rope_theta: float
    rotary_dim: int
    scaling: rs.Scaling | None
    original_length: int
    """Training length, in tokens, of the frequencies without `scaling`."""
    compression: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def yarn_temperature(self, factor: float) -> float:
        """Return YaRN's factor of cos and sin as transformers computes it: from mscale and
        mscale_all_dim if both are given, otherwise from `factor`."""
        if self.mscale and self.mscale_all_dim:
            all_dim = rs.yarn_temperature(factor, self.mscale_all_dim)
            return rs.yarn_temperature(factor, self.mscale) / all_dim
        return rs.yarn_temperature(factor)

    @property
    def compressed_length(self) -> int:
        """Return the original length divided by the compression, in tokens."""
        return max(1, round(self.original_length / self.compression))

    @property
    def scaling_name(self) -> str:
        """Return the class name of the scaling; "none" if there is none."""
        if self.scaling is None:
            return "none" if self.compression == 1.0 else rs.Linear.__name__
        return type(self.scaling).__name__

    def frequencies(self, length: int | None = None) -> rs.Frequencies:
        """Return the frequencies at a length in tokens; None means the training length."""
        if length is not None:
            length = max(1, round(length / self.compression))
        found = rs.rope_frequencies(self.rotary_dim, self.rope_theta, self.scaling, length)
        if self.compression == 1.0:
            return found
        divisor = Decimal(self.compression)
        return found._replace(inv_freq=tuple(f / divisor for f in found.inv_freq))


def head_size(config: Any, layer_type: str | None = None) -> int:
    """Return the head dimension of a layer type; some configs omit it, Gemma 4 has two."""
    kinds = getattr(config, "layer_types", None) or ()
    if (each := getattr(config, "per_layer_config", None)) and layer_type in kinds:
        config = each[kinds.index(layer_type)]
    elif layer_type == "full_attention" and (size := getattr(config, "global_head_dim", None)):
        return size  # early transformers 5 has no per_layer_config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def read_settings(config: Any) -> tuple[RopeSetting, ...]:
    """Read the rotary settings of a transformers config; empty if it has none.

    Raises: ValueError for a rope_type that posenc does not know.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return ()
    nested = {k: v for k, v in parameters.items() if isinstance(v, dict)}
    return tuple(_setting(kind, p, config) for kind, p in (nested or {None: parameters}).items())


def _setting(layer_type: str | None, parameters: dict[str, Any], config: Any) -> RopeSetting:
    head_dim = head_size(config, layer_type)
    share = parameters.get("partial_rotary_factor") or 1.0
    kind = parameters["rope_type"]
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * share)
    if rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor {share} of a head of {head_dim} is {rotary_dim} channels, an "
            "odd number, which runtimes round differently."
        )
    maximum = getattr(config, "max_position_embeddings", None)
    if maximum is None:
        raise ValueError(
            f"a {config.model_type} config has rotary keys and no max_position_embeddings: nothing "
            "says at what length its rotation was trained."
        )
    original = parameters.get("original_max_position_embeddings") or (
        getattr(config, "original_max_position_embeddings", None) if kind == "longrope" else None
    )
    if kind == "longrope":  # its original length may be the longest one; then it never switches
        kept = getattr(config, TRAINED_KEY, None)
        original = kept if is_length(kept) else original
    theta, length = float(parameters["rope_theta"]), int(original or maximum)
    if kind == "linear" and original is None:
        return RopeSetting(layer_type, theta, rotary_dim, None, length, float(parameters["factor"]))
    if kind == "yarn":  # transformers 5 looks for it outside of the layer types
        truncate = config.rope_parameters.get("truncate", True)
        parameters = {**parameters, "truncate": True if truncate is None else truncate}
    if kind == "dynamic" and config.model_type in ALPHA and (alpha := parameters.get("alpha")):
        theta *= float(alpha) ** (rotary_dim / (rotary_dim - 2))
        return RopeSetting(layer_type, theta, rotary_dim, None, length)
    setting = RopeSetting(layer_type, theta, rotary_dim, None, length)
    given = parameters.get("attention_factor")
    if kind == "yarn":
        pair = {key: parameters.get(key) for key in ("mscale", "mscale_all_dim")}
        setting = replace(setting, **pair)
        given = setting.yarn_temperature(parameters["factor"]) if given is None else given
    return replace(setting, scaling=rs.scaling_of(parameters, length, maximum, given))
