"""YaRN: scale by parts, with a temperature of the logits."""

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Self

from posenc.arguments import explain_constructor_misfits
from posenc.frequencies.float64_formulas import yarn_attention_factor
from posenc.frequencies.scalings.by_parts import blend_frequencies
from posenc.frequencies.scalings.scaling import (
    Frequencies,
    NamedEncoding,
    RopeType,
    Scaling,
    current_or_training_length,
    require,
    require_attention_factor,
)
from posenc.frequencies.series import TWO_PI, inverse_frequencies


def _index_of_pair_with_turns(
    turns: float, rotary_dim: int, rope_theta: float, length: int
) -> Decimal:
    """Return the index t, a real number, of a pair that would make `turns` turns in `length`
    positions.

    turns = length inv_freq[t] / 2 pi, with inv_freq[t] = rope_theta^(-2t/rotary_dim), solved for t:
    t = rotary_dim ln(length / (2 pi turns)) / (2 ln(rope_theta))
    """
    logarithm = (Decimal(length) / (Decimal(turns) * TWO_PI)).ln()
    return rotary_dim * logarithm / (2 * Decimal(rope_theta).ln())


def _ramp(low: Decimal, high: Decimal, count: int) -> list[Decimal]:
    """Return `count` numbers, one for each index from 0: 0 up to index `low`, 1 from index `high`
    on, and between them on the straight line from 0 to 1."""
    if low == high:
        high += Decimal("0.001")  # as in the authors' code, against division by zero
    return [min(max((t - low) / (high - low), Decimal(0)), Decimal(1)) for t in range(count)]


def _ramp_ends(
    fast_turns: float,
    slow_turns: float,
    rotary_dim: int,
    rope_theta: float,
    length: int,
    truncate: bool,
) -> tuple[Decimal, Decimal]:
    """Return the indices (low, high) of pairs between which YaRN's ramp rises: those of the pairs
    that make `fast_turns` and `slow_turns` turns in `length` positions. They are real numbers,
    rounded outwards to whole ones if `truncate`."""
    low = _index_of_pair_with_turns(fast_turns, rotary_dim, rope_theta, length)
    high = _index_of_pair_with_turns(slow_turns, rotary_dim, rope_theta, length)
    if truncate:
        low = Decimal(math.floor(low))
        high = Decimal(math.ceil(high))
    # The last pair has the index rotary_dim / 2 - 1; the released code, which checkpoints were
    # trained with, limits `high` to the last channel.
    return max(low, Decimal(0)), min(high, Decimal(rotary_dim - 1))


