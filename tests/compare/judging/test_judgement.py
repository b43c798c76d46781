"""The judgement in other code: numpy alone, on simulated studies and on three published ones."""

import csv
import dataclasses
import math
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from posenc.compare.judging import judgement
from posenc.compare.judging.context_use import ContextUse
from posenc.compare.judging.judgement import (
    LEADS,
    TIED,
    USE,
    DriftOfLeads,
    Judgement,
    _broken_encodings,
    _held_in_window,
    choose,
    judge,
)
from posenc.compare.judging.near_far import Places, places_of
from posenc.compare.judging.sentences import _sentence_on_breaking
from posenc.compare.results import Study
from posenc.statistics.seed_intervals import Gap
from posenc.tasks.registry import TEXT
from tests.compare.judging.test_context_use import rows_with, scores_of_model
from tests.compare.judging.test_standing import verdicts_of_pairs
from tests.experiment import experiment

RESULTS = Path(__file__).parents[3] / "results"
SPREADS = (0.015, 0.018)
"""What is expected near and far, in bits."""
MARGIN, KNOWN = 0.02, 10


@cache
def critical(k: int, freedom: int) -> float:
    """The studentized range that is exceeded in 2.5 %; scipy takes long for each."""
    return float(stats.studentized_range.isf(0.025, k, freedom))


def half_widths(table: np.ndarray, expected: float) -> np.ndarray:
    """Half of the interval of every pair, of losses (encodings, seeds)."""
    k, n = table.shape
    freedom = (k - 1) * (n - 1)
    left = table - table.mean(1)[:, None] - table.mean(0) + table.mean()
    pooled = ((left**2).sum() + KNOWN * expected**2) / (freedom + KNOWN)
    own = (table[:, None] - table).var(2, ddof=1) / 2
    own = ((n - 1) * own + KNOWN * expected**2) / (n - 1 + KNOWN)
    return critical(k, freedom + KNOWN) * np.sqrt(np.maximum(pooled, own) / n)


def behind(table: np.ndarray, expected: float) -> np.ndarray:
    """True where the row's encoding is worse than the column's: judged again without the worse."""
    found = np.zeros((len(table), len(table)), bool)
    kept = np.arange(len(table))
    while len(kept) > 1:
        means = table[kept].mean(1)
        apart = means[:, None] - means
        worse = (apart > half_widths(table[kept], expected)) & (apart > MARGIN)
        found[np.ix_(kept, kept)] |= worse
        if not worse.any():
            break
        kept = kept[~worse.any(1)]
    return found


def steady_half(tables: list[np.ndarray], place: int, first: int) -> float:
    """Half of the interval of the first of a place by its own seeds, over both places."""
    variances = []
    for table, expected in zip(tables, SPREADS, strict=True):
        means = table.mean(1)
        others = [i for i in np.argsort(abs(means - means[first]), kind="stable") if i != first]
        spreads = [np.std(table[i] - table[first], ddof=1) for i in others[:3]]
        variances.append((min(spreads) / expected) ** 2)
    n = tables[0].shape[1]
    quantile = stats.t.isf(0.018, len(tables) * (n - 1))
    return quantile * SPREADS[place] * math.sqrt(np.mean(variances) / n)


def named(tables: list[np.ndarray]) -> list[tuple[int | None, np.ndarray]]:
    """Of each place the encoding that leads, None if it is tied, and which are worse than which."""
    found = []
    for place, table in enumerate(tables):
        worse = behind(table, SPREADS[place])
        means = table.mean(1)
        first = int(means.argmin())
        half = steady_half(tables, place, first)
        others = [i for i in range(len(table)) if i != first]
        best = not worse[first].any() and all(worse[i].any() for i in others)
        leads = best and all(abs(means[i] - means[first]) > half for i in others)
        found.append((first if leads else None, worse))
    return found


def draw(random: np.random.Generator, means: np.ndarray, seeds: int, tenfold: bool = False):
    """Losses near and far, whose seeds vary as those of the published trials do."""
    tables = []
    for least, most in ((0.002, 0.015), (0.008, 0.022)):
        spread = random.uniform(least, most, len(means))
        if tenfold:
            spread[0] = 0.06
        noise = random.normal(size=(len(means), seeds)) * spread[:, None]
        tables.append(2 + means[:, None] + noise + 0.05 * random.normal(size=seeds))
    return tables


def as_values(table: np.ndarray) -> dict[str, dict[int, float]]:
    return {f"e{i}": dict(enumerate(map(float, row))) for i, row in enumerate(table)}


