"""Scalings of RoPE's frequencies for contexts longer than the trained one: plain numbers, no torch.

Each scaling is a frozen dataclass with one formula. All of it is decimal arithmetic of 50 digits,
so that scaled angles are as exact as unscaled ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import ClassVar, NamedTuple

from posenc.frequencies import PRECISION, TWO_PI, geometric, inverse_frequencies


class Frequencies(NamedTuple):
    """What a rotation needs: cos and sin of position * inv_freq, both times attention_factor."""

    inv_freq: tuple[Decimal, ...]
    """Radians per position, one for each pair of channels."""
    attention_factor: float = 1.0
    """The rotated part of the logits grows by its square."""


def rope_frequencies(
    rotary_dim: int,
    rope_theta: float = 10000.0,
    scaling: Scaling | None = None,
    length: int | None = None,
) -> Frequencies:
    """The frequencies of RoPE under any scaling or none; `length` as in Scaling.frequencies."""
    if scaling is None:
        return Frequencies(inverse_frequencies(rotary_dim, rope_theta))
    with localcontext(PRECISION):
        return scaling.frequencies(rotary_dim, rope_theta, length)


class Scaling:
    """The base of all scalings.

    A subclass defines `frequencies`; it is called inside a 50-digit decimal context.
    """

    source: ClassVar[str]
    exempt_tokens: int = 0
    """How many first positions keep the unscaled rotation."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the current length: keys cached at one length are
        then wrong at another."""
        return False

    @property
    def logit_scale(self) -> float:
        """What the model multiplies 1/sqrt(head_dim) with, beside the factor on cos and sin."""
        return 1.0

    def frequencies(
        self, rotary_dim: int, rope_theta: float, length: int | None = None
    ) -> Frequencies:
        """Scaled frequencies of `rotary_dim` channels.

        `length` is the current length in tokens, read only where `depends_on_length`; None means
        the trained length.
        """
        raise NotImplementedError(f"{type(self).__name__} must define frequencies()")


def _require(scaling: Scaling, condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{type(scaling).__name__}: {expected}, got {got}.")


def _require_factor(scaling: Scaling, factor: float) -> None:
    _require(
        scaling,
        math.isfinite(factor) and factor >= 1,
        "factor is how many times longer the context becomes, a finite number of at least 1",
        factor,
    )


def _require_length(scaling: Scaling, length: int) -> None:
    expected = "original_max_positions is the trained length in tokens, at least 1"
    _require(scaling, length >= 1, expected, length)


def _at_least(scaling: Scaling, length: int | None, trained: int) -> int:
    _require(scaling, length is None or length >= 1, "length must be at least 1", length)
    return trained if length is None else max(length, trained)


def _blend(
    inv_freq: Sequence[Decimal], factor: Decimal, kept: Sequence[Decimal]
) -> tuple[Decimal, ...]:
    """(1 - kept) f / factor + kept f, per pair."""
    return tuple((1 - keep) * f / factor + keep * f for f, keep in zip(inv_freq, kept, strict=True))


def _ntk(
    scaling: Scaling, rotary_dim: int, rope_theta: float, factor: Decimal
) -> tuple[Decimal, ...]:
    expected = "rotary_dim must be at least 4: the slowest pair is scaled, the fastest is not"
    _require(scaling, rotary_dim >= 4, expected, rotary_dim)
    base = Decimal(rope_theta) * factor ** (Decimal(rotary_dim) / (rotary_dim - 2))
    return geometric(rotary_dim // 2, base, Decimal(2) / rotary_dim)


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: theta' = theta / factor, which is RoPE at real positions p / factor.

    Source: Chen et al. 2023, arXiv:2306.15595, section 2.3. Hugging Face: "linear".
    """

    factor: float
    source: ClassVar[str] = "Chen et al. 2023, arXiv:2306.15595, section 2.3"

    def __post_init__(self) -> None:
        _require_factor(self, self.factor)

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        factor = Decimal(self.factor)
        return Frequencies(tuple(f / factor for f in inverse_frequencies(rotary_dim, rope_theta)))


