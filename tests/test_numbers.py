"""Numbers in the documents: those of the rows, and those that other code computes from the rows."""

import csv
import json
import re
from collections import Counter
from functools import cache
from itertools import combinations, permutations

import numpy as np
import pytest
from scipy import stats

from tests.test_readme import ROOT, load_script

numbers = load_script("update_numbers")


def numbers_of(text: str, sentences: list[str]) -> list[tuple[str, str]]:
    """Return each call and what stands in the document in its place."""
    found = []
    for sentence in sentences:
        stands = (
            " ".join(number.split()) for number in numbers.find_sentence(text, sentence).groups()
        )
        found += zip(numbers.CALL.findall(sentence), stands, strict=True)
    return found


NUMBERS = sorted(
    {
        (path.relative_to(ROOT).as_posix(), call, said)
        for path, sentences in numbers.documents().items()
        for call, said in numbers_of(path.read_text(encoding="utf-8"), sentences)
    }
)
"""Document, call and what the document says, of every number that is written from the rows."""
SAID = sorted({(call, said) for _, call, said in NUMBERS})
BY_TOKEN = ("recall", "flip_flop", "offset", "grid")
LEVELS = ROOT / "posenc/statistics/levels.csv"


NAMES = {
    "alibi:bias_max=8": "alibi_with_fixed_slopes",
    "rope:rope_theta=10000": "rope_at_base_10,000",
    "t5:unscaled=true": "t5_unscaled",
}
"""Encodings of the board whose options are their name; of all others options are settings."""
ROUND = ("code", "novel")
SIZES = ("size-0.2M", "size-0.9M")
ONE_SEED, WITH_ONE_SEED = "-one-seed", ("sinusoidal", "learned", "alibi_with_fixed_slopes")
RATE = 0.008
"""The learning rate of all encodings on text, before any is tuned."""


