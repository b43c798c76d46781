"""Proportional, or p-RoPE: rotate the fast pairs only."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Self

from posenc.arguments import explain_constructor_misfits
from posenc.frequencies.scalings.scaling import (
    Frequencies,
    NamedEncoding,
    RopeType,
    Scaling,
    require,
)
from posenc.frequencies.series import inverse_frequencies


@explain_constructor_misfits
@dataclass(frozen=True)
class Proportional(Scaling):
    """Rotate only the fastest int(p * rotary_dim / 2) pairs: p-RoPE.

    Partial rotary has fewer pairs, with frequencies from the fastest to the slowest; p-RoPE leaves
    the slowest pairs of all unrotated.

    p: fraction of pairs that rotate, from 0 to 1. factor: divisor of their frequencies.

    Source: Barbero et al. 2025, arXiv:2410.06205, section 6. Hugging Face: "proportional".

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.Proportional(0.5))
    """

    p: float
    factor: float = 1.0
    name = "proportional"
    source = "Barbero et al. 2025, arXiv:2410.06205, section 6"
    also_called = "prope proportional proportionalrope"
    encoding = NamedEncoding("p_rope", "golden", {"p": 0.75})
    rope_type = RopeType("proportional", optional=("partial_rotary_factor", "factor"))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, 0 <= self.p <= 1, "p is the fraction of pairs to rotate, 0 to 1", self.p)

    @classmethod
    def from_rope_parameters(
        cls, parameters, training_length, max_length, attention_factor
    ) -> Self:
        return cls(parameters.get("partial_rotary_factor", 1.0), parameters.get("factor", 1.0))

    def rope_parameters(self, rotary_dim) -> dict[str, Any]:
        return {"partial_rotary_factor": self.p, "factor": self.factor}

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        num_kept_pairs = int(self.p * rotary_dim // 2)  # pairs that rotate
        factor = Decimal(self.factor)
        inv_freq = inverse_frequencies(rotary_dim, rope_theta)
        return Frequencies(
            tuple(f / factor if t < num_kept_pairs else Decimal(0) for t, f in enumerate(inv_freq))
        )
