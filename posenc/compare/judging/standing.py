"""Test who is first: how the encodings of a study stand at a length, at a task, or over all tasks.

Texts, tables and figures take every order of encodings from a `Standing`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, stdev

from posenc.compare.judging.summary import has_learned, shown_score
from posenc.compare.results import Study, TrialResult, kept_by_study
from posenc.compare.trial.evaluate import NUM_TEST_SEQUENCES
from posenc.statistics.seed_intervals import (
    Gap,
    PairwiseComparison,
    Prior,
    RelativeSpread,
    group_into_tiers,
    half_width_by_spreads,
)
from posenc.statistics.text_intervals import window_gaps
from posenc.tasks.registry import TASKS, TEXT

MIN_TASKS = 3
"""With fewer tasks their ranks are not averaged: chosen, not derived."""
MARGIN = 0.02
"""Bits per byte up to which a difference on text does not matter, however certain it is: another
seed, text or rate of the tables moves as much. Chosen, not derived."""
NEAR_PRIOR = Prior(0.015, 10)
FAR_PRIOR = Prior(0.018, 10)
"""Standard deviations over seeds that are expected at the training length and on far bytes: those
of three of four published encodings, of those that do not break, are smaller. They, and their
weights, were chosen by simulated studies (experiments/judged.py)."""
STEADY_LEVEL = 0.036
"""Significance level at which the first of a place must lead by its own seeds alone; chosen by
simulated studies (experiments/judged.py)."""
NUM_NEAREST_RIVALS = 3
"""Number of rivals, the nearest ones, with which the seeds of the first are compared."""
NumbersBySeed = dict[str, dict[int, float]]
"""One number by encoding and seed."""


@dataclass(frozen=True)
class Standing:
    """The order of encodings at one length, in one task or over all tasks, and which differences
    are significant by seeds.

    where: in words, such as "128 bytes".
    pairs: the numbers, and the differences of all pairs.
    higher_is_better: of scores; not of losses and ranks.
    window_losses: mean losses over seeds of each window of the text, by encoding; {} if not kept.
    margin: the largest difference that does not matter, in the unit of the numbers.
    half_by_own_seeds: half of an interval of the first row by its own seeds, see
        `with_own_spread_of_first`; it leads only by more.
    """

    where: str
    pairs: PairwiseComparison
    higher_is_better: bool = False
    window_losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    margin: float = 0.0
    half_by_own_seeds: float = 0.0

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Return the encodings, best mean first."""
        return tuple(sorted(self.pairs.names, key=self.mean, reverse=self.higher_is_better))

    @cached_property
    def among_best(self) -> "Standing | None":
        """Return the standing of those tied for the best without the encodings that are worse: one
        that breaks varies most and would hide their differences. None for tasks, if no encoding is
        left out, or if only one remains."""
        names_behind = {a for a, _ in self._pairs_that_matter}
        values = {
            name: by_seed for name, by_seed in self.pairs.values.items() if name not in names_behind
        }
        if self.pairs.kind_of_values != "text" or not 1 < len(values) < len(self.pairs.values):
            return None
        remaining_standing = replace(self, pairs=replace(self.pairs, values=values))
        return (
            remaining_standing
            if remaining_standing.pairs.least_significant_gap < math.inf
            else None
        )

    @cached_property
    def _pairs_that_matter(self) -> frozenset[tuple[str, str]]:
        """Return the pairs (a, b) in which `a` has a significantly higher number than `b`, by more
        than the margin."""
        means = self.pairs.means
        return frozenset(
            (a, b) for a, b in self.pairs.significantly_higher if means[a] - means[b] > self.margin
        )

    @cached_property
    def worse_pairs(self) -> frozenset[tuple[str, str]]:
        """Return the pairs (a, b) in which `a` is significantly worse than `b`, by more than the
        margin; none with too few seeds for an interval."""
        higher_pairs = (
            self._pairs_that_matter | self.among_best.worse_pairs
            if self.among_best
            else self._pairs_that_matter
        )
        # Of losses and ranks the higher is the worse, of scores the lower.
        return frozenset((b, a) for a, b in higher_pairs) if self.higher_is_better else higher_pairs

    @cached_property
    def tiers(self) -> tuple[tuple[str, ...], ...]:
        """Return groups of encodings: those worse than none, then those worse only than encodings
        of earlier groups, and so on."""
        return group_into_tiers(self.order, self.worse_pairs)

    def tier(self, name: str) -> int:
        """Return the number of an encoding's tier, from 1 for the best."""
        return next(
            number for number, names_of_tier in enumerate(self.tiers, 1) if name in names_of_tier
        )

    @cached_property
    def first_tier(self) -> tuple[str, ...]:
        """Return the best and those tied with it: encodings that are significantly worse than
        none."""
        return self.tiers[0]

    @cached_property
    def contenders(self) -> tuple[str, ...]:
        """Return the encodings that cannot be told apart from the first of the order, best mean
        first, the first included: those that are worse than none, and those that it leads by no
        more than `half_by_own_seeds`."""
        first_name = self.order[0]
        close_names = {
            n for n in self.order if abs(self.gap(n, first_name).value) <= self.half_by_own_seeds
        }
        return tuple(
            name for name in self.order if name in {first_name, *self.first_tier} | close_names
        )

    @cached_property
    def gaps_over_windows(self) -> dict[tuple[str, str], Gap]:
        """Return the differences of the first from all others, in either order, with intervals over
        the windows of the text instead of seeds; {} without windows."""
        return window_gaps(self.window_losses, self.order[0])

    def verdict(self, name: str) -> str:
        """Return "best", "tied" or "worse"; "" if nothing can be significant."""
        if self.pairs.least_significant_gap == math.inf or len(self.order) < 2:
            return ""
        if name not in self.contenders:
            return "worse"
        return "best" if len(self.contenders) == 1 else "tied"

    @property
    def least_significant_gap(self) -> float:
        """Return the smallest difference that is significant, of two encodings that have all seeds;
        inf if none can be."""
        return min(
            self.pairs.least_significant_gap,
            self.among_best.least_significant_gap if self.among_best else math.inf,
        )

    def mean(self, name: str) -> float:
        """Return the mean of an encoding over seeds; if trials are missing, that of the fitted
        model, without the effect of seeds. The fit of those in `among_best` has fewer trials, so
        means of all others are shifted by as much as that of the best moves. A score stays between
        0 and 1."""
        means, shift = self.pairs.means, 0.0
        if self.among_best:
            if name in self.among_best.pairs.values:
                return self.among_best.mean(name)
            best_name = self.among_best.order[0]
            # 0 if no trial is missing.
            shift = round(self.among_best.mean(best_name) - means[best_name], 11)
        mean = round(means[name] + shift, 12) + 0.0  # no -0.0
        return min(max(mean, 0.0), 1.0) if self.higher_is_better else mean

    def gap(self, name: str, other: str | None = None) -> Gap:
        """Return the difference of the encoding `name` from another, by default the first of the
        order."""
        other = other or self.order[0]
        gap = self.pairs.gap(name, other)
        if self.among_best and {name, other} <= self.among_best.pairs.values.keys():
            gap_among_best = self.among_best.gap(name, other)
            # False if a trial is missing.
            is_equal = abs(gap_among_best.value - gap.value) < 1e-11
            if not is_equal:
                return gap_among_best
            return Gap(gap_among_best.value, min(gap.half_width, gap_among_best.half_width))
        return gap


