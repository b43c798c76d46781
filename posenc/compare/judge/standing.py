"""Who is first: how the encodings of a study stand at one length, at one task, or over all tasks.

Texts, tables and figures take every order of encodings from a `Standing`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

from posenc.compare.judge.summary import has_learned, shown_score
from posenc.compare.results import Study, TrialResult
from posenc.compare.trial.evaluate import NUM_TEST_SEQUENCES
from posenc.statistics.seed_intervals import Gap, PairwiseComparison, Prior, group_into_tiers
from posenc.statistics.text_intervals import window_gaps
from posenc.tasks.registry import TASKS, TEXT

MIN_TASKS = 3
"""With fewer tasks their ranks are not averaged: chosen, not derived."""
MARGIN = 0.02
"""Bits per byte up to which a difference on text does not matter, however certain it is: another
seed, text or rate of the tables moves as much. Chosen, not derived."""
NEAR_SPREAD = Prior(0.015, 10)
FAR_SPREAD = Prior(0.018, 10)
"""Standard deviations over seeds that are expected at the training length and on far bytes: those
of three of four published encodings, of those that do not break, are smaller. They, and their
weights, were chosen by simulated studies (experiments/judged.py)."""
Values = dict[str, dict[int, float]]
"""One number by encoding and seed."""


@dataclass(frozen=True)
class Standing:
    """The order of encodings at one length, in one task or over all tasks, and which differences
    are significant by seeds.

    where: in words, such as "128 bytes".
    pairs: the numbers, and the differences of all pairs.
    higher_is_better: of scores; not of losses and ranks.
    by_window: mean losses over seeds of each window of the text, by encoding; {} if not kept.
    margin: the largest difference that does not matter, in the unit of the numbers.
    half_by_own_seeds: half of an interval of the first row by its own seeds, see near_far.py; it
        leads only by more.
    """

    where: str
    pairs: PairwiseComparison
    higher_is_better: bool = False
    by_window: Mapping[str, Sequence[float]] = field(default_factory=dict)
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
        behind = {a for a, _ in self._pairs_that_matter}
        values = {name: seeds for name, seeds in self.pairs.values.items() if name not in behind}
        if self.pairs.kind_of_values != "text" or not 1 < len(values) < len(self.pairs.values):
            return None
        again = replace(self, pairs=replace(self.pairs, values=values))
        return again if again.pairs.least_significant_gap < math.inf else None

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
        pairs = (
            self._pairs_that_matter | self.among_best.worse_pairs
            if self.among_best
            else self._pairs_that_matter
        )
        # Of losses and ranks the higher is the worse, of scores the lower.
        return frozenset((b, a) for a, b in pairs) if self.higher_is_better else pairs

    @cached_property
    def tiers(self) -> tuple[tuple[str, ...], ...]:
        """Return groups of encodings: those worse than none, then those worse only than encodings
        of earlier groups, and so on."""
        return group_into_tiers(self.order, self.worse_pairs)

    def tier(self, name: str) -> int:
        """Return the number of an encoding's tier, from 1 for the best."""
        return next(i for i, names in enumerate(self.tiers, 1) if name in names)

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
        first = self.order[0]
        close = {n for n in self.order if abs(self.gap(n, first).value) <= self.half_by_own_seeds}
        return tuple(name for name in self.order if name in {first, *self.first_tier} | close)

    @cached_property
    def gaps_over_windows(self) -> dict[tuple[str, str], Gap]:
        """Return the differences of the first from all others, in either order, with intervals over
        the windows of the text instead of seeds; {} without windows."""
        return window_gaps(self.by_window, self.order[0])

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
            best = self.among_best.order[0]
            shift = round(self.among_best.mean(best) - means[best], 11)  # 0 if no trial is missing
        mean = round(means[name] + shift, 12) + 0.0  # no -0.0
        return min(max(mean, 0.0), 1.0) if self.higher_is_better else mean

    def gap(self, name: str, other: str | None = None) -> Gap:
        """Return the difference of the encoding `name` from another, by default the first of the
        order."""
        other = other or self.order[0]
        gap = self.pairs.gap(name, other)
        if self.among_best and {name, other} <= self.among_best.pairs.values.keys():
            again = self.among_best.gap(name, other)
            same = abs(again.value - gap.value) < 1e-11  # False if a trial is missing
            return Gap(again.value, min(gap.half_width, again.half_width)) if same else again
        return gap


