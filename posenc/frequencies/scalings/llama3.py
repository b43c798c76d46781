"""Llama 3.1's scaling: NTK-by-parts with other numbers of turns."""

from dataclasses import dataclass

from posenc.arguments import explain_constructor_misfits
from posenc.frequencies.scalings.by_parts import NTKByParts
from posenc.frequencies.scalings.scaling import (
    ExtendMethod,
    Frequencies,
    NamedEncoding,
    RopeType,
    Scaling,
    require,
)


@explain_constructor_misfits
@dataclass(frozen=True)
class Llama3(Scaling):
    """Scale as Llama 3.1, with L = original_max_positions: keep wavelengths below
    L/high_freq_factor, multiply those above L/low_freq_factor by `factor`, and blend the
    frequencies between.

    This is the paper's NTK-by-parts with alpha = low_freq_factor, beta = high_freq_factor.
    Source: Meta 2024, github.com/meta-llama/llama-models, apply_scaling.

    >>> rope = posenc.RoPE(64, interleaved=False, scaling=posenc.Llama3(8.0, 8192))
    """

    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    name = "llama3"
    source = "Meta 2024, github.com/meta-llama/llama-models, apply_scaling"
    also_called = "llama31 llama3scaling llama3rope"
    encoding = NamedEncoding("llama3", "golden", {"factor": 4.0})
    rope_type = RopeType(
        "llama3",
        required=("factor", "low_freq_factor", "high_freq_factor"),
        has_original_length=True,
    )
    extend_method = ExtendMethod("llama3", "Llama 3 scaling")

    def __post_init__(self) -> None:
        super().__post_init__()
        low = self.low_freq_factor
        high = self.high_freq_factor
        requirement = "low_freq_factor must be positive and below high_freq_factor"
        require(self, 0 < low < high, requirement, f"{low} and {high}")

    def frequencies(self, rotary_dim, rope_theta, length=None) -> Frequencies:
        by_parts = NTKByParts(
            self.factor, self.original_max_positions, self.low_freq_factor, self.high_freq_factor
        )
        return by_parts.frequencies(rotary_dim, rope_theta)
