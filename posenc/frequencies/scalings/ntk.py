"""NTK-aware: enlarge the base, by which slow pairs change more than fast ones."""

from dataclasses import dataclass
from decimal import Decimal

from posenc.arguments import explain_constructor_misfits
from posenc.frequencies.scalings.scaling import (
    ExtendMethod,
    Frequencies,
    NamedEncoding,
    RopeType,
    Scaling,
    current_or_training_length,
    require,
)
from posenc.frequencies.series import geometric_series


def ntk_frequencies(
    scaling: Scaling, rotary_dim: int, rope_theta: float, factor: Decimal
) -> tuple[Decimal, ...]:
    """Return the frequencies of rotary_dim / 2 pairs, the fastest first, for the base rope_theta *
    factor^(d/(d-2)), d = rotary_dim: the fastest frequency stays, the slowest is divided by
    `factor`.

    Raises: ValueError if rotary_dim is below 4; the message names the class of `scaling`.
    """
    requirement = "rotary_dim must be at least 4: the slowest pair is scaled, the fastest is not"
    require(scaling, rotary_dim >= 4, requirement, rotary_dim)
    base = Decimal(rope_theta) * factor ** (Decimal(rotary_dim) / (rotary_dim - 2))
    return geometric_series(rotary_dim // 2, base, Decimal(2) / rotary_dim)


@explain_constructor_misfits
@dataclass(frozen=True)
class NTK(Scaling):
    """Enlarge the base, NTK-aware: rope_theta' = rope_theta * factor^(d/(d-2)), d = rotary_dim.

    The fastest frequency stays; the slowest is divided by exactly `factor`, the new context length
    divided by the training length.

    Source: bloc97 2023, in Peng et al. 2023, arXiv:2309.00071, section 3.1.

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.NTK(4.0))
    """

    factor: float
    name = "ntk"
    source = "Peng et al. 2023, arXiv:2309.00071, section 3.1"
    also_called = "ntkaware ntkawarescaling ntkscaling ntkrope"
    encoding = NamedEncoding("ntk", "golden", {"factor": 4.0})
    extend_method = ExtendMethod("ntk", "NTK-aware base")

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        return Frequencies(ntk_frequencies(self, rotary_dim, rope_theta, Decimal(self.factor)))


@explain_constructor_misfits
@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """Enlarge the base as far as the current length l exceeds the training length L.

    rope_theta' = rope_theta * (factor l/L - (factor - 1))^(d/(d-2)), with d = rotary_dim.

    original_max_positions: L in tokens. Up to it nothing changes.

    Source: emozilla 2023, in Peng et al. 2023, arXiv:2309.00071, section 3.3. Hugging Face:
    "dynamic".

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.DynamicNTK(2.0, 4096))
    """

    factor: float
    original_max_positions: int
    depends_on_length = True
    name = "dynamic_ntk"
    source = "emozilla 2023; Peng et al. 2023, arXiv:2309.00071, section 3.3"
    also_called = "dynamic dynamicscaling dynamicntkscaling dynntk dynamicntkscalingrotaryembedding"
    encoding = NamedEncoding("dynamic_ntk", "golden", {"factor": 4.0})
    rope_type = RopeType("dynamic", required=("factor",))
    extend_method = ExtendMethod("dynamic", "NTK by current length")

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        training_length = self.original_max_positions
        factor = Decimal(self.factor)
        current_length = current_or_training_length(self, length, training_length)
        # 1 at the training length, and `factor` more with each training length beyond it.
        stretched_factor = factor * current_length / training_length - (factor - 1)
        return Frequencies(ntk_frequencies(self, rotary_dim, rope_theta, stretched_factor))