@explain_constructor_misfits
@dataclass(frozen=True)
class YaRN(Scaling):
    """Scale as released YaRN: a linear ramp in the pair's index between the pairs with beta_fast
    and beta_slow turns within the training length, and a factor of cos and sin.

    attention_factor: factor of cos and sin; None means
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), at every length.
    mscale, mscale_all_dim: DeepSeek's pair. All logits are also multiplied by `logit_scale`,
    (0.1 mscale_all_dim ln(factor) + 1)^2. Hugging Face's Llama omits that factor, and ignores one
    of the two without the other: give attention_factor for its checkpoints.
    extrapolation_factor: fraction of the fast pairs' own frequency that is kept, from 0 to 1.
    truncate: round the ends of the ramp to whole pairs (False: gpt-oss).

    Raises: ValueError for beta_fast < beta_slow, or attention_factor together with mscale.
    Source: Peng et al. 2023, arXiv:2309.00071, section 3; github.com/jquesnelle/yarn;
    DeepSeek-AI 2024, arXiv:2405.04434.

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.YaRN(4.0, 4096))
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    extrapolation_factor: float = 1.0
    name = "yarn"
    source = "Peng et al. 2023, arXiv:2309.00071, section 3"
    also_called = "yarnscaling yarnrope yarnrotaryembedding"
    encoding = NamedEncoding("yarn", "golden", {"factor": 4.0})
    rope_type = RopeType(
        "yarn",
        required=("factor",),
        optional=(
            "beta_fast",
            "beta_slow",
            "truncate",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        ),
        has_original_length=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        requirement = "beta_fast and beta_slow are numbers of turns with beta_fast >= beta_slow > 0"
        betas_in_words = f"{self.beta_fast} and {self.beta_slow}"
        require(self, self.beta_fast >= self.beta_slow > 0, requirement, betas_in_words)
        require_attention_factor(self, self.attention_factor)
        share = self.extrapolation_factor
        require(self, 0 <= share <= 1, "extrapolation_factor must be between 0 and 1", share)
        require(
            self,
            self.attention_factor is None or (self.mscale, self.mscale_all_dim) == (1.0, 0.0),
            "give attention_factor, or mscale and mscale_all_dim, not both",
            f"{self.attention_factor}, {self.mscale} and {self.mscale_all_dim}",
        )

    @classmethod
    def from_rope_parameters(
        cls, parameters, training_length, max_length, attention_factor
    ) -> Self:
        return cls(
            parameters["factor"],
            training_length,
            # transformers takes the defaults for null and 0, too
            beta_fast=parameters.get("beta_fast") or 32.0,
            beta_slow=parameters.get("beta_slow") or 1.0,
            truncate=parameters.get("truncate", True) is not False,
            attention_factor=attention_factor,
        )

    def rope_parameters(self, rotary_dim) -> dict[str, Any]:  # only longrope needs rotary_dim
        return {
            "factor": self.factor,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
            "attention_factor": self.attention_factor_in_use,
        }

    @property
    def attention_factor_in_use(self) -> float:
        """Return the factor of cos and sin, the same at every length: `attention_factor`, or if
        that is None the number that the class's formula gives."""
        if self.attention_factor is not None:
            return self.attention_factor
        numerator = yarn_attention_factor(self.factor, self.mscale)
        return numerator / yarn_attention_factor(self.factor, self.mscale_all_dim)

    @property
    def logit_scale(self) -> float:
        return yarn_attention_factor(self.factor, self.mscale_all_dim) ** 2

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        require(self, rope_theta != 1, "rope_theta must differ from 1", rope_theta)
        low, high = _ramp_ends(
            self.beta_fast,
            self.beta_slow,
            rotary_dim,
            rope_theta,
            self.original_max_positions,
            self.truncate,
        )
        inv_freq = inverse_frequencies(rotary_dim, rope_theta)
        max_kept_fraction = Decimal(self.extrapolation_factor)
        kept_fractions = [
            (1 - interpolated_fraction) * max_kept_fraction
            for interpolated_fraction in _ramp(low, high, len(inv_freq))
        ]
        scaled = blend_frequencies(inv_freq, Decimal(self.factor), kept_fractions)
        return Frequencies(scaled, self.attention_factor_in_use)


@explain_constructor_misfits
@dataclass(frozen=True)
class DynamicYaRN(Scaling):
    """Scale as YaRN with factor = l / L at the current length l, and not at all up to the training
    length L.

    Source: github.com/jquesnelle/yarn, LlamaDynamicYaRNScaledRotaryEmbedding.

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.DynamicYaRN(4096))
    """

    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    depends_on_length = True
    name = "dynamic_yarn"
    source = "github.com/jquesnelle/yarn, LlamaDynamicYaRNScaledRotaryEmbedding"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._yarn_at_length(None)  # YaRN's constructor checks beta_fast and beta_slow

    def _yarn_at_length(self, length: int | None) -> YaRN:
        """Return the YaRN with factor = length / training length for a current length in tokens;
        factor 1 up to the training length, and if `length` is None."""
        training_length = self.original_max_positions
        factor = current_or_training_length(self, length, training_length) / training_length
        return YaRN(factor, training_length, self.beta_fast, self.beta_slow)

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        return self._yarn_at_length(length).frequencies(rotary_dim, rope_theta)