def standing_at(study: Study, length: int) -> Standing | None:
    """Return the standing by bits per byte at a length of the text; None if no encoding runs
    there."""
    losses: Values = {}
    by_window: dict[str, list[Sequence[float]]] = {}
    for result in results_that_count(study.of_task(TEXT)):
        name = result.config.encoding
        for score in result.by_length:
            if score.length == length and score.bits_per_byte is not None:
                losses.setdefault(name, {})[result.config.seed] = score.bits_per_byte
                by_window.setdefault(name, []).append(score.windows)
    losses = {name: losses[name] for name in study.encodings if name in losses}
    if not losses:
        return None
    train = study.of_task(TEXT).trials[0].train_length
    pairs = PairwiseComparison(losses, "text", prior=NEAR_SPREAD if length == train else FAR_SPREAD)
    return Standing(
        f"{length:,} bytes", pairs, by_window=mean_loss_by_window(by_window), margin=MARGIN
    )


def order_by_standings(study: Study, ordered: Iterable[Standing]) -> list[str]:
    """Return all encodings, sorted by the first of these standings; those that it lacks are sorted
    by the next ones."""
    names: dict[str, None] = {}
    for standing in ordered:
        names |= dict.fromkeys(standing.order)
    return list(names | dict.fromkeys(study.encodings))


def standing_of_task(study: Study, task: str) -> Standing | None:
    """Return the standing in a task by mean scores over all tests but that at the training length;
    None if no encoding has one. Trials that did not learn the task count, too. Compared are the
    seeds that all encodings have, or all seeds if these are fewer than two."""
    scores = scores_of_task(study, task)
    shared = sorted(set.intersection(*map(set, scores.values()))) if scores else []
    if len(shared) > 1:
        scores = {name: {seed: seeds[seed] for seed in shared} for name, seeds in scores.items()}
    return (
        Standing(
            task, PairwiseComparison(scores, "task", 1 / NUM_TEST_SEQUENCES), higher_is_better=True
        )
        if scores
        else None
    )


def standing_of_tasks(study: Study) -> Standing | None:
    """Return the standing by mean ranks over all tasks, including text, of the encodings that run
    all of them.

    The ranks are those of the trials of a seed. Trials that did not learn their task share the
    last ranks of it. None with fewer than three tasks or two encodings.
    """
    ranks = ranks_by_task(study)
    first = next(iter(ranks.values()), {})
    if len(ranks) < MIN_TASKS or len(first) < 2:
        return None
    means = {
        name: {seed: fmean(task[name][seed] for task in ranks.values()) for seed in seeds}
        for name, seeds in first.items()
    }
    half_a_rank = 0.5 / len(ranks)  # in one task
    return Standing(f"{len(ranks)} tasks", PairwiseComparison(means, "tasks", half_a_rank))


def ranks_by_task(study: Study) -> dict[str, Values]:
    """Return the rank of each trial among those of its task and seed, by task, encoding and seed; 1
    is best.

    Ranked are the encodings that have the most seeds with all tasks, by the seeds that all of these
    have; one that cannot run at some longer length has no rank. Equal trials share the mean of
    their ranks.
    """
    tasks = list(dict.fromkeys(trial.task for trial in study.trials))
    keys = {task: _sort_keys(study, task) for task in tasks}
    whole = {
        name: set.intersection(*(set(keys[task].get(name, {})) for task in tasks))
        for name in study.encodings
    }
    most = max(map(len, whole.values()), default=0)
    names = [name for name, seeds in whole.items() if seeds and len(seeds) == most]
    seeds = sorted(set.intersection(*(whole[name] for name in names))) if names else []
    return {
        task: {
            name: {seed: _rank(keys[task], names, name, seed) for seed in seeds} for name in names
        }
        for task in tasks
        if seeds
    }


