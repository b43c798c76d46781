"""Read the rotary settings of a transformers config, and write others that stock tools compute."""

import math
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from posenc.frequencies.float64_formulas import ntk_theta, yarn_attention_factor
from posenc.frequencies.scalings.lookup import scaling_of
from posenc.frequencies.scalings.registry import NTK, Linear, LongRoPE, Proportional, YaRN
from posenc.frequencies.scalings.scaling import Frequencies, Scaling, rope_frequencies
from posenc.runtimes.config_model import TRAINED_LENGTH_KEY
from posenc.runtimes.known.transformers5 import HUNYUAN_FAMILIES
from posenc.runtimes.meaning import is_length

EXTENDED_LAYER_TYPES = ("full_attention",)
"""Layer types without a window, the only ones in which distances grow with the context."""
FAMILIES_WITH_ONLY_LONGROPE = ("phi3", "phi4_multimodal")
"""Families whose config accepts only the rope types "default" and "longrope"."""
MROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""Keys that assign pairs to the components of positions in images; extending leaves them as they
are."""
NO_ROTATION_DIVISOR = 1e30
"""Divisor of a frequency after which float32 shows no rotation at any position."""


@dataclass(frozen=True)
class RopeSetting:
    """Describe the rotation of one kind of layer (layer_type None: of all layers).

    compression: divisor of all frequencies in addition to `scaling`; 1 if there is none. It is the
    factor of a linear scaling in a config that names no original length: the checkpoint was trained
    with it, so extending keeps it.

    rotary_dim: channels of a head that rotate. original_length: the training length in tokens,
    before any scaling.

    mscale, mscale_all_dim: YaRN's temperatures in the rotary keys, None if absent. All attentions
    compute the factor of cos and sin from both. DeepSeek's also multiplies its scores by a factor
    computed from mscale_all_dim.
    """

    layer_type: str | None
    rope_theta: float
    rotary_dim: int
    scaling: Scaling | None
    original_length: int
    """Training length, in tokens, of the frequencies without `scaling`."""
    compression: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def yarn_attention_factor(self, factor: float) -> float:
        """Return YaRN's factor of cos and sin as transformers computes it: from `factor` and, if
        both are given, from mscale and mscale_all_dim."""
        if self.mscale and self.mscale_all_dim:
            all_dim_factor = yarn_attention_factor(factor, self.mscale_all_dim)
            return yarn_attention_factor(factor, self.mscale) / all_dim_factor
        return yarn_attention_factor(factor)

    @property
    def compressed_length(self) -> int:
        """Return the original length divided by the compression, in tokens."""
        return max(1, round(self.original_length / self.compression))

    @property
    def scaling_name(self) -> str:
        """Return the class name of the scaling; "none" if there is none."""
        if self.scaling is None:
            return "none" if self.compression == 1.0 else Linear.__name__
        return type(self.scaling).__name__

    def frequencies(self, length: int | None = None) -> Frequencies:
        """Return the frequencies at a length in tokens; None means the training length."""
        if length is not None:
            length = max(1, round(length / self.compression))
        scaled = rope_frequencies(self.rotary_dim, self.rope_theta, self.scaling, length)
        if self.compression == 1.0:
            return scaled
        divisor = Decimal(self.compression)
        return scaled._replace(inv_freq=tuple(f / divisor for f in scaled.inv_freq))


def head_dim_of(config: Any, layer_type: str | None = None) -> int:
    """Return the number of channels of an attention head.

    layer_type: "full_attention" or another type of layers, because Gemma 4's types differ; None for
    models whose layers are all alike. A config without head_dim means hidden_size /
    num_attention_heads.
    """
    layer_types = getattr(config, "layer_types", None) or ()
    layer_configs = getattr(config, "per_layer_config", None)
    if layer_configs and layer_type in layer_types:
        config = layer_configs[layer_types.index(layer_type)]
    elif layer_type == "full_attention" and (head_dim := getattr(config, "global_head_dim", None)):
        return head_dim  # early transformers 5 has no per_layer_config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def read_settings(config: Any) -> tuple[RopeSetting, ...]:
    """Return the rotary settings of a transformers config, one for each layer type; empty if it has
    none.

    Raises: ValueError for a rope_type that posenc does not know.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return ()
    nested_parameters = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    by_layer_type = nested_parameters or {None: parameters}
    return tuple(
        _read_layer_setting(layer_type, parameters_of_type, config)
        for layer_type, parameters_of_type in by_layer_type.items()
    )