@kept_by_study
def standing_at(study: Study, length: int) -> Standing | None:
    """Return the standing by bits per byte at a length of the text; None if no encoding runs
    there."""
    losses: NumbersBySeed = {}
    window_losses: dict[str, list[Sequence[float]]] = {}
    for result in results_that_count(study.of_task(TEXT)):
        name = result.config.encoding
        for score in result.by_length:
            if score.length == length and score.bits_per_byte is not None:
                losses.setdefault(name, {})[result.config.seed] = score.bits_per_byte
                window_losses.setdefault(name, []).append(score.windows)
    losses = {name: losses[name] for name in study.encodings if name in losses}
    if not losses:
        return None
    trial = study.of_task(TEXT).trials[0]
    pairs = PairwiseComparison(
        losses, "text", prior=NEAR_PRIOR if length == trial.train_length else FAR_PRIOR
    )
    where = f"{length:,} {trial.length_unit}"
    return Standing(where, pairs, window_losses=mean_loss_by_window(window_losses), margin=MARGIN)


def order_by_standings(study: Study, standings: Iterable[Standing]) -> list[str]:
    """Return all encodings, sorted by the first of these standings; those that it lacks are sorted
    by the next ones."""
    names: dict[str, None] = {}
    for standing in standings:
        names |= dict.fromkeys(standing.order)
    return list(names | dict.fromkeys(study.encodings))


