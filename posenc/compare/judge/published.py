"""How far a study agrees with published tables: which table, which order, how sure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import fmean, stdev

from posenc.compare.judge.standing import scores_of_task
from posenc.compare.results import Study
from posenc.compare.trial.config import CAUSAL
from posenc.sentence import phrase
from posenc.statistics.agreement import Rho, agreement_p, separated_pairs, sign_agreement, spearman
from posenc.tasks.known import TEXT

TEXT_TABLES, TASK_TABLES = "published.json", "published_tasks.json"
NEAR = 0.05
"""How far a published length may lie from the multiple of the training length that we tested."""

HEADER = ("published table", "length", "encodings", "Spearman", "exact p", "pairs that agree")


@dataclass(frozen=True)
class Agreement:
    """Agreement of a study with one published table: at one multiple of the training length or, for
    a task, over all lengths beyond it.

    ours: what the study measured, lower is better.
    told: the pairs that the publication tells apart beyond its seeds, the better first.
    """

    table: str
    source: str
    multiple: int | None
    rho: Rho | None
    ours: Mapping[str, float]
    told: Sequence[tuple[str, str]]

    @property
    def agreeing(self) -> int:
        return sign_agreement(self.ours, list(self.told))[0]

    @property
    def pairs(self) -> int:
        return sign_agreement(self.ours, list(self.told))[1]

    @property
    def where(self) -> str:
        return phrase("unseen") if self.multiple is None else f"x{self.multiple}"


def agreements(study: Study) -> list[Agreement]:
    """Against every published table that has two encodings of the study or more; by the texts that
    its trials have, so that a label changes nothing."""
    if any(trial.objective != CAUSAL for trial in study.trials):
        return []  # the tables are of the next token
    text = study.of_task(TEXT)
    found = [each for table in read_tables(TEXT_TABLES) for each in _against(table, text)]
    tables = read_tables(TASK_TABLES)
    return found + [each for table in tables for each in _against_task(table, study)]


def rows(found: Sequence[Agreement]) -> Iterator[list[str]]:
    """Return one row of text per table, then the sums of the pairs beyond x1 for text and tasks."""
    for each in found:
        rho, p = ("–", "–") if each.rho is None else (f"{each.rho.value:.2f}", f"{each.rho.p:.3f}")
        names = f"{len(each.ours)}: {' '.join(each.ours)}"
        yield [f"{each.table}, {each.source}", each.where, names, rho, p, _counted([each])]
    beyond = [each for each in found if each.multiple is not None and each.multiple > 1]
    tasks = [each for each in found if each.multiple is None]
    text = phrase("text, all tables beyond x1")
    for title, whole in ((text, beyond), (phrase("tasks, all tables"), tasks)):
        if any(each.pairs for each in whole):
            rhos = [each.rho.value for each in whole if each.rho and not each.pairs]
            without = values = ""
            if rhos:
                without = phrase("tables without pairs", count=len(rhos))
                values = phrase("{low:.2f} to {high:.2f} there", low=min(rhos), high=max(rhos))
            yield [title, "", without, values, "", _counted(whole)]


def _counted(found: list[Agreement]) -> str:
    """Say how many pairs agree, with the p-value."""
    agreeing, pairs = sum(a.agreeing for a in found), sum(a.pairs for a in found)
    if not pairs:
        return "–"
    p = agreement_p([(a.ours, a.told) for a in found])
    said = "{part} of {whole} ({share:.2f})"
    if p is not None:
        said = "{part} of {whole} ({share:.2f}, p {p:.3f})"
    return phrase(said, part=agreeing, whole=pairs, share=agreeing / pairs, p=p)


def read_tables(name: str) -> list[dict]:
    """Read TEXT_TABLES or TASK_TABLES."""
    return json.loads(resources.files("posenc.compare.judge").joinpath(name).read_bytes())


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
    said = {key: table[key] for key in ("name", "task", "model")}
    title = phrase("table against a task", **said)
    told = told_in_task(table, list(ours))
    yield Agreement(title, table["source"], None, spearman(ours, known), ours, told)


def told_in_task(table: dict, names: Sequence[str]) -> list[tuple[str, str]]:
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
