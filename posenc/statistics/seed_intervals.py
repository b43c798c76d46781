"""Compare all pairs of encodings by least squares over seeds.

value = encoding + seed + residual. The residual variance is pooled over all encodings, so that two
seeds of six encodings have five degrees of freedom. A pair whose own differences vary more than
that is compared with its own variance.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from statistics import fmean
from typing import NamedTuple

import numpy as np

LARGEST_ROUNDING_DEVIATION = 1e-12
"""Standard deviation, as a fraction of the largest value, up to which it may be rounding error
only: some thousand times float64's epsilon of 2e-16."""
SMALLEST_DIFFERENCES = {"text": 5e-4}
"""Smallest half-width of an interval, by the kind of values. Losses of 0.0005 bits per byte print
as 0.000, and two computations of one formula differ as much by their rounding."""
TEXT_LEVEL = 0.025
"""Significance level of the losses at one length. An answer has two such tests, near and far, so it
is half of 5 %."""


class Prior(NamedTuple):
    """Hold an estimate of the spread over seeds from earlier studies. With it two seeds can show a
    difference at all, and two that are alike by chance do not show a false one.

    spread: standard deviation over seeds, in the unit of the values.
    degrees_of_freedom: weight of the spread, which counts as measured with so many degrees of
    freedom.
    """

    spread: float
    degrees_of_freedom: int


class Gap(NamedTuple):
    """Hold a difference of two encodings and the half-width of its confidence interval, inf if that
    is unknown. The intervals of all pairs hold simultaneously.

    >>> Gap(0.15, 0.07).significant, Gap(0.08, 0.12).significant
    (True, False)
    """

    value: float
    half_width: float

    @property
    def significant(self) -> bool:
        """Return True if the confidence interval excludes 0; False if its half-width is unknown."""
        return abs(self.value) > self.half_width