def with_own_spread_of_first(
    near: Standing | None, far: Standing | None, near_row_of: Mapping[str, str]
) -> tuple[Standing | None, Standing | None]:
    """Return both standings with `half_by_own_seeds` set: half of an interval of the lead of the
    first row, from its own seeds alone.

    An interval pooled over all encodings is too narrow for one whose seeds vary much more than
    those of the others, and with few seeds such a one is first by luck. Its spread is taken over
    both places, each in units of what is expected there, so that seeds that are alike by chance in
    one place do not hide it, see `half_width_by_spreads`.
    """
    far_row_of = {near_name: name for name, near_name in near_row_of.items()}
    return (
        _with_own_spread(near, far, far_row_of),
        _with_own_spread(far, near, near_row_of),
    )


def _with_own_spread(
    standing: Standing | None, other: Standing | None, other_row_of: Mapping[str, str]
) -> Standing | None:
    """Return one of the two standings with `half_by_own_seeds` set, see `with_own_spread_of_first`.

    other_row_of: the name in the other standing of each row of this one.
    """
    if standing is None:
        return None
    first_row = standing.order[0]
    spreads = [
        _spread_of_lead(standing, first_row),
        _spread_of_lead(other, other_row_of.get(first_row)),
    ]
    return replace(standing, half_by_own_seeds=_half_by_own_seeds(standing, spreads))


def _spread_of_lead(standing: Standing | None, name: str | None) -> RelativeSpread | None:
    """Return how much a row's lead varies between seeds: of its leads over the NUM_NEAREST_RIVALS
    nearest other rows, the one that varies least, as the others vary by their rivals' own seeds.
    None with fewer than two common seeds, or for a row that is not in the standing."""
    if standing is None or name not in standing.order or standing.pairs.prior is None:
        return None
    values = standing.pairs.values
    means = standing.pairs.means
    rivals = [other for other in values if other != name]
    spreads = []
    for other in sorted(rivals, key=lambda other: abs(means[other] - means[name]))[
        :NUM_NEAREST_RIVALS
    ]:
        common_seeds = values[name].keys() & values[other].keys()
        leads = [values[other][seed] - values[name][seed] for seed in common_seeds]
        if len(leads) > 1:
            deviation = stdev(leads) / standing.pairs.prior.spread
            spreads.append(RelativeSpread(deviation, len(leads) - 1))
    return min(spreads, default=None)


def _half_by_own_seeds(standing: Standing, spreads: Sequence[RelativeSpread | None]) -> float:
    """Return half of the interval of the first row of a standing, from its spreads in this place
    and the other one, see `with_own_spread_of_first`; inf where there is none in this place."""
    if spreads[0] is None or standing.pairs.prior is None:
        return math.inf
    known_spreads = [spread for spread in spreads if spread is not None]
    num_seeds = spreads[0].degrees_of_freedom + 1
    relative_half = half_width_by_spreads(known_spreads, num_seeds, STEADY_LEVEL)
    return standing.pairs.prior.spread * relative_half


