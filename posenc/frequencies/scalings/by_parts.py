"""Scale by parts: keep fast pairs, interpolate slow pairs, and blend between."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from posenc.arguments import explain_constructor_misfits
from posenc.frequencies.scalings.ntk import ntk_frequencies
from posenc.frequencies.scalings.scaling import Frequencies, NamedEncoding, Scaling, require
from posenc.frequencies.series import TWO_PI, inverse_frequencies


def blend_frequencies(
    inv_freq: Sequence[Decimal], factor: Decimal, kept_fractions: Sequence[Decimal]
) -> tuple[Decimal, ...]:
    """Return kept f + (1 - kept) f / factor for each frequency f and its kept fraction: f itself
    where kept is 1, f divided by `factor` where it is 0."""
    return tuple(
        (1 - kept) * f / factor + kept * f for f, kept in zip(inv_freq, kept_fractions, strict=True)
    )


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


def ramp(low: Decimal, high: Decimal, count: int) -> list[Decimal]:
    """Return `count` numbers, one for each index from 0: 0 up to index `low`, 1 from index `high`
    on, and between them on the straight line from 0 to 1."""
    if low == high:
        high += Decimal("0.001")  # as in the authors' code, against division by zero
    return [min(max((t - low) / (high - low), Decimal(0)), Decimal(1)) for t in range(count)]


def ramp_ends(
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
class NTKByParts(Scaling):
    """Scale as the paper's NTK-by-parts: inv_freq' = (1 - g) inv_freq / factor + g inv_freq.

    g = clip((r - alpha) / (beta - alpha), 0, 1), r = original_max_positions / wavelength

    r is the number of turns of a pair within the training length. Pairs with more than beta turns
    keep their frequency; pairs with less than alpha turns are interpolated. Released YaRN code uses
    another ramp, see YaRN.

    Source: Peng et al. 2023, arXiv:2309.00071, definition 2.

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.NTKByParts(4.0, 4096))
    """

    factor: float
    original_max_positions: int
    alpha: float = 1.0
    beta: float = 32.0
    name = "ntk_by_parts"
    source = "Peng et al. 2023, arXiv:2309.00071, definition 2"
    also_called = "byparts"
    encoding = NamedEncoding("ntk_by_parts", "reference", {"factor": 4.0})

    def __post_init__(self) -> None:
        super().__post_init__()
        requirement = "alpha and beta are numbers of turns with 0 <= alpha <= beta"
        require(self, 0 <= self.alpha <= self.beta, requirement, f"{self.alpha} and {self.beta}")

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        inv_freq = inverse_frequencies(rotary_dim, rope_theta)
        kept_fractions = tuple(
            self._kept_fraction(self.original_max_positions * f / TWO_PI) for f in inv_freq
        )
        return Frequencies(blend_frequencies(inv_freq, Decimal(self.factor), kept_fractions))

    def _kept_fraction(self, turns: Decimal) -> Decimal:
        """Return the fraction of its own frequency that a pair keeps, from 0 (interpolated) to 1,
        for its number of turns in the training length."""
        if turns >= self.beta:
            return Decimal(1)
        if turns <= self.alpha:
            return Decimal(0)
        return (turns - Decimal(self.alpha)) / (Decimal(self.beta) - Decimal(self.alpha))


@explain_constructor_misfits
@dataclass(frozen=True)
class NTKByPartsV1(Scaling):
    """Scale as bloc97's first by-parts: slow pairs are interpolated, faster ones scaled as by NTK,
    the fastest unscaled, with a ramp over the pair index between them.

    By numbers of turns in the training length, the ramp from interpolation to NTK is between 0.75
    and 1.25, that from NTK to unscaled between 2 and 16; bloc97 tuned these by hand for Llama.

    ntk_factor, extrapolation_factor: fraction of the way that the first and the second ramp go,
    from 0 to 1.

    Source: github.com/jquesnelle/yarn, LlamaPartNTKScaledRotaryEmbedding.

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.NTKByPartsV1(4.0, 4096))
    """

    factor: float
    original_max_positions: int
    ntk_factor: float = 1.0
    extrapolation_factor: float = 1.0
    name = "ntk_by_parts_v1"
    source = "github.com/jquesnelle/yarn, LlamaPartNTKScaledRotaryEmbedding"

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = (self.ntk_factor, self.extrapolation_factor)
        requirement = "ntk_factor and extrapolation_factor must be between 0 and 1"
        require(self, all(0 <= share <= 1 for share in shares), requirement, shares)

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        unscaled = inverse_frequencies(rotary_dim, rope_theta)
        interpolated = tuple(f / Decimal(self.factor) for f in unscaled)
        ntk_scaled = ntk_frequencies(self, rotary_dim, rope_theta, Decimal(self.factor))

        def blend_series(
            slower: Sequence[Decimal],
            faster: Sequence[Decimal],
            fast_turns: float,
            slow_turns: float,
            share,
        ) -> tuple[Decimal, ...]:
            """Return frequencies that lead from `slower` to `faster`: `slower` ones for pairs with
            `slow_turns` turns or less, and from there on a ramp that ends at `fast_turns` turns
            with the fraction `share` of the way to the `faster` ones."""
            low, high = ramp_ends(
                fast_turns, slow_turns, rotary_dim, rope_theta, self.original_max_positions, True
            )
            shares_of_faster = [
                (1 - ramp_value) * Decimal(share) for ramp_value in ramp(low, high, len(unscaled))
            ]
            return tuple(
                slow_frequency * (1 - share_of_faster) + fast_frequency * share_of_faster
                for slow_frequency, fast_frequency, share_of_faster in zip(
                    slower, faster, shares_of_faster, strict=True
                )
            )

        # The numbers of turns that bloc97 tuned by hand, see the class.
        blended_with_ntk = blend_series(
            interpolated, ntk_scaled, fast_turns=1.25, slow_turns=0.75, share=self.ntk_factor
        )
        return Frequencies(
            blend_series(
                blended_with_ntk,
                unscaled,
                fast_turns=16,
                slow_turns=2,
                share=self.extrapolation_factor,
            )
        )
