"""Describe frequencies as a search varies them: factors and a temperature."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posenc.encodings import rope_scaling as rs
from posenc.hf.rope.settings import EXTENDED_LAYERS, RopeSetting


@dataclass(frozen=True)
class Genome:
    """The searched values: theta' = theta / factors, non-decreasing from the fastest pair on,
    and a temperature."""

    factors: tuple[float, ...]
    temperature: float

    @property
    def key(self) -> str:
        """Return the values in four digits: genomes that agree in these count as one."""
        return ",".join(f"{x:.4g}" for x in (*self.factors, self.temperature))

    def scaling(self, setting: RopeSetting, factor: float) -> rs.Scaling:
        """Return the genome as a scaling with these factors at any length. factor: how many times
        longer texts become."""
        return rs.LongRoPE(
            max(1.0, factor), setting.original_length, self.factors, self.factors, self.temperature
        )


def monotone(factors: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """Clip factors to at least 1, never falling from the fastest pair to the slowest."""
    return tuple(float(f) for f in np.maximum.accumulate(np.maximum(factors, 1.0)))


def apply_genome(
    settings: tuple[RopeSetting, ...], genome: Genome, target: int
) -> tuple[RopeSetting, ...]:
    """Put the searched frequencies into every layer that looks beyond a window. A genome's factors
    start from the frequencies of rope_theta, so they include any compression."""
    return tuple(
        replace(s, scaling=genome.scaling(s, target / s.original_length), compression=1.0)
        if s.layer_type is None or s.layer_type in EXTENDED_LAYERS
        else s
        for s in settings
    )