@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware: base' = base * factor^(d/(d-2)) with d the rotary dim.

    The fastest pair stays, the slowest is divided by exactly `factor`.
    Source: bloc97 2023, in Peng et al. 2023, arXiv:2309.00071, section 3.1.
    """

    factor: float
    source: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071, section 3.1"

    def __post_init__(self) -> None:
        _require_factor(self, self.factor)

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        return Frequencies(_ntk(self, rotary_dim, rope_theta, Decimal(self.factor)))


@dataclass(frozen=True)
class NTKByParts(Scaling):
    """The paper's NTK-by-parts: theta' = (1 - g) theta/factor + g theta, with
    g = clip((r - alpha) / (beta - alpha), 0, 1) linear in r = original_max_positions / wavelength.

    Pairs that turn more than beta times within the trained length stay, those that turn less than
    alpha times are interpolated. Released YaRN code uses another ramp (see YaRN).

    Source: Peng et al. 2023, arXiv:2309.00071, definition 2.
    """

    factor: float
    original_max_positions: int
    alpha: float = 1.0
    beta: float = 32.0
    source: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071, definition 2"

    def __post_init__(self) -> None:
        _require_factor(self, self.factor)
        _require_length(self, self.original_max_positions)
        expected = "alpha and beta are numbers of turns with 0 <= alpha <= beta"
        _require(self, 0 <= self.alpha <= self.beta, expected, f"{self.alpha} and {self.beta}")

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        inv_freq = inverse_frequencies(rotary_dim, rope_theta)
        kept = tuple(self._kept(self.original_max_positions * f / TWO_PI) for f in inv_freq)
        return Frequencies(_blend(inv_freq, Decimal(self.factor), kept))

    def _kept(self, turns: Decimal) -> Decimal:
        if turns >= self.beta:
            return Decimal(1)
        if turns <= self.alpha:
            return Decimal(0)
        return (turns - Decimal(self.alpha)) / (Decimal(self.beta) - Decimal(self.alpha))


@dataclass(frozen=True)
class Llama3(Scaling):
    """Llama 3.1: wavelengths below L/high_freq_factor stay, those above L/low_freq_factor are
    multiplied by `factor`, frequencies between are blended.

    This is the paper's NTK-by-parts with alpha = low_freq_factor, beta = high_freq_factor.
    Source: Meta 2024, github.com/meta-llama/llama-models, apply_scaling.
    """

    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    source: ClassVar[str] = "Meta 2024, github.com/meta-llama/llama-models, apply_scaling"

    def __post_init__(self) -> None:
        _require_factor(self, self.factor)
        _require_length(self, self.original_max_positions)
        low, high = self.low_freq_factor, self.high_freq_factor
        expected = "low_freq_factor must be positive and below high_freq_factor"
        _require(self, 0 < low < high, expected, f"{low} and {high}")

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        by_parts = NTKByParts(
            self.factor, self.original_max_positions, self.low_freq_factor, self.high_freq_factor
        )
        return by_parts.frequencies(rotary_dim, rope_theta)


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """YaRN's sqrt(1/t) = 0.1 mscale ln(factor) + 1; 1 where nothing is extended."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _pair_index(turns: float, rotary_dim: int, rope_theta: float, length: int) -> Decimal:
    """The real-valued index of the pair that turns `turns` times within `length` positions."""
    return rotary_dim * (Decimal(length) / (Decimal(turns) * TWO_PI)).ln() / (2 * _log(rope_theta))


def _log(x: float) -> Decimal:
    return Decimal(x).ln()


def _ramp(low: Decimal, high: Decimal, count: int) -> list[Decimal]:
    """0 up to index `low`, 1 from `high` on, linear between."""
    if low == high:
        high += Decimal("0.001")  # as the authors do, to stay off a division by zero
    return [min(max((t - low) / (high - low), Decimal(0)), Decimal(1)) for t in range(count)]


