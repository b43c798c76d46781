"""llama.cpp: a converter that writes GGUF keys, and a library that reads some of them.

Each fact about a graph names its file and line in llama.cpp's src/models at the release of
llama_cpp.json. An architecture without a fact rotates every layer and multiplies by
1 / sqrt(head dimension).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import (
    ComputedPositions,
    LayerRotation,
    NotReadError,
    RefusedError,
    Switch,
)
from posenc.runtimes.config_model import Model
from posenc.runtimes.families import facts_of_runtime
from posenc.runtimes.files.gguf_metadata import DEFAULT_FREQ_BASE, Metadata
from posenc.runtimes.known.llama_cpp_converter import converted_metadata
from posenc.runtimes.known.releases import RELEASES

ARCHITECTURES_BY_FACT = facts_of_runtime("llama.cpp")["architectures"]
ARCHITECTURES_LOADING_FREQS = ARCHITECTURES_BY_FACT["loads rope_freqs.weight"]
"""They load the tensor of divisors of the frequencies; the others refuse a file that has it."""
ARCHITECTURES_LOADING_FACTORS = ARCHITECTURES_BY_FACT["loads rope_factors"]
"""They load longrope's lists, rope_factors_long.weight and rope_factors_short.weight; the others
refuse a file that has them."""
ARCHITECTURES_LOADING_FACTORS_ALWAYS = ("minicpm3", "phi3", "phimoe")
"""Of these, those that load rope_factors whatever rope.scaling.type is (phi3.cpp; libllama of
b11549 was run). The others load them only with the type longrope."""
ARCHITECTURES_READING_BETAS = ARCHITECTURES_BY_FACT["reads betas"]
"""They read yarn's beta_fast and beta_slow; in the others they are 32 and 1."""
ARCHITECTURES_READING_LOG_MULTIPLIER = ARCHITECTURES_BY_FACT["reads yarn_log_multiplier"]
"""They read the key from which mscale_all_dim follows, see `_mscale_all_dim`."""
ARCHITECTURES_OF_WHOLE_HEADS = ARCHITECTURES_BY_FACT["whole head only"]
"""They refuse a rope.dimension_count other than the head dimension."""
ARCHITECTURES_OF_OWN_SLIDING_BASE = ARCHITECTURES_BY_FACT["own sliding base"]
"""Windowed layers have the base 10000 unless rope.freq_base_swa says another. In all others they
share the full layers' base."""
ARCHITECTURES_SCALING_SLIDING = ARCHITECTURES_BY_FACT["scaled sliding"]
"""Windowed layers have the full layers' scaling. In all others they are not scaled."""
ARCHITECTURES_OF_PLAIN_SLIDING = ARCHITECTURES_BY_FACT["plain sliding"]
"""Windowed layers have neither the scaling nor a multiplier: laguna.cpp:186, mellum.cpp:122,
olmo2.cpp:117."""
ARCHITECTURES_OF_ONE_BASE = ARCHITECTURES_BY_FACT["base of all layers"]
"""The graph gives windowed layers the full layers' base, whatever rope.freq_base_swa says:
cohere2.cpp:89, cohere2moe.cpp:184, exaone-moe.cpp:150, exaone4.cpp:127, mellum.cpp:122,
olmo2.cpp:117."""
ARCHITECTURES_OF_TWO_KINDS = (
    *ARCHITECTURES_OF_OWN_SLIDING_BASE,
    *ARCHITECTURES_SCALING_SLIDING,
    *ARCHITECTURES_OF_PLAIN_SLIDING,
    "muse-glimmer",
)
"""Windowed layers may rotate differently from full-attention ones."""
ARCHITECTURES_OF_FULL_LAYER_FREQS = ARCHITECTURES_BY_FACT["freqs of full layers only"]
"""rope_freqs.weight divides the frequencies of full-attention layers only."""
SCALING_TYPES = ("none", "linear", "yarn", "longrope")
"""The values of rope.scaling.type with which a file loads."""

ARCHITECTURES_SWITCHED_BY_A_KEY = ("granite", "granitehybrid")
"""rope.scaling.finetuned = false means here that no layer rotates: granite.cpp:33 and :216,
granite-hybrid.cpp:16 and :210. granite-moe.cpp does not read the key."""