@dataclass(frozen=True)
class PairwiseComparison:
    """Compare all pairs of some encodings at one length or in one task.

    Args:
        values: one number by encoding and seed. Trials that did not run are missing.
        kind_of_values: "text" for losses on text, "task" for scores in one task, or "tasks" for
            mean ranks over several tasks. It selects the significance level.
        resolution: the smallest difference that the measurement resolves, a lower bound of the
            residual standard deviation. With 0, seeds with equal values count as copies, not as
            evidence.
        prior: what is known of the residual standard deviation beforehand; None for nothing.

    Raises: ValueError for a value that is NaN or infinite.

    >>> losses = {"t5": {0: 1.88, 1: 1.89}, "rope": {0: 2.00, 1: 1.96}, "nope": {0: 2.93, 1: 2.90}}
    >>> pairs = PairwiseComparison(losses, "text")
    >>> gap = pairs.gap("nope", "t5")
    >>> pairs.degrees_of_freedom, round(gap.value, 3), gap.significant
    (2, 1.03, True)
    """

    values: Mapping[str, Mapping[int, float]]
    kind_of_values: str
    resolution: float = 0.0
    prior: Prior | None = None

    def __post_init__(self) -> None:
        for name, by_seed in self.values.items():
            if not all(math.isfinite(value) for value in by_seed.values()):
                raise ValueError(f"{name}: expected numbers, got {list(by_seed.values())}.")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the encodings, in the order of `values`."""
        return tuple(self.values)

    @cached_property
    def _fit(self) -> "_LeastSquaresFit":
        """Return the least-squares fit of one mean per encoding and one effect per seed."""
        return _fit_least_squares(self.values)

    @property
    def means(self) -> dict[str, float]:
        """Return the mean value of each encoding, by its name. If trials are missing, it is the
        mean that the fit expects with all seeds."""
        return dict(zip(self.names, self._fit.means.tolist(), strict=True))

    @property
    def degrees_of_freedom(self) -> int:
        """Return the degrees of freedom of the residuals: trials - encodings - seeds + 1."""
        return self._fit.degrees_of_freedom

    @cached_property
    def level(self) -> float | None:
        """Return the significance level for all pairs together, as a probability; None if there are
        too few seeds.

        If trials are missing, it is the level of a complete study with about as many degrees of
        freedom.
        """
        num_encodings = len(self.names)
        if num_encodings < 2:
            return None
        # A complete study has (encodings - 1) * (seeds - 1) degrees of freedom.
        num_seeds = 1 + round(self.degrees_of_freedom / (num_encodings - 1))
        return significance_level(self.kind_of_values, num_encodings, num_seeds)

    @property
    def least_significant_gap(self) -> float:
        """Return the smallest significant difference between two encodings that have all seeds; inf
        if there is none."""
        num_seeds = max(map(len, self.values.values()), default=0)
        if num_seeds == 0:
            return math.inf
        # The variance of a difference of two means of `num_seeds` values is 2 / num_seeds of a
        # value's.
        return float(self._half_widths_of(self._pooled_variance, 2 / num_seeds))

    @property
    def _pooled_variance(self) -> float:
        """Return the variance of the residuals of all encodings together, averaged with the
        prior's."""
        return float(self._with_prior(self._fit.variance, self.degrees_of_freedom))

    def _with_prior(
        self, variance: np.ndarray | float, degrees_of_freedom: np.ndarray | int
    ) -> np.ndarray:
        """Return the mean of each variance and the prior's, weighted by their degrees of freedom;
        without a prior the variance itself.

        degrees_of_freedom: degrees of freedom of `variance`, in the same shape.
        """
        if self.prior is None:
            return np.asarray(variance)
        prior_degrees = self.prior.degrees_of_freedom
        total_degrees = degrees_of_freedom + prior_degrees
        return np.asarray(
            (degrees_of_freedom * variance + prior_degrees * self.prior.spread**2) / total_degrees
        )

    def gap(self, a: str, b: str) -> Gap:
        """Return the mean of `a` minus that of `b`, with its simultaneous confidence interval."""
        i = self.names.index(a)
        j = self.names.index(b)
        fit = self._fit
        return Gap(float(fit.means[i] - fit.means[j]), float(self._half_widths[i, j]))

    @cached_property
    def _half_widths(self) -> np.ndarray:
        """Return the half-width of the interval of each pair, (encodings, encodings). It is inf
        where the trials do not determine the difference, see `_are_determined`, and where
        `_half_widths_of` returns inf. The diagonal has no meaning."""
        fit = self._fit
        num_encodings = len(self.names)
        # Variance factors of the differences: those of both means, less twice their covariance.
        variance_factors = np.diagonal(fit.inverse)[:num_encodings]
        difference_factors = (
            variance_factors[:, None]
            + variance_factors
            - 2 * fit.inverse[:num_encodings, :num_encodings]
        )
        variances_of_differences, degrees_of_differences = _variances_of_differences(self.values)
        # Half of it, as a difference of two residuals has twice the variance of one.
        variances_with_prior = self._with_prior(
            variances_of_differences / 2, degrees_of_differences
        )
        variances = np.maximum(
            self._pooled_variance, np.where(degrees_of_differences > 0, variances_with_prior, 0.0)
        )
        half_widths = self._half_widths_of(variances, difference_factors)
        return np.where(self._are_determined, half_widths, math.inf)

    @cached_property
    def _are_determined(self) -> np.ndarray:
        """Return an array (encodings, encodings), True for the pairs whose difference the trials
        determine: a chain of seeds that two encodings share leads from one to the other."""
        group_of_encoding = np.array(_groups_with_shared_seeds(self.values))
        return group_of_encoding[:, None] == group_of_encoding

    def _half_widths_of(
        self, variances: np.ndarray | float, factors: np.ndarray | float
    ) -> np.ndarray:
        """Return the half-width of the simultaneous interval of differences with the variances
        factors * variances, element by element.

        It is inf if there is no significance level, and if all seeds are copies of each other;
        otherwise at least that in SMALLEST_DIFFERENCES.
        """
        largest_value = max(abs(v) for by_seed in self.values.values() for v in by_seed.values())
        least_variance = self.resolution**2
        rounding_variance = (LARGEST_ROUNDING_DEVIATION * largest_value) ** 2
        are_copies = max(self._fit.variance, least_variance) <= rounding_variance
        if self.level is None or are_copies:
            return np.full(np.shape(variances), math.inf)
        degrees_of_freedom = self.degrees_of_freedom + (
            self.prior.degrees_of_freedom if self.prior else 0
        )
        # The range is in units of one mean's standard deviation, of which a difference has sqrt(2).
        quantile = studentized_range_quantile(self.level, len(self.names), degrees_of_freedom)
        half_widths = quantile * np.sqrt(np.maximum(variances, least_variance) * factors / 2)
        return np.maximum(half_widths, SMALLEST_DIFFERENCES.get(self.kind_of_values, 0.0))

    @cached_property
    def significantly_higher(self) -> frozenset[tuple[str, str]]:
        """Return the pairs (a, b) in which `a` has a significantly higher value than `b`: `a` is
        worse if the values are losses or ranks, and better if they are scores."""
        means = self._fit.means
        differences = means[:, None] - means
        significant_pairs = np.argwhere(differences > self._half_widths)
        return frozenset((self.names[i], self.names[j]) for i, j in significant_pairs)


