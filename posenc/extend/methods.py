"""The methods of stretching a rotary checkpoint: name, frequencies, and whether a KV cache stays
exact."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from posenc.frequencies.scalings.lookup import SCALINGS
from posenc.frequencies.scalings.registry import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    NTKByParts,
    Proportional,
    YaRN,
)
from posenc.frequencies.scalings.scaling import Scaling, rope_frequencies
from posenc.hf.rope_settings import EXTENDED_LAYER_TYPES, NO_ROTATION_DIVISOR, RopeSetting


@dataclass(frozen=True)
class Method:
    """Describe one way to choose frequencies.

    name: as --method takes it. summary: in words, for tables. make_scaling: takes the setting
    without its scaling, and how many times longer texts become; returns the scaling, None for none.
    cache_safe: True if the frequencies do not change with the length, so that cached keys stay
    valid.
    """

    name: str
    summary: str
    make_scaling: Callable[[RopeSetting, float], Scaling | None]
    cache_safe: bool = True
    keeps_maximum: bool = False
    """True if max_position_embeddings must not change, because transformers reads the training
    length from it."""


def _turns_without_scaling(setting: RopeSetting) -> float:
    """Return the number of turns within the training length from which on a pair of channels keeps
    its frequency: 32, as the paper says.

    Below 402 tokens no pair makes that many: the fastest turns by one radian a token, so it makes
    length / (2 pi) turns. The ramp then begins at half of these, and not below 2.
    """
    return min(32.0, max(2.0, setting.original_length / (4 * math.pi)))


def _yarn_scaling(setting: RopeSetting, factor: float) -> Scaling:
    """Return YaRN that makes texts `factor` times longer. A setting that has YaRN already keeps its
    other values, and its temperature follows the factor."""
    if isinstance(setting.scaling, YaRN):
        temperature = setting.yarn_attention_factor(factor)
        return replace(setting.scaling, factor=factor, attention_factor=temperature)
    return YaRN(factor, setting.original_length, beta_fast=_turns_without_scaling(setting))


def _by_parts_scaling(setting: RopeSetting, factor: float) -> Scaling:
    """Return NTK-by-parts as in the YaRN paper, for texts `factor` times longer: a ramp over the
    turns of a pair within the training length, and no temperature."""
    return NTKByParts(factor, setting.original_length, beta=_turns_without_scaling(setting))


def _count_pairs_with_a_full_turn(setting: RopeSetting) -> tuple[int, int]:
    """Return how many pairs of channels finish a turn within the training length, and how many
    pairs there are."""
    unscaled = rope_frequencies(setting.rotary_dim, setting.rope_theta).inv_freq
    num_full_turn = sum(float(f) * setting.original_length >= 2 * math.pi for f in unscaled)
    return num_full_turn, len(unscaled)


def _proportional_scaling(setting: RopeSetting, factor: float) -> Scaling:
    """Return a scaling with which only the pairs rotate that finish a turn within the training
    length, at their old frequencies."""
    num_rotating, num_pairs = _count_pairs_with_a_full_turn(setting)
    return Proportional(num_rotating / num_pairs)


def _clipped_scaling(setting: RopeSetting, factor: float) -> Scaling:
    """Return a scaling that multiplies the frequencies of pairs that finish no turn in training by
    a half cosine, which falls from 1 to 0. For a single pair it is 1, as in the authors' code."""
    num_kept, num_pairs = _count_pairs_with_a_full_turn(setting)
    last_slow_index = max(1, num_pairs - num_kept - 1)
    kept_shares = [
        (1 + math.cos(math.pi * k / last_slow_index)) / 2 for k in range(num_pairs - num_kept)
    ]
    divisors = (1.0,) * num_kept + tuple(1 / s if s else NO_ROTATION_DIVISOR for s in kept_shares)
    return LongRoPE(
        max(1.0, factor), setting.original_length, divisors, divisors, attention_factor=1.0
    )


def _switching_scaling(setting: RopeSetting, factor: float) -> Scaling:
    """Return LongRoPE with the frequencies of training up to the training length, and NTK's beyond
    it."""
    unscaled = rope_frequencies(setting.rotary_dim, setting.rope_theta).inv_freq
    ntk_frequencies = rope_frequencies(setting.rotary_dim, setting.rope_theta, NTK(factor)).inv_freq
    long_factors = tuple(float(p / f) for p, f in zip(unscaled, ntk_frequencies, strict=True))
    return LongRoPE(
        factor, setting.original_length, (1.0,) * len(unscaled), long_factors, attention_factor=1.0
    )


