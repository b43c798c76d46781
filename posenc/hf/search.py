"""Search a checkpoint's own frequency factors: evolution over monotone factors and a
temperature."""

from __future__ import annotations

import hashlib
import itertools
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
from posenc.hf.losses import Reader
from posenc.hf.measure import bucket_edges
from posenc.hf.methods import METHODS, stretch
from posenc.queries_keys import rope_scaling as rs

PARENTS = 6
CHILDREN = 8
FINALISTS = 4
SHORT_WEIGHT = 1.75
"""A nat lost where the model could read counts as so many of those it still lacks beyond."""
SEEDS = ("linear", "ntk", "ntk-1.5x", "ntk-2x", "by-parts", "yarn", "llama3")
BANDED = ("ntk-1.5x", "ntk-2x")
"""Seeds of which each band of pairs is also tried stretched more and less."""
BAND_STEPS = (0.88, 1.2)
STEPS = (0.02, 0.07, 0.25)
"""Standard deviations of a mutation, in logs: some to settle and some to get away."""


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
    """The best genome, its score, how many were tried, and its score on windows that did not choose
    it."""

    genome: Genome
    score: float
    tried: int
    held_out: float


class Probe:
    """Windows on which genomes are compared, all on the same tokens.

    Every loss counts relative to what the model as trained makes of the same token from a window of
    its trained length: a bucket of hard text is then no argument against a genome.
    """

    def __init__(
        self, reader: Reader, settings: tuple[RopeSetting, ...], windows: Windows, trained: int
    ) -> None:
        self.reader, self.settings, self.windows = reader, settings, windows
        self.edges = bucket_edges(trained, windows.tokens.shape[1])
        self.trained = trained
        # Masked tokens are not the same ones in windows of another length: there, plain losses.
        sliding = replace(reader, window=trained)
        self.reference = np.zeros(windows.tokens.shape)
        if reader.mask_token is None:
            self.reference = sliding.all_losses(windows.tokens).numpy()

    def score(self, genome: Genome) -> float:
        """The larger of two: the worst bucket beyond the trained length, and what is lost within it
        times SHORT_WEIGHT; and a quarter of their sum, so that the smaller counts too. In nats."""
        target = self.windows.tokens.shape[1]
        with applied(self.reader.model, apply_genome(self.settings, genome, target), target):
            excess = self.reader.all_losses(self.windows.tokens).numpy() - self.reference
        beyond = max(
            float(np.nanmean(excess[:, low:high]))
            for low, high in itertools.pairwise(self.edges)
            if high > self.trained
        )
        within = SHORT_WEIGHT * float(np.nanmean(excess[:, : self.trained]))
        return max(beyond, within) + 0.25 * (beyond + within)