@kept_by_study
def standing_of_task(study: Study, task: str) -> Standing | None:
    """Return the standing in a task by mean scores over all tests but that at the training length;
    None if no encoding has one. Trials that did not learn the task count, too. Compared are the
    seeds that all encodings have, or all seeds if these are fewer than two."""
    scores = scores_of_task(study, task)
    shared_seeds = sorted(set.intersection(*map(set, scores.values()))) if scores else []
    if len(shared_seeds) > 1:
        scores = {
            name: {seed: score_by_seed[seed] for seed in shared_seeds}
            for name, score_by_seed in scores.items()
        }
    return (
        Standing(
            task, PairwiseComparison(scores, "task", 1 / NUM_TEST_SEQUENCES), higher_is_better=True
        )
        if scores
        else None
    )


@kept_by_study
def standing_of_tasks(study: Study) -> Standing | None:
    """Return the standing by mean ranks over all tasks, including text, of the encodings that run
    all of them.

    The ranks are those of the trials of a seed. Trials that did not learn their task share the
    last ranks of it. None with fewer than three tasks or two encodings.
    """
    ranks_of_tasks = ranks_by_task(study)
    ranks_of_first_task = next(iter(ranks_of_tasks.values()), {})
    if len(ranks_of_tasks) < MIN_TASKS or len(ranks_of_first_task) < 2:
        return None
    means = {
        name: {
            seed: fmean(ranks_of_task[name][seed] for ranks_of_task in ranks_of_tasks.values())
            for seed in rank_by_seed
        }
        for name, rank_by_seed in ranks_of_first_task.items()
    }
    half_a_rank = 0.5 / len(ranks_of_tasks)  # in one task
    return Standing(f"{len(ranks_of_tasks)} tasks", PairwiseComparison(means, "tasks", half_a_rank))


def ranks_by_task(study: Study) -> dict[str, NumbersBySeed]:
    """Return the rank of each trial among those of its task and seed, by task, encoding and seed; 1
    is best.

    Ranked are the encodings that have the most seeds with all tasks, by the seeds that all of these
    have; one that cannot run at some longer length has no rank. Equal trials share the mean of
    their ranks.
    """
    tasks = list(dict.fromkeys(trial.task for trial in study.trials))
    keys_by_task = {task: _ranking_keys(study, task) for task in tasks}
    complete_seeds = {
        name: set.intersection(*(set(keys_by_task[task].get(name, {})) for task in tasks))
        for name in study.encodings
    }
    max_num_seeds = max(map(len, complete_seeds.values()), default=0)
    ranked_names = [
        name for name, seeds in complete_seeds.items() if seeds and len(seeds) == max_num_seeds
    ]
    seeds = (
        sorted(set.intersection(*(complete_seeds[name] for name in ranked_names)))
        if ranked_names
        else []
    )
    return {
        task: {
            name: {seed: _rank(keys_by_task[task], ranked_names, name, seed) for seed in seeds}
            for name in ranked_names
        }
        for task in tasks
        if seeds
    }


def ranks_without_a_task(study: Study) -> dict[str, tuple[int, int]]:
    """Return each encoding's best and worst rank if any one task is left out."""
    ranks_of_tasks, best_and_worst = ranks_by_task(study), {}
    for left_out_task in ranks_of_tasks:
        ranks_of_other_tasks = [
            ranks_of_task for task, ranks_of_task in ranks_of_tasks.items() if task != left_out_task
        ]
        means = {
            name: fmean(
                rank
                for ranks_of_task in ranks_of_other_tasks
                for rank in ranks_of_task[name].values()
            )
            for name in ranks_of_tasks[left_out_task]
        }
        for name, mean in means.items():
            # Means that differ by the rounding of sums only are equal.
            rank_of_mean = 1 + sum(other < mean - 1e-9 for other in means.values())
            low, high = best_and_worst.get(name, (rank_of_mean, rank_of_mean))
            best_and_worst[name] = min(low, rank_of_mean), max(high, rank_of_mean)
    return best_and_worst


