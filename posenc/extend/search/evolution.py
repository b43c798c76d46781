"""Search a checkpoint's own frequency factors: evolution over monotone factors and a
temperature."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from posenc.encodings import rope_scaling as rs
from posenc.extend.measure.evaluation import position_edges
from posenc.extend.measure.losses import NotFinite, Reader
from posenc.extend.restart import read_sealed, run_identity, write_sealed
from posenc.extend.search.genome import Genome, apply_genome, monotone
from posenc.extend.variants.methods import METHODS, stretch
from posenc.hf.checkpoint.text import Windows
from posenc.hf.rope.apply import settings_applied
from posenc.hf.rope.settings import EXTENDED_LAYERS, RopeSetting

SHORT_WEIGHT = 1.75
"""Weight of a nat lost within the training length, in nats beyond it."""


@dataclass(frozen=True)
class Tried:
    """A genome's score on all windows (inf if it was given up), and on the first ones."""

    genome: Genome
    score: float
    first: float


class Probe:
    """The windows on which all genomes are compared.

    Every loss is relative to the trained model's loss on the same token in a window of its training
    length, so that a bucket of hard text does not count against a genome.
    """

    def __init__(
        self, reader: Reader, settings: tuple[RopeSetting, ...], windows: Windows, trained: int
    ) -> None:
        self.reader, self.settings, self.windows = reader, settings, windows
        self.edges = position_edges(trained, windows.tokens.shape[1])
        self.trained = trained
        # Masked tokens are not the same ones in windows of another length: there, plain losses.
        sliding = replace(reader, window=trained)
        self.reference = np.zeros(windows.tokens.shape)
        if reader.mask_token is None:
            self.reference = sliding.all_losses(windows.tokens).numpy()

    def score(self, genome: Genome, bar: float = math.inf) -> Tried:
        """Return the larger of two losses plus a quarter of their sum, in nats: the worst bucket
        beyond the training length, and SHORT_WEIGHT times what is lost within it.

        A genome that the first third of the windows puts above `bar`, or whose losses are not
        finite, is given up.
        """
        tokens = self.windows.tokens
        first = -(-len(tokens) // 3)
        length = tokens.shape[1]
        settings = apply_genome(self.settings, genome, length)
        try:
            with settings_applied(self.reader.model, settings, length):
                losses = self.reader.all_losses(tokens[:first]).numpy()
                early = self._weighted_loss(losses - self.reference[:first])
                if early > bar:
                    return Tried(genome, math.inf, early)
                if first < len(tokens):
                    rest = self.reader.all_losses(tokens[first:]).numpy()
                    losses = np.concatenate([losses, rest])
        except NotFinite:
            return Tried(genome, math.inf, math.inf)
        return Tried(genome, self._weighted_loss(losses - self.reference), early)

    def _weighted_loss(self, excess: np.ndarray) -> float:
        """Return the loss of `score` in nats, from losses (windows, length) of which those of the
        trained model are subtracted."""
        beyond = max(
            float(np.nanmean(excess[:, low:high]))
            for low, high in itertools.pairwise(self.edges)
            if high > self.trained
        )
        within = SHORT_WEIGHT * float(np.nanmean(excess[:, : self.trained]))
        return max(beyond, within) + 0.25 * (beyond + within)


PARENTS = 6
CHILDREN = 8
FINALISTS = 4
MARGIN = 0.05
"""A genome whose first windows are at most this many nats worse than the parents' is read on."""
SEEDS = ("linear", "ntk", "ntk-1.5x", "ntk-2x", "by-parts", "yarn", "llama3")
BANDED = ("ntk-1.5x", "ntk-2x")
"""Seeds whose bands of pairs are also tried stretched more and less."""
BAND_STEPS = (0.88, 1.2)
STEPS = (0.02, 0.07, 0.25)
"""Standard deviations of a mutation, in logs: some to settle and some to get away."""


@dataclass(frozen=True)
class Found:
    """The best genome, its score and the number tried."""

    genome: Genome
    score: float
    tried: int


class Search:
    """Evolve frequency factors for one checkpoint; resumes from `state` if the file exists.

    Children lie between or a little beyond two parents, with a band of neighbouring pairs and the
    temperature multiplied by log-normal noise, made monotone again. The best few are compared once
    more on windows that none of them was chosen on.

    Args:
        reader: the model; settings: its rotation before.
        windows: texts to score on; a third is reserved for the last comparison.
        trained: the training length in tokens.
        state: file that keeps the score of every genome; None: nothing is kept.

    Raises: ValueError where the file belongs to a search for something else.
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
        self.settings = settings
        self.state = state
        self.target = windows.tokens.shape[1]
        held = len(windows) // 3
        self.windows = windows.take(len(windows) - held)
        rest = Windows(windows.tokens[-held:], windows.documents[-held:]) if held else self.windows
        self.known: dict[str, Tried] = {}
        if state is not None:
            self.identity = run_identity(
                reader.model,
                windows,
                settings=settings,
                trained=trained,
                mask_token=reader.mask_token,
                scoring=(SHORT_WEIGHT, MARGIN, SEEDS, BANDED),
            )
            kept = read_sealed(state, self.identity) or {"tried": []}
            for factors, temperature, *scores in kept["tried"]:
                genome = Genome(tuple(factors), temperature)
                score, first = (math.inf if s is None else s for s in scores)
                self.known[genome.key] = Tried(genome, score, first)
        self.probe = Probe(reader, settings, self.windows, trained)
        self.check = Probe(reader, settings, rest, trained)
        self.tried: dict[str, Tried] = {}

    def evolve(self, tries: int, progress: Callable[[str, float], None]) -> Found:
        """Try this many sets of frequencies, the seeds first.

        Each depends on the scores before it. A restart reuses stored scores and ends with the
        result of an uninterrupted search.
        """
        self.tried.clear()
        began = time.perf_counter()
        before = len(self.known)
        for generation in itertools.count():
            for genome in self._children(generation) if generation else self._seeds():
                if self.tried and len(self.tried) >= tries:
                    return self._choose()
                self._try(genome)
                best = self._best(1)[0].score
                share = min(1.0, len(self.tried) / max(1, tries))
                seconds_each = (time.perf_counter() - began) / max(1, len(self.known) - before)
                left = max(0, tries - len(self.tried)) * seconds_each
                status = (
                    f"search, {len(self.tried)} tried, best {best:.3f}, about {left:.0f} s left"
                )
                progress(status, share)
        raise AssertionError("generations never end")

    def _choose(self) -> Found:
        """Return the finalist with the best mean of both scores."""
        checked = [(best, self.check.score(best.genome).score) for best in self._best(FINALISTS)]
        best, _ = min(checked, key=lambda pair: pair[0].score + pair[1])
        return Found(best.genome, best.score, len(self.tried))

    def _best(self, count: int) -> list[Tried]:
        """Return the `count` genomes with the lowest scores, the best first."""
        return sorted(self.tried.values(), key=lambda tried: tried.score)[:count]

    def _searched_setting(self) -> RopeSetting:
        """Return the rotation whose frequencies are searched, which must turn every pair."""
        searched = next(
            s for s in self.settings if s.layer_type is None or s.layer_type in EXTENDED_LAYERS
        )
        if not all(searched.frequencies().inv_freq):
            raise ValueError(
                "some of its pairs of channels do not rotate, and no config says what is searched "
                "of the others only"
            )
        return searched

    def _seeds(self) -> list[Genome]:
        """Return the known methods, then those with one band of pairs moved."""
        searched = self._searched_setting()
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
        """Return genomes made from two of the best parents each. The same state has the same
        children."""
        rng = np.random.default_rng((len(self.tried), generation))
        parents = [tried.genome for tried in self._best(PARENTS) if tried.score < math.inf]
        if not parents:
            raise ValueError("no set of frequencies that was tried gives finite losses")
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

    def _try(self, genome: Genome) -> None:
        """Score a genome, unless its score is known, and count it as tried."""
        if genome.key in self.tried:
            return
        # All read the same windows, so that a part of them compares fairly.
        best = self._best(PARENTS)
        bar = max(tried.first for tried in best) + MARGIN if len(best) == PARENTS else math.inf
        if genome.key not in self.known:
            self.known[genome.key] = self.probe.score(genome, bar)
            self._remember()
        self.tried[genome.key] = self.known[genome.key]

    def _remember(self) -> None:
        """Write the scores of all genomes to the restart state, if there is one."""
        if self.state is not None:
            rows = []
            for tried in self.known.values():  # JSON lacks infinity
                scores = [None if s == math.inf else s for s in (tried.score, tried.first)]
                rows.append([list(tried.genome.factors), tried.genome.temperature, *scores])
            write_sealed(self.state, self.identity, {"tried": rows})


def _bands(turns: Sequence[float]) -> list[np.ndarray]:
    """Group the pairs into those that finish a turn within the training length, those that finish a
    quarter, and the rest."""
    turned = np.array(turns)
    bands = [turned >= 1, (turned < 1) & (turned >= 0.25), turned < 0.25]
    return [band for band in bands if band.any()]


def _logs(genome: Genome) -> np.ndarray:
    """Return the logarithms of a genome's factors and, at the end, of its temperature."""
    return np.log([*genome.factors, genome.temperature])
