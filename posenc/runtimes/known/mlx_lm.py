"""mlx-lm: it reads config.json into a dataclass per model file and drops unknown keys."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import (
    LLAMA3_DEFAULTS,
    ComputedPositions,
    LayerRotation,
    NotReadError,
    RefusedError,
    Switch,
    llama3_rotation,
    name_of_further_rotation,
    require_factors,
    require_key,
    require_number,
)
from posenc.runtimes.config_model import ORIGINAL_LENGTH_KEY, Model, language_model_key
from posenc.runtimes.runtime_facts import ConfigFacts

YARN_TYPES = ("yarn", "deepseek_yarn", "telechat3-yarn")
KEYS_ADDED_TO_LANGUAGE_MODEL = {
    "gemma3": ("vocab_size", "num_attention_heads", "num_key_value_heads"),
    "llava": ("tie_word_embeddings",),
    "mistral3": ("tie_word_embeddings",),
}
"""model_type of a multimodal model -> keys that its file adds to the config of the language model
(gemma3.py:22, mistral3.py:18)."""
FAMILIES_WITH_EVEN_HEADS = ("internlm3",)
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
    def file_name(self) -> str:
        """Return the name of the model file, without its ending."""
        return self.read.partition(".py")[0]


def compute(model: Model, length: int | None) -> ComputedPositions:
    """Return what mlx-lm 0.32 computes. It never refuses a length."""
    facts = MlxLmFacts.of(model.facts["mlx_lm"])
    _check_arguments(model, facts)
    config = {**facts.defaults, **model.config}
    changed_facts = {"even_heads": True} if model.model_type in FAMILIES_WITH_EVEN_HEADS else {}
    model = replace(model, config=config, facts={**model.facts, **changed_facts})
    length = length or model.max_positions
    # A file reads rope_scaling, and perhaps rope_parameters too; rope_parameters alone, which then
    # has a dict for each kind; or no dict at all, and rotates by theta alone.
    reads_nested_dicts_only = facts.reads and "rope_scaling" not in facts.reads
    if reads_nested_dicts_only:
        scaling, rotations = None, _rotations_of_nested_dicts(model, facts)
    else:
        theta, scaling = _theta_and_scaling(model, facts)
        rotations = _rotations_by_kind(model, facts, rotation(model, facts, theta, scaling, length))
    return ComputedPositions(
        None,
        rotations,
        _softmax_scale(model, scaling),
        _frequency_switch(facts, scaling),
        None,
        model.without_rotation,
    )


def _check_arguments(model: Model, facts: MlxLmFacts) -> None:
    """Raise RefusedError for a missing key for which the model file's dataclass has no default."""
    arguments = {*_arguments_of_language_model(model)}
    missing_names = [name for name in facts.needs if name not in arguments]
    if missing_names:
        names_in_words = " and ".join(repr(name) for name in missing_names)
        plural_ending = "s" if len(missing_names) > 1 else ""
        raise RefusedError(
            f"TypeError: ModelArgs.__init__() missing {len(missing_names)} required positional "
            f"argument{plural_ending}: {names_in_words}"
        )


def _arguments_of_language_model(model: Model) -> Iterator[str]:
    """Yield the keys that reach the dataclass of the language model: those of its own config, and
    what the file of a multimodal model adds to it."""
    key = language_model_key(model.outer_config)
    if not key:
        yield from model.config
        return
    yield from model.outer_config[key]
    yield from KEYS_ADDED_TO_LANGUAGE_MODEL.get(str(model.outer_config.get("model_type")), ())


