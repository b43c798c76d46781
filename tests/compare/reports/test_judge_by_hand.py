"""Random tables of losses, whose pairwise verdicts are computed here from docs/compare.md alone.

Of posenc's code only the judged study and its verdicts are used.
"""

import csv
import itertools
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import posenc
from posenc.compare.judging.near_far import standings
from tests.compare.judging.test_standing import verdicts_of_pairs

EXPECTED_SPREAD = {"near": 0.015, "far": 0.018}
NAMES = ["rope", "alibi", "t5", "nope", "my pe", "fire", "RoPE-2", "x,y", "kerple", 'a "b"', "Ω"]


@cache
def quantile_of_range(count: int, degrees: int) -> float:
    """The studentized range's quantile, which scipy integrates for a second."""
    return stats.studentized_range.ppf(1 - 0.025, count, degrees)


def intervals(losses: np.ndarray, spread: float) -> np.ndarray:
    """Half of the interval of each pair's difference, from losses (encodings, seeds).

    q(0.025; encodings, degrees) * sqrt(max(pooled, own) * c / 2), c = 2 / seeds; both variances
    are averaged with the expected one, which counts as ten degrees of freedom.
    """
    count, seeds = losses.shape
    residuals = losses - losses.mean(1, keepdims=True) - losses.mean(0) + losses.mean()
    degrees = (count - 1) * (seeds - 1)
    pooled = ((residuals**2).sum() + 10 * spread**2) / (degrees + 10)
    quantile = quantile_of_range(count, degrees + 10)
    halves = np.zeros((count, count))
    for i, j in itertools.permutations(range(count), 2):
        variance = (losses[i] - losses[j]).var(ddof=1) / 2
        own = ((seeds - 1) * variance + 10 * spread**2) / (seeds - 1 + 10)
        halves[i, j] = max(0.0005, quantile * math.sqrt(max(pooled, own) * (2 / seeds) / 2))
    return halves


def pairs_worse(losses: np.ndarray, spread: float) -> set[tuple[int, int]]:
    """The pairs (a, b) in which a is worse than b: outside the interval and by more than 0.02 bits.

    Those that are worse than none are judged again without the others, until nobody turns out
    worse.
    """
    worse: set[tuple[int, int]] = set()
    left = [*range(len(losses))]
    while len(left) > 1:
        means = losses[left].mean(1)
        halves = intervals(losses[left], spread)
        found = {
            (left[i], left[j])
            for i, j in itertools.permutations(range(len(left)), 2)
            if means[i] - means[j] > max(halves[i, j], 0.02)
        }
        worse |= found
        behind = {a for a, _ in found}
        if not behind:
            break
        left = [i for i in left if i not in behind]
    return worse


def is_clear(losses: np.ndarray, spread: float) -> bool:
    """Whether no difference lies so near a threshold that rounding could turn it."""
    left = [*range(len(losses))]
    while len(left) > 1:
        means, halves = losses[left].mean(1), intervals(losses[left], spread)
        for i, j in itertools.permutations(range(len(left)), 2):
            difference = means[i] - means[j]
            if min(abs(difference - halves[i, j]), abs(difference - 0.02)) < 2e-5:
                return False
        behind = {a for a, _ in pairs_worse(losses[left], spread)}
        if not behind:
            return True
        left = [x for i, x in enumerate(left) if i not in behind]
    return True


class Trial:
    """The true losses of a trial in bits: near, and far in each reading; None if it failed."""

    def __init__(self, near, far):
        self.near, self.far = near, far


def draw(generator) -> dict:
    """A random study: encodings, seeds, lengths, losses."""
    names = [*generator.permutation(NAMES)[: generator.integers(2, 9)]]
    seeds = [*map(int, generator.permutation(9)[: generator.integers(2, 6)])]
    scale = generator.choice([0.004, 0.015, 0.06])
    trials, has_far, has_window = {}, {}, {}
    for i, name in enumerate(names):
        level = 2.0 + generator.choice([0.0, 0.01, 0.05, 0.15, 0.6]) * generator.random()
        breaks = generator.choice([0.0, 0.03, 0.2, 2.0])
        has_far[name] = i < 2 or generator.random() > 0.15
        has_window[name] = bool(has_far[name] and generator.random() < 0.3)
        own_scale = scale * generator.choice([1, 1, 1, 5])
        for seed in seeds:
            near = level + own_scale * generator.normal()
            far = {"trained": level + breaks + own_scale * generator.normal()}
            if has_window[name]:
                # Clearly above or below the 0.02 bits from which a window counts.
                step = 0.2 if breaks > 0.1 else -0.2
                far["window"] = far["trained"] - step
            trials[name, seed] = Trial(near, far if has_far[name] else {})
    failed = []
    if len(names) > 3 and generator.random() < 0.4:
        failed.append((names[-1], seeds[0]))
    return {"names": names, "seeds": seeds, "trials": trials, "failed": failed}