def _method_of_scaling(scaling: type[Scaling]) -> Method:
    """Return the method of a class of scalings whose arguments are the factor and the training
    length alone."""
    field_names = [field.name for field in fields(scaling)]  # pyright: ignore[reportArgumentType]

    def make_scaling(setting: RopeSetting, factor: float) -> Scaling:
        arguments = {"factor": factor, "original_max_positions": setting.original_length}
        return scaling(**{name: arguments[name] for name in field_names if name in arguments})

    assert scaling.extend_method is not None
    rope_type = scaling.rope_type
    reads_maximum = rope_type is not None and not rope_type.has_original_length
    return Method(
        *scaling.extend_method,
        make_scaling,
        cache_safe=not scaling.depends_on_length,
        keeps_maximum=scaling.depends_on_length and reads_maximum,
    )


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("none", "as trained, the baseline", lambda s, f: s.scaling),
        _method_of_scaling(Linear),
        _method_of_scaling(NTK),
        Method("ntk-1.5x", "NTK-aware, half as far again", lambda s, f: NTK(1.5 * f)),
        Method("ntk-2x", "NTK-aware, twice as far", lambda s, f: NTK(2 * f)),
        Method("by-parts", "NTK-by-parts, the paper's ramp", _by_parts_scaling),
        Method("yarn", "YaRN, the released ramp", _yarn_scaling),
        _method_of_scaling(Llama3),
        Method(
            "proportional",
            "rotate only pairs that finish a turn in training",
            _proportional_scaling,
        ),
        Method("clip", "clipped RoPE: slow pairs fade to a standstill", _clipped_scaling),
        _method_of_scaling(DynamicNTK),
        Method(
            "longrope-switch",
            "as trained for texts up to the training length, NTK for all of a longer one",
            _switching_scaling,
            cache_safe=False,
        ),
    )
}
for _scaling in SCALINGS.values():
    if _scaling.extend_method is not None and _scaling.extend_method.name not in METHODS:
        METHODS[_scaling.extend_method.name] = _method_of_scaling(_scaling)


METHODS_OF_SEVERAL_PAIRS = ("ntk", "ntk-1.5x", "ntk-2x", "dynamic", "longrope-switch")
"""Methods that keep the fastest pair and stretch the slowest, so that they need at least two."""


def stretch(
    settings: tuple[RopeSetting, ...], method: Method, target_length: int
) -> tuple[RopeSetting, ...]:
    """Return the settings for `target_length` tokens: `method` is applied to that of every kind of
    layers that looks beyond a window.

    A scaling with an original length is replaced, never stacked: the factor is relative to that
    length. A linear scaling from training is kept, and pairs that did not rotate in training stay
    unrotated.

    Raises: ValueError if the method needs more pairs of channels than rotate, or cannot stretch
    only the fastest ones.
    """
    stretched_settings = []
    for setting in settings:
        if setting.layer_type is None or setting.layer_type in EXTENDED_LAYER_TYPES:
            if setting.rotary_dim < 4 and method.name in METHODS_OF_SEVERAL_PAIRS:
                raise ValueError(
                    "it keeps the fastest pair of channels and stretches the slowest, and here "
                    "only one pair rotates"
                )
            # Without its compression, the same rotation was trained on a shorter text.
            factor = target_length / setting.original_length
            if isinstance(setting.scaling, Proportional) and setting.scaling != Proportional(1):
                setting = _stretch_proportional(setting, setting.scaling, method, factor)
            else:
                plain_setting = replace(
                    setting, original_length=setting.compressed_length, compression=1.0
                )
                setting = replace(setting, scaling=method.make_scaling(plain_setting, factor))
        stretched_settings.append(setting)
    return tuple(stretched_settings)


def _stretch_proportional(
    setting: RopeSetting, original_scaling: Proportional, method: Method, factor: float
) -> RopeSetting:
    """Return a stretched setting for a model in which only the fastest pairs rotate: the same pairs
    rotate, slower.

    original_scaling: the scaling of training, with the fraction of pairs that rotate. factor: how
    many times longer texts become.

    Raises: ValueError for a method that no config can express for some of the pairs.
    """
    num_pairs = int(original_scaling.p * setting.rotary_dim // 2)
    match method.make_scaling(setting, factor):
        case Linear(factor=slowdown):
            return replace(
                setting,
                scaling=replace(original_scaling, factor=original_scaling.factor * slowdown),
            )
        case NTK(factor=slowdown) if num_pairs > 1:
            # The slowest pair that rotates is slower by the whole factor, the fastest not at all.
            base = setting.rope_theta * slowdown ** (setting.rotary_dim / (2 * num_pairs - 2))
            return replace(setting, rope_theta=base)
        case Proportional(p=share):
            return replace(
                setting, scaling=replace(original_scaling, p=min(share, original_scaling.p))
            )
    raise ValueError(
        f"only {num_pairs} of {setting.rotary_dim // 2} pairs of channels rotate in this model, "
        "and no config says this of some pairs only"
    )