ARCHITECTURES_READING_ATTENTION_SCALE = ("granite", "granitemoe", "granitehybrid", "granite_swa")
"""They read attention.scale, 0 for the usual one: granite.cpp:10 and :235, granite-moe.cpp:8,
granite-hybrid.cpp:8 and :223, granite-swa.cpp:10 and :231."""
ARCHITECTURES_OF_SCALE_ONE = ("gemma3n", "gemma4", "gemma4-assistant")
"""Their scale is 1: gemma3n.cpp:8, gemma4.cpp:12, gemma4-assistant.cpp:12."""
NUM_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Number of layers by which libllama knows the 27B model, whose scale goes with the width of the
model per head and not with the head dimension: gemma2.cpp:25, gemma3.cpp:29."""
ARCHITECTURES_SCALED_BY_ROTATED = ("gpt-oss",)
"""Their scale goes with the number of rotated channels: openai-moe.cpp:113."""
GROKS_SCALE = 0.08838834764831845
"""Grok's where attention.output_scale does not say another: grok.cpp:8 and :18, and the product is
in llama-graph.cpp:2702."""


def compute(model: Model, length: int | None) -> ComputedPositions:
    """Return what libllama computes, at a context of `length` tokens, from the file that its
    converter makes of a config.json."""
    return compute_from_metadata(converted_metadata(model), length, model)


def compute_from_metadata(
    meta: Metadata, length: int | None, model: Model | None = None
) -> ComputedPositions:
    """Return what libllama computes from a GGUF file's keys and factor tensors.

    Raises: NotReadError for an architecture that posenc has not read; RefusedError where the file
    fails to load.
    """
    if meta.architecture not in known_architectures():
        raise NotReadError(f"posenc does not know the architecture {meta.architecture!r}")
    refuse_tensors_or_scaling(meta)
    try:
        return _compute_from_accepted_file(meta, length, model)
    except ArithmeticError as error:
        raise RefusedError(f"the frequencies cannot be computed ({error})") from error


def _compute_from_accepted_file(
    meta: Metadata, length: int | None, model: Model | None
) -> ComputedPositions:
    """Return what libllama computes from a file that it accepts. model: what it was converted from,
    where that is known."""
    rotations = _rotations_by_kind(meta, length, model)
    if model is not None and meta.architecture not in ARCHITECTURES_WHOSE_FILES_SAY_ALL:
        unrotated_layers = model.without_rotation
    else:
        unrotated_layers = _unrotated_in_graph(meta)
        if meta.num_layers and len(unrotated_layers) == meta.num_layers:
            rotations = {}
    return ComputedPositions(
        None,
        rotations,
        _softmax_scale(meta, model),
        _frequency_switch(meta),
        None,
        unrotated_layers,
        version=RELEASES["llama.cpp"].read,
    )


def _rotations_by_kind(
    meta: Metadata, length: int | None, model: Model | None
) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer: of the model's kinds where the model is known,
    else of those that the file's keys tell apart."""
    full_rotation = full_attention_rotation(meta, length or meta.context_length)
    if model is not None:
        if not model.has_rope_dict_per_kind:
            return {"all": full_rotation}
        windowed_rotation = sliding_window_rotation(meta)
        return {
            kind: windowed_rotation if "sliding" in kind else full_rotation
            for kind in model.layer_kinds
        }
    has_windows = meta.freq_base_swa is not None or meta.sliding_window
    if meta.architecture in ARCHITECTURES_OF_TWO_KINDS and has_windows:
        windowed_rotation = sliding_window_rotation(meta)
        if windowed_rotation != full_rotation:
            return {"full_attention": full_rotation, "sliding_attention": windowed_rotation}
    return {"all": full_rotation}


@cache
def known_architectures() -> frozenset[str]:
    """Return the architectures of llama.cpp whose source posenc's authors have read."""
    architectures = [
        facts["architecture"] for facts in facts_of_runtime("llama.cpp")["families"].values()
    ]
    return frozenset(
        (
            *architectures,
            *ARCHITECTURES_LOADING_FREQS,
            *ARCHITECTURES_LOADING_FACTORS,
            *ARCHITECTURES_READING_BETAS,
            *ARCHITECTURES_OF_TWO_KINDS,
        )
    )


