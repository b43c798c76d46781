"""Scale by parts: keep fast pairs, interpolate slow pairs, and blend between."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from posenc.arguments import explain_constructor_misfits
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