def _read_layer_setting(
    layer_type: str | None, parameters: dict[str, Any], config: Any
) -> RopeSetting:
    """Return the setting of one layer type (None: all layers) from its rotary keys."""
    rope_type = parameters["rope_type"]
    rotary_dim = _rotary_dim(parameters, head_dim_of(config, layer_type))
    max_positions = _max_positions(config)
    original_length = _original_length(parameters, config)
    length = int(original_length or max_positions)
    setting = RopeSetting(layer_type, float(parameters["rope_theta"]), rotary_dim, None, length)
    if (
        rope_type == "linear" and original_length is None
    ):  # the model was trained with it: no length is given
        return replace(setting, compression=float(parameters["factor"]))
    if rope_type == "yarn":
        return _yarn_setting(setting, parameters, config, max_positions)
    alpha = parameters.get("alpha")
    if rope_type == "dynamic" and config.model_type in HUNYUAN_FAMILIES and alpha:
        # The slowest pair slows by alpha.
        return replace(setting, rope_theta=ntk_theta(setting.rope_theta, float(alpha), rotary_dim))
    attention_factor = parameters.get("attention_factor")
    scaling = scaling_of(parameters, length, max_positions, attention_factor)
    return replace(setting, scaling=scaling)


def _rotary_dim(parameters: dict[str, Any], head_dim: int) -> int:
    """Return how many channels of a head rotate. Raises: ValueError for an odd number."""
    rotated_fraction = parameters.get("partial_rotary_factor") or 1.0
    if parameters["rope_type"] == "proportional":  # its other pairs have the frequency 0
        rotary_dim = head_dim
    else:
        rotary_dim = int(head_dim * rotated_fraction)
    if rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor {rotated_fraction} of a head of {head_dim} is {rotary_dim} "
            "channels, an odd number, which runtimes round differently."
        )
    return rotary_dim


def _max_positions(config: Any) -> int:
    """Return the longest length of a config, in tokens. Raises: ValueError if it gives none."""
    max_positions = getattr(config, "max_position_embeddings", None)
    if max_positions is None:
        raise ValueError(
            f"a {config.model_type} config has rotary keys and no max_position_embeddings: nothing "
            "says at what length its rotation was trained."
        )
    return max_positions


def _original_length(parameters: dict[str, Any], config: Any) -> int | None:
    """Return the length in tokens for which the frequencies were made before any scaling; None if
    no key gives it."""
    original_length = parameters.get("original_max_position_embeddings") or None
    if parameters["rope_type"] != "longrope":
        return original_length
    # The original length may be the longest one, so that longrope never switches: export keeps the
    # length of the training in a key of posenc's own.
    trained_length = getattr(config, TRAINED_LENGTH_KEY, None)
    if is_length(trained_length):
        return trained_length
    return original_length or getattr(config, "original_max_position_embeddings", None)


def _yarn_setting(
    setting: RopeSetting, parameters: dict[str, Any], config: Any, max_positions: int
) -> RopeSetting:
    """Return `setting`, which has no scaling yet, with YaRN's scaling and temperatures added.
    max_positions: the config's longest length in tokens."""
    setting = replace(
        setting,
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
    )
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = setting.yarn_attention_factor(parameters["factor"])
    # transformers 5 looks for it outside of the layer types
    truncate = config.rope_parameters.get("truncate", True)
    parameters = {**parameters, "truncate": True if truncate is None else truncate}
    scaling = scaling_of(parameters, setting.original_length, max_positions, attention_factor)
    return replace(setting, scaling=scaling)