def _theta_and_scaling(model: Model, facts: MlxLmFacts) -> tuple[float, Scaling]:
    """Return theta and the scaling dict. Only some model files read rope_parameters."""
    if facts.theta_keys.get("all") == "":  # the base is a number in the code
        return require_number(facts.rope_theta, "rope_theta"), None
    model_file = facts.file_name
    scaling = model.config.get("rope_scaling")
    rope_parameters = model.config.get("rope_parameters")
    if model_file == "ministral3":
        return _ministral_theta_and_scaling(rope_parameters)
    if model_file == "olmo_hybrid" and isinstance(rope_parameters, Mapping):
        return require_number(rope_parameters.get("rope_theta", 10000.0), "rope_theta"), None
    _refuse_null(model, model_file)
    theta = _outer_base(model, facts)
    if (
        "rope_parameters" in facts.reads
        and isinstance(rope_parameters, Mapping)
        and rope_parameters
    ):
        full_dict = rope_parameters.get("full_attention", rope_parameters)
        theta = _base_of_dict_or_outer(theta, full_dict, model_file)
        scaling = full_dict if scaling is None else scaling
    if theta is None:
        raise RefusedError("ValueError: rope_theta is missing from the model config.")
    return require_number(theta, "rope_theta"), scaling if isinstance(scaling, Mapping) else None


def _refuse_null(model: Model, model_file: str) -> None:
    """Raise RefusedError where mlx-lm's model file looks into a dict that is null; NotReadError
    where a null turns the rotation off."""
    if model_file in ("deepseek_v2", "minicpm3") and model.config.get("rope_scaling") is None:
        raise RefusedError("AttributeError: 'NoneType' object has no attribute 'get'")
    if model_file == "olmo_hybrid" and model.config.get("rope_theta", 0) is None:
        raise NotReadError("a null base, without which nothing rotates")


def _outer_base(model: Model, facts: MlxLmFacts) -> Any:
    """Return the base at the top level of the config, else the model file's default; None if there
    is neither."""
    if facts.file_name == "gpt_neox":
        return model.config.get("rotary_emb_base")
    return model.config.get("rope_theta", facts.rope_theta)


def _base_of_dict_or_outer(outer_base: Any, rope_dict: Any, model_file: str) -> Any:
    """Return the base of a rope dict, else the one at the top level, which wins in Qwen 3's model
    file."""
    inner_base = rope_dict.get("rope_theta") if isinstance(rope_dict, Mapping) else None
    outer_wins = inner_base is None or model_file == "qwen3"
    return outer_base if outer_wins and outer_base is not None else inner_base


def _ministral_theta_and_scaling(rope_parameters: Any) -> tuple[float, Scaling]:
    """Return the base and the scaling dict of Ministral 3, whose model file reads rope_parameters
    alone. Raises: RefusedError where it stops at them."""
    if not isinstance(rope_parameters, Mapping):
        raise RefusedError("TypeError: 'NoneType' object is not subscriptable")
    for key in ("rope_theta", "llama_4_scaling_beta", "original_max_position_embeddings"):
        require_key(rope_parameters, key)
    return require_number(rope_parameters["rope_theta"], "rope_theta"), rope_parameters


