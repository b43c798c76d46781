"""How far our studies rank encodings as papers do: whose table, in which order, how sure.

`update_numbers.py` and `update_findings.py` write what comes out into docs/findings.md.
"""

import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from posenc.compare.judging.standing import scores_of_task
from posenc.compare.results import Study
from posenc.compare.trial.config import CAUSAL
from posenc.tasks.registry import TEXT

PAPERS = Path(__file__).parents[2] / "results" / "papers"
TEXT_TABLES, TASK_TABLES = "published.json", "published_tasks.json"
NEAR = 0.05
"""How far a published length may be from the multiple of the training length that we tested."""


@dataclass(frozen=True)
class Rho:
    """Hold Spearman's rank correlation of `count` encodings, and its two-sided p-value.

    The smallest possible p-value is 0.083 with 4 encodings, 0.017 with 5.
    """

    value: float
    p: float
    count: int


def spearman(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Rho | None:
    """Return the rank correlation over encodings in both; None for fewer than 3, or if one side is
    constant. The p-value is exact up to 8 encodings, and from 9,999 random orders for more.

    Raises: ValueError for NaN or an infinity.

    >>> found = spearman({"t5": 1, "alibi": 2, "rope": 3}, {"t5": 20, "alibi": 21, "rope": 62})
    >>> found.value, round(found.p, 3), found.count
    (1.0, 0.333, 3)
    """
    from scipy.stats import permutation_test, rankdata

    _checked(theirs)
    names = [name for name in _checked(ours) if name in theirs]
    if len(names) < 3:
        return None
    a, b = (rankdata([side[name] for name in names]) for side in (ours, theirs))
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    if not size > 0:
        return None

    def rho(x: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.round((x * b).sum(axis=axis) / size, 12)  # ties must be exactly equal

    few = len(names) <= 8
    count, random = math.factorial(len(names)) if few else 9_999, np.random.default_rng(0)
    # Before scipy 1.15 the generator has another name.
    drawn = "rng" if "rng" in inspect.signature(permutation_test).parameters else "random_state"
    pairings: dict[str, Any] = {"permutation_type": "pairings", "n_resamples": count, drawn: random}
    found = permutation_test((a,), rho, vectorized=True, **pairings)
    return Rho(float(found.statistic), float(found.pvalue), len(names))


def separated_pairs(
    means: Mapping[str, float], deviations: Mapping[str, float], num_seeds: int
) -> list[tuple[str, str]]:
    """Return the pairs (a, b) in which `a` has a significantly smaller mean in a publication.

    |mean_a - mean_b| > t * sqrt((sd_a^2 + sd_b^2) / num_seeds), with t of num_seeds - 1 degrees of
    freedom, two-sided 95 %; seeds are unpaired. Pairs without both standard deviations, and all
    pairs of a publication with one seed, are omitted.

    >>> separated_pairs({"t5": 21.7, "kerple": 21.6, "rope": 62.4},
    ...                 {"t5": 0.2, "kerple": 0.3, "rope": 6.1}, 5)
    [('t5', 'rope'), ('kerple', 'rope')]
    """
    if num_seeds < 2:
        return []
    from scipy.special import stdtrit

    quantile = float(stdtrit(num_seeds - 1, 0.975))
    pairs = []
    for a, b in combinations(means, 2):
        if a in deviations and b in deviations:
            error = math.hypot(deviations[a], deviations[b]) / math.sqrt(num_seeds)
            if abs(means[a] - means[b]) > quantile * error:
                pairs.append((a, b) if means[a] < means[b] else (b, a))
    return pairs


def sign_agreement(ours: Mapping[str, float], pairs: list[tuple[str, str]]) -> tuple[int, int]:
    """Return in how many pairs (a, b) `ours` of a is smaller than of b, and how many pairs are in
    `ours`. Ties do not count as agreement.

    Raises: ValueError for NaN or an infinity.

    >>> sign_agreement({"t5": 1.8, "rope": 2.9}, [("t5", "rope"), ("kerple", "rope")])
    (1, 1)
    """
    _checked(ours)
    known = [(a, b) for a, b in pairs if a in ours and b in ours]
    return sum(ours[a] < ours[b] for a, b in known), len(known)


def agreement_p(
    parts: Sequence[tuple[Mapping[str, float], Sequence[tuple[str, str]]]],
) -> float | None:
    """Return the p-value of the agreement: the probability that a random order agrees in as many
    pairs or more.

    Exact up to 8 encodings, from 9,999 random orders for more. An order permutes the encodings in
    all parts alike, so similar parts do not count as independent evidence.

    Args:
        parts: for each comparison our numbers, and the pairs that differ significantly in a
            publication, the smaller first.

    Returns: None if fewer than two encodings are in all parts that have a pair.

    >>> agreement_p([({"t5": 1.8, "alibi": 1.9, "rope": 2.9}, [("t5", "rope"), ("alibi", "rope")])])
    0.3333333333333333
    """
    parts = [(ours, [p for p in pairs if set(p) <= ours.keys()]) for ours, pairs in parts]
    parts = [(ours, pairs) for ours, pairs in parts if pairs]
    paired = {name for _, pairs in parts for pair in pairs for name in pair}
    names = sorted(paired.intersection(*(ours.keys() for ours, _ in parts)))
    if len(names) < 2:
        return None
    index = {name: i for i, name in enumerate(names)}
    values = [np.array([ours[name] for name in names]) for ours, _ in parts]
    indices = [
        np.array([(index[a], index[b]) for a, b in pairs if a in index and b in index], dtype=int)
        for _, pairs in parts
    ]
    if len(names) <= 8:
        orders = np.array(list(permutations(range(len(names)))))
    else:
        draws = np.random.default_rng(0).permuted(
            np.tile(np.arange(len(names)), (9_999, 1)), axis=1
        )
        orders = np.vstack([np.arange(len(names)), draws])
    agreeing = np.zeros(len(orders), int)
    for each, known in zip(values, indices, strict=True):
        if len(known):
            mixed = each[orders]
            agreeing += (mixed[:, known[:, 0]] < mixed[:, known[:, 1]]).sum(1)
    return float((agreeing >= agreeing[0]).mean())


def _checked(side: Mapping[str, float]) -> Mapping[str, float]:
    wrong = [name for name, value in side.items() if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"an order needs finite numbers; not finite: {', '.join(wrong)}.")
    return side


@dataclass(frozen=True)
class Agreement:
    """Agreement of a study with one published table: at one multiple of the training length or, for
    a task, over all lengths beyond it.

    ours: what the study measured, lower is better.
    separated: the pairs that the publication separates beyond its seeds, the better first.
    """

    table: str
    source: str
    multiple: int | None
    rho: Rho | None
    ours: Mapping[str, float]
    separated: Sequence[tuple[str, str]]

    @property
    def agreeing(self) -> int:
        return sign_agreement(self.ours, list(self.separated))[0]

    @property
    def pairs(self) -> int:
        return sign_agreement(self.ours, list(self.separated))[1]


def agreements(study: Study) -> list[Agreement]:
    """Against every published table that has two encodings of the study or more; by the texts that
    its trials have, so that a label changes nothing."""
    if any(trial.objective != CAUSAL for trial in study.trials):
        return []  # the tables are of the next token
    text = study.of_task(TEXT)
    found = [each for table in read_tables(TEXT_TABLES) for each in _against(table, text)]
    tables = read_tables(TASK_TABLES)
    return found + [each for table in tables for each in _against_task(table, study)]


def read_tables(name: str) -> list[dict]:
    """Read TEXT_TABLES or TASK_TABLES."""
    return json.loads((PAPERS / name).read_bytes())


def _against_task(table: dict, study: Study) -> Iterator[Agreement]:
    """Compare a table's accuracies with mean scores beyond the training length."""
    part = study.of_task(table["task"])
    if not part.trials:
        return
    own = {trial.encoding for trial in part.trials if not trial.code}
    theirs = {name: -fmean(each) for name, each in table["seeds"].items()}
    ours = {
        name: -fmean(seeds.values())
        for name, seeds in scores_of_task(part, table["task"]).items()
        if name in theirs and name in own
    }
    if len(ours) < 2:
        return
    known = {name: theirs[name] for name in ours}
    title = f"{table['name']} against {table['task']} ({table['model']})"
    separated = separated_in_task(table, list(ours))
    yield Agreement(title, table["source"], None, spearman(ours, known), ours, separated)


def separated_in_task(table: dict, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of these encodings that a table of TASK_TABLES separates, better first."""
    means = {name: -fmean(table["seeds"][name]) for name in names}
    deviations = {name: stdev(table["seeds"][name]) for name in names}
    count = min(len(each) for each in table["seeds"].values())
    return separated_pairs(means, deviations, count)


def _against(table: dict, study: Study) -> Iterator[Agreement]:
    if not study.trials:
        return
    train = study.trials[0].train_length
    for length in study.trials[0].test_lengths:
        multiple, rest = divmod(length, train)
        wanted = multiple * table["train_length"]
        apart = [abs(each - wanted) for each in table["lengths"]]
        column = apart.index(min(apart))
        if rest or not apart[column] <= NEAR * wanted:
            continue
        ours = _means(study, length)
        theirs = {n: row[column] for n, row in table["means"].items() if row[column] is not None}
        shared = [name for name in ours if name in theirs]
        if len(shared) < 2:
            continue
        deviations = {n: row[column] for n, row in table["deviations"].items() if n in shared}
        known = {name: theirs[name] for name in shared}
        mine = {name: ours[name] for name in shared}
        yield Agreement(
            f"{table['name']} ({table['model']})",
            table["source"],
            multiple,
            spearman(mine, known),
            mine,
            separated_pairs(known, deviations, table["seeds"]),
        )


def _means(study: Study, length: int) -> dict[str, float]:
    """Return mean losses of posenc's own encodings only, not of a user's file or module."""
    found: dict[str, list[float]] = {}
    for result in study.finished:
        config = result.config
        if config.code or config.encoding in study.unchecked:
            continue
        for score in result.by_length:
            if score.length == length and score.bits_per_byte is not None:
                found.setdefault(config.encoding, []).append(score.bits_per_byte)
    return {name: fmean(values) for name, values in found.items()}
