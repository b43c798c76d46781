"""Search a checkpoint's own frequency factors: evolution over monotone factors and a
temperature."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from posenc.checkpoints.rope_config import EXTENDED_LAYERS, RopeSetting
from posenc.checkpoints.text import Windows
from posenc.files import write_atomically
from posenc.hf.apply import applied
from posenc.hf.measure import Evaluation, Reader, evaluate
from posenc.hf.methods import METHODS, stretch
from posenc.queries_keys import rope_scaling as rs

PARENTS = 6
CHILDREN = 8
SHORT_WEIGHT = 1.5
SEEDS = ("linear", "ntk", "ntk-1.5x", "ntk-2x", "by-parts", "yarn", "llama3")


@dataclass(frozen=True)
class Genome:
    """What is searched: theta' = theta / factors, non-decreasing from the fastest pair on, and a
    temperature."""

    factors: tuple[float, ...]
    temperature: float

    @property
    def key(self) -> str:
        return ",".join(f"{x:.4g}" for x in (*self.factors, self.temperature))

    def scaling(self, setting: RopeSetting, factor: float) -> rs.Scaling:
        return rs.LongRoPE(
            max(1.0, factor), setting.original_length, self.factors, self.factors, self.temperature
        )


@dataclass(frozen=True)
class Found:
    genome: Genome
    score: float
    tried: int


class Search:
    """Evolve frequency factors for one checkpoint; resumes from `state` where the file exists.

    The score is the loss of the worst bucket beyond the trained length plus 1.5 times what is lost
    within it, in nats: what a checkpoint can do already counts more than what it gains. Children
    are parents with some factors multiplied by log-normal noise, made monotone again, as in
    LongRoPE.

    Source: Ding et al. 2024, arXiv:2402.13753, section 3.2 (evolution, monotone factors, seeds from
    other methods).
    """

    def __init__(
        self,
        reader: Reader,
        settings: tuple[RopeSetting, ...],
        windows: Windows,
        trained: int,
        state: Path | None,
    ) -> None:
        self.reader, self.settings, self.windows, self.trained = reader, settings, windows, trained
        self.target = windows.tokens.shape[1]
        self.state = state
        self.scores: dict[str, tuple[Genome, float]] = {}
        self.baseline = self._measure(settings).short(trained)
        if state is not None and state.exists():
            kept = json.loads(state.read_text(encoding="utf-8"))
            if kept["searched"] != self._fingerprint():
                raise ValueError(
                    f"{state} holds a search for another model, text or length; remove it or give "
                    "another --state."
                )
            for factors, temperature, score in kept["tried"]:
                genome = Genome(tuple(factors), temperature)
                self.scores[genome.key] = (genome, score)

    def run(self, seconds: float, progress: Callable[[str, float], None]) -> Found:
        """Search for so many seconds; every candidate tried is kept in the state file."""
        deadline = time.perf_counter() + seconds
        for genome in self._seeds():
            self._score(genome)
        generation = 0
        while (left := deadline - time.perf_counter()) > 0:
            progress(
                f"search, {len(self.scores)} tried, best {self._best()[0][1]:.3f}",
                1 - left / seconds,
            )
            rng = np.random.default_rng((len(self.scores), generation))
            generation += 1
            for genome in self._children(rng):
                if time.perf_counter() > deadline:
                    break
                self._score(genome)
        genome, score = self._best()[0]
        return Found(genome, score, len(self.scores))

    def _best(self) -> list[tuple[Genome, float]]:
        return sorted(self.scores.values(), key=lambda pair: pair[1])[:PARENTS]

    def _seeds(self) -> list[Genome]:
        seeds = []
        searched = next(
            s for s in self.settings if s.layer_type is None or s.layer_type in EXTENDED_LAYERS
        )
        plain = rs.rope_frequencies(searched.rotary_dim, searched.rope_theta).inv_freq
        for name in SEEDS:
            if searched.rotary_dim < 4 and name.startswith("ntk"):
                continue  # NTK leaves the fastest pair and scales the slowest: it needs two
            frequencies = stretch((searched,), METHODS[name], self.target)[0].frequencies()
            factors = [float(p / f) for p, f in zip(plain, frequencies.inv_freq, strict=True)]
            seeds.append(Genome(monotone(factors), frequencies.attention_factor))
        return seeds

    def _children(self, rng: np.random.Generator) -> list[Genome]:
        parents = [genome for genome, _ in self._best()]
        children = []
        for _ in range(CHILDREN):
            mother, father = (parents[i] for i in rng.integers(0, len(parents), 2))
            mixed = np.where(rng.random(len(mother.factors)) < 0.5, mother.factors, father.factors)
            noise = np.exp(rng.normal(0, 0.2, len(mixed)) * (rng.random(len(mixed)) < 0.5))
            temperature = mother.temperature * float(np.exp(rng.normal(0, 0.05)))
            children.append(Genome(monotone(mixed * noise), temperature))
        return children

    def _score(self, genome: Genome) -> None:
        if genome.key in self.scores:
            return
        measured = self._measure(apply_genome(self.settings, genome, self.target))
        beyond = [
            e.mean
            for edge, e in zip(measured.edges[1:], measured.by_position, strict=True)
            if edge > self.trained
        ]
        self.scores[genome.key] = (
            genome,
            max(beyond) + SHORT_WEIGHT * (measured.short(self.trained) - self.baseline),
        )
        if self.state is not None:
            rows = [[list(g.factors), g.temperature, s] for g, s in self.scores.values()]
            self.state.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(
                self.state, json.dumps({"searched": self._fingerprint(), "tried": rows})
            )

    def _fingerprint(self) -> str:
        """Scores hold for these frequencies, these tokens, and this loss before."""
        digest = hashlib.sha256(self.windows.tokens.numpy().tobytes())
        digest.update(repr((self.settings, self.trained, round(self.baseline, 4))).encode())
        return digest.hexdigest()[:16]

    def _measure(self, settings: tuple[RopeSetting, ...]) -> Evaluation:
        with applied(self.reader.model, settings, self.target):
            return evaluate(self.reader, self.windows, self.trained, entropy=False)


def monotone(factors: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """At least 1 and never falling from the fastest pair to the slowest."""
    return tuple(float(f) for f in np.maximum.accumulate(np.maximum(factors, 1.0)))


def apply_genome(
    settings: tuple[RopeSetting, ...], genome: Genome, target: int
) -> tuple[RopeSetting, ...]:
    """The settings with the searched frequencies in every layer that looks beyond a window."""
    return tuple(
        replace(s, scaling=genome.scaling(s, target / s.original_length))
        if s.layer_type is None or s.layer_type in EXTENDED_LAYERS
        else s
        for s in settings
    )