def scores_of_task(study: Study, task: str) -> NumbersBySeed:
    """Return the mean of the task's metric over all tests but that at the training length, by
    encoding and seed; a trial that cannot run one of these tests is left out."""
    scores: NumbersBySeed = {}
    for result in results_that_count(study.of_task(task)):
        shown_scores = [shown_score(task, score) for score in result.by_case[1:]]
        known_scores = [value for value in shown_scores if value is not None]
        if known_scores and len(known_scores) == len(
            shown_scores
        ):  # without a test it would be a mean of easier ones
            scores.setdefault(result.config.encoding, {})[result.config.seed] = fmean(known_scores)
    return {name: scores[name] for name in study.encodings if name in scores}


def metric_beyond(task: str, train_length: int) -> str:
    """Return words for the scores of `scores_of_task`: "METRIC on TASK beyond LENGTH UNIT"."""
    definition = TASKS[task]
    return f"{definition.metric} on {task} beyond {train_length:,} {definition.length_unit}"


def _ranking_keys(study: Study, task: str) -> NumbersBySeed:
    """Return the number by which a task's trials are ranked, by encoding and seed; lower is better,
    inf if the trial has not learned the task.

    Text: the mean of bits per byte beyond the training length; trials without a loss at one of
    these lengths are left out. Any other task: the negative of `scores_of_task`.
    """
    task_study = study.of_task(task)
    if task == TEXT:
        sort_keys: NumbersBySeed = {}
        # A model that has learned less than the frequencies of bytes has not learned the text.
        bits_of_frequencies = None if study.corpus is None else study.corpus.bits_of_tables[0]
        loss_of_frequencies = bits_of_frequencies or math.inf
        for result in results_that_count(task_study):
            near_loss, *far_losses = (score.bits_per_byte for score in result.by_length)
            known_far_losses = [value for value in far_losses if value is not None]
            if known_far_losses and len(known_far_losses) == len(far_losses):
                sort_key = (
                    fmean(known_far_losses)
                    if (near_loss or 0.0) < loss_of_frequencies
                    else math.inf
                )
                sort_keys.setdefault(result.config.encoding, {})[result.config.seed] = sort_key
        return sort_keys
    learned_trials = {
        (r.config.encoding, r.config.seed) for r in results_that_count(task_study) if has_learned(r)
    }
    return {
        name: {
            seed: -score_of_seed if (name, seed) in learned_trials else math.inf
            for seed, score_of_seed in score_by_seed.items()
        }
        for name, score_by_seed in scores_of_task(study, task).items()
    }


def _rank(sort_keys: NumbersBySeed, names: Sequence[str], name: str, seed: int) -> float:
    """Return the rank, from 1, of the trial of encoding `name` and this seed among those of
    `names`; equal keys share the mean of their ranks."""
    own_key, all_keys = sort_keys[name][seed], [sort_keys[other][seed] for other in names]
    num_equal = sum(key == own_key for key in all_keys)
    return sum(key < own_key for key in all_keys) + (num_equal + 1) / 2


def mean_loss_by_window(
    window_losses: Mapping[str, list[Sequence[float]]],
) -> dict[str, list[float]]:
    """Return the means over seeds of the losses of each window, by encoding; {} if a result lacks
    windows or has others."""
    if (
        len(
            {
                len(losses_of_windows)
                for losses_of_seeds in window_losses.values()
                for losses_of_windows in losses_of_seeds
            }
        )
        != 1
    ):
        return {}
    return {
        name: [fmean(losses_of_window) for losses_of_window in zip(*losses_of_seeds, strict=True)]
        for name, losses_of_seeds in window_losses.items()
    }


def results_that_count(study: Study) -> list[TrialResult]:
    """Return the results of finished trials but for those of encodings that fail the contract,
    whose losses mean nothing."""
    return [r for r in study.finished if r.config.encoding not in study.unchecked]
