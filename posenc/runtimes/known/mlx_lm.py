"""mlx-lm: it reads config.json into a dataclass per model file and drops unknown keys."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import (
    LLAMA3,
    ComputedPositions,
    LayerRotation,
    NotReadError,
    RefusedError,
    Switch,
    llama3_rotation,
    require_factors,
    require_key,
    require_number,
)
from posenc.runtimes.config_model import ORIGINAL_LENGTH_KEY, Model, language_model_key
from posenc.runtimes.runtime_facts import ConfigFacts

YARN_TYPES = ("yarn", "deepseek_yarn", "telechat3-yarn")
ADDED_BY_WHOLE = {
    "gemma3": ("vocab_size", "num_attention_heads", "num_key_value_heads"),
    "llava": ("tie_word_embeddings",),
    "mistral3": ("tie_word_embeddings",),
}
"""model_type of a multimodal model -> keys that its file adds to the config of the language model
(gemma3.py:22, mistral3.py:18)."""
EVEN_HEADS = ("internlm3",)
"""Families whose file divides the hidden size by the heads, whatever head_dim says."""
Scaling = Mapping[str, Any] | None


@dataclass(frozen=True, eq=False, repr=False)
class MlxLmFacts(ConfigFacts):
    """What mlx_lm.json says of a family: how its model file reads the config and rotates.

    `own_dicts` has, under a kind of layers, the file's own rope dict, or just the base of this kind
    where the config has a key for it at the top level.
    """

    reads: tuple[str, ...] = ("rope_scaling",)
    """As in `ConfigFacts`; most files know the older name only."""
    rope_theta: float | None = None
    """As in `ConfigFacts`; most files demand a base."""
    needs: tuple[str, ...] = ()
    """Keys for which the file's dataclass has no default."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the file that differ from those of transformers' class, and those of keys that
    the class has not."""
    scaling: str = "initialize"
    """How the file scales: "initialize" for mlx-lm's initialize_rope, "none", "checked linear" for
    a linear factor that it checks and does not use, or the name of the one file or type that
    `rotation` has code for."""

    @property
    def file(self) -> str:
        """Return the name of the model file, without its ending."""
        return self.read.partition(".py")[0]


def compute(model: Model, length: int | None) -> ComputedPositions:
    """Return what mlx-lm 0.32 computes. It never refuses a length."""
    facts = MlxLmFacts.of(model.facts["mlx_lm"])
    _check_arguments(model, facts)
    config = {**facts.defaults, **model.config}
    own = {"even_heads": True} if model.model_type in EVEN_HEADS else {}
    model = replace(model, config=config, facts={**model.facts, **own})
    length = length or model.max_positions
    if "rope_scaling" not in facts.reads and facts.reads:
        scaling, layers = None, _rotations_of_nested_dicts(model, facts)
    else:
        theta, scaling = _theta_and_scaling(model, facts)
        layers = _rotations_by_kind(model, facts, rotation(model, facts, theta, scaling, length))
    return ComputedPositions(
        None,
        layers,
        _softmax_scale(model, scaling),
        _frequency_switch(facts, scaling),
        None,
        model.without_rotation,
    )


def _check_arguments(model: Model, facts: MlxLmFacts) -> None:
    """Raise RefusedError for a missing key for which the model file's dataclass has no default."""
    arguments = {*_arguments_of_language_model(model)}
    missing = [name for name in facts.needs if name not in arguments]
    if missing:
        names = " and ".join(repr(name) for name in missing)
        plural = "s" if len(missing) > 1 else ""
        raise RefusedError(
            f"TypeError: ModelArgs.__init__() missing {len(missing)} required positional "
            f"argument{plural}: {names}"
        )


def _arguments_of_language_model(model: Model) -> Iterator[str]:
    """Yield the keys that reach the dataclass of the language model: those of its own config, and
    what the file of a multimodal model adds to it."""
    key = language_model_key(model.outer_config)
    if not key:
        yield from model.config
        return
    yield from model.outer_config[key]
    yield from ADDED_BY_WHOLE.get(str(model.outer_config.get("model_type")), ())