def _rotations_by_kind(
    model: Model, facts: MlxLmFacts, full_rotation: LayerRotation
) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer.

    olmo3's model file reads layer_types, as do those whose configs have a rope dict with a base for
    each kind. The others, of Gemma 3's style, count by sliding_window_pattern, whatever layer_types
    say.
    """
    if not model.has_rope_dict_per_kind:
        return {"all": full_rotation}
    if facts.file_name == "olmo3":
        theta = require_number(model.config["rope_theta"], "rope_theta")
        sliding_rotation = LayerRotation(
            float64_formulas.unscaled_frequencies(model.head_dim, theta)
        )
        return {
            kind: sliding_rotation if "sliding" in kind else full_rotation
            for kind in model.layer_kinds
        }
    own_base = facts.own_dicts.get("sliding_attention", {}).get("rope_theta")
    local_base = model.config.get("rope_local_base_freq", own_base)
    if local_base is None:
        return _rotations_of_dicts_with_base(model, full_rotation)
    sliding_rotation = LayerRotation(
        float64_formulas.unscaled_frequencies(
            model.head_dim, require_number(local_base, "rope_local_base_freq")
        )
    )
    period = model.config.get("sliding_window_pattern", 6)
    rotations: dict[str, LayerRotation] = {}
    for i, kind in enumerate(model.layer_types):
        layer_rotation = (
            sliding_rotation
            if (i + 1) % int(require_number(period, "sliding_window_pattern"))
            else full_rotation
        )
        name_of_kind = kind
        if kind in rotations and rotations[kind] != layer_rotation:
            name_of_kind = name_of_further_rotation(kind, i)
        rotations.setdefault(name_of_kind, layer_rotation)
    return rotations


def _rotations_of_nested_dicts(model: Model, facts: MlxLmFacts) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer by a model file that reads nothing but nested rope
    dicts."""
    if "sliding_window_pattern" in facts.defaults and not model.config.get("layer_types"):
        raise NotReadError("which layers are windowed differs from transformers")
    rope_parameters = model.config.get("rope_parameters")
    dict_by_kind = rope_parameters if isinstance(rope_parameters, Mapping) else facts.own_dicts
    rotations: dict[str, LayerRotation] = {}
    for kind in model.layer_kinds:
        inner_dict = dict_by_kind.get(kind, {})
        if inner_dict is None:
            raise RefusedError("AttributeError: 'NoneType' object has no attribute 'get'")
        theta = require_number(inner_dict.get("rope_theta", 10000.0), "rope_theta")
        outer_share = model.config.get("partial_rotary_factor")
        share = inner_dict.get("partial_rotary_factor", 1.0 if outer_share is None else outer_share)
        dim = model.with_sizes_of_kind(kind).head_dim
        if facts.share_use != "ignored":  # such a file passes whole heads on to the type
            dim = int(dim * require_number(share, "partial_rotary_factor"))
        rotations[kind] = initialize_rope(model, inner_dict, theta, dim, model.max_positions)
    return rotations


def _rotations_of_dicts_with_base(
    model: Model, full_rotation: LayerRotation
) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer by its nested dict; where it has none with a base,
    the full layers' one."""
    rope_parameters = model.config.get("rope_parameters")
    rotations: dict[str, LayerRotation] = {}
    for kind in model.layer_kinds:
        inner_dict = rope_parameters.get(kind) if isinstance(rope_parameters, Mapping) else None
        if not isinstance(inner_dict, Mapping) or "rope_theta" not in inner_dict:
            rotations[kind] = full_rotation
            continue
        share = require_number(
            inner_dict.get("partial_rotary_factor", 1.0), "partial_rotary_factor"
        )
        head_dim = model.with_sizes_of_kind(kind).head_dim
        rotates_whole = inner_dict.get("rope_type") == "proportional"
        dim = head_dim if rotates_whole else int(head_dim * share)
        theta = require_number(inner_dict["rope_theta"], "rope_theta")
        rotations[kind] = initialize_rope(model, inner_dict, theta, dim, model.max_positions)
    return rotations


def _frequency_switch(facts: MlxLmFacts, scaling: Scaling) -> Switch:
    """Return when the frequencies change: only those of dynamic NTK do, with the length."""
    if not scaling or facts.scaling != "initialize":
        return "static"
    rope_type = scaling.get("type") or scaling.get("rope_type", "default")
    return "length" if rope_type == "dynamic" else "static"


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
    if model.is_mla or not reads_share or facts.file_name == "glm":
        return model.head_dim
    return int(
        model.head_dim * require_number(_rotated_share(model, facts), "partial_rotary_factor")
    )


