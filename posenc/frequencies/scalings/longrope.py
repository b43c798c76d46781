"""LongRoPE: divide the frequency of each pair of channels by a factor of its own."""

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Self

from posenc.arguments import explain_constructor_misfits
from posenc.frequencies.float64_formulas import longrope_attention_factor
from posenc.frequencies.scalings.scaling import (
    Frequencies,
    NamedEncoding,
    RopeType,
    Scaling,
    current_or_training_length,
    require,
    require_attention_factor,
)
from posenc.frequencies.series import inverse_frequencies


@explain_constructor_misfits
@dataclass(frozen=True)
class LongRoPE(Scaling):
    """Divide each pair's frequency by its own searched factor: LongRoPE.

    inv_freq'[t] = inv_freq[t] / long_factor[t] if the current length exceeds
    original_max_positions, otherwise inv_freq[t] / short_factor[t]. Two equal lists give the same
    frequencies at every length.

    factor: new context length divided by the old one; sets attention_factor.
    short_factor: None means 1 for every pair. long_factor: None means `factor` for every pair,
    which is position interpolation, where a search starts.
    attention_factor: factor of cos and sin; None means sqrt(1 + ln(factor) /
    ln(original_max_positions)), at every length.
    exempt_tokens: number of first positions that keep the unscaled rotation, without
    attention_factor.

    Raises: ValueError if a list does not fit rotary_dim or has a number that is not positive.
    Source: Ding et al. 2024, arXiv:2402.13753, section 3; github.com/microsoft/LongRoPE.

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.LongRoPE(4.0, 4096))
    """

    factor: float
    original_max_positions: int
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    attention_factor: float | None = None
    exempt_tokens: int = 0
    name = "longrope"
    source = "Ding et al. 2024, arXiv:2402.13753, section 3"
    also_called = "su surope suscaled longropescaling"
    encoding = NamedEncoding("longrope", "golden", {"factor": 4.0})
    rope_type = RopeType(
        "longrope",
        required=("short_factor", "long_factor"),
        optional=("factor", "attention_factor", "short_mscale", "long_mscale"),
        has_original_length=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        requirement = "original_max_positions is the training length in tokens, at least 2"
        require(self, self.original_max_positions >= 2, requirement, self.original_max_positions)
        require_attention_factor(self, self.attention_factor)
        require(self, self.exempt_tokens >= 0, "exempt_tokens must be >= 0", self.exempt_tokens)
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None:
                object.__setattr__(self, name, tuple(float(f) for f in factors))
                are_valid = all(math.isfinite(f) and f > 0 for f in factors)
                require(self, are_valid, f"{name} must be positive numbers", list(factors))

    @classmethod
    def from_rope_parameters(
        cls, parameters, training_length, max_length, attention_factor
    ) -> Self:
        return cls(
            parameters.get("factor") or max_length / training_length,
            training_length,
            short_factor=tuple(parameters["short_factor"]),
            long_factor=tuple(parameters["long_factor"]),
            attention_factor=attention_factor,
        )

    def rope_parameters(self, rotary_dim) -> dict[str, Any]:
        num_pairs = rotary_dim // 2
        return {
            "factor": self.factor,
            "short_factor": list(self.short_factor or (1.0,) * num_pairs),
            "long_factor": list(self.long_factor or (self.factor,) * num_pairs),
            "attention_factor": self.attention_factor_in_use,
        }

    @property
    def attention_factor_in_use(self) -> float:
        """Return the factor of cos and sin, the same at every length: `attention_factor`, or if
        that is None the number that the class's formula gives."""
        if self.attention_factor is not None:
            return self.attention_factor
        return longrope_attention_factor(self.factor, self.original_max_positions)

    @property
    def depends_on_length(self) -> bool:  # type: ignore[override]
        return self.short_factor is None or self.short_factor != self.long_factor

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        inv_freq = inverse_frequencies(rotary_dim, rope_theta)
        training_length = self.original_max_positions
        num_pairs = len(inv_freq)
        for name in ("short_factor", "long_factor"):
            num_factors = len(getattr(self, name) or inv_freq)
            require(
                self,
                num_factors == num_pairs,
                f"{name} must have one number per pair, {num_pairs}",
                num_factors,
            )
        if current_or_training_length(self, length, training_length) > training_length:
            factors = self.long_factor or (self.factor,) * num_pairs
        else:
            factors = self.short_factor or (1.0,) * num_pairs
        scaled = tuple(f / Decimal(factor) for f, factor in zip(inv_freq, factors, strict=True))
        return Frequencies(scaled, self.attention_factor_in_use)