def refuse_tensors_or_scaling(meta: Metadata) -> None:
    """Raise RefusedError if libllama does not accept a tensor or the scaling of the file."""
    if meta.scaling_type not in SCALING_TYPES:
        raise RefusedError(
            f"llama.cpp: unknown rope.scaling.type {meta.scaling_type!r}, expected one of "
            f"{', '.join(SCALING_TYPES)}; the model fails to load"
        )
    if meta.rope_freqs is not None:
        if meta.architecture not in ARCHITECTURES_LOADING_FREQS:
            raise RefusedError(
                f"llama.cpp: the architecture {meta.architecture} loads no rope_freqs.weight: "
                "wrong number of tensors, the model fails to load"
            )
        if meta.scaling_type == "longrope" and meta.architecture in ARCHITECTURES_LOADING_FACTORS:
            raise RefusedError(
                "llama.cpp: with rope.scaling.type longrope it wants rope_factors_long.weight, "
                "not rope_freqs.weight; the model fails to load"
            )
    _refuse_unread_factor_lists(meta)
    if meta.architecture in ARCHITECTURES_OF_WHOLE_HEADS and meta.dimension_count != meta.head_dim:
        raise RefusedError(
            f"llama.cpp: invalid n_rot: {meta.dimension_count}, expected {meta.head_dim}"
        )
    for name in ("rope_freqs", "factors_long", "factors_short"):
        divisors = getattr(meta, name)
        if divisors is not None and len(divisors) != meta.dimension_count // 2:
            raise RefusedError(
                f"llama.cpp: {name} has {len(divisors)} values for "
                f"{meta.dimension_count // 2} pairs"
            )


def _refuse_unread_factor_lists(meta: Metadata) -> None:
    """Raise RefusedError for longrope's lists where the architecture does not load them: the loader
    then counts more tensors than it has asked for."""
    if not meta.has_factor_lists or meta.architecture in ARCHITECTURES_LOADING_FACTORS_ALWAYS:
        return
    if meta.architecture not in ARCHITECTURES_LOADING_FACTORS:
        why = f"the architecture {meta.architecture} loads no rope_factors"
    elif meta.scaling_type != "longrope":
        why = f"rope_factors are loaded only with {meta.architecture}.rope.scaling.type longrope"
    else:
        return
    raise RefusedError(f"llama.cpp: {why}: wrong number of tensors, the model fails to load")


def full_attention_rotation(meta: Metadata, length: int) -> LayerRotation:
    """Return the rotation of the full-attention layers at a context of `length` tokens."""
    dim = meta.dimension_count
    theta = meta.freq_base
    divisors = _divisors(meta, length)
    factor = 1.0 if meta.scaling_type == "none" else meta.scaling_factor
    if meta.scaling_type != "yarn":
        divided_inv_freq = float64_formulas.divide_each(
            float64_formulas.unscaled_frequencies(dim, theta), divisors
        )
        return LayerRotation(
            float64_formulas.linear_frequencies(divided_inv_freq, factor), meta.attn_factor
        )
    beta_fast = 32.0
    beta_slow = 1.0
    if meta.architecture in ARCHITECTURES_READING_BETAS:
        beta_fast = meta.beta_fast or beta_fast
        beta_slow = meta.beta_slow or beta_slow
    inv_freq = float64_formulas.yarn_frequencies(
        dim, theta, factor, meta.original_length, beta_fast, beta_slow
    )
    return LayerRotation(
        float64_formulas.divide_each(inv_freq, divisors), _yarn_multiplier(meta, factor)
    )


def sliding_base(meta: Metadata) -> float:
    """Return the base of the windowed layers."""
    if meta.architecture in ARCHITECTURES_OF_ONE_BASE:
        return meta.freq_base
    if meta.freq_base_swa is not None:
        return meta.freq_base_swa
    return (
        DEFAULT_FREQ_BASE
        if meta.architecture in ARCHITECTURES_OF_OWN_SLIDING_BASE
        else meta.freq_base
    )