def _rotated_share(model: Model, facts: MlxLmFacts) -> Any:
    """Return the rotated share of a head, by the rope dict where the model file reads one, else by
    its key at the top level."""
    default_share = 1.0 if facts.partial_rotary_factor is None else facts.partial_rotary_factor
    share = model.config.get("partial_rotary_factor", default_share)
    if facts.file_name == "gpt_neox":
        share = model.config.get("rotary_pct")
    rope_parameters = model.config.get("rope_parameters")
    if (
        "rope_parameters" in facts.reads
        and isinstance(rope_parameters, Mapping)
        and not model.has_rope_dict_per_kind
    ):
        share = rope_parameters.get("partial_rotary_factor", share)
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
    plain_inv_freq = float64_formulas.unscaled_frequencies(dim, theta)
    if scaling_code == "minicpm3" and scaling is not None:
        return _minicpm3_rotation(model, scaling, plain_inv_freq)
    if not scaling or scaling_code == "none":
        return LayerRotation(plain_inv_freq)
    if scaling_code == "initialize":
        return initialize_rope(model, scaling, theta, dim, length)
    if scaling_code in ("linear", "checked linear"):
        scaled_rotation = _linear_rotation(scaling, plain_inv_freq)
        return scaled_rotation if scaling_code == "linear" else LayerRotation(plain_inv_freq)
    if scaling_code == "alpha":
        return _hunyuan_rotation(scaling, theta, dim)
    if scaling_code == "deepseek_v2":
        return _yarn_rotation(scaling, theta, dim)
    return _phi3_rotation(model, facts, scaling, plain_inv_freq)


def _check_type(scaling: Mapping[str, Any], only_types: Sequence[str]) -> None:
    """Raise RefusedError for a type that the file does not take."""
    if scaling.get("rope_type") not in only_types:
        raise RefusedError(
            "ValueError: rope_scaling 'rope_type' currently only supports "
            f"{' or '.join(only_types)}"
        )