def _variances_of_differences(
    values: Mapping[str, Mapping[int, float]],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the variance over seeds of each pair's difference, and its degrees of freedom, both
    (encodings, encodings). Only seeds that both encodings have count; both are 0 for fewer than
    two."""
    seeds = sorted({seed for by_seed in values.values() for seed in by_seed})
    value_table = np.full((len(values), len(seeds)), math.nan)
    for values_of_encoding, by_seed in zip(value_table, values.values(), strict=True):
        for seed, value in by_seed.items():
            values_of_encoding[seeds.index(seed)] = value
    differences = value_table[:, None] - value_table
    is_shared = np.isfinite(differences)
    num_shared = is_shared.sum(2)
    shared_differences = np.where(is_shared, differences, 0.0)
    means = shared_differences.sum(2) / np.maximum(num_shared, 1)
    sums_of_squares = np.where(is_shared, (differences - means[:, :, None]) ** 2, 0.0).sum(2)
    degrees_of_freedom = np.maximum(num_shared - 1, 0)
    return sums_of_squares / np.maximum(degrees_of_freedom, 1), degrees_of_freedom


def group_into_tiers(
    names: Sequence[str], worse_pairs: frozenset[tuple[str, str]]
) -> tuple[tuple[str, ...], ...]:
    """Group encodings into tiers: first those that are worse than no other, then those that are
    worse only than some in the first tier, and so on.

    names: names of the encodings, the best first; each tier keeps this order.
    worse_pairs: pairs (a, b) of names in which `a` is worse than `b`.

    >>> group_into_tiers(["t5", "alibi", "rope"], frozenset({("rope", "t5")}))
    (('t5', 'alibi'), ('rope',))
    """
    tiers = []
    remaining = list(names)
    while remaining:
        # All that are left, if each of them is worse than another one.
        tier = [
            b for b in remaining if not any((b, a) in worse_pairs for a in remaining)
        ] or remaining
        tiers.append(tuple(tier))
        remaining = [name for name in remaining if name not in tier]
    return tuple(tiers)


class _LeastSquaresFit(NamedTuple):
    """Hold a fit of value = encoding + seed + residual.

    inverse: the pseudoinverse of design^T design; the design has a row per trial, with a 1 in the
        column of its encoding and in that of its seed.
    means: the effect of each encoding plus the mean effect of a seed, in the order of encodings.
    variance, degrees_of_freedom: the variance of the residuals, and their degrees of freedom.
    """

    inverse: np.ndarray
    means: np.ndarray
    variance: float
    degrees_of_freedom: int


def _fit_least_squares(values: Mapping[str, Mapping[int, float]]) -> _LeastSquaresFit:
    """Return the least-squares fit of values by an effect of each encoding and an effect of each
    seed.

    values: a number by encoding and seed; trials that did not run are missing.
    """
    seeds = sorted({seed for by_seed in values.values() for seed in by_seed})
    num_trials = sum(map(len, values.values()))
    design = np.zeros((num_trials, len(values) + len(seeds)))
    observed_values = np.empty(num_trials)
    trial_index = 0
    for encoding_index, by_seed in enumerate(values.values()):
        for seed, value in by_seed.items():
            design[trial_index, encoding_index] = 1
            design[trial_index, len(values) + seeds.index(seed)] = 1
            observed_values[trial_index] = value
            trial_index += 1
    # Only differences of effects are determined, so there is no inverse but the pseudoinverse.
    inverse = np.linalg.pinv(design.T @ design, hermitian=True)
    effects = inverse @ design.T @ observed_values
    residuals = observed_values - design @ effects
    num_groups = len(set(_groups_with_shared_seeds(values)))
    # In each group the effects of all encodings may rise by as much as those of all seeds fall.
    rank_of_design = len(values) + len(seeds) - num_groups
    degrees_of_freedom = num_trials - rank_of_design
    variance = float(residuals @ residuals) / degrees_of_freedom if degrees_of_freedom else 0.0
    means = effects[: len(values)] + effects[len(values) :].mean()
    return _LeastSquaresFit(inverse, means, variance, degrees_of_freedom)


def _groups_with_shared_seeds(values: Mapping[str, Mapping[int, float]]) -> list[int]:
    """Return the number of the group of each encoding, in their order. Of one group are encodings
    that share a seed, directly or through others; one without trials is a group of its own.

    >>> _groups_with_shared_seeds({"a": {0: 1.0}, "b": {0: 1.0, 1: 2.0}, "c": {1: 2.0}, "d": {}})
    [0, 0, 0, 3]
    """
    group_of_encoding = list(range(len(values)))
    group_of_seed: dict[int, int] = {}
    for index, by_seed in enumerate(values.values()):
        groups_to_join = {group_of_seed.get(seed, index) for seed in by_seed} | {index}
        first_group = min(groups_to_join)
        for seed in by_seed:
            group_of_seed[seed] = first_group
        if len(groups_to_join) > 2:
            joined = dict.fromkeys(groups_to_join, first_group)
            group_of_encoding = [joined.get(group, group) for group in group_of_encoding]
            group_of_seed = {
                seed: joined.get(group, group) for seed, group in group_of_seed.items()
            }
        group_of_encoding[index] = first_group
    return group_of_encoding


class RelativeSpread(NamedTuple):
    """Hold a standard deviation over seeds, in units of the expected one, and its degrees of
    freedom."""

    relative_deviation: float
    degrees_of_freedom: int


def half_width_by_spreads(spreads: Sequence[RelativeSpread], num_seeds: int, level: float) -> float:
    """Return half of the confidence interval of the mean of `num_seeds` differences, in units of
    their expected standard deviation, from spreads that were measured in several places.

        half = t(level; sum of degrees of freedom) * sqrt(mean of relative_deviation^2 / num_seeds)
    """
    # Loaded here, because it takes long, and only some studies need it.
    from scipy import special

    degrees_of_freedom = sum(spread.degrees_of_freedom for spread in spreads)
    variance = fmean(spread.relative_deviation**2 for spread in spreads)
    quantile = float(special.stdtrit(degrees_of_freedom, 1 - level / 2))
    return quantile * math.sqrt(variance / num_seeds)


@lru_cache(maxsize=256)
def studentized_range_quantile(level: float, num_means: int, degrees_of_freedom: int) -> float:
    """Return the upper quantile of the studentized range of `num_means` means: the value that the
    range exceeds with probability `level`, in units of a standard deviation that has been estimated
    with `degrees_of_freedom`. For two means it is Student's t times the square root of 2."""
    from scipy import special, stats

    if num_means == 2:  # exact, where scipy integrates numerically
        return float(special.stdtrit(degrees_of_freedom, 1 - level / 2)) * math.sqrt(2)
    return float(stats.studentized_range.isf(level, num_means, degrees_of_freedom))


def significance_level(kind_of_values: str, num_encodings: int, num_seeds: int) -> float | None:
    """Return the significance level for all pairs of `num_encodings` encodings together, as a
    probability; None if no level is low enough, or for fewer than two seeds.

    kind_of_values: as in PairwiseComparison. For "text" the level is TEXT_LEVEL. For "task" and
    "tasks" it is that of `levels.csv`, from simulated studies (experiments/levels.py): with it at
    most 7 % of studies of equal encodings find any difference. A number of encodings between two of
    the table gets the level of the larger one. Beyond the table the level falls in proportion to
    the number of encodings, and stays that of the largest number of seeds.
    """
    if kind_of_values == "text":
        return TEXT_LEVEL if num_seeds > 1 else None
    level_by_size = _levels_from_file()[kind_of_values]
    most_seeds_in_table = max(seeds_in_table for _, seeds_in_table in level_by_size)
    numbers_in_table = {encodings_in_table for encodings_in_table, _ in level_by_size}
    encodings_used = min(
        (number for number in numbers_in_table if number >= num_encodings),
        default=max(numbers_in_table),
    )
    level = level_by_size.get((encodings_used, min(num_seeds, most_seeds_in_table)))
    return None if level is None else level * min(1.0, encodings_used / num_encodings)


@lru_cache(maxsize=1)
def _levels_from_file() -> dict[str, dict[tuple[int, int], float]]:
    """Return the significance levels of `levels.csv`, by the kind of values and then by (number of
    encodings, number of seeds). Sizes for which no level is low enough are missing."""
    text = resources.files("posenc.statistics").joinpath("levels.csv").read_text(encoding="utf-8")
    levels: dict[str, dict[tuple[int, int], float]] = {}
    for row in csv.DictReader(text.splitlines()):
        if row["level"]:
            size_of_study = int(row["encodings"]), int(row["seeds"])
            levels.setdefault(row["where"], {})[size_of_study] = float(row["level"])
    return levels