@cache
def read(file):
    """The results of a file of rows, read without posenc; `name` is the encoding's name."""
    folder = "ablations" if file in ("text_600", "copy_longer") else "leaderboard"
    text = (ROOT / f"results/{folder}/{file}.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line)["result"] for line in text.splitlines()]
    for each in found:
        text = each["config"]["encoding"]
        each["name"] = NAMES.get(text, text.split(":")[0])
    return found


@cache
def trials(study):
    """The results of a study. A text of the round has as many seeds as all encodings have, but
    those that stand beside the others with one seed; and the first seed of all is a study, too."""
    if study.endswith(ONE_SEED):
        rows = read(study.removesuffix(ONE_SEED))
        return [each for each in rows if each["config"]["seed"] == 0]
    if study not in (*ROUND, *SIZES):
        return read(study)
    rows = [each for each in read(study) if each["name"] not in WITH_ONE_SEED]
    num_seeds = min(Counter(each["name"] for each in rows).values())
    return [each for each in rows if each["config"]["seed"] < num_seeds]


def of(study, task):
    return [each for each in trials(study) if each["config"]["task"] == task]


def losses(study, length):
    """(encoding, seed, bits) of every trial that has a loss at this length."""
    return [
        (each["name"], each["config"]["seed"], at["bits_per_byte"])
        for each in of(study, "text")
        for at in each["by_length"]
        if at["length"] == int(length) and at["bits_per_byte"] is not None
    ]


def bits(study, name, length):
    found = far_losses(study) if length == "far" else losses(study, length)
    return [np.mean([b for row, _, b in found if of_encoding(row, name)])]


def means(study, length):
    """The mean loss of each encoding that has one at a length."""
    return {n: bits(study, n, length)[0] for n in {name for name, _, _ in losses(study, length)}}


def of_encoding(row, name):
    """Whether a row is that of an encoding, in whatever reading."""
    return row in (name, f"{name} in a window", f"{name} tuned")


def far_of_readings(study):
    """Bits on the last bytes of the longest windows, by (encoding, reading) and seed."""
    found = {}
    for each in of(study, "text"):
        readings = [{"name": "trained", "far": each["far"]}, *each["readings"]]
        for reading in readings:
            # A learned table has no row for far bytes.
            if reading["far"] and reading["far"][-1]["far"] is not None:
                key = each["name"], reading["name"]
                found.setdefault(key, {})[each["config"]["seed"]] = reading["far"][-1]["far"]
    return found


def far(study, name, reading):
    return [np.mean([*far_of_readings(study)[name, reading].values()])]


def far_losses(study):
    """(row, seed, far bits), a row for each encoding: read as trained, unless a window, or after it
    a tuning, is better by more than 0.02."""
    words = {"trained": "", "window": " in a window", "tuned": " tuned"}
    found = far_of_readings(study)
    rows = []
    for name in {name for name, _ in found}:
        means = {r: np.mean([*found[name, r].values()]) for r in words if (name, r) in found}
        reading = next(r for r in means if means[r] <= min(means.values()) + 0.02)
        rows += [(name + words[reading], *item) for item in found[name, reading].items()]
    return rows


def ranks(study):
    """(encoding, seed, mean rank over all tasks); what did not learn its task ranks last."""
    pandas = pytest.importorskip("pandas")
    keys = []
    for each in trials(study):
        config = each["config"]
        beyond = (each["by_length"] or each["by_case"])[1:]
        metric = measure(config["task"])
        found = [at[metric] for at in beyond]
        if not any(value is None for value in found):
            passes = config["task"] == "text" or each["by_case"][0]["exact_match"] >= 0.9
            sign = 1 if config["task"] == "text" else -1
            key = sign * np.mean(found) if passes else np.inf
            keys.append((each["name"], config["seed"], config["task"], key))
    frame = pandas.DataFrame(keys, columns=["name", "seed", "task", "key"])
    wide = frame.pivot(index="name", columns=["seed", "task"], values="key")
    counts = wide.columns.get_level_values("seed").value_counts()
    wide = wide[counts[counts == counts.max()].index]  # seeds with all tasks
    wide = wide.dropna()  # NaN: cannot run a test
    placed = wide.apply(stats.rankdata)
    means = placed.T.groupby(level="seed").mean().T
    return [(name, seed, row[seed]) for name, row in means.iterrows() for seed in means]


def scored(study, task):
    """(encoding, seed, mean score beyond the training length) of every trial that runs the task."""
    return [
        (each["name"], each["config"]["seed"], np.mean(found))
        for each in of(study, task)
        if None not in (found := [at[measure(task)] for at in each["by_case"][1:]])
    ]


def measure(task):
    """The score by which a task is judged, see docs/compare.md."""
    if task == "text":
        return "bits_per_byte"
    return "token_accuracy" if task in BY_TOKEN else "exact_match"


def rank(study, name):
    return [np.mean([value for encoding, _, value in ranks(study) if encoding == name])]


def gap(study, place, name, minus):
    fitted = fit(study, place)
    (one,) = (row for row in fitted.mean.index if of_encoding(row, name))
    (other,) = (row for row in fitted.mean.index if of_encoding(row, minus))
    return [fitted.mean[one] - fitted.mean[other], fitted.half(one, other)]


def lead(study, place, name, over):
    return gap(study, place, over, name)


def gap_by_seeds(study, place, name, minus):
    fitted = Fit(study, place, expects=False)
    (one,) = (row for row in fitted.mean.index if of_encoding(row, name))
    (other,) = (row for row in fitted.mean.index if of_encoding(row, minus))
    return [fitted.mean[one] - fitted.mean[other], fitted.half(one, other)]


@cache
def fit(study, place):
    return Fit(study, place)


class Fit:
    """A linear model of encodings and seeds, and Tukey's interval; the
    losses of the best are fitted again without the others. In one task higher is better."""

    def __init__(self, study, place, among=None, expects=True):
        pandas = pytest.importorskip("pandas")
        ols = pytest.importorskip("statsmodels.formula.api", reason="make test-all installs it").ols
        task = place in {each["config"]["task"] for each in trials(study)}
        read = {"rank": ranks, "far": far_losses}.get(place, scored if task else losses)
        cells = read(study) if place in ("rank", "far") else read(study, place)
        self.sign = -1 if task else 1
        cells = [cell for cell in cells if among is None or cell[0] in among]
        frame = pandas.DataFrame(cells, columns=["name", "seed", "value"])
        model = ols("value ~ C(name) + C(seed)", frame).fit()
        names, self.seeds = frame.name.nunique(), frame.seed.nunique()
        self.mean = frame.groupby("name").value.mean()
        self.own = frame.pivot(index="seed", columns="name", values="value")
        self.variance, self.known, self.expected, self.margin = model.mse_resid, 0, 0.0, 0.0
        if place == "rank":  # half a rank in one task is the least difference
            tasks = len({each["config"]["task"] for each in trials(study)})
            self.variance, where = max(self.variance, (0.5 / tasks) ** 2), "tasks"
        elif task:  # one of its 512 sequences is
            self.variance, where = max(self.variance, (1 / 512) ** 2), "task"
        else:
            first = min(each["by_length"][0]["length"] for each in of(study, "text"))
            where, self.known, self.margin = "text", 10 if expects else 0, 0.02
            self.expected = 0.015 if place == str(first) else 0.018
        self.variance = self.with_expected(self.variance, model.df_resid)
        with LEVELS.open(encoding="utf-8") as file:
            levels = [
                float(row["level"])
                for row in csv.DictReader(file)
                if (row["where"], row["encodings"], row["seeds"])
                == (where, str(names), str(self.seeds))
            ]
        (level,) = [0.025] if where == "text" else levels
        freedom = model.df_resid + self.known
        self.spread = stats.studentized_range.ppf(1 - level, names, freedom)
        kept, self.again = self.kept(), None
        if where == "text" and 1 < len(kept) < names:
            self.again = Fit(study, place, kept, expects)

    def with_expected(self, variance, freedom):
        """With what is expected of losses on text, as much as ten degrees of freedom say."""
        total = freedom + self.known
        return (freedom * variance + self.known * self.expected**2) / total

    def kept(self):
        """Those than which none is significantly better, judged once."""
        return [
            name
            for name in self.mean.index
            if all(
                self.sign * (self.mean[name] - self.mean[other])
                <= max(self.once(name, other), self.margin)
                for other in self.mean.index
                if other != name
            )
        ]

    def best(self):
        return self.again.best() if self.again else self.kept()

    def once(self, name, minus):
        own = np.var(self.own[name] - self.own[minus], ddof=1) / 2
        own = self.with_expected(own, self.seeds - 1)
        return self.spread * np.sqrt(max(self.variance, own) / self.seeds)

    def half(self, name, minus):
        known = self.again is not None and {name, minus} <= {*self.again.mean.index}
        again = self.again.half(name, minus) if known else np.inf
        return min(self.once(name, minus), again)


def tied(study, place):
    return [len(fit(study, place).best())]


def best(study, place):
    """Their names, best mean first, as words."""
    found = fit(study, place)
    return sorted(found.best(), key=lambda name: found.sign * found.mean[name])


def several(study, place):
    return [len(fit(study, place).mean)]


def context(study, name):
    found = []
    for each in of(study, "text"):
        if each["name"] == name:
            longest = each["far"][-1]
            found.append(longest["far_near"] - longest["far"])
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
    if len(gaps) == 1:
        return gaps
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    return [np.mean(gaps), (high - low) / 2]


def passed(study, task, name):
    gates = [
        each["by_case"][0]["exact_match"] >= 0.9
        for each in trials(study)
        if each["name"] == name
        and each["config"]["task"] != "text"
        and task in ("all", each["config"]["task"])
    ]
    return [sum(gates), len(gates)]


def score(study, task, name):
    found = [
        at[measure(task)]
        for each in of(study, task)
        if each["name"] == name
        for at in each["by_case"][1:]
    ]
    return [np.mean(found)]


def scores(study, task, name, place):
    found = {
        each["config"]["seed"]: at[measure(task)]
        for each in of(study, task)
        if each["name"] == name
        for at in each["by_case"]
        if place in (at["variant"].replace(" ", "_"), "" if at["variant"] else str(at["length"]))
    }
    return [found[seed] for seed in sorted(found)]


def cells(table, column, *where):
    wanted = {*where}
    with (ROOT / f"results/ablations/{table}.csv").open(encoding="utf-8") as file:
        return [
            float(row[column])
            for row in csv.DictReader(file)
            if wanted <= {f"{key}={value}".replace(" ", "_") for key, value in row.items()}
        ]


def agreed(study, source):
    """Pairs of every published table beyond its training length, by scipy's t and by counting all
    orders of the encodings that all of these tables have."""
    tables = [*published("published"), *published("published_tasks")]
    found = []
    for table in (t for t in tables if t["name"].startswith(source.replace("_", " "))):
        found += against_task(study, table) if "task" in table else against_text(study, table)
    ours = [(mine, better) for mine, better in found if better]
    agreeing = [sum(mine[a] < mine[b] for a, b in better) for mine, better in ours]
    names = sorted(set.intersection(*(set(mine) for mine, _ in ours)))
    kept = [(mine, [p for p in better if set(p) <= set(names)]) for mine, better in ours]
    paired = {n for _, better in kept for p in better for n in p}
    names = [n for n in names if n in paired]
    counts = []
    for order in permutations(names):
        as_if = dict(zip(names, order, strict=True))
        counts.append(
            sum(mine[as_if[a]] < mine[as_if[b]] for mine, better in kept for a, b in better)
        )
    chance = np.mean(np.array(counts) >= counts[0])
    return [sum(agreeing), sum(len(better) for _, better in ours), chance]


def published(name):
    return json.loads((ROOT / f"results/papers/{name}.json").read_text(encoding="utf-8"))


def against_text(study, table):
    for length in sorted({length for each in of(study, "text") for length in lengths(each)})[1:]:
        multiple = length / min(lengths(of(study, "text")[0]))
        at = np.abs(np.array(table["lengths"]) / table["train_length"] / multiple - 1)
        if at.min() <= 0.05:
            means = {n: each[at.argmin()] for n, each in table["means"].items()}
            errors = {n: each[at.argmin()] for n, each in table["deviations"].items()}
            own = {n for n, _, _ in losses(study, length)}
            # Of RoPE's two bases the papers have 10,000.
            ours = {n: {"rope": "rope_at_base_10,000"}.get(n, n) for n in means}
            shared = {n for n in means if ours[n] in own}
            mine = {n: bits(study, ours[n], length)[0] for n in shared}
            yield mine, separated({n: means[n] for n in shared}, errors, table["seeds"])


def against_task(study, table):
    own = {each["name"] for each in of(study, table["task"])}
    mine = {n: -score(study, table["task"], n)[0] for n in table["seeds"].keys() & own}
    means = {n: -np.mean(table["seeds"][n]) for n in mine}
    errors = {n: np.std(table["seeds"][n], ddof=1) for n in mine}
    return [(mine, separated(means, errors, 3))] if mine else []


def separated(means, errors, seeds):
    def apart(a, b):
        if seeds == 1:
            return True
        error = np.sqrt((errors[a] ** 2 + errors[b] ** 2) / seeds)
        return means[b] - means[a] > stats.t.ppf(0.975, seeds - 1) * error

    return [(a, b) for a, b in permutations(means, 2) if means[a] < means[b] and apart(a, b)]


def lengths(result):
    return [at["length"] for at in result["by_length"]]


def search(study, name):
    """The trials by which a rate and a setting were chosen for an encoding, the best first."""
    tried = [each for each in read(f"{study}_rates") if each["name"] == name]
    return sorted(tried, key=lambda each: each["training"][-1]["valid"])


def trained(study):
    """(validation loss of the chosen rate, that of its first seed after all steps) by encoding."""
    found = {}
    for each in trials(study):
        if each["config"]["seed"] == 0:
            best = search(study, each["name"])[0]
            for chosen in ("encoding", "lr", "encoding_lr"):
                assert best["config"][chosen] == each["config"][chosen]
            found[each["name"]] = best["training"][-1]["valid"], each["training"][-1]["valid"]
    return found


def cut(study, name):
    longest = [each["far"][-1] for each in of(study, "text") if each["name"] == name]
    return [np.mean([each["far_near"] for each in longest])]


def tried(study, name, text):
    found = [each for each in search(study, name) if each["config"]["encoding"] == text]
    return [found[0]["training"][-1]["valid"]]


def tuned(study, name):
    """The loss at the rates of all with the usual setting, and the lowest."""
    return [*usual(study, name, 20.0), search(study, name)[0]["training"][-1]["valid"]]


def one_rate(study, name):
    return usual(study, name, 1.0)


def usual(study, name, factor):
    """The loss with the usual setting, whose text is the shortest, at the rate of all, and tables
    at this factor of it."""
    tried = search(study, name)
    text = min((each["config"]["encoding"] for each in tried), key=len)
    wanted = {"encoding": text, "lr": RATE, "encoding_lr": factor}
    return [
        each["training"][-1]["valid"] for each in tried if wanted.items() <= each["config"].items()
    ]


def turned_by_tuning(study):
    return turned_pairs([tuned(study, name) for name in {each["name"] for each in trials(study)}])


def early(study, name):
    return [trained(study)[name][0]]


def late(study, name):
    return [trained(study)[name][1]]


def turned(study):
    return turned_pairs([*trained(study).values()])


def turned_pairs(befores_and_afters):
    both = np.array(befores_and_afters)
    signs = np.sign(both[:, None] - both[None])  # (first, second, early or late)
    pairs = np.triu(np.ones((len(both), len(both)), bool), 1)
    return [(signs[..., 0] * signs[..., 1] < 0)[pairs].sum(), pairs.sum()]  # a tie does not turn


def reseeded(study, length):
    table = {(name, seed): loss for name, seed, loss in losses(study, length)}
    names = sorted({name for name, _ in table})
    counts = []
    for one, two in ((0, 1), (0, 2), (1, 2)):
        order = [stats.rankdata([table[name, seed] for name in names]) for seed in (one, two)]
        tau = stats.kendalltau(*order).statistic  # 1 - 2 * turned / all pairs
        counts.append(round((1 - tau) / 2 * len(names) * (len(names) - 1) / 2))
    return [*sorted(counts), len(names) * (len(names) - 1) // 2]


def same_order(study, other, length):
    one, two = means(study, length), means(other, length)
    pairs = [*combinations(sorted(one.keys() & two.keys()), 2)]
    return [sum((one[a] - one[b]) * (two[a] - two[b]) > 0 for a, b in pairs), len(pairs)]


def hours(*studies):
    names = [name for study in studies for name in (study, f"{study}_rates")]
    found = [n for n in names if (ROOT / f"results/leaderboard/{n}.jsonl").is_file()]
    times = [each["timing"] or {} for name in found for each in read(name)]
    parts = ("train_seconds", "test_seconds", "tuning_seconds")
    return [sum(time.get(part, 0) for time in times for part in parts) / 3600]


def slower(study, name, other):
    content = (ROOT / "results/leaderboard/step_seconds.json").read_text(encoding="utf-8")
    texts = {each["name"]: each["config"]["encoding"] for each in trials(study)}
    seconds = json.loads(content)["seconds"]
    return [np.median(np.divide(seconds[texts[name]], seconds[texts[other]]))]


def perplexity(method, start):
    table = np.genfromtxt(ROOT / "results/extend/tuned.csv", delimiter=",", names=True, dtype=None)
    return np.exp(table["loss"][(table["method"] == method) & (table["start"] == int(start))])


def recorded_check(name):
    choices = ROOT / "posenc/compare/plan/choices_standard_budget.json"
    checks = json.loads(choices.read_text(encoding="utf-8"))["checks"]
    (check,) = (check for check in checks if check["encoding"] == name)
    return check


def recorded(name, what):
    """Words as a text, and numbers as a list."""
    check = recorded_check(name)
    best = min(check["tried"], key=lambda tried: tried["bits"])
    if what == "edges":
        return ", ".join(check["edges"]) or "none"
    return best[what] if what == "encoding" else [best[what]]


def searched(name, text, lr, encoding_lr):
    at = {"encoding": text, "lr": float(lr), "encoding_lr": float(encoding_lr)}
    return [tried["bits"] for tried in recorded_check(name)["tried"] if at.items() <= tried.items()]


AGAIN = {
    each.__name__: each
    for each in (
        bits,
        rank,
        gap,
        gap_by_seeds,
        lead,
        tied,
        several,
        far,
        cut,
        context,
        tuned,
        tried,
        one_rate,
        turned_by_tuning,
        passed,
        scores,
        changed,
        cells,
        agreed,
        early,
        late,
        turned,
        hours,
        best,
        reseeded,
        slower,
        perplexity,
        same_order,
        recorded,
        searched,
    )
}


def test_every_function_is_computed_again():
    assert AGAIN.keys() == numbers.KNOWN.keys()


@pytest.mark.prose
@pytest.mark.parametrize("path", numbers.documents(), ids=lambda path: path.name)
def test_documents_have_the_numbers_of_the_rows(path):
    text = path.read_text(encoding="utf-8")
    assert text == numbers.with_numbers(text, numbers.documents()[path]), "run `make readme`"


@pytest.mark.parametrize("call, said", SAID)
def test_other_code_computes_the_same(call, said):
    name, *given = call.removesuffix(" zh").split()
    wanted = AGAIN[name](*given)
    if isinstance(wanted, str):
        assert said.replace("、", ", ") == wanted
        return
    if name == "best":
        titles = [re.sub(r"^\S+", lambda m: numbers.TITLES.get(m[0], m[0]), row) for row in wanted]
        assert re.split(", | and ", said) == titles
        return
    found = re.findall(r"[+-]?\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", said))
    for number, value in zip(found, wanted, strict=True):
        digits = len(number.partition(".")[2])
        assert abs(float(number) - value) <= 0.50001 * 10**-digits, (call, said, wanted)


@pytest.mark.prose
def test_a_wrong_number_is_put_right_and_an_unknown_one_is_told():
    sentence = "RoPE has {rank tasks rope} of"
    (right,) = numbers_of("RoPE\nhas 9.99\nof ten.", [sentence])
    assert right == ("rank tasks rope", "9.99")
    mended = numbers.with_numbers("RoPE\nhas 9.99\nof ten.", [sentence])
    assert mended == f"RoPE\nhas {numbers.value_of('rank tasks rope')}\nof ten."
    rank = numbers.value_of("rank tasks rope")
    first_of_paragraph = ["{rank tasks rope} is its rank"]
    text = numbers.with_numbers("# Ranks\n\n9.99 is its rank.", first_of_paragraph)
    assert text == f"# Ranks\n\n{rank} is its rank."
    with pytest.raises(KeyError, match="nosuch"):
        numbers.with_numbers("has 1 of", ["has {nosuch rope} of"])


@pytest.mark.prose
@pytest.mark.parametrize(
    "text, message",
    [
        ("RoPE had 1.00 of ten.", "stands nowhere"),
        ("RoPE has 1.00 of ten. RoPE has 1.00 of ten.", "stands 2 times"),
        ("RoPE has 1.00\n\nof ten.", "stands nowhere"),
        (
            "RoPE has one, two, three, four, five, six, seven, eight, nine, ten, 11 of it",
            "no number",
        ),
    ],
)
def test_a_sentence_that_was_changed_alone_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        numbers.with_numbers(text, ["RoPE has {rank tasks rope} of"])


def cells_of_table(text: str, words: str) -> list[list[str]]:
    """The lines of a table of the board's page, by the words of its markers, without its head."""
    made = text.split(f"<!-- {words}: written by make readme -->\n")[1].split("<!--")[0]
    lines = [line.strip("| ").split(" | ") for line in made.splitlines() if line.startswith("|")]
    return lines[2:]


def name_of(label: str) -> str:
    """The name of an encoding in this file, from its label on the board."""
    return label.strip("`").partition(" (")[0].replace(" ", "_")


@pytest.mark.parametrize("page", ["leaderboard.md", "leaderboard.zh-CN.md"])
def test_other_code_computes_the_table_by_reading(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = cells_of_table(text, "readings")
    assert len(lines) == 10
    for label, *said in lines:
        name = name_of(label)
        wanted = []
        for study in ROUND:
            found = far_of_readings(study)
            wanted += [bits(study, name, "128")[0], cut(study, name)[0]]
            for reading in ("trained", "window", "tuned"):
                losses_by_seed = found.get((name, reading))
                wanted.append(losses_by_seed and np.mean([*losses_by_seed.values()]))
        assert said == ["–" if each is None else f"{each:.2f}" for each in wanted], label


@pytest.mark.parametrize("page", ["leaderboard.md", "leaderboard.zh-CN.md"])
def test_other_code_computes_the_table_of_sizes(page):
    """Losses, leads over the best other encoding, and the slope of leads over doublings."""
    parameters = [min(each["parameters"] for each in trials(study)) for study in SIZES]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = cells_of_table(text, "sizes")
    names = [name_of(label) for label, *_ in lines]
    assert sorted(names) == ["alibi", "rnope_swa", "rope", "rope_at_base_10,000", "t5"]
    for name, (_, *said) in zip(names, lines, strict=True):
        wanted = []
        for place in ("128", "far"):
            leads = []
            for study in SIZES:
                own, *rest = (bits(study, n, place)[0] for n in (name, *names))
                others = [loss for other, loss in zip(names, rest, strict=True) if other != name]
                leads.append(min(others) - own)
                wanted.append(f"{own:.2f} ({leads[-1]:+.3f})")
            slope, _ = np.polyfit(np.log2(parameters), leads, 1)
            wanted.append(f"{slope:+.3f}")
        assert said == wanted, name


def test_other_code_computes_the_loss_at_equal_time():
    """Validation losses when the fastest has done all its steps, on a line over the logarithm of
    the steps between the points of a curve."""
    text = (ROOT / "docs/leaderboard.md").read_text(encoding="utf-8")
    content = (ROOT / "results/leaderboard/step_seconds.json").read_text(encoding="utf-8")
    texts = {each["name"]: each["config"]["encoding"] for each in trials("code")}
    seconds = {name: json.loads(content)["seconds"][text] for name, text in texts.items()}
    cheapest = min(seconds, key=lambda name: np.median(seconds[name]))
    lines = cells_of_table(text, "equal time")
    assert len(lines) == 10
    for label, cost, loss in lines:
        name = name_of(label)
        ratio = np.median(np.divide(seconds[name], seconds[cheapest]))
        assert cost == f"{ratio:.2f}"
        at_time = []
        for each in trials("code"):
            if each["name"] == name:
                steps = [point["step"] for point in each["training"]]
                valid = [point["valid"] for point in each["training"]]
                step = each["config"]["steps"] / ratio
                at_time.append(np.interp(np.log(step), np.log(steps), valid))
        assert loss == f"{np.mean(at_time):.2f}", label
