"""Estimate means, fractions and differences with 95 % intervals over documents or windows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from posenc.statistics.seed_intervals import LARGEST_ROUNDING_DEVIATION, Gap

DOCUMENT_SAMPLES = 200
"""Number of samples of documents, drawn with replacement, from which an interval is computed;
chosen, not derived."""
FEWEST_DOCUMENTS = 3
"""Number of documents below which there is no interval: resampling fewer says nothing of how much
texts differ."""


@dataclass(frozen=True)
class Estimate:
    """Hold a mean and the ends of its 95 % interval.

    mean: NaN if there are no values. low, high: NaN if there is no interval, as for fewer than
    FEWEST_DOCUMENTS documents.
    tokens: number of values that are averaged. For the fraction of exact answers it is the number
    of sequences.
    """

    mean: float
    low: float
    high: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return e^mean, at most e^50, for a mean in nats."""
        return math.exp(min(self.mean, 50.0))


def estimate_mean(losses: np.ndarray, documents: np.ndarray) -> Estimate:
    """Return the mean of all losses that are not NaN, each with the same weight, and its 95 %
    interval from resampled documents.

    losses: floats of any shape. documents: for each loss the number of the document that it is
    from, integers in the same shape.
    """
    is_number = ~np.isnan(losses)
    distinct_documents, document_indices = np.unique(documents[is_number], return_inverse=True)
    num_documents = len(distinct_documents)
    loss_sums = np.bincount(document_indices, losses[is_number], num_documents)
    token_counts = np.bincount(document_indices, minlength=num_documents).astype(float)
    if not num_documents:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(loss_sums.sum() / token_counts.sum())
    num_tokens = int(token_counts.sum())
    if num_documents < FEWEST_DOCUMENTS:
        return Estimate(mean, math.nan, math.nan, num_tokens)
    drawn_documents = np.random.default_rng(0).integers(
        0, num_documents, (DOCUMENT_SAMPLES, num_documents)
    )
    low, high = np.percentile(
        loss_sums[drawn_documents].sum(1) / token_counts[drawn_documents].sum(1), [2.5, 97.5]
    )
    return Estimate(mean, float(low), float(high), num_tokens)


def fraction_interval(num_right: int, num_answers: int) -> tuple[float, float]:
    """Return the lower and upper end of Wilson's 95 % interval of the fraction num_right /
    num_answers.

    num_right: number of right answers. num_answers: of all answers, at least 1.

    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953.
    >>> [round(bound, 4) for bound in fraction_interval(9, 10)]
    [0.5958, 0.9821]
    """
    # Loaded here, because it takes half a second, and only tasks with answers need it.
    from scipy.stats import binomtest

    bounds = binomtest(num_right, num_answers).proportion_ci(0.95, method="wilson")
    return float(bounds.low), float(bounds.high)


WINDOW_SAMPLES = 2000
"""Number of samples of windows, drawn with replacement, from which all intervals are computed;
chosen, not derived: about 100 of them are above the 95 % quantile."""
FEWEST_WINDOWS = 8
"""Number of windows below which there are no intervals; chosen, not derived."""


def window_gaps(
    losses: Mapping[str, Sequence[float]], encoding: str | None = None
) -> dict[tuple[str, str], Gap]:
    """Return the difference of mean losses of each pair of encodings, first minus second, in both
    orders; with `encoding`, only of pairs that have it. {} for fewer than eight windows, or if two
    encodings have different numbers of windows.

    The confidence intervals hold simultaneously with 95 %, by a bootstrap. Each sample draws the
    same windows for all encodings. Its statistic is the largest change of a difference, in units of
    the difference's standard error in the sample. The half-width of an interval is the 95 %
    quantile of this statistic, times the standard error.

    losses: for each encoding, one number per window.

    >>> losses = {"t5": [2.0] * 9 + [2.2] * 9, "rope": [2.5] * 9 + [2.9] * 9}
    >>> gap = window_gaps(losses)["rope", "t5"]
    >>> round(gap.value, 2), 0.0 < gap.half_width < 0.1
    (0.6, True)
    """
    window_counts = {len(window_losses) for window_losses in losses.values()}
    if len(window_counts) != 1 or len(losses) < 2 or min(window_counts) < FEWEST_WINDOWS:
        return {}
    (num_windows,) = window_counts
    pairs = [pair for pair in combinations(losses, 2) if encoding is None or encoding in pair]
    differences = np.array([np.subtract(losses[a], losses[b]) for a, b in pairs])
    means = differences.mean(1)
    window_fractions = _window_fractions(num_windows)
    changes = window_fractions @ differences.T - means  # (samples, pairs)
    # Variance as mean square minus squared mean, which rounding may leave below 0.
    variances = (window_fractions @ (differences.T - means) ** 2 - changes**2).clip(0)
    standard_errors = np.sqrt(variances / (num_windows - 1))
    # A pair whose differences are all alike in a sample has no error to divide by.
    has_error = standard_errors > LARGEST_ROUNDING_DEVIATION * np.abs(differences).max()
    largest_ratios = np.divide(
        np.abs(changes), standard_errors, out=np.zeros_like(changes), where=has_error
    ).max(1)
    half_widths = (
        np.quantile(largest_ratios, 0.95) * differences.std(1, ddof=1) / np.sqrt(num_windows)
    )
    gaps = {}
    for (a, b), mean, half_width in zip(pairs, means.tolist(), half_widths.tolist(), strict=True):
        gaps[a, b] = Gap(mean, half_width)
        gaps[b, a] = Gap(-mean, half_width)
    return gaps


@lru_cache(maxsize=4)
def _window_fractions(num_windows: int) -> np.ndarray:
    """Return the share of each window in each sample, (samples, windows), which sum up to 1; a
    sample may draw a window repeatedly. The seed is fixed: equal losses give equal intervals."""
    probabilities = np.full(num_windows, 1 / num_windows)
    counts = np.random.default_rng(0).multinomial(num_windows, probabilities, size=WINDOW_SAMPLES)
    return counts / num_windows