def _index_range(
    fast: float, slow: float, rotary_dim: int, rope_theta: float, length: int, truncate: bool
) -> tuple[Decimal, Decimal]:
    """The pairs between which YaRN's ramp runs."""
    low = _pair_index(fast, rotary_dim, rope_theta, length)
    high = _pair_index(slow, rotary_dim, rope_theta, length)
    if truncate:
        low, high = Decimal(math.floor(low)), Decimal(math.ceil(high))
    return max(low, Decimal(0)), min(high, Decimal(rotary_dim - 1))


@dataclass(frozen=True)
class YaRN(Scaling):
    """YaRN as released: a ramp linear in the pair's index between the pairs that turn beta_fast
    and beta_slow times within the trained length, and a temperature on cos and sin.

    attention_factor: what multiplies cos and sin; None means
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), at every length.
    mscale, mscale_all_dim: DeepSeek's pair; its second half returns squared in the scale of all
    logits (`logit_scale`), rotated or not. Hugging Face's Llama leaves that square out, and ignores
    one of the two without the other: give attention_factor for its checkpoints.
    truncate: round the ends of the ramp to whole pairs (False: gpt-oss).

    Raises: ValueError where numbers make no ramp, or attention_factor meets mscale.
    Source: Peng et al. 2023, arXiv:2309.00071, section 3; github.com/jquesnelle/yarn;
    DeepSeek-AI 2024, arXiv:2405.04434.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    source: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071, section 3"

    def __post_init__(self) -> None:
        _require_factor(self, self.factor)
        _require_length(self, self.original_max_positions)
        expected = "beta_fast and beta_slow are numbers of turns with beta_fast >= beta_slow > 0"
        got = f"{self.beta_fast} and {self.beta_slow}"
        _require(self, self.beta_fast >= self.beta_slow > 0, expected, got)
        _require_temperature(self, self.attention_factor)
        _require(
            self,
            self.attention_factor is None or (self.mscale, self.mscale_all_dim) == (1.0, 0.0),
            "give attention_factor, or mscale and mscale_all_dim, not both",
            f"{self.attention_factor}, {self.mscale} and {self.mscale_all_dim}",
        )

    @property
    def logit_scale(self) -> float:
        return yarn_temperature(self.factor, self.mscale_all_dim) ** 2

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        _require(self, rope_theta != 1, "rope_theta must differ from 1", rope_theta)
        low, high = _index_range(
            self.beta_fast, self.beta_slow, rotary_dim, rope_theta,
            self.original_max_positions, self.truncate,
        )  # fmt: skip
        inv_freq = inverse_frequencies(rotary_dim, rope_theta)
        kept = [1 - ramp for ramp in _ramp(low, high, len(inv_freq))]
        temperature = self.attention_factor
        if temperature is None:
            temperature = yarn_temperature(self.factor, self.mscale)
            temperature /= yarn_temperature(self.factor, self.mscale_all_dim)
        return Frequencies(_blend(inv_freq, Decimal(self.factor), kept), temperature)


def _require_temperature(scaling: Scaling, temperature: float | None) -> None:
    valid = temperature is None or (math.isfinite(temperature) and temperature > 0)
    _require(scaling, valid, "attention_factor must be a positive number or None", temperature)


@dataclass(frozen=True)
class NTKByPartsV1(Scaling):
    """bloc97's first by-parts, of YaRN's repository: interpolation, NTK-aware and unscaled
    frequencies joined by two ramps in the pair's index.

    Its constants were found by hand for Llama: interpolation gives way to NTK between 1.25 and
    0.75 turns, NTK to the unscaled frequencies between 16 and 2. ntk_factor and
    extrapolation_factor say how much of either step is taken.
    Source: github.com/jquesnelle/yarn, LlamaPartNTKScaledRotaryEmbedding.
    """

    factor: float
    original_max_positions: int
    ntk_factor: float = 1.0
    extrapolation_factor: float = 1.0
    source: ClassVar[str] = "github.com/jquesnelle/yarn, LlamaPartNTKScaledRotaryEmbedding"

    def __post_init__(self) -> None:
        _require_factor(self, self.factor)
        _require_length(self, self.original_max_positions)
        shares = (self.ntk_factor, self.extrapolation_factor)
        expected = "ntk_factor and extrapolation_factor must be between 0 and 1"
        _require(self, all(0 <= share <= 1 for share in shares), expected, shares)

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        plain = inverse_frequencies(rotary_dim, rope_theta)
        scaled = [f / Decimal(self.factor) for f in plain]
        ntk = _ntk(self, rotary_dim, rope_theta, Decimal(self.factor))
        steps = ((ntk, 1.25, 0.75, self.ntk_factor), (plain, 16, 2, self.extrapolation_factor))
        for faster, fast, slow, share in steps:
            ends = _index_range(
                fast, slow, rotary_dim, rope_theta, self.original_max_positions, True
            )
            taken = [(1 - ramp) * Decimal(share) for ramp in _ramp(*ends, len(plain))]
            scaled = [s * (1 - x) + f * x for s, f, x in zip(scaled, faster, taken, strict=True)]
        return Frequencies(tuple(scaled))


@dataclass(frozen=True)
class DynamicLinear(Scaling):
    """Position interpolation by the current length l: theta' = theta * L / l beyond the trained L.

    Source: github.com/jquesnelle/yarn, LlamaDynamicScaledRotaryEmbedding with ntk=False.
    """

    original_max_positions: int
    source: ClassVar[str] = "github.com/jquesnelle/yarn, LlamaDynamicScaledRotaryEmbedding"

    def __post_init__(self) -> None:
        _require_length(self, self.original_max_positions)

    @property
    def depends_on_length(self) -> bool:
        return True

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        trained = self.original_max_positions
        ratio = Decimal(trained) / _at_least(self, length, trained)
        return Frequencies(tuple(f * ratio for f in inverse_frequencies(rotary_dim, rope_theta)))


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """NTK-aware by the current length l: base' = base * (factor l/L - (factor - 1))^(d/(d-2)).

    Nothing changes up to the trained length L. Source: emozilla 2023, in Peng et al. 2023,
    arXiv:2309.00071, section 3.3. Hugging Face: "dynamic".
    """

    factor: float
    original_max_positions: int
    source: ClassVar[str] = "emozilla 2023; Peng et al. 2023, arXiv:2309.00071, section 3.3"

    def __post_init__(self) -> None:
        _require_factor(self, self.factor)
        _require_length(self, self.original_max_positions)

    @property
    def depends_on_length(self) -> bool:
        return True

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        trained = self.original_max_positions
        factor = Decimal(self.factor)
        stretch = factor * _at_least(self, length, trained) / trained - (factor - 1)
        return Frequencies(_ntk(self, rotary_dim, rope_theta, stretch))


@dataclass(frozen=True)
class DynamicYaRN(Scaling):
    """YaRN with factor = l / L at the current length l; plain RoPE up to the trained length L.

    Source: github.com/jquesnelle/yarn, LlamaDynamicYaRNScaledRotaryEmbedding.
    """

    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    source: ClassVar[str] = "github.com/jquesnelle/yarn, LlamaDynamicYaRNScaledRotaryEmbedding"

    def __post_init__(self) -> None:
        self._at(None)

    @property
    def depends_on_length(self) -> bool:
        return True

    def _at(self, length: int | None) -> YaRN:
        trained = self.original_max_positions
        _require_length(self, trained)
        factor = _at_least(self, length, trained) / trained
        return YaRN(factor, trained, self.beta_fast, self.beta_slow)

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        return self._at(length).frequencies(rotary_dim, rope_theta)


def longrope_temperature(factor: float, original_max_positions: int) -> float:
    """LongRoPE's sqrt(1 + ln(factor) / ln(original_max_positions)); 1 where nothing is extended."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_positions))


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """LongRoPE: every pair's frequency divided by its own searched factor.

    theta'_t = theta_t / long_factor[t] where the current length exceeds the trained one, else
    theta_t / short_factor[t]. With equal lists, any frequencies at all can be written this way.

    factor: how many times longer the context becomes; sets the temperature.
    short_factor: None means 1 for every pair. long_factor: None means `factor` for every pair, the
    interpolation that a search starts from.
    attention_factor: what multiplies cos and sin; None means
    sqrt(1 + ln(factor) / ln(original_max_positions)), at every length.
    exempt_tokens: the first positions keep the unscaled rotation, without attention_factor.

    Raises: ValueError where a list does not fit rotary_dim or holds a number that is not positive.
    Source: Ding et al. 2024, arXiv:2402.13753, section 3; github.com/microsoft/LongRoPE.
    """

    factor: float
    original_max_positions: int
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    attention_factor: float | None = None
    exempt_tokens: int = 0
    source: ClassVar[str] = "Ding et al. 2024, arXiv:2402.13753, section 3"

    def __post_init__(self) -> None:
        _require_factor(self, self.factor)
        expected = "original_max_positions is the trained length in tokens, at least 2"
        _require(self, self.original_max_positions >= 2, expected, self.original_max_positions)
        _require_temperature(self, self.attention_factor)
        _require(self, self.exempt_tokens >= 0, "exempt_tokens must be >= 0", self.exempt_tokens)
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None:
                object.__setattr__(self, name, tuple(float(f) for f in factors))
                valid = all(math.isfinite(f) and f > 0 for f in factors)
                _require(self, valid, f"{name} must hold positive numbers", list(factors))

    @property
    def depends_on_length(self) -> bool:
        return self.short_factor is None or self.short_factor != self.long_factor

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        trained = self.original_max_positions
        name, default = "short_factor", 1.0
        if _at_least(self, length, trained) > trained:
            name, default = "long_factor", self.factor
        inv_freq = inverse_frequencies(rotary_dim, rope_theta)
        factors = getattr(self, name) or (default,) * len(inv_freq)
        expected = f"{name} must have one number per pair, {len(inv_freq)}"
        _require(self, len(factors) == len(inv_freq), expected, len(factors))
        temperature = self.attention_factor or longrope_temperature(self.factor, trained)
        scaled = tuple(f / Decimal(x) for f, x in zip(inv_freq, factors, strict=True))
        return Frequencies(scaled, temperature)