@pytest.mark.quick(3)
@pytest.mark.parametrize("count", [2, 3, 6, 13])
@pytest.mark.parametrize("seeds", [2, 3])
def test_posenc_names_what_plain_numpy_names(count, seeds):
    random = np.random.default_rng([count, seeds])
    leads = 0
    for case in range(12):
        means = random.choice([0.0, 0.02, 0.1, 0.4], count) + 0.1 * (np.arange(count) > 0)
        tables = draw(random, means, seeds, tenfold=case % 3 == 0)
        places = places_of(*map(as_values, tables))
        for standing, (first, worse) in zip(places.all, named(tables), strict=True):
            choice = choose(standing, places, DriftOfLeads({}, places), None)
            assert (choice.certainty != TIED) == (first is not None)
            if first is not None:
                assert choice.taken == f"e{first}"
                leads += 1
            pairs = {(f"e{a}", f"e{b}") for a, b in np.argwhere(worse)}
            assert standing.worse_pairs == pairs
    assert 2 < leads < 24


@pytest.mark.parametrize(("count", "seeds"), [(2, 2), (6, 2), (6, 3), (13, 2)])
def test_a_named_encoding_is_seldom_wrong_and_a_leader_seldom_missed(count, seeds):
    """At most 5 % are wrong, with two standard errors of 100 studies, where all are worse by 0.025
    and one has four to ten times the spread; at least 80 % of leads of 0.1 are named."""
    random = np.random.default_rng([7, count, seeds])
    wrong = 0
    found = np.zeros(2)
    studies = 100
    for _ in range(studies):
        close = np.where(np.arange(count) == count - 1, 0.0, 0.025)
        of_places = named(draw(random, close, seeds, tenfold=True))
        wrong += any(first not in (None, count - 1) for first, _ in of_places)
        ahead = np.where(np.arange(count) == count - 1, 0.0, 0.1)
        for place, (first, _) in enumerate(named(draw(random, ahead, seeds))):
            found[place] += first == count - 1
    assert wrong / studies <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / studies)
    assert (found / studies >= 0.8).all()


def test_the_simulated_levels_are_as_documented():
    rows = list(csv.DictReader((RESULTS / "ablations/judged.csv").read_text().splitlines()))
    assert len(rows) == 32
    assert max(float(row["wrong"]) for row in rows) <= 0.05
    usual = [row for row in rows if row["world"] != "tenfold"]
    assert min(min(float(row["named_near"]), float(row["named_far"])) for row in usual) >= 0.795
    assert max(float(row["differ"]) for row in usual) <= 0.07
    tenfold = [row for row in rows if row["world"] == "tenfold"]
    assert max(float(row["differ"]) for row in tenfold) <= 2 / 3


def test_an_encoding_breaks_where_far_context_costs_more_than_a_tenth_of_a_bit():
    good = rows_with([scores_of_model(256, seed) for seed in (1, 2)])
    worse = []
    for seed in (1, 2):
        scores = scores_of_model(64, seed)
        near = scores[-1].near_windows
        broken = dataclasses.replace(
            scores[-1], far=scores[-1].far_near + 1.5, windows=tuple(w + 1.5 for w in near)
        )
        worse.append((*scores[:-1], broken))
    assert _broken_encodings({"t5": good}) == {}
    assert _broken_encodings({"rope": rows_with(worse)}) == {"rope": pytest.approx(1.5)}


@pytest.mark.parametrize(
    ("costs", "half_width", "breaks"),
    [
        (1.5, 0.1, True),
        (0.09, 0.01, False),
        (1.5, 1.6, False),
        (1.5, math.inf, False),
        (1.5, math.nan, False),
        (math.nan, 0.1, False),
    ],
)
def test_nothing_breaks_within_its_interval_or_without_one(monkeypatch, costs, half_width, breaks):
    use = ContextUse(0, None, 128, 1024, Gap(-costs, half_width))
    monkeypatch.setattr(judgement, "context_use", lambda rows: use)
    rows = rows_with([scores_of_model(64, 1)])
    assert bool(_broken_encodings({"rope": rows})) == breaks


BREAKS_IN_WORDS = (
    "Read as trained, rope breaks beyond 128 bytes: context of 1,024 bytes costs it 1.50 bits"
)


def broken(**changed):
    return Judgement(Places(None, None, {}, {}), **changed)


