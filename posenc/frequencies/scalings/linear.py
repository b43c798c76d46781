"""Linear: divide all frequencies by one number, which interpolates positions."""

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
)
from posenc.frequencies.series import inverse_frequencies


@explain_constructor_misfits
@dataclass(frozen=True)
class Linear(Scaling):
    """Interpolate positions: inv_freq' = inv_freq / factor, which is RoPE at real positions p /
    factor.

    factor: new context length divided by the training length, at least 1.

    Source: Chen et al. 2023, arXiv:2306.15595, section 2.3. Hugging Face: "linear".

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.Linear(4.0))
    """

    factor: float
    name = "linear"
    source = "Chen et al. 2023, arXiv:2306.15595, section 2.3"
    also_called = (
        "pi positioninterpolation positionalinterpolation interpolation linearscaling "
        "linearinterpolation linearscalingrotaryembedding"
    )
    encoding = NamedEncoding("linear", "golden", {"factor": 4.0})
    rope_type = RopeType("linear", required=("factor",))
    extend_method = ExtendMethod("linear", "position interpolation")

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        factor = Decimal(self.factor)
        return Frequencies(tuple(f / factor for f in inverse_frequencies(rotary_dim, rope_theta)))


@explain_constructor_misfits
@dataclass(frozen=True)
class DynamicLinear(Scaling):
    """Interpolate positions as far as the current length l exceeds the training length L: inv_freq'
    = inv_freq L/l.

    original_max_positions: L in tokens. Up to it nothing changes.

    Source: github.com/jquesnelle/yarn, LlamaDynamicScaledRotaryEmbedding with ntk=False.

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.DynamicLinear(4096))
    """

    original_max_positions: int
    depends_on_length = True
    name = "dynamic_linear"
    source = "github.com/jquesnelle/yarn, LlamaDynamicScaledRotaryEmbedding"

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        training_length = self.original_max_positions
        ratio = Decimal(training_length) / current_or_training_length(self, length, training_length)
        return Frequencies(tuple(f * ratio for f in inverse_frequencies(rotary_dim, rope_theta)))
