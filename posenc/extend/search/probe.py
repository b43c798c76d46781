"""Score a set of frequencies for a checkpoint, always on the same tokens."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from posenc.extend.measure.evaluation import position_edges
from posenc.extend.measure.losses import NotFinite, Reader
from posenc.extend.search.genome import Genome, apply_genome
from posenc.hf.checkpoint.text import Windows
from posenc.hf.rope.apply import applied
from posenc.hf.rope.settings import RopeSetting

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
        try:
            return self._score(genome, bar)
        except NotFinite:
            return Tried(genome, math.inf, math.inf)

    def _score(self, genome: Genome, bar: float) -> Tried:
        tokens = self.windows.tokens
        first = -(-len(tokens) // 3)
        with applied(
            self.reader.model, apply_genome(self.settings, genome, tokens.shape[1]), tokens.shape[1]
        ):
            losses = self.reader.all_losses(tokens[:first]).numpy()
            early = self._rate(losses - self.reference[:first])
            if early > bar:
                return Tried(genome, math.inf, early)
            if first < len(tokens):
                rest = self.reader.all_losses(tokens[first:]).numpy()
                losses = np.concatenate([losses, rest])
        return Tried(genome, self._rate(losses - self.reference), early)

    def _rate(self, excess: np.ndarray) -> float:
        beyond = max(
            float(np.nanmean(excess[:, low:high]))
            for low, high in itertools.pairwise(self.edges)
            if high > self.trained
        )
        within = SHORT_WEIGHT * float(np.nanmean(excess[:, : self.trained]))
        return max(beyond, within) + 0.25 * (beyond + within)
