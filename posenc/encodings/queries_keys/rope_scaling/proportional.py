"""p-RoPE: leave the slowest pairs unrotated."""

from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

from posenc.encodings.numbers.frequencies import inverse_frequencies
from posenc.encodings.queries_keys.rope_scaling.scaling import (
    Frequencies,
    Scaling,
    require,
    require_factor,
)


@dataclass(frozen=True)
class Proportional(Scaling):
    """Rotate only the fastest int(p * rotary_dim / 2) pairs: p-RoPE.

    Partial rotary spreads the whole spectrum over fewer pairs; p-RoPE cuts off its slow end.
    `factor` divides the remaining frequencies.
    Source: Barbero et al. 2025, arXiv:2410.06205, section 6. Hugging Face: "proportional".
    """

    p: float
    factor: float = 1.0
    source: ClassVar[str] = "Barbero et al. 2025, arXiv:2410.06205, section 6"

    def __post_init__(self) -> None:
        require(self, 0 <= self.p <= 1, "p is the fraction of pairs to rotate, 0 to 1", self.p)
        require_factor(self, self.factor)

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        kept = int(self.p * rotary_dim // 2)
        factor = Decimal(self.factor)
        inv_freq = inverse_frequencies(rotary_dim, rope_theta)
        return Frequencies(
            tuple(f / factor if t < kept else Decimal(0) for t, f in enumerate(inv_freq))
        )
