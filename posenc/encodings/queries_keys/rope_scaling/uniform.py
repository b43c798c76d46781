"""Scale all pairs by one formula, unlike `by_parts`: interpolate positions, enlarge the base, by
which slow pairs change more than fast ones, or stop slow pairs."""

from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

from posenc.arguments import answered_class
from posenc.encodings.numbers.frequencies import geometric_series, inverse_frequencies
from posenc.encodings.queries_keys.rope_scaling.scaling import (
    Frequencies,
    Scaling,
    current_or_training_length,
    require,
)


def ntk_frequencies(
    scaling: Scaling, rotary_dim: int, rope_theta: float, factor: Decimal
) -> tuple[Decimal, ...]:
    """Return the frequencies of rotary_dim / 2 pairs, the fastest first, with the base rope_theta *
    factor^(d/(d-2)), d = rotary_dim: the fastest stays, the slowest is divided by `factor`.

    Raises: ValueError, which names `scaling`, if rotary_dim is below 4.
    """
    expected = "rotary_dim must be at least 4: the slowest pair is scaled, the fastest is not"
    require(scaling, rotary_dim >= 4, expected, rotary_dim)
    base = Decimal(rope_theta) * factor ** (Decimal(rotary_dim) / (rotary_dim - 2))
    return geometric_series(rotary_dim // 2, base, Decimal(2) / rotary_dim)


@answered_class
@dataclass(frozen=True)
class Linear(Scaling):
    """Interpolate positions: theta' = theta / factor, which is RoPE at real positions p / factor.

    Source: Chen et al. 2023, arXiv:2306.15595, section 2.3. Hugging Face: "linear".

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.Linear(4.0))
    """

    factor: float
    source: ClassVar[str] = "Chen et al. 2023, arXiv:2306.15595, section 2.3"

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        factor = Decimal(self.factor)
        return Frequencies(tuple(f / factor for f in inverse_frequencies(rotary_dim, rope_theta)))


@answered_class
@dataclass(frozen=True)
class NTK(Scaling):
    """Enlarge the base, NTK-aware: base' = base * factor^(d/(d-2)), d = rotary_dim.

    The fastest frequency stays; the slowest is divided by exactly `factor`.
    Source: bloc97 2023, in Peng et al. 2023, arXiv:2309.00071, section 3.1.

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.NTK(4.0))
    """

    factor: float
    source: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071, section 3.1"

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        return Frequencies(ntk_frequencies(self, rotary_dim, rope_theta, Decimal(self.factor)))


@answered_class
@dataclass(frozen=True)
class DynamicLinear(Scaling):
    """Interpolate positions if the current length l exceeds the training length L: theta' = theta
    L/l.

    Source: github.com/jquesnelle/yarn, LlamaDynamicScaledRotaryEmbedding with ntk=False.

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.DynamicLinear(4096))
    """

    original_max_positions: int
    depends_on_length = True
    source: ClassVar[str] = "github.com/jquesnelle/yarn, LlamaDynamicScaledRotaryEmbedding"

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        trained = self.original_max_positions
        ratio = Decimal(trained) / current_or_training_length(self, length, trained)
        return Frequencies(tuple(f * ratio for f in inverse_frequencies(rotary_dim, rope_theta)))


@answered_class
@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """Enlarge the base depending on the current length l.

    base' = base * (factor l/L - (factor - 1))^(d/(d-2)), with d = rotary_dim.

    Nothing changes up to the training length L. Source: emozilla 2023, in Peng et al. 2023,
    arXiv:2309.00071, section 3.3. Hugging Face: "dynamic".

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.DynamicNTK(2.0, 4096))
    """

    factor: float
    original_max_positions: int
    depends_on_length = True
    source: ClassVar[str] = "emozilla 2023; Peng et al. 2023, arXiv:2309.00071, section 3.3"

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        trained = self.original_max_positions
        factor = Decimal(self.factor)
        stretch = factor * current_or_training_length(self, length, trained) / trained - (
            factor - 1
        )
        return Frequencies(ntk_frequencies(self, rotary_dim, rope_theta, stretch))


@answered_class
@dataclass(frozen=True)
class Proportional(Scaling):
    """Rotate only the fastest int(p * rotary_dim / 2) pairs: p-RoPE.

    Partial rotary spreads the whole spectrum over fewer pairs; p-RoPE cuts off its slow end.
    `factor` divides the remaining frequencies.
    Source: Barbero et al. 2025, arXiv:2410.06205, section 6. Hugging Face: "proportional".

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.Proportional(0.5))
    """

    p: float
    factor: float = 1.0
    source: ClassVar[str] = "Barbero et al. 2025, arXiv:2410.06205, section 6"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, 0 <= self.p <= 1, "p is the fraction of pairs to rotate, 0 to 1", self.p)

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        kept = int(self.p * rotary_dim // 2)  # pairs that rotate
        factor = Decimal(self.factor)
        inv_freq = inverse_frequencies(rotary_dim, rope_theta)
        return Frequencies(
            tuple(f / factor if t < kept else Decimal(0) for t, f in enumerate(inv_freq))
        )