class Search:
    """Evolve frequency factors for one checkpoint; resumes from `state` where the file exists.

    Children lie between or a little beyond two parents, with a band of neighbouring pairs and the
    temperature multiplied by log-normal noise, made monotone again. The best few are compared once
    more on windows that none of them was chosen on.

    Args:
        reader: the model; settings: its rotation before.
        windows: a third is held out for the last comparison.
        trained: the trained length in tokens.
        state: file that keeps every genome tried; None: nothing is kept.

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
        self.settings, self.state = settings, state
        self.target = windows.tokens.shape[1]
        held = len(windows) // 3
        self.windows = windows.take(len(windows) - held)
        rest = Windows(windows.tokens[-held:], windows.documents[-held:]) if held else self.windows
        self.probe = Probe(reader, settings, self.windows, trained)
        self.check = Probe(reader, settings, rest, trained)
        self.scores: dict[str, tuple[Genome, float]] = {}
        self.spent = 0.0
        if state is not None and state.exists():
            kept = json.loads(state.read_text(encoding="utf-8"))
            if kept["searched"] != self._fingerprint():
                raise ValueError(
                    f"{state} holds a search for another model, text or length; remove it or give "
                    "another --state."
                )
            self.spent = kept["seconds"]
            for factors, temperature, score in kept["tried"]:
                genome = Genome(tuple(factors), temperature)
                self.scores[genome.key] = (genome, score)

    def run(self, seconds: float, progress: Callable[[str, float], None]) -> Found:
        """Search for so many seconds, those before a restart included; every candidate tried is
        kept in the state file."""
        began = time.perf_counter() - self.spent
        generation = 0
        for genomes in itertools.chain([self._seeds()], map(self._children, itertools.count())):
            for genome in genomes:
                self.spent = time.perf_counter() - began
                # The seeds are always tried: they are what a search has to beat.
                if generation and self.spent > seconds:
                    return self._choose()
                self._score(genome)
                best = self._best(1)[0][1]
                told = f"search, {len(self.scores)} tried, best {best:.3f}"
                progress(told, min(1.0, self.spent / max(seconds, 1e-9)))
            generation += 1
        raise AssertionError("generations never end")

    def _choose(self) -> Found:
        """The finalist with the best mean of both scores."""
        checked = [
            (genome, score, self.check.score(genome)) for genome, score in self._best(FINALISTS)
        ]
        genome, score, held_out = min(checked, key=lambda found: found[1] + found[2])
        return Found(genome, score, len(self.scores), held_out)

    def _best(self, count: int) -> list[tuple[Genome, float]]:
        return sorted(self.scores.values(), key=lambda pair: pair[1])[:count]

    def _seeds(self) -> list[Genome]:
        searched = next(
            s for s in self.settings if s.layer_type is None or s.layer_type in EXTENDED_LAYERS
        )
        plain = rs.rope_frequencies(searched.rotary_dim, searched.rope_theta).inv_freq
        turns = [float(f) * searched.original_length / (2 * np.pi) for f in plain]
        seeds, banded = [], []
        for name in SEEDS:
            if searched.rotary_dim < 4 and name.startswith("ntk"):
                continue  # NTK leaves the fastest pair and scales the slowest: it needs two
            frequencies = stretch((searched,), METHODS[name], self.target)[0].frequencies()
            factors = np.array(
                [float(p / f) for p, f in zip(plain, frequencies.inv_freq, strict=True)]
            )
            seeds.append(Genome(monotone(factors), frequencies.attention_factor))
            if name in BANDED:
                for band, step in itertools.product(_bands(turns), BAND_STEPS):
                    moved = np.where(band, factors * step, factors)
                    banded.append(Genome(monotone(moved), frequencies.attention_factor))
        return seeds + banded

    def _children(self, generation: int) -> list[Genome]:
        rng = np.random.default_rng((len(self.scores), generation))
        parents = [genome for genome, _ in self._best(PARENTS)]
        children = []
        for _ in range(CHILDREN):
            mother, father = (parents[i] for i in rng.choice(len(parents), 2))
            share = rng.uniform(-0.3, 1.3)
            logs = share * _logs(mother) + (1 - share) * _logs(father)
            start, stop = sorted(rng.integers(0, len(logs), 2))
            logs[start : stop + 1] += rng.normal(0, rng.choice(STEPS))
            *factors, temperature = np.exp(logs)
            children.append(Genome(monotone(factors), float(temperature)))
        return children

    def _score(self, genome: Genome) -> None:
        if genome.key in self.scores:
            return
        self.scores[genome.key] = (genome, self.probe.score(genome))
        if self.state is not None:
            rows = [[list(g.factors), g.temperature, s] for g, s in self.scores.values()]
            self.state.parent.mkdir(parents=True, exist_ok=True)
            kept = {"searched": self._fingerprint(), "seconds": self.spent, "tried": rows}
            write_atomically(self.state, json.dumps(kept))

    def _fingerprint(self) -> str:
        """Scores hold for these frequencies, these tokens, and these losses before."""
        digest = hashlib.sha256(self.windows.tokens.numpy().tobytes())
        before = round(float(np.nanmean(self.probe.reference)), 4)
        digest.update(repr((self.settings, self.probe.trained, SHORT_WEIGHT, before)).encode())
        return digest.hexdigest()[:16]


def _bands(turns: Sequence[float]) -> list[np.ndarray]:
    """Which pairs turn at least once within the trained length, which a quarter, which less."""
    turned = np.array(turns)
    bands = [turned >= 1, (turned < 1) & (turned >= 0.25), turned < 0.25]
    return [band for band in bands if band.any()]


def _logs(genome: Genome) -> np.ndarray:
    return np.log([*genome.factors, genome.temperature])


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