def test_a_break_is_said_with_the_window_in_which_the_same_weights_hold():
    alone = broken(broken={"rope": 1.5})
    assert _sentence_on_breaking(alone, "128 bytes", 1024) == f"{BREAKS_IN_WORDS}."
    held = broken(broken={"rope": 1.5}, held_in_window={"rope": 0.0103}, window_length=128)
    assert _sentence_on_breaking(held, "128 bytes", 1024) == (
        f"{BREAKS_IN_WORDS}; in a window of 128 bytes it costs +0.01."
    )
    two = broken(
        broken={"rope": 1.5, "nope": 2.0}, held_in_window={"rope": -0.001}, window_length=64
    )
    assert _sentence_on_breaking(two, "128 bytes", 1024) == (
        "Read as trained, some break beyond 128 bytes: context of 1,024 bytes costs them bits: "
        "rope 1.50 and nope 2.00; in a window of 64 bytes it costs rope +0.00."
    )


@pytest.mark.parametrize(("costs", "holds"), [(0.01, True), (0.03, False), (-0.2, True)])
def test_a_row_in_a_window_holds_where_far_bytes_cost_no_more_than_the_margin(costs, holds):
    by_seed = []
    for seed in (1, 2):
        scores = scores_of_model(64, seed)
        near = scores[-1].near_windows
        moved = dataclasses.replace(
            scores[-1], far=scores[-1].far_near + costs, windows=tuple(w + costs for w in near)
        )
        by_seed.append((*scores[:-1], moved))
    rows = {"rope in a window": rows_with(by_seed)}
    expected = {"rope": pytest.approx(costs)} if holds else {}
    assert _held_in_window(["rope", "nope"], rows) == expected


def published() -> dict[str, Study]:
    """Two studies with two or three seeds of all encodings."""
    boards = experiment("leaderboard_plan").published_studies()
    kept = Study.from_json((RESULTS / "compare/study.json").read_text(encoding="utf-8"))
    return {"code": boards["code"], "compare": kept}


def from_positions(result) -> float | None:
    """The loss of the last 128 of 1,024 bytes, where results have losses by position only."""
    last = [b for b in result.by_position if b.start >= 1024 - 128]
    if not last or (last[0].start, last[-1].stop) != (896, 1024):
        return None
    sizes = [b.stop - b.start for b in last]
    return float(np.average([b.bits_per_byte for b in last], weights=sizes))


@pytest.mark.parametrize("name", ["code", "compare"])
def test_every_pair_and_every_named_row_of_two_studies_follows_in_other_code(name):
    """Read from the trials, without any function of the judge but the pairs it names."""
    given = published()[name]
    near: dict[str, list[float]] = {}
    far_of_readings: dict[str, dict[str, list[float]]] = {}
    for result in sorted(given.of_task(TEXT).finished, key=lambda each: each.config.seed):
        name = result.config.encoding
        near.setdefault(name, []).append(result.by_length[0].bits_per_byte)
        far_of_result = {each.name: each.far[-1].far for each in result.readings if each.far}
        far_of_result[""] = result.far[-1].far if result.far else from_positions(result)
        for reading, bits in far_of_result.items():
            if bits is not None:
                far_of_readings.setdefault(name, {}).setdefault(reading, []).append(bits)
    # An encoding is judged as trained, unless a window, or else a tuning, saves more than 0.02.
    far: dict[str, list[float]] = {}
    for name, losses_of_reading in far_of_readings.items():
        enough = min(map(np.mean, losses_of_reading.values())) + 0.02
        reading = next(
            r for r in ("", "window", "tuned") if np.mean(losses_of_reading[r]) <= enough
        )
        words = {"": "", "window": " in a window", "tuned": " tuned"}[reading]
        far[name + words] = losses_of_reading[reading]
    judgement = judge(given)
    checked = 0
    for losses, standing, expected, choice in (
        (near, judgement.places.near, SPREADS[0], judgement.near),
        (far, judgement.places.far, SPREADS[1], judgement.far),
    ):
        names = list(losses)
        worse = behind(np.array([losses[n] for n in names]), expected)
        for a, b, verdict in verdicts_of_pairs(standing):
            i, j = names.index(a), names.index(b)
            assert verdict == ("worse" if worse[i, j] else "better" if worse[j, i] else "tied")
            checked += 1
        best = {names[i] for i in range(len(names)) if not worse[i].any()}
        lowest = min(losses, key=lambda n: np.mean(losses[n]))
        assert best | {lowest} <= set(choice.tied) and choice.taken in choice.tied
        if choice.certainty in (USE, LEADS):
            assert choice.taken == lowest and set(choice.tied) == {lowest}
        for n in choice.tied:
            assert choice.loss_of_row[n] == pytest.approx(np.mean(losses[n]))
    assert checked == sum(len(list(combinations(losses, 2))) for losses in (near, far)) >= 25