def write(study: dict, path: Path, generator) -> dict:
    """Write the table in a random form. Return the keywords for posenc.compare.judge."""
    trained, longest = [(128, 1024), (512, 2048), (100, 150)][generator.integers(3)]
    unit = generator.choice(["loss", "bits", "bits_per_token", "bits_per_byte"])
    factor = math.log(2) if unit == "loss" else 1.0
    form = generator.choice(["runs", "positions", "alone"])
    rows = []
    for (name, seed), trial in study["trials"].items():
        key = {"encoding": name, "seed": seed, "reading": "trained", "position": ""}
        if (name, seed) in study["failed"]:
            rows.append({**key, "length": trained, unit: generator.choice(["nan", "inf", "-inf"])})
            continue
        rows.append({**key, "length": trained, unit: factor * trial.near})
        for reading, far in trial.far.items():
            place = {**key, "length": longest, "reading": reading}
            if reading != "trained":
                rows.append({**place, "length": trained, unit: factor * trial.near})
            starts = {
                "runs": [0, longest - trained, longest - trained // 2],
                "positions": [*range(longest - trained, longest)],
                "alone": [longest - trained],
            }[form]
            wobble = generator.normal(size=len(starts)) * 0.01
            in_far = [i for i, start in enumerate(starts) if start >= longest - trained]
            ends = [*starts[1:], longest]
            sizes = np.diff([*starts, longest])
            wobble[in_far] -= (wobble * sizes)[in_far].sum() / sizes[in_far].sum()
            assert len(ends) == len(starts)
            for start, moved in zip(starts, wobble, strict=True):
                rows.append({**place, "position": start, unit: factor * (far + moved)})
            if form != "runs":
                rows.append({**place, unit: factor * (far - 0.5)})
    generator.shuffle(rows)
    own_names = {"encoding": "pe", "seed": "run", unit: "val"} if generator.random() < 0.5 else {}
    columns = ["encoding", "seed", "length", "reading", "position", unit]
    generator.shuffle(columns)
    with path.open("w", newline="", encoding=generator.choice(["utf-8", "utf-8-sig"])) as file:
        table = csv.writer(file, lineterminator=generator.choice(["\n", "\r\n"]))
        table.writerow(own_names.get(column, column) for column in columns)
        table.writerows([row[column] for column in columns] for row in rows)
    words = {"columns": {str(k): v for k, v in own_names.items()}} if own_names else {}
    if generator.random() < 0.5:
        words["trained_length"] = trained
    return words


def judged_far(trial: Trial) -> float:
    """The far loss in the simplest reading that holds: a window only if more than 0.02 better."""
    window = trial.far.get("window", math.inf)
    return window if window < trial.far["trained"] - 0.02 else trial.far["trained"]


def by_hand(study: dict) -> dict[str, tuple[list[str], np.ndarray]]:
    """The losses (encodings, seeds) that are judged, near and far, with the encodings' names."""
    failed = {name for name, _ in study["failed"]}
    names = [name for name in study["names"] if name not in failed]
    trials, seeds = study["trials"], study["seeds"]
    far_names = [name for name in names if trials[name, seeds[0]].far]
    near = np.array([[trials[name, seed].near for seed in seeds] for name in names])
    far = np.array([[judged_far(trials[name, seed]) for seed in seeds] for name in far_names])
    return {"near": (names, near), "far": (far_names, far)}


@pytest.mark.parametrize("number", range(30))
def test_a_random_table_has_the_verdicts_that_the_documents_say(number, tmp_path):
    generator = np.random.default_rng([62, number])
    study = draw(generator)
    expected = by_hand(study)
    while not all(is_clear(losses, EXPECTED_SPREAD[p]) for p, (_, losses) in expected.items()):
        study = draw(generator)
        expected = by_hand(study)
    words = write(study, tmp_path / "losses.csv", generator)
    judged = posenc.compare.judge(tmp_path / "losses.csv", **words)
    assert {(r.config.encoding, r.config.seed) for r in judged.failed} == {*study["failed"]}
    for standing, (place, (names, losses)) in zip(standings(judged), expected.items(), strict=True):
        spread = EXPECTED_SPREAD[place]
        means = dict(zip(names, losses.mean(1), strict=True))
        row_of = {name.removesuffix(" in a window"): name for name in standing.order}
        assert [*row_of] == sorted(means, key=means.__getitem__)
        assert [standing.mean(row_of[name]) for name in names] == pytest.approx([*means.values()])
        worse = {(names[a], names[b]) for a, b in pairs_worse(losses, spread)}
        halves = intervals(losses, spread)
        for a, b, verdict in verdicts_of_pairs(standing):
            a, b = a.removesuffix(" in a window"), b.removesuffix(" in a window")
            expected_verdict = "tied"
            if (a, b) in worse:
                expected_verdict = "worse"
            elif (b, a) in worse:
                expected_verdict = "better"
            assert verdict == expected_verdict
            # Of the intervals of a pair the narrowest counts; this is that among all.
            half = halves[names.index(a), names.index(b)]
            assert standing.gap(row_of[a], row_of[b]).half_width <= half * 1.001
