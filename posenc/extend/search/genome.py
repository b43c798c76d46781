"""Describe frequencies as a search varies them: factors and a temperature."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posenc.frequencies.scaling import Scaling
from posenc.frequencies.scalings import LongRoPE
from posenc.hf.rope.settings import EXTENDED_LAYERS, RopeSetting


@dataclass(frozen=True)
class Genome:
    """The searched values: theta' = theta / factors, non-decreasing from the fastest pair on,
    and a temperature."""

    factors: tuple[float, ...]
    temperature: float

    @property
    def key(self) -> str:
        """Return the values in four digits as a text: genomes with the same text count as one."""
        return ",".join(f"{x:.4g}" for x in (*self.factors, self.temperature))

    def scaling(self, setting: RopeSetting, factor: float) -> Scaling:
        """Return the genome as a scaling with the same factors for short and long texts. factor:
        how many times longer texts become."""
        return LongRoPE(
            max(1.0, factor), setting.original_length, self.factors, self.factors, self.temperature
        )


def monotone_factors(factors: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """Return the factors raised to at least 1 and to the largest before them, so that they never
    fall from the fastest pair to the slowest: (0.5, 2, 1) -> (1.0, 2.0, 2.0)."""
    return tuple(float(f) for f in np.maximum.accumulate(np.maximum(factors, 1.0)))


def apply_genome(
    settings: tuple[RopeSetting, ...], genome: Genome, target: int
) -> tuple[RopeSetting, ...]:
    """Return the settings with the genome's frequencies in every layer that looks beyond a window.
    target: the new length in tokens. A genome's factors start from the frequencies of rope_theta,
    so they include any compression."""
    return tuple(
        replace(s, scaling=genome.scaling(s, target / s.original_length), compression=1.0)
        if s.layer_type is None or s.layer_type in EXTENDED_LAYERS
        else s
        for s in settings
    )