def write_settings(config: Any, settings: tuple[RopeSetting, ...], max_positions: int) -> None:
    """Write settings and the new maximum length into a transformers config, in place."""
    only_longrope = config.model_type in FAMILIES_WITH_ONLY_LONGROPE
    parameters_before = config.rope_parameters
    new_parameters = {}
    for setting in settings:
        layer_parameters_before = (
            parameters_before[setting.layer_type] if setting.layer_type else parameters_before
        )
        is_proportional = layer_parameters_before["rope_type"] == "proportional"
        head_dim = head_dim_of(config, setting.layer_type)
        mrope_parameters = {
            key: layer_parameters_before[key]
            for key in MROPE_KEYS
            if key in layer_parameters_before
        }
        parameters = rope_parameters(
            setting, head_dim, only_longrope, is_proportional=is_proportional
        )
        new_parameters[setting.layer_type] = {**parameters, **mrope_parameters}
    if None in new_parameters and "partial_rotary_factor" in parameters_before:
        # Phi-3 needs the key even if all channels are rotated.
        rotated_fraction = settings[0].rotary_dim / head_dim_of(config)
        new_parameters[None].setdefault("partial_rotary_factor", rotated_fraction)
    if None in new_parameters:
        config.rope_parameters = new_parameters[None]
    else:  # keep the entries of layers that do not rotate, None
        config.rope_parameters = {**parameters_before, **new_parameters}
    config.max_position_embeddings = max_positions
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = settings[0].original_length


def rope_parameters(
    setting: RopeSetting,
    head_dim: int,
    only_longrope: bool = False,
    *,
    is_proportional: bool = False,
) -> dict[str, Any]:
    """Return rope_parameters with which stock transformers computes the setting's frequencies.

    If transformers, or a family with few rope types (only_longrope), has no type for the
    frequencies, they are written as longrope with equal short and long factors. is_proportional:
    the model's type is proportional already; other models would apply its fraction to attention
    too, and rotate fewer channels.

    Raises: ValueError if no type can express the setting.
    """
    common_parameters: dict[str, Any] = {"rope_theta": setting.rope_theta}
    if setting.rotary_dim != head_dim:
        common_parameters["partial_rotary_factor"] = setting.rotary_dim / head_dim
    return {**common_parameters, **_scaling_parameters(setting, only_longrope, is_proportional)}


def _scaling_parameters(
    setting: RopeSetting, only_longrope: bool, is_proportional: bool
) -> dict[str, Any]:
    """Return the rope type and the keys that belong to it: rope_parameters without the fraction of
    rotated channels. The arguments are those of `rope_parameters`."""
    scaling = setting.scaling
    is_compressed = setting.compression != 1.0

    # Every family has the types longrope and default.
    if isinstance(scaling, LongRoPE):
        return _longrope_parameters(setting, scaling)
    if scaling is None and not is_compressed:
        return {"rope_type": "default"}
    if isinstance(scaling, NTK) and not is_compressed:
        base = ntk_theta(setting.rope_theta, scaling.factor, setting.rotary_dim)
        # As people write it, 160000 and not 159999.99999999997: 12 digits decide all frequencies.
        return {"rope_type": "default", "rope_theta": float(f"{base:.12g}")}
    if only_longrope:
        return _fixed_frequencies_as_longrope(setting)

    # The compression is a linear scaling, and two of them are one by their product.
    if scaling is None:
        return {"rope_type": "linear", "factor": setting.compression}
    if isinstance(scaling, Linear):
        return {"rope_type": "linear", "factor": scaling.factor * setting.compression}
    if is_compressed:  # no rope type has the rest on top of a linear scaling
        return _fixed_frequencies_as_longrope(setting)
    return _stock_type_parameters(setting, is_proportional)


