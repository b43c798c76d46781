"""Numbers in the documents: those of the rows, and those that other code computes from the rows."""

import csv
import json
import re
from functools import cache

import numpy as np
import pytest
from scipy import stats

from tests.test_readme import ROOT, load_script

numbers = load_script("update_numbers")
MARKS = sorted(
    {
        (name, mark, said)
        for name, mark, said in (
            (str(path.relative_to(ROOT)), *found)
            for path, text in numbers.documents().items()
            for found in numbers.MARK.findall(text)
        )
    }
)
SAID = sorted({(mark, said) for _, mark, said in MARKS})
METRIC = {"flip_flop": "token_accuracy", "offset": "token_accuracy", "recall": "token_accuracy"}
LEVELS = ROOT / "posenc/statistics/levels.csv"


@cache
def trials(study):
    """The results of a file of rows, read without posenc."""
    text = (ROOT / f"results/leaderboard/{study}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["result"] for line in text.splitlines()]


def of(study, task):
    return [each for each in trials(study) if each["config"]["task"] == task]


def losses(study, length):
    """(encoding, seed, bits) of every trial that has a loss at this length."""
    return [
        (each["config"]["encoding"], each["config"]["seed"], at["bits_per_byte"])
        for each in of(study, "text")
        for at in each["by_length"]
        if at["length"] == int(length) and at["bits_per_byte"] is not None
    ]


def mean_ranks(study):
    """(encoding, seed, mean rank over tasks); trials that did not learn share the last ranks."""
    table = {}
    for each in trials(study):
        metrics = [
            case[METRIC.get(each["config"]["task"], "exact_match")] for case in each["by_case"][1:]
        ]
        key = each["config"]["encoding"], each["config"]["seed"]
        learned = each["by_case"][0]["exact_match"] >= 0.9
        if None not in metrics:
            table.setdefault(each["config"]["task"], {})[key] = (
                -np.mean(metrics) if learned else np.inf
            )
    keys = sorted(set.intersection(*map(set, table.values())))
    ranks = {key: [] for key in keys}
    for scores in table.values():
        for seed in {seed for _, seed in keys}:
            some = [key for key in keys if key[1] == seed]
            for key, rank in zip(some, stats.rankdata([scores[key] for key in some]), strict=True):
                ranks[key].append(rank)
    return [(*key, np.mean(each)) for key, each in ranks.items()], len(table)


def bits(study, name, length):
    return [np.mean([b for encoding, _, b in losses(study, length) if encoding == name])]


def rank(study, name):
    return [np.mean([value for encoding, _, value in mean_ranks(study)[0] if encoding == name])]


def gap(study, place, name, minus):
    """A linear model of encodings and seeds, and Tukey's interval with the published level."""
    values, least = (losses(study, place), 0.0) if place != "rank" else mean_ranks(study)
    pandas = pytest.importorskip("pandas")
    ols = pytest.importorskip("statsmodels.formula.api", reason="make test-all installs it").ols
    frame = pandas.DataFrame(values, columns=["name", "seed", "bits"])
    model = ols("bits ~ C(name) + C(seed)", frame).fit()
    names, seeds = frame.name.nunique(), frame.seed.nunique()
    mean = frame.groupby("name").bits.mean()
    own = frame.pivot(index="seed", columns="name", values="bits")
    variance = max(model.mse_resid, np.var(own[name] - own[minus], ddof=1) / 2)
    variance = max(variance, (0.5 / least) ** 2 if least else 0.0)  # half a rank in one task
    with LEVELS.open(encoding="utf-8") as file:
        where = {"128": "at", "rank": "tasks"}.get(place, "beyond")
        (level,) = [
            float(row["level"])
            for row in csv.DictReader(file)
            if (row["where"], row["encodings"], row["seeds"]) == (where, str(names), str(seeds))
        ]
    spread = stats.studentized_range.ppf(1 - level, names, model.df_resid)
    return [mean[name] - mean[minus], spread * np.sqrt(variance / seeds)]


def context(study, name):
    found = []
    for each in of(study, "text"):
        if each["config"]["encoding"] == name:
            bits = {at["length"]: at["bits_per_byte"] for at in each["by_context"]}
            found.append(bits[each["config"]["train_length"]] - bits[max(bits)])
    return sorted(found)


def changed(table, length, encoding, arm=""):
    with (ROOT / f"results/ablations/{table}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    mine = [r for r in rows if (r["encoding"], r["arm"].replace(" ", "_")) == (encoding, arm)]
    value = {
        (r["minus"], r["seed"]): float(r["bits_per_byte"]) for r in mine if r["length"] == length
    }
    gaps = []
    for (minus, seed), bits in value.items():
        (base,) = [
            float(r["bits_per_byte"])
            for r in rows
            if f"{r['encoding']} {r['arm']}".strip() == minus
            and (r["seed"], r["length"]) == (seed, length)
        ]
        gaps.append(bits - base)
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    return [np.mean(gaps), (high - low) / 2]


def times(case, name):
    text = (ROOT / "benchmarks/results/performance.json").read_text(encoding="utf-8")
    return [
        row["ratios"]["SDPA"][0]
        for row in json.loads(text)["rows"]
        if row["group"] == "attention" and row["case"] == case and row["run"] == name
        and (row["dtype"], row["threads"]) == ("float32", 1)
    ]  # fmt: skip


AGAIN = {each.__name__: each for each in (bits, rank, gap, context, changed, times)}


@pytest.mark.parametrize("path", numbers.documents(), ids=lambda path: path.name)
def test_documents_have_the_numbers_of_the_rows(path):
    text = path.read_text(encoding="utf-8")
    assert text == numbers.with_numbers(text), "run `make readme`"


@pytest.mark.parametrize("mark, said", SAID)
def test_other_code_computes_the_same(mark, said):
    name, *given = mark.split()
    if name not in AGAIN:
        pytest.skip(f"{name} is not computed twice")
    wanted = AGAIN[name](*given)
    found = re.findall(r"[+-]?\d+\.\d+", said)
    for number, value in zip(found, wanted, strict=True):
        digits = len(number.partition(".")[2])
        assert abs(float(number) - value) <= 0.50001 * 10**-digits, (mark, said, wanted)


def test_a_wrong_number_is_put_right_and_an_unknown_one_is_told():
    mark = "<!--= rank tasks rope -->9.99<!--/-->"
    assert "9.99" not in numbers.with_numbers(mark)
    with pytest.raises(KeyError, match="nosuch"):
        numbers.with_numbers("<!--= nosuch rope -->1<!--/-->")