@dataclass(frozen=True)
class Proportional(Scaling):
    """p-RoPE: keep the fastest int(p * rotary_dim / 2) pairs, do not rotate the others.

    Unlike partial rotary, the spectrum is cut, not spread anew over fewer pairs. `factor` divides
    the frequencies that stay.
    Source: Barbero et al. 2025, arXiv:2410.06205, section 6. Hugging Face: "proportional".
    """

    p: float
    factor: float = 1.0
    source: ClassVar[str] = "Barbero et al. 2025, arXiv:2410.06205, section 6"

    def __post_init__(self) -> None:
        _require(self, 0 <= self.p <= 1, "p is the share of pairs to rotate, 0 to 1", self.p)
        _require_factor(self, self.factor)

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        kept = int(self.p * rotary_dim // 2)
        factor = Decimal(self.factor)
        inv_freq = inverse_frequencies(rotary_dim, rope_theta)
        return Frequencies(
            tuple(f / factor if t < kept else Decimal(0) for t, f in enumerate(inv_freq))
        )


SCALINGS: dict[str, type[Scaling]] = {
    "linear": Linear,
    "ntk": NTK,
    "ntk_by_parts": NTKByParts,
    "ntk_by_parts_v1": NTKByPartsV1,
    "yarn": YaRN,
    "llama3": Llama3,
    "longrope": LongRoPE,
    "proportional": Proportional,
    "dynamic_linear": DynamicLinear,
    "dynamic_ntk": DynamicNTK,
    "dynamic_yarn": DynamicYaRN,
}
"""The scalings by the names that the registry, the tool and Hugging Face use."""