def _theta_and_scaling(model: Model, facts: MlxLmFacts) -> tuple[float, Scaling]:
    """Return theta and the scaling dict. Only some model files read rope_parameters."""
    if facts.theta_keys.get("all") == "":  # the base is a number in the code
        return require_number(facts.rope_theta, "rope_theta"), None
    file = facts.file
    scaling = model.config.get("rope_scaling")
    modern = model.config.get("rope_parameters")
    if file == "ministral3":
        return _ministral_theta_and_scaling(modern)
    if file == "olmo_hybrid" and isinstance(modern, Mapping):
        return require_number(modern.get("rope_theta", 10000.0), "rope_theta"), None
    _refuse_null(model, file)
    theta = _outer_base(model, facts)
    if "rope_parameters" in facts.reads and isinstance(modern, Mapping) and modern:
        full = modern.get("full_attention", modern)
        theta = _base_of_dict_or_outer(theta, full, file)
        scaling = full if scaling is None else scaling
    if theta is None:
        raise RefusedError("ValueError: rope_theta is missing from the model config.")
    return require_number(theta, "rope_theta"), scaling if isinstance(scaling, Mapping) else None


def _refuse_null(model: Model, file: str) -> None:
    """Raise RefusedError where mlx-lm's model file looks into a dict that is null; NotReadError
    where a null turns the rotation off."""
    if file in ("deepseek_v2", "minicpm3") and model.config.get("rope_scaling") is None:
        raise RefusedError("AttributeError: 'NoneType' object has no attribute 'get'")
    if file == "olmo_hybrid" and model.config.get("rope_theta", 0) is None:
        raise NotReadError("a null base, without which nothing rotates")


def _outer_base(model: Model, facts: MlxLmFacts) -> Any:
    """Return the base at the top level of the config, else the model file's default; None if there
    is neither."""
    if facts.file == "gpt_neox":
        return model.config.get("rotary_emb_base")
    return model.config.get("rope_theta", facts.rope_theta)


def _base_of_dict_or_outer(outer: Any, rope_dict: Any, file: str) -> Any:
    """Return the base of a rope dict, else the one at the top level, which wins in Qwen 3's model
    file."""
    inner = rope_dict.get("rope_theta") if isinstance(rope_dict, Mapping) else None
    outer_wins = inner is None or file == "qwen3"
    return outer if outer_wins and outer is not None else inner


def _ministral_theta_and_scaling(modern: Any) -> tuple[float, Scaling]:
    """Return the base and the scaling dict of Ministral 3, whose model file reads rope_parameters
    alone. Raises: RefusedError where it stops at them."""
    if not isinstance(modern, Mapping):
        raise RefusedError("TypeError: 'NoneType' object is not subscriptable")
    for key in ("rope_theta", "llama_4_scaling_beta", "original_max_position_embeddings"):
        require_key(modern, key)
    return require_number(modern["rope_theta"], "rope_theta"), modern


def _rotations_by_kind(
    model: Model, facts: MlxLmFacts, full: LayerRotation
) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer. mlx-lm decides kinds by sliding_window_pattern,
    never by layer_types."""
    if not model.has_rope_dict_per_kind:
        return {"all": full}
    if facts.file == "olmo3":
        theta = require_number(model.config["rope_theta"], "rope_theta")
        sliding = LayerRotation(float64_formulas.unscaled_frequencies(model.head_dim, theta))
        return {kind: sliding if "sliding" in kind else full for kind in model.layer_kinds}
    own_base = facts.own_dicts.get("sliding_attention", {}).get("rope_theta")
    local_base = model.config.get("rope_local_base_freq", own_base)
    if local_base is None:
        return _rotations_of_dicts_with_base(model, full)
    sliding = LayerRotation(
        float64_formulas.unscaled_frequencies(
            model.head_dim, require_number(local_base, "rope_local_base_freq")
        )
    )
    period = model.config.get("sliding_window_pattern", 6)
    layers: dict[str, LayerRotation] = {}
    for i, kind in enumerate(model.layer_types):
        layer = sliding if (i + 1) % int(require_number(period, "sliding_window_pattern")) else full
        name = kind
        if kind in layers and layers[kind] != layer:
            name = f"{kind} (layer {i} and others)"
        layers.setdefault(name, layer)
    return layers


def _rotations_of_nested_dicts(model: Model, facts: MlxLmFacts) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer by a model file that reads nothing but nested rope
    dicts."""
    if "sliding_window_pattern" in facts.defaults and not model.config.get("layer_types"):
        raise NotReadError("which layers are windowed differs from transformers")
    modern = model.config.get("rope_parameters")
    dicts = modern if isinstance(modern, Mapping) else facts.own_dicts
    layers: dict[str, LayerRotation] = {}
    for kind in model.layer_kinds:
        inner = dicts.get(kind, {})
        if inner is None:
            raise RefusedError("AttributeError: 'NoneType' object has no attribute 'get'")
        theta = require_number(inner.get("rope_theta", 10000.0), "rope_theta")
        outer = model.config.get("partial_rotary_factor")
        share = inner.get("partial_rotary_factor", 1.0 if outer is None else outer)
        dim = model.with_sizes_of_kind(kind).head_dim
        if facts.share_use != "ignored":  # such a file passes whole heads on to the type
            dim = int(dim * require_number(share, "partial_rotary_factor"))
        layers[kind] = initialize_rope(model, inner, theta, dim, model.max_positions)
    return layers