def sliding_window_rotation(meta: Metadata) -> LayerRotation:
    """Return the rotation of the layers with a sliding window: usually without scaling, and with
    the full layers' attn_factor."""
    base = sliding_base(meta)
    is_scaled = meta.architecture in ARCHITECTURES_SCALING_SLIDING
    dim = meta.dimension_count_swa or meta.dimension_count
    if is_scaled:
        meta_like_full = replace(meta, freq_base=base, dimension_count=dim)
        return full_attention_rotation(meta_like_full, meta.context_length)
    if meta.architecture in ARCHITECTURES_OF_PLAIN_SLIDING:
        return LayerRotation(float64_formulas.unscaled_frequencies(dim, base))
    multiplier = meta.attn_factor
    if meta.scaling_type == "yarn":
        # These layers are not stretched, so yarn's own temperature for the factor, which
        # _yarn_multiplier includes, is divided out. The rest of the multiplier stays.
        factor = meta.scaling_factor
        multiplier = _yarn_multiplier(meta, factor) / float64_formulas.yarn_attention_factor(factor)
    divisors = meta.rope_freqs
    if divisors is None or meta.architecture in ARCHITECTURES_OF_FULL_LAYER_FREQS:
        divisors = (1.0,) * ((dim + 1) // 2)
    return LayerRotation(
        float64_formulas.divide_each(float64_formulas.unscaled_frequencies(dim, base), divisors),
        multiplier,
    )


def _divisors(meta: Metadata, length: int) -> tuple[float, ...]:
    """Return the divisors of the frequencies at a length: rope_freqs.weight, else longrope's list,
    else ones."""
    if meta.rope_freqs is not None:
        return meta.rope_freqs
    factors = meta.factors_long if length > meta.original_length else meta.factors_short
    return factors if factors is not None else (1.0,) * ((meta.dimension_count + 1) // 2)


def _mscale_all_dim(meta: Metadata) -> float:
    """Return mscale_all_dim, computed from the key yarn_log_multiplier: Mistral's converter writes
    it there unchanged, DeepSeek's a tenth of it. 0 for an architecture that does not read the
    key."""
    log_multiplier = meta.log_multiplier or 0.0
    if meta.architecture not in ARCHITECTURES_READING_LOG_MULTIPLIER:
        return 0.0
    return log_multiplier if meta.architecture == "mistral3" else log_multiplier / 0.1


def _yarn_multiplier(meta: Metadata, factor: float) -> float:
    """Return yarn's multiplier of cos and sin, times attn_factor."""
    mscale_all_dim = _mscale_all_dim(meta)
    mscale = mscale_all_dim if meta.architecture == "deepseek2" and mscale_all_dim else 1.0
    numerator = float64_formulas.yarn_attention_factor(factor, mscale)
    return (
        numerator
        / float64_formulas.yarn_attention_factor(factor, mscale_all_dim)
        * meta.attn_factor
    )


def _softmax_scale(meta: Metadata, model: Model | None) -> float | None:
    """Return the softmax scale, which latent attention multiplies by its squared temperature."""
    scale_without_scaling = _scale_in_graph(meta) if model is None else model.softmax_scale
    if meta.architecture not in ("deepseek2", "deepseek32"):
        return scale_without_scaling
    factor = meta.scaling_factor if meta.scaling_type == "yarn" else 1.0
    multiplier = _yarn_multiplier(meta, factor) if factor > 1 else meta.attn_factor
    # _yarn_multiplier divides by the temperature of mscale_all_dim: the product has it once. The
    # square is that of q's and k's temperature.
    return (
        scale_without_scaling
        * (multiplier * float64_formulas.yarn_attention_factor(factor, _mscale_all_dim(meta))) ** 2
    )


def _frequency_switch(meta: Metadata) -> Switch:
    """Return when the frequencies change: those of two different lists do with the context for
    which the program is started, which may be longer than the file's."""
    return "start" if meta.chooses_list_by_length else "static"


def _scale_in_graph(meta: Metadata) -> float:
    """Return the factor of q.k, before any temperature of the positions."""
    usual_scale = meta.head_dim**-0.5
    if meta.architecture in ARCHITECTURES_READING_ATTENTION_SCALE:
        return meta.attention_scale or usual_scale
    if meta.architecture in ARCHITECTURES_OF_SCALE_ONE:
        return 1.0
    if meta.architecture == "grok":
        return GROKS_SCALE if meta.output_scale is None else meta.output_scale
    if meta.architecture in ARCHITECTURES_SCALED_BY_ROTATED:
        return meta.dimension_count**-0.5
    is_27b = NUM_LAYERS_OF_27B.get(meta.architecture) == meta.num_layers
    if is_27b and meta.width_per_head:
        return meta.width_per_head**-0.5
    return usual_scale


def _unrotated_in_graph(meta: Metadata) -> tuple[int, ...]:
    """Return the layers that the graph does not rotate."""
    if meta.architecture in ARCHITECTURES_SWITCHED_BY_A_KEY and not meta.rotates:
        return tuple(range(meta.num_layers))
    rule = RULES_OF_UNROTATED_LAYERS.get(meta.architecture)
    return () if rule is None else tuple(rule(meta))


def _last_of_each(step: int, meta: Metadata) -> Iterator[int]:
    """Yield the last layer of each `step` layers."""
    return (i for i in range(meta.num_layers) if (i + 1) % step == 0)


def _all_layers(meta: Metadata) -> Iterator[int]:
    """Yield every layer."""
    return iter(range(meta.num_layers))


def _unrotated_in_llama4(meta: Metadata) -> Iterator[int]:
    """Yield the last of each 4 layers; the last of all layers where the file has no window."""
    return _last_of_each(meta.num_layers if meta.sliding_window == 0 else 4, meta)


def _unrotated_in_smallthinker(meta: Metadata) -> Iterator[int]:
    """Yield the first of each 4 layers; none where the file has no window."""
    return (i for i in range(meta.num_layers) if meta.sliding_window and i % 4 == 0)


def _unrotated_in_exaone4(meta: Metadata) -> Iterator[int]:
    """Yield the layers with full attention in a model of 64 layers; none in another one, which
    libllama builds without windows, whatever the file says."""
    return _layers_without_window(meta) if meta.num_layers == 64 else iter(())


def _unrotated_in_cohere2moe(meta: Metadata) -> Iterator[int]:
    """Yield the layers with full attention, the first of each n (the file's n, or 4), behind the
    dense layers that come first."""
    return (
        i
        for i in _layers_without_window(meta, full_comes_first=True)
        if i >= meta.num_leading_dense
    )


def _unrotated_in_granite_swa(meta: Metadata) -> Iterator[int]:
    """Yield the layers for which attention.rope_pattern has a 0."""
    pattern = meta.rope_pattern or ()
    return (i for i in range(min(meta.num_layers, len(pattern))) if not pattern[i])


def _layers_without_window(meta: Metadata, full_comes_first: bool = False) -> Iterator[int]:
    """Yield the layers without a window: by a list of flags, or the last (`full_comes_first`: the
    first) of each n layers, of each 4 where the file says no n: llama-model.cpp:3434,
    llama-hparams.cpp:8."""
    flags_or_period = 4 if meta.window_pattern is None else meta.window_pattern
    for i in range(meta.num_layers):
        if isinstance(flags_or_period, tuple):
            is_windowed = i < len(flags_or_period) and bool(flags_or_period[i])
        else:
            is_windowed = flags_or_period == 0 or i % flags_or_period != (
                0 if full_comes_first else flags_or_period - 1
            )
        if not is_windowed:
            yield i


RULES_OF_UNROTATED_LAYERS: dict[str, Callable[[Metadata], Iterator[int]]] = {
    "afmoe": partial(_last_of_each, 4),  # afmoe.cpp:135
    "cohere2": _layers_without_window,  # cohere2.cpp:89
    "cohere2moe": _unrotated_in_cohere2moe,  # cohere2moe.cpp:29, :171, :184
    "exaone-moe": _layers_without_window,  # exaone-moe.cpp:131
    "exaone4": _unrotated_in_exaone4,  # exaone4.cpp:4, :111
    "granite_swa": _unrotated_in_granite_swa,  # granite-swa.cpp:41, :211
    "llama4": _unrotated_in_llama4,  # llama4.cpp:11, :143
    "muse-glimmer": _layers_without_window,  # muse-glimmer.cpp:88
    "refact": _all_layers,  # refact.cpp: ALiBi
    "smallthinker": _unrotated_in_smallthinker,  # smallthinker.cpp:16, :106
    "smollm3": partial(_last_of_each, 4),  # smollm3.cpp:5, :69
}
"""Architecture -> the rule of its layers that do not rotate."""
ARCHITECTURES_WHOSE_FILES_SAY_ALL = (
    "afmoe",
    "cohere2",
    "cohere2moe",
    "exaone-moe",
    "exaone4",
    "llama4",
    "smollm3",
)
"""Architectures of which the converter says all that these rules read. For others a config's own
rule is taken."""