def _hunyuan_rotation(scaling: Mapping[str, Any], theta: float, dim: int) -> LayerRotation:
    """Return HunYuan's rotation, whose base alpha stretches. The factor must be there, unused."""
    missing_keys = [key for key in ("type", "alpha", "factor") if key not in scaling]
    if missing_keys:
        raise RefusedError(
            "ValueError: rope_scaling must contain keys {'type', 'alpha', 'factor'}; missing: "
            f"{', '.join(missing_keys)}"
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
    rope_type = scaling.get("type") or scaling.get("rope_type", "default")
    plain_inv_freq = float64_formulas.unscaled_frequencies(dim, theta)
    if rope_type == "default":
        return LayerRotation(plain_inv_freq)
    if rope_type in ("linear", "dynamic", "llama3"):
        return _rotation_by_factor(rope_type, model, scaling, theta, dim, length)
    if rope_type in YARN_TYPES:
        return _yarn_rotation(scaling, theta, dim)
    if rope_type == "longrope":
        original_length = require_number(
            require_key(scaling, "original_max_position_embeddings"), "original length"
        )
        return _rotation_by_long_list(
            scaling, plain_inv_freq, model.max_positions, original_length, None
        )
    if rope_type == "proportional":
        share = require_number(scaling.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
        factor = require_number(scaling.get("factor", 1.0), "factor")
        return LayerRotation(float64_formulas.proportional_frequencies(dim, theta, share, factor))
    if rope_type == "mrope":
        sections = scaling.get("mrope_section", [])
        if len(sections) != 3:
            raise RefusedError(
                f"AssertionError: MRoPE currently only supports 3 sections, got {len(sections)}."
            )
        # The sections say which axis of a position turns a pair. In a text all axes are equal.
        return LayerRotation(plain_inv_freq)
    raise RefusedError(f"ValueError: Unsupported RoPE type {rope_type}")


def _rotation_by_factor(
    rope_type: str, model: Model, scaling: Mapping[str, Any], theta: float, dim: int, length: int
) -> LayerRotation:
    """Return the rotation of linear, dynamic or llama3, which all stop without a factor."""
    factor = require_key(scaling, "factor")
    if rope_type == "llama3":
        return llama3_rotation({**LLAMA3_DEFAULTS, **scaling}, dim, theta)
    factor = require_number(factor, "factor")
    if rope_type == "linear":
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
    plain_inv_freq: tuple[float, ...],
    trained_length: int,
    original_length: float,
    mscale: Any,
) -> LayerRotation:
    """Return longrope's rotation by its long list at any length. mscale: the multiplier, where the
    file has one of its own."""
    long_factors = require_key(scaling, "long_factor")
    if isinstance(long_factors, list) and len(long_factors) != len(plain_inv_freq):
        raise RefusedError(
            f"ValueError: [broadcast_shapes] Shapes ({len(long_factors)}) and "
            f"({len(plain_inv_freq)}) cannot be broadcast."
        )
    require_key(scaling, "short_factor")
    attention_factor = float64_formulas.longrope_attention_factor(
        trained_length / original_length, original_length
    )
    inv_freq = float64_formulas.divide_each(
        plain_inv_freq, require_factors(scaling, "long_factor", len(plain_inv_freq))
    )
    return LayerRotation(
        inv_freq, require_number(mscale, "long_mscale") if mscale else attention_factor
    )


def _linear_rotation(
    scaling: Mapping[str, Any], plain_inv_freq: tuple[float, ...]
) -> LayerRotation:
    """Return the rotation of a file that scales by a linear factor and refuses other types."""
    require_key(scaling, "type")
    if "factor" not in scaling or scaling["type"] != "linear":
        raise RefusedError("ValueError: rope_scaling 'type' currently only supports 'linear'")
    factor = require_number(scaling["factor"], "factor")
    return LayerRotation(float64_formulas.linear_frequencies(plain_inv_freq, factor))


def _phi3_rotation(
    model: Model, facts: MlxLmFacts, scaling: Mapping[str, Any], plain_inv_freq: tuple[float, ...]
) -> LayerRotation:
    """Return the rotation of phi3 and phimoe, which read the top-level original length and always
    use the long factors."""
    length_stated = model.config.get(ORIGINAL_LENGTH_KEY) or facts.defaults.get(ORIGINAL_LENGTH_KEY)
    original_length = require_number(length_stated, "original length")
    if facts.scaling == "phimoe":
        mscale = require_key(scaling, "long_mscale")
        return _rotation_by_long_list(
            scaling, plain_inv_freq, model.max_positions, original_length, mscale
        )
    missing_keys = [key for key in ("long_factor", "type") if key not in scaling]
    if missing_keys:
        raise RefusedError(
            "ValueError: rope_scaling must contain keys {'long_factor', 'type'}; missing: "
            f"{', '.join(missing_keys)}"
        )
    if scaling["type"] in ("longrope", "su"):
        return _rotation_by_long_list(
            scaling, plain_inv_freq, model.max_positions, original_length, None
        )
    if scaling["type"] == "linear":
        factor = scaling.get("factor")
        if not isinstance(factor, float):
            raise RefusedError(f"AssertionError: factor is {factor!r}, expected a float")
        return LayerRotation(float64_formulas.linear_frequencies(plain_inv_freq, factor))
    return LayerRotation(plain_inv_freq)


def _minicpm3_rotation(
    model: Model, scaling: Mapping[str, Any], plain_inv_freq: tuple[float, ...]
) -> LayerRotation:
    """Return MiniCPM 3's rotation: longrope's temperature whatever the type, and its long list if
    it is there."""
    original_length = require_number(
        scaling.get("original_max_position_embeddings", 4096), "original length"
    )
    attention_factor = float64_formulas.longrope_attention_factor(
        model.max_positions / original_length, original_length
    )
    if "long_factor" not in scaling:
        return LayerRotation(plain_inv_freq, attention_factor)
    return LayerRotation(
        float64_formulas.divide_each(
            plain_inv_freq, require_factors(scaling, "long_factor", len(plain_inv_freq))
        ),
        attention_factor,
    )