def ranks_without_a_task(study: Study) -> dict[str, tuple[int, int]]:
    """Return each encoding's best and worst rank if any one task is left out."""
    ranks, best_and_worst = ranks_by_task(study), {}
    for left_out in ranks:
        others = [of_task for task, of_task in ranks.items() if task != left_out]
        means = {
            name: fmean(rank for of_task in others for rank in of_task[name].values())
            for name in ranks[left_out]
        }
        for name, mean in means.items():
            # Means that differ by the rounding of sums only are equal.
            place = 1 + sum(other < mean - 1e-9 for other in means.values())
            low, high = best_and_worst.get(name, (place, place))
            best_and_worst[name] = min(low, place), max(high, place)
    return best_and_worst


def scores_of_task(study: Study, task: str) -> Values:
    """Return the mean of the task's metric over all tests but that at the training length, by
    encoding and seed; a trial that cannot run one of these tests is left out."""
    scores: Values = {}
    for result in results_that_count(study.of_task(task)):
        shown = [shown_score(task, score) for score in result.by_case[1:]]
        known = [value for value in shown if value is not None]
        if known and len(known) == len(shown):  # without a test it would be a mean of easier ones
            scores.setdefault(result.config.encoding, {})[result.config.seed] = fmean(known)
    return {name: scores[name] for name in study.encodings if name in scores}


def metric_beyond(task: str, train_length: int) -> str:
    """Return words for the scores of `scores_of_task`: "METRIC on TASK beyond LENGTH UNIT"."""
    definition = TASKS[task]
    return f"{definition.metric} on {task} beyond {train_length:,} {definition.length_unit}"


def _sort_keys(study: Study, task: str) -> Values:
    """Return the number by which a task's trials are ranked, by encoding and seed; lower is better,
    inf if the trial has not learned the task.

    Text: the mean of bits per byte beyond the training length; trials without a loss at one of
    these lengths are left out. Any other task: the negative of `scores_of_task`.
    """
    part = study.of_task(task)
    if task == TEXT:
        keys: Values = {}
        # A model that has learned less than the frequencies of bytes has not learned the text.
        frequent = (study.corpus and study.corpus.byte_entropy) or math.inf
        for result in results_that_count(part):
            near, *far = (score.bits_per_byte for score in result.by_length)
            known = [value for value in far if value is not None]
            if known and len(known) == len(far):
                key = fmean(known) if (near or 0.0) < frequent else math.inf
                keys.setdefault(result.config.encoding, {})[result.config.seed] = key
        return keys
    passed = {
        (r.config.encoding, r.config.seed) for r in results_that_count(part) if has_learned(r)
    }
    return {
        name: {seed: -v if (name, seed) in passed else math.inf for seed, v in seeds.items()}
        for name, seeds in scores_of_task(study, task).items()
    }


def _rank(keys: Values, names: Sequence[str], name: str, seed: int) -> float:
    """Return the rank, from 1, of the trial of encoding `name` and this seed among those of
    `names`; equal keys share the mean of their ranks."""
    mine, all_of_them = keys[name][seed], [keys[other][seed] for other in names]
    equal = sum(key == mine for key in all_of_them)
    return sum(key < mine for key in all_of_them) + (equal + 1) / 2


def mean_loss_by_window(by_window: Mapping[str, list[Sequence[float]]]) -> dict[str, list[float]]:
    """Return the means over seeds of the losses of each window, by encoding; {} if a result lacks
    windows or has others."""
    if len({len(windows) for seeds in by_window.values() for windows in seeds}) != 1:
        return {}
    return {
        name: [fmean(window) for window in zip(*seeds, strict=True)]
        for name, seeds in by_window.items()
    }


def results_that_count(study: Study) -> list[TrialResult]:
    """Return the results of finished trials but for those of encodings that fail the contract,
    whose losses mean nothing."""
    return [r for r in study.finished if r.config.encoding not in study.unchecked]