def _rotations_of_dicts_with_base(model: Model, full: LayerRotation) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer by its nested dict; where it has none with a base,
    the full layers' one."""
    modern = model.config.get("rope_parameters")
    layers: dict[str, LayerRotation] = {}
    for kind in model.layer_kinds:
        inner = modern.get(kind) if isinstance(modern, Mapping) else None
        if not isinstance(inner, Mapping) or "rope_theta" not in inner:
            layers[kind] = full
            continue
        share = require_number(inner.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
        head_dim = model.with_sizes_of_kind(kind).head_dim
        rotates_whole = inner.get("rope_type") == "proportional"
        dim = head_dim if rotates_whole else int(head_dim * share)
        theta = require_number(inner["rope_theta"], "rope_theta")
        layers[kind] = initialize_rope(model, inner, theta, dim, model.max_positions)
    return layers


def _frequency_switch(facts: MlxLmFacts, scaling: Scaling) -> Switch:
    """Return when the frequencies change: only those of dynamic NTK do, with the length."""
    if not scaling or facts.scaling != "initialize":
        return "static"
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    return "length" if kind == "dynamic" else "static"


def _softmax_scale(model: Model, scaling: Scaling) -> float:
    """Return the softmax scale, which latent attention multiplies by its squared temperature."""
    if not model.is_mla or not scaling:
        return model.softmax_scale
    mscale_all_dim = require_number(scaling.get("mscale_all_dim") or 0, "mscale_all_dim")
    if not mscale_all_dim:
        return model.softmax_scale
    factor = require_number(require_key(scaling, "factor"), "factor")
    return model.softmax_scale * float64_formulas.yarn_attention_factor(factor, mscale_all_dim) ** 2


def _rotated_channels(model: Model, facts: MlxLmFacts) -> int:
    """Return how many channels of a head rotate."""
    if not facts.share_key and facts.partial_rotary_factor is not None:  # a number in the code
        return int(model.head_dim * facts.partial_rotary_factor)
    if facts.dims_key:
        return int(require_number(model.config[facts.dims_key], facts.dims_key))
    has_default = facts.partial_rotary_factor is not None
    reads_share = model.supports_partial_rotation or has_default
    if model.is_mla or not reads_share or facts.file == "glm":
        return model.head_dim
    return int(
        model.head_dim * require_number(_rotated_share(model, facts), "partial_rotary_factor")
    )


def _rotated_share(model: Model, facts: MlxLmFacts) -> Any:
    """Return the rotated share of a head, by the rope dict where the model file reads one, else by
    its key at the top level."""
    default = 1.0 if facts.partial_rotary_factor is None else facts.partial_rotary_factor
    share = model.config.get("partial_rotary_factor", default)
    if facts.file == "gpt_neox":
        share = model.config.get("rotary_pct")
    modern = model.config.get("rope_parameters")
    if (
        "rope_parameters" in facts.reads
        and isinstance(modern, Mapping)
        and not model.has_rope_dict_per_kind
    ):
        share = modern.get("partial_rotary_factor", share)
    return share


def rotation(
    model: Model, facts: MlxLmFacts, theta: float, scaling: Scaling, length: int
) -> LayerRotation:
    """Return the rotation by the rotary module that the family's model file builds."""
    dim = _rotated_channels(model, facts)
    if dim % 2:
        raise RefusedError(f"ValueError: [rope] dims must be even but got {dim}.")
    if scaling and facts.types is not None:
        _check_type(scaling, facts.types)
    scaling_code = facts.scaling
    plain = float64_formulas.unscaled_frequencies(dim, theta)
    if scaling_code == "minicpm3" and scaling is not None:
        return _minicpm3_rotation(model, scaling, plain)
    if not scaling or scaling_code == "none":
        return LayerRotation(plain)
    if scaling_code == "initialize":
        return initialize_rope(model, scaling, theta, dim, length)
    if scaling_code in ("linear", "checked linear"):
        scaled = _linear_rotation(scaling, plain)
        return scaled if scaling_code == "linear" else LayerRotation(plain)
    if scaling_code == "alpha":
        return _hunyuan_rotation(scaling, theta, dim)
    if scaling_code == "deepseek_v2":
        return _yarn_rotation(scaling, theta, dim)
    return _phi3_rotation(model, facts, scaling, plain)


def _check_type(scaling: Mapping[str, Any], only_types: Sequence[str]) -> None:
    """Raise RefusedError for a type that the file does not take."""
    if scaling.get("rope_type") not in only_types:
        raise RefusedError(
            "ValueError: rope_scaling 'rope_type' currently only supports "
            f"{' or '.join(only_types)}"
        )


def _hunyuan_rotation(scaling: Mapping[str, Any], theta: float, dim: int) -> LayerRotation:
    """Return HunYuan's rotation, whose base alpha stretches. The factor must be there, unused."""
    missing = [key for key in ("type", "alpha", "factor") if key not in scaling]
    if missing:
        raise RefusedError(
            "ValueError: rope_scaling must contain keys {'type', 'alpha', 'factor'}; missing: "
            f"{', '.join(missing)}"
        )
    alpha = require_number(scaling["alpha"], "alpha")
    return LayerRotation(
        float64_formulas.unscaled_frequencies(dim, float64_formulas.ntk_theta(theta, alpha, dim))
    )


def initialize_rope(
    model: Model, scaling: Mapping[str, Any], theta: float, dim: int, length: int
) -> LayerRotation:
    """Return the rotation that mlx-lm's initialize_rope builds for a dict's type.

    Raises: RefusedError for a type that it does not know.
    """
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    plain = float64_formulas.unscaled_frequencies(dim, theta)
    if kind == "default":
        return LayerRotation(plain)
    if kind in ("linear", "dynamic", "llama3"):
        return _rotation_by_factor(kind, model, scaling, theta, dim, length)
    if kind in YARN_TYPES:
        return _yarn_rotation(scaling, theta, dim)
    if kind == "longrope":
        original_length = require_number(
            require_key(scaling, "original_max_position_embeddings"), "original length"
        )
        return _rotation_by_long_list(scaling, plain, model.max_positions, original_length, None)
    if kind == "proportional":
        share = require_number(scaling.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
        factor = require_number(scaling.get("factor", 1.0), "factor")
        return LayerRotation(float64_formulas.proportional_frequencies(dim, theta, share, factor))
    if kind == "mrope":
        sections = scaling.get("mrope_section", [])
        if len(sections) != 3:
            raise RefusedError(
                f"AssertionError: MRoPE currently only supports 3 sections, got {len(sections)}."
            )
        # The sections say which axis of a position turns a pair. In a text all axes are equal.
        return LayerRotation(plain)
    raise RefusedError(f"ValueError: Unsupported RoPE type {kind}")


def _rotation_by_factor(
    kind: str, model: Model, scaling: Mapping[str, Any], theta: float, dim: int, length: int
) -> LayerRotation:
    """Return the rotation of linear, dynamic or llama3, which all stop without a factor."""
    factor = require_key(scaling, "factor")
    if kind == "llama3":
        return llama3_rotation({**LLAMA3, **scaling}, dim, theta)
    factor = require_number(factor, "factor")
    if kind == "linear":
        return LayerRotation(
            float64_formulas.linear_frequencies(
                float64_formulas.unscaled_frequencies(dim, theta), factor
            )
        )
    base = float64_formulas.dynamic_theta(theta, factor, length, model.max_positions, dim)
    return LayerRotation(float64_formulas.unscaled_frequencies(dim, base))


def _yarn_rotation(scaling: Mapping[str, Any], theta: float, dim: int) -> LayerRotation:
    """Return the rotation of mlx-lm's YaRN, which ignores truncate, attention_factor and
    attn_factor, and whose default original length is 4096."""
    factor = require_number(require_key(scaling, "factor"), "factor")
    mscale = require_number(scaling.get("mscale", 1), "mscale")
    mscale_all_dim = require_number(scaling.get("mscale_all_dim", 0), "mscale_all_dim")
    inv_freq = float64_formulas.yarn_frequencies(
        dim,
        theta,
        factor,
        require_number(scaling.get("original_max_position_embeddings", 4096), "original length"),
        require_number(scaling.get("beta_fast", 32), "beta_fast"),
        require_number(scaling.get("beta_slow", 1), "beta_slow"),
    )
    multiplier = float64_formulas.yarn_attention_factor(
        factor, mscale
    ) / float64_formulas.yarn_attention_factor(factor, mscale_all_dim)
    return LayerRotation(inv_freq, multiplier)


def _rotation_by_long_list(
    scaling: Mapping[str, Any],
    plain: tuple[float, ...],
    trained_length: int,
    original_length: float,
    mscale: Any,
) -> LayerRotation:
    """Return longrope's rotation by its long list at any length. mscale: the multiplier, where the
    file has one of its own."""
    long_factors = require_key(scaling, "long_factor")
    if isinstance(long_factors, list) and len(long_factors) != len(plain):
        raise RefusedError(
            f"ValueError: [broadcast_shapes] Shapes ({len(long_factors)}) and ({len(plain)}) "
            "cannot be broadcast."
        )
    require_key(scaling, "short_factor")
    scale = float64_formulas.longrope_attention_factor(
        trained_length / original_length, original_length
    )
    inv_freq = float64_formulas.divide_each(
        plain, require_factors(scaling, "long_factor", len(plain))
    )
    return LayerRotation(inv_freq, require_number(mscale, "long_mscale") if mscale else scale)


def _linear_rotation(scaling: Mapping[str, Any], plain: tuple[float, ...]) -> LayerRotation:
    """Return the rotation of a file that scales by a linear factor and refuses other types."""
    require_key(scaling, "type")
    if "factor" not in scaling or scaling["type"] != "linear":
        raise RefusedError("ValueError: rope_scaling 'type' currently only supports 'linear'")
    factor = require_number(scaling["factor"], "factor")
    return LayerRotation(float64_formulas.linear_frequencies(plain, factor))


def _phi3_rotation(
    model: Model, facts: MlxLmFacts, scaling: Mapping[str, Any], plain: tuple[float, ...]
) -> LayerRotation:
    """Return the rotation of phi3 and phimoe, which read the top-level original length and always
    use the long factors."""
    length_stated = model.config.get(ORIGINAL_LENGTH_KEY) or facts.defaults.get(ORIGINAL_LENGTH_KEY)
    original_length = require_number(length_stated, "original length")
    if facts.scaling == "phimoe":
        mscale = require_key(scaling, "long_mscale")
        return _rotation_by_long_list(scaling, plain, model.max_positions, original_length, mscale)
    missing = [key for key in ("long_factor", "type") if key not in scaling]
    if missing:
        raise RefusedError(
            "ValueError: rope_scaling must contain keys {'long_factor', 'type'}; missing: "
            f"{', '.join(missing)}"
        )
    if scaling["type"] in ("longrope", "su"):
        return _rotation_by_long_list(scaling, plain, model.max_positions, original_length, None)
    if scaling["type"] == "linear":
        factor = scaling.get("factor")
        if not isinstance(factor, float):
            raise RefusedError(f"AssertionError: factor is {factor!r}, expected a float")
        return LayerRotation(float64_formulas.linear_frequencies(plain, factor))
    return LayerRotation(plain)


def _minicpm3_rotation(
    model: Model, scaling: Mapping[str, Any], plain: tuple[float, ...]
) -> LayerRotation:
    """Return MiniCPM 3's rotation: longrope's temperature whatever the type, and its long list if
    it is there."""
    original_length = require_number(
        scaling.get("original_max_position_embeddings", 4096), "original length"
    )
    scale = float64_formulas.longrope_attention_factor(
        model.max_positions / original_length, original_length
    )
    if "long_factor" not in scaling:
        return LayerRotation(plain, scale)
    return LayerRotation(
        float64_formulas.divide_each(plain, require_factors(scaling, "long_factor", len(plain))),
        scale,
    )