def _longrope_parameters(setting: RopeSetting, scaling: LongRoPE) -> dict[str, Any]:
    """Return the keys of LongRoPE, which divides frequencies by a factor for each pair."""
    parameters = _type_and_parameters(setting, scaling)
    for name in ("short_factor", "long_factor"):
        parameters[name] = [factor * setting.compression for factor in parameters[name]]
    return parameters


def _type_and_parameters(setting: RopeSetting, scaling: Scaling) -> dict[str, Any]:
    """Return the rotary keys of a scaling for which transformers has a type: rope_type,
    original_max_position_embeddings if the type has it, and the parameters of the scaling."""
    assert scaling.rope_type is not None
    parameters: dict[str, Any] = {"rope_type": scaling.rope_type.name}
    if scaling.rope_type.has_original_length:
        parameters["original_max_position_embeddings"] = setting.original_length
    return {**parameters, **scaling.rope_parameters(setting.rotary_dim)}


def _stock_type_parameters(setting: RopeSetting, is_proportional: bool) -> dict[str, Any]:
    """Return the keys of the type that transformers has for this scaling, or longrope's.

    is_proportional: whether the type may be proportional, see `rope_parameters`.
    """
    scaling = setting.scaling
    assert scaling is not None
    if scaling.rope_type is None or (isinstance(scaling, Proportional) and not is_proportional):
        return _fixed_frequencies_as_longrope(setting)
    parameters = _type_and_parameters(setting, scaling)
    if isinstance(scaling, YaRN):
        del parameters["attention_factor"]
        parameters.update(_temperature_parameters(setting, scaling.factor))
    return parameters


def _temperature_parameters(setting: RopeSetting, factor: float) -> dict[str, float]:
    """Return the keys of YaRN's temperature: attention_factor and, if the model has them, mscale
    and mscale_all_dim.

    attention_factor is left out if mscale and mscale_all_dim alone give the same temperature: next
    to attention_factor 1, vLLM omits them in DeepSeek's scores.
    """
    attention_factor = setting.frequencies().attention_factor
    mscales = {"mscale": setting.mscale, "mscale_all_dim": setting.mscale_all_dim}
    given_mscales = {key: value for key, value in mscales.items() if value is not None}
    if len(given_mscales) == len(mscales) and math.isclose(
        attention_factor, setting.yarn_attention_factor(factor)
    ):
        return given_mscales
    return {"attention_factor": attention_factor, **given_mscales}


def _fixed_frequencies_as_longrope(setting: RopeSetting) -> dict[str, Any]:
    """Return longrope's keys for frequencies that do not change with the length.

    Raises: ValueError for a scaling that changes them.
    """
    scaling = setting.scaling
    if scaling is not None and scaling.depends_on_length:
        raise ValueError(
            f"{type(scaling).__name__} changes with the length, and on top of a linear scaling "
            "or in this family no config can say so"
        )
    return _frequencies_as_longrope(setting)


def _frequencies_as_longrope(setting: RopeSetting) -> dict[str, Any]:
    """Return longrope's keys for the setting's frequencies at the training length: longrope divides
    those without scaling by a factor for each pair."""
    frequencies = setting.frequencies()
    unscaled = rope_frequencies(setting.rotary_dim, setting.rope_theta).inv_freq
    # longrope divides, so a pair that does not rotate gets a wavelength beyond any text.
    factors = [
        float(p / f) if f else NO_ROTATION_DIVISOR
        for p, f in zip(unscaled, frequencies.inv_freq, strict=True)
    ]
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": setting.original_length,
        "short_factor": factors,
        "long_factor": factors,
        "factor": max(1.0, *(f for f in factors if f < NO_ROTATION_DIVISOR)),
        "attention_factor": frequencies.attention_factor,
    }
