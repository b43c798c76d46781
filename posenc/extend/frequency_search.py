"""Search frequencies for one checkpoint, by evolution of a factor for each pair of channels and a
temperature."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from posenc.extend.measure.evaluation import position_edges
from posenc.extend.measure.losses import LossReader, NotFinite
from posenc.extend.methods import METHODS, stretch
from posenc.frequencies.scalings.registry import LongRoPE
from posenc.frequencies.scalings.scaling import Scaling, rope_frequencies
from posenc.hf.checkpoint.tokenization import Windows
from posenc.hf.model_rotation import settings_applied
from posenc.hf.restart_state import identity_of_run, read_sealed, write_sealed
from posenc.hf.rope_settings import EXTENDED_LAYER_TYPES, RopeSetting


@dataclass(frozen=True)
class Genome:
    """Hold what the search varies: factors, one for each pair of channels, and a temperature.

    The frequency of a pair is divided by its factor. Factors never fall from the fastest pair to
    the slowest. Cos and sin are multiplied by the temperature.
    """

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
    settings: tuple[RopeSetting, ...], genome: Genome, target_length: int
) -> tuple[RopeSetting, ...]:
    """Return the settings with the genome's frequencies in every layer that looks beyond a window.
    target_length: the new length in tokens. A genome's factors start from the frequencies of
    rope_theta, so they include any compression."""
    return tuple(
        replace(s, scaling=genome.scaling(s, target_length / s.original_length), compression=1.0)
        if s.layer_type is None or s.layer_type in EXTENDED_LAYER_TYPES
        else s
        for s in settings
    )


SHORT_WEIGHT = 1.75
"""Weight of the loss within the training length, relative to the loss beyond it."""


@dataclass(frozen=True)
class ScoredGenome:
    """Hold a genome that was tried, with its scores in nats; lower is better."""

    genome: Genome
    score: float
    """On all windows; inf if the genome was given up after the first third of them."""
    first_score: float
    """On the first third of the windows."""


class GenomeScorer:
    """Score genomes by the losses of the model on the same windows.

    Every loss is relative to the trained model's loss on the same token in a window of its training
    length, so that a bucket of hard text does not count against a genome.
    """

    def __init__(
        self,
        reader: LossReader,
        settings: tuple[RopeSetting, ...],
        windows: Windows,
        train_length: int,
    ) -> None:
        self.reader = reader
        self.settings = settings
        self.windows = windows
        self.edges = position_edges(train_length, windows.tokens.shape[1])
        self.train_length = train_length
        # Masked tokens are not the same ones in windows of another length: there, plain losses.
        sliding_reader = replace(reader, window_length=train_length)
        self.reference_losses = np.zeros(windows.tokens.shape)
        if reader.mask_token_id is None:
            self.reference_losses = sliding_reader.losses_in_batches(windows.tokens).numpy()

    def score(self, genome: Genome, score_limit: float = math.inf) -> ScoredGenome:
        """Score a genome: the larger of two losses plus a quarter of their sum, in nats. One is the
        worst bucket beyond the training length, the other SHORT_WEIGHT times the loss within it.

        A genome whose loss on the first third of the windows is above `score_limit`, or whose
        losses are not finite, is given up: its score is infinite.
        """
        tokens = self.windows.tokens
        num_first_windows = -(-len(tokens) // 3)
        length = tokens.shape[1]
        settings = apply_genome(self.settings, genome, length)
        try:
            with settings_applied(self.reader.model, settings, length):
                losses = self.reader.losses_in_batches(tokens[:num_first_windows]).numpy()
                first_score = self._weighted_loss(
                    losses - self.reference_losses[:num_first_windows]
                )
                if first_score > score_limit:
                    return ScoredGenome(genome, math.inf, first_score)
                if num_first_windows < len(tokens):
                    other_losses = self.reader.losses_in_batches(tokens[num_first_windows:]).numpy()
                    losses = np.concatenate([losses, other_losses])
        except NotFinite:
            return ScoredGenome(genome, math.inf, math.inf)
        return ScoredGenome(
            genome, self._weighted_loss(losses - self.reference_losses), first_score
        )

    def _weighted_loss(self, excess: np.ndarray) -> float:
        """Return the score in nats, see `score`. excess: losses (windows, length) minus those of
        the trained model."""
        loss_beyond = max(
            float(np.nanmean(excess[:, low:high]))
            for low, high in itertools.pairwise(self.edges)
            if high > self.train_length
        )
        loss_within = SHORT_WEIGHT * float(np.nanmean(excess[:, : self.train_length]))
        # The worse of the two decides; a quarter of the sum, chosen and not derived, ranks those
        # that are equally bad there.
        return max(loss_beyond, loss_within) + 0.25 * (loss_beyond + loss_within)


NUM_PARENTS = 6
NUM_CHILDREN = 8
NUM_FINALISTS = 4
"""Best genomes that have children, children of a generation, and best genomes that are scored again
at the end; chosen, not derived, as are the numbers below."""
FIRST_SCORE_MARGIN = 0.05
"""A genome is given up after the first third of the windows if its score there is more than this
many nats above the highest one of the best genomes."""
SEED_METHODS = ("linear", "ntk", "ntk-1.5x", "ntk-2x", "by-parts", "yarn", "llama3")
BANDED_METHODS = ("ntk-1.5x", "ntk-2x")
"""Methods whose factors are also tried with one band of pairs stretched more or less."""
BAND_FACTORS = (0.88, 1.2)
"""By what the factors of this band are then multiplied."""
MUTATION_SIZES = (0.02, 0.07, 0.25)
"""Standard deviations of a mutation, in logarithms: small ones refine, large ones leave a local
minimum."""


@dataclass(frozen=True)
class SearchResult:
    """Hold the best genome, its score and the number of genomes tried."""

    genome: Genome
    score: float
    num_tried: int


class FrequencySearch:
    """Evolve frequency factors for one checkpoint; resumes from `state` if the file exists.

    Children lie between or a little beyond two parents, with a band of neighbouring pairs and the
    temperature multiplied by log-normal noise, made monotone again. The best few are compared once
    more on windows that none of them was chosen on.

    Args:
        reader: computes the model's losses.
        settings: the model's rotation before the search.
        windows: texts to score on; a third is reserved for the last comparison.
        train_length: the training length in tokens.
        state: file that keeps the score of every genome; None to keep nothing.

    Raises: ValueError where the file belongs to a search for something else.
    Source: Ding et al. 2024, arXiv:2402.13753, section 3.2 (evolution, monotone factors, seeds from
    other methods).
    """

    def __init__(
        self,
        reader: LossReader,
        settings: tuple[RopeSetting, ...],
        windows: Windows,
        train_length: int,
        state_file: Path | None,
    ) -> None:
        self.settings = settings
        self.state_file = state_file
        self.target_length = windows.tokens.shape[1]
        num_held_out = len(windows) // 3  # reserved for the comparison of the finalists
        self.windows = windows.take(len(windows) - num_held_out)
        held_out_windows = self.windows  # where one or two windows are all that there is
        if num_held_out:
            held_out_windows = Windows(
                windows.tokens[-num_held_out:], windows.document_of_token[-num_held_out:]
            )
        # All genomes with a score, also from a run before: it need not be computed again.
        self.scored: dict[str, ScoredGenome] = {}
        if state_file is not None:
            self.identity = identity_of_run(
                reader.model,
                windows,
                settings=settings,
                trained=train_length,
                mask_token=reader.mask_token_id,
                scoring=(SHORT_WEIGHT, FIRST_SCORE_MARGIN, SEED_METHODS, BANDED_METHODS),
            )
            saved_scores = read_sealed(state_file, self.identity) or {"tried": []}
            # As _save_scores wrote them, with None for infinity.
            for factors, temperature, score, first_score in saved_scores["tried"]:
                genome = Genome(tuple(factors), temperature)
                self.scored[genome.key] = ScoredGenome(
                    genome,
                    math.inf if score is None else score,
                    math.inf if first_score is None else first_score,
                )
        self.scorer = GenomeScorer(reader, settings, self.windows, train_length)
        self.final_scorer = GenomeScorer(reader, settings, held_out_windows, train_length)
        # Those that this search has come to. Only they are parents, so that a search that goes on
        # after a restart tries the same genomes as one without.
        self.tried: dict[str, ScoredGenome] = {}

    def evolve(self, num_tries: int, progress: Callable[[str, float], None]) -> SearchResult:
        """Try `num_tries` genomes, the seeds first, and return the best.

        Which genomes are tried depends on the scores before. A restart reuses stored scores and
        ends with the result of an uninterrupted search.
        """
        self.tried.clear()
        start_time = time.perf_counter()
        num_scored_before = len(self.scored)
        for generation in itertools.count():
            for genome in self._children(generation) if generation else self._seeds():
                if self.tried and len(self.tried) >= num_tries:
                    return self._choose_finalist()
                self._score_and_count(genome)
                best_score = self._best_tried(1)[0].score
                fraction_done = min(1.0, len(self.tried) / max(1, num_tries))
                seconds_each = (time.perf_counter() - start_time) / max(
                    1, len(self.scored) - num_scored_before
                )
                seconds_left = max(0, num_tries - len(self.tried)) * seconds_each
                status = (
                    f"search, {len(self.tried)} tried, best {best_score:.3f}, "
                    f"about {seconds_left:.0f} s left"
                )
                progress(status, fraction_done)
        raise AssertionError("generations never end")

    def _choose_finalist(self) -> SearchResult:
        """Score the best genomes again, on windows that none was chosen on; return the one whose
        two scores have the lowest sum."""
        tried_and_final_scores = [
            (finalist, self.final_scorer.score(finalist.genome).score)
            for finalist in self._best_tried(NUM_FINALISTS)
        ]
        finalist, _ = min(tried_and_final_scores, key=lambda pair: pair[0].score + pair[1])
        return SearchResult(finalist.genome, finalist.score, len(self.tried))

    def _best_tried(self, count: int) -> list[ScoredGenome]:
        """Return the `count` tried genomes with the lowest scores, the best first."""
        return sorted(self.tried.values(), key=lambda tried: tried.score)[:count]

    def _searched_setting(self) -> RopeSetting:
        """Return the rotation setting whose frequencies are searched: that of the layers that look
        beyond a window.

        Raises: ValueError if some of its pairs of channels do not rotate.
        """
        searched_setting = next(
            s for s in self.settings if s.layer_type is None or s.layer_type in EXTENDED_LAYER_TYPES
        )
        if not all(searched_setting.frequencies().inv_freq):
            raise ValueError(
                "some of its pairs of channels do not rotate, and no config says what is searched "
                "of the others only"
            )
        return searched_setting

    def _seeds(self) -> list[Genome]:
        """Return the genomes to begin with: those of SEED_METHODS, then those of BANDED_METHODS
        with the factors of one band of pairs changed."""
        searched_setting = self._searched_setting()
        unscaled = rope_frequencies(
            searched_setting.rotary_dim, searched_setting.rope_theta
        ).inv_freq
        turns = [float(f) * searched_setting.original_length / (2 * np.pi) for f in unscaled]
        seed_genomes = []
        banded_genomes = []
        for name in SEED_METHODS:
            if searched_setting.rotary_dim < 4 and name.startswith("ntk"):
                continue  # NTK leaves the fastest pair and scales the slowest: it needs two
            frequencies = stretch((searched_setting,), METHODS[name], self.target_length)[
                0
            ].frequencies()
            factors = np.array(
                [float(p / f) for p, f in zip(unscaled, frequencies.inv_freq, strict=True)]
            )
            seed_genomes.append(Genome(monotone_factors(factors), frequencies.attention_factor))
            if name in BANDED_METHODS:
                for band_mask, band_factor in itertools.product(_band_masks(turns), BAND_FACTORS):
                    banded_factors = np.where(band_mask, factors * band_factor, factors)
                    banded_genomes.append(
                        Genome(monotone_factors(banded_factors), frequencies.attention_factor)
                    )
        return seed_genomes + banded_genomes

    def _children(self, generation: int) -> list[Genome]:
        """Return NUM_CHILDREN genomes, each made from two of the best ones. The same tried genomes
        have the same children, so that a restart repeats them."""
        rng = np.random.default_rng((len(self.tried), generation))
        parents = [
            tried.genome for tried in self._best_tried(NUM_PARENTS) if tried.score < math.inf
        ]
        if not parents:
            raise ValueError("no set of frequencies that was tried gives finite losses")
        children = []
        for _ in range(NUM_CHILDREN):
            mother, father = (parents[i] for i in rng.choice(len(parents), 2))
            mix = rng.uniform(-0.3, 1.3)  # outside of 0 to 1: beyond one of the parents
            log_genome = mix * _logarithms(mother) + (1 - mix) * _logarithms(father)
            start, stop = sorted(rng.integers(0, len(log_genome), 2))
            log_genome[start : stop + 1] += rng.normal(0, rng.choice(MUTATION_SIZES))
            *factors, temperature = np.exp(log_genome)
            children.append(Genome(monotone_factors(factors), float(temperature)))
        return children

    def _score_and_count(self, genome: Genome) -> None:
        """Score a genome, unless its score is known, and count it as tried."""
        if genome.key in self.tried:
            return
        # All genomes read the same first windows, so that their scores there compare fairly.
        best_tries = self._best_tried(NUM_PARENTS)
        score_limit = (
            max(tried.first_score for tried in best_tries) + FIRST_SCORE_MARGIN
            if len(best_tries) == NUM_PARENTS
            else math.inf
        )
        if genome.key not in self.scored:
            self.scored[genome.key] = self.scorer.score(genome, score_limit)
            self._save_scores()
        self.tried[genome.key] = self.scored[genome.key]

    def _save_scores(self) -> None:
        """Write the scores of all genomes to the restart state, if there is one."""
        if self.state_file is not None:
            rows = []
            for tried in self.scored.values():  # JSON lacks infinity
                scores = [None if s == math.inf else s for s in (tried.score, tried.first_score)]
                rows.append([list(tried.genome.factors), tried.genome.temperature, *scores])
            write_sealed(self.state_file, self.identity, {"tried": rows})


def _band_masks(turns: Sequence[float]) -> list[np.ndarray]:
    """Return a mask over pairs for each band that has any: pairs that finish a turn within the
    training length, those that finish a quarter of one, and the rest. turns: by pair."""
    turns_of_pairs = np.array(turns)
    band_masks = [
        turns_of_pairs >= 1,
        (turns_of_pairs < 1) & (turns_of_pairs >= 0.25),
        turns_of_pairs < 0.25,
    ]
    return [band_mask for band_mask in band_masks if band_mask.any()]


def _logarithms(genome: Genome) -> np.ndarray:
    """Return the logarithms of a genome's factors and, at the end, of its temperature."""
    return np.log([*genome.factors, genome.temperature])
