"""Write measured numbers into documents; run by `make readme`.

docs/numbers.toml lists, for each document, some words of its sentences with a call for each number
between braces: `has {bits code rope 128} bits` means that the number between these words is that of
the function `bits` below with the arguments code, rope and 128. Studies are those of
results/leaderboard and two of results/ablations; tables are those of results/ablations; recorded
choices are those of posenc/compare/plan/equal_tuning.py.

Encodings have the names of the board without chosen settings, with underscores: "rope (base 100)"
is rope. Places are a length, at which windows are read as trained, "far", the far bytes by which
the board judges, a task, or "rank".
"""

from __future__ import annotations

import csv
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations
from pathlib import Path
from statistics import fmean, median

from agreement import (
    TEXT_TABLES,
    Agreement,
    agreement_p,
    agreements,
    read_tables,
    sign_agreement,
)

from posenc.compare.judging.context_use import context_gains
from posenc.compare.judging.near_far import near_and_far
from posenc.compare.judging.standing import (
    Standing,
    standing_at,
    standing_of_task,
    standing_of_tasks,
)
from posenc.compare.judging.summary import has_learned, shown_score
from posenc.compare.judging.tuning import pairs_turned_by_tuning
from posenc.compare.plan.equal_tuning import CHOICES_FILE, RecordedChoices
from posenc.compare.reports.leaderboard import PUBLISHED_FOLDER
from posenc.compare.results import RateCheck, Study, TrialResult, with_labels
from posenc.compare.rows import plain_name, row_name, rows_of
from posenc.compare.scores import READINGS, FarScore
from posenc.report.report import join_names
from posenc.tasks.registry import TASKS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "experiments"))
import leaderboard_plan  # noqa: E402 - lies in experiments/
import published_trials  # noqa: E402 - lies in experiments/

TITLES = {
    "nope": "NoPE",
    "rope": "RoPE",
    "rove": "RoVE",
    "alibi": "ALiBi",
    "t5": "T5",
    "fire": "FIRE",
    "kerple": "KERPLE",
    "shaw": "Shaw",
    "cope": "CoPE",
    "fox": "FoX",
    "dape": "DAPE",
    "rnope_swa": "RNoPE-SWA",
    "t5_unscaled": "unscaled T5",
    "rope_at_base_10,000": "RoPE at base 10,000",
}
BASE_OF_PAPERS = "rope_at_base_10,000"
"""RoPE with the base of published tables, beside that whose base was chosen."""
SENTENCES_FILE = ROOT / "docs/numbers.toml"
CALL = re.compile(r"\{([^{}]+)\}")
"""A function below and its arguments, between the words of a sentence in SENTENCES_FILE."""
NUMBER = r"(\S(?:(?!\n\n)[^|])*?)"
"""What stands in the document in place of a call: within one paragraph and one cell of a table. It
does not begin with the line end before a paragraph."""
BLANK = r"(?:[ \t]+\n?[ \t]*|\n[ \t]*)"
"""Blanks with at most one line end."""


@cache
def published() -> dict[str, Study]:
    """Return the studies of the board, and two of results/ablations."""
    others = (ROOT / f"results/ablations/{name}.jsonl" for name in ("text_600", "copy_longer"))
    return leaderboard_plan.published_studies() | {
        path.stem: published_trials.study_of(published_trials.read_rows(path)) for path in others
    }


@cache
def studies() -> dict[str, Study]:
    """Return the same, with the names that this file's functions take."""
    return {name: _with_short_names(study) for name, study in published().items()}


def _with_short_names(study: Study) -> Study:
    """Return the study with short names of encodings, see the head of this file."""
    label_of = {trial.encoding: trial.encoding for trial in study.trials} | study.labels
    labels = {text: _short_name(label) for text, label in label_of.items()}
    rates = tuple(replace(check, encoding=_short_name(check.encoding)) for check in study.rates)
    return with_labels(replace(study, labels=labels, rates=rates))


def _short_name(label: str) -> str:
    """Return the name of an encoding without its settings, blanks as underscores."""
    return plain_name(label).replace(" ", "_")


def _results(study: str, task: str, name: str) -> list[TrialResult]:
    found = [
        result
        for result in studies()[study].of_task(task).finished
        if result.config.encoding == name
    ]
    return sorted(found, key=lambda result: result.config.seed)


def _standing(study: str, place: str) -> Standing:
    """At a length of the text, on its far bytes, on a task, or over all tasks for "rank"."""
    board = studies()[study]
    if place == "rank":
        found = standing_of_tasks(board)
    elif place == "far":
        found = near_and_far(board).far
    elif place in TASKS:
        found = standing_of_task(board, place)
    else:
        found = standing_at(board, int(place))
    assert found is not None, f"{study} has nothing at {place}"
    return found


def _row(standing: Standing, encoding: str) -> str:
    """The row that stands for an encoding, which may be read in a window: `rope in a window`."""
    (found,) = {row_name(encoding, reading) for reading in READINGS}.intersection(standing.order)
    return found


def title_of(row: str) -> str:
    """The name of a row in sentences: `RoPE in a window`."""
    encoding, *reading = row.split(" ")
    return " ".join([TITLES.get(encoding, encoding), *reading])


def bits(study: str, name: str, length: str) -> str:
    """The mean loss of an encoding at a length, or on far bytes, in bits per byte."""
    found = _standing(study, length)
    return f"{found.mean(_row(found, name)):.2f}"


def far(study: str, name: str, reading: str) -> str:
    """The mean loss of an encoding on far bytes in one of READINGS."""
    losses = [score.far for score in _far_scores(study, name, reading) if score.far is not None]
    return f"{fmean(losses):.2f}"


def cut(study: str, name: str) -> str:
    """The mean loss of an encoding on far bytes where the text is cut to the nearest ones."""
    scores_by_seed = _far_scores(study, name, "trained")
    losses = [score.far_near for score in scores_by_seed if score.far_near is not None]
    return f"{fmean(losses):.2f}"


def _far_scores(study: str, name: str, reading: str) -> list[FarScore]:
    """The scores of an encoding's trials on far bytes in one of READINGS.

    Raises: ValueError where it cannot run there.
    """
    found = [
        row.far_by_length[max(row.trial.test_lengths)]
        for row in rows_of(studies()[study])
        if (row.encoding, row.reading) == (name, reading)
    ]
    if any(score.far is None for score in found):
        raise ValueError(f"{name} cannot run on far bytes of {study}, read {reading}.")
    return found


def rank(study: str, name: str) -> str:
    """Its mean rank over all tasks."""
    return f"{_standing(study, 'rank').mean(name):.2f}"


def gap(study: str, place: str, name: str, minus: str) -> str:
    """The difference of two encodings with the interval by which verdicts are made."""
    standing = _standing(study, place)
    found = standing.gap(_row(standing, name), _row(standing, minus))
    return _interval(found.value, found.half_width)


def lead(study: str, place: str, name: str, over: str) -> str:
    """By how much an encoding is ahead of another one, with the interval of `gap`.

    Raises: ValueError where it is behind.
    """
    found = gap(study, place, over, name)
    if not found.startswith("+"):
        raise ValueError(f"{name} is behind {over} by {found} in {study}.")
    return found.removeprefix("+")


def gap_by_seeds(study: str, place: str, name: str, minus: str) -> str:
    """What `gap` says by the study's own seeds, without what is expected of them."""
    standing = _standing(study, place)
    by_seeds = replace(standing, pairs=replace(standing.pairs, prior=None))
    found = by_seeds.gap(_row(standing, name), _row(standing, minus))
    return _interval(found.value, found.half_width)


def tied(study: str, place: str) -> str:
    """How many encodings none is significantly better than."""
    return str(len(_standing(study, place).first_tier))


def best(study: str, place: str) -> str:
    """Their names, best mean first."""
    return join_names([title_of(row) for row in _standing(study, place).first_tier])


def several(study: str, place: str) -> str:
    """How many encodings run there."""
    return str(len(_standing(study, place).order))


def context(study: str, name: str) -> str:
    """The bits that context beyond the training length saves on the same bytes, in each seed."""
    found = context_gains(studies()[study].of_task("text"), name)
    assert found is not None
    return join_names([f"{round(gain, 3) + 0.0:+.3f}" for gain in sorted(found[1])])


def tuned(study: str, name: str) -> str:
    """The validation losses of an encoding's search: at the rates of all with the usual setting,
    and at what was chosen."""
    (check,) = (check for check in studies()[study].rates if check.encoding == name)
    assert check.plain_bits is not None and check.best is not None and check.best.bits is not None
    return f"{check.plain_bits:.2f} to {check.best.bits:.2f}"


def tried(study: str, name: str, text: str) -> str:
    """The lowest validation loss of an encoding's search with one of its settings.

    text: the encoding with the setting.
    """
    (check,) = (check for check in studies()[study].rates if check.encoding == name)
    found = [each.bits for each in check.tried if each.encoding == text and each.bits is not None]
    return f"{min(found):.2f}"


def one_rate(study: str, name: str) -> str:
    """The validation loss of an encoding's search with its usual setting and one learning rate for
    all parameters."""
    (check,) = (check for check in studies()[study].rates if check.encoding == name)
    assert check.one_rate_bits is not None
    return f"{check.one_rate_bits:.2f}"


def turned_by_tuning(study: str) -> str:
    """How many pairs have another order at the rates of all with the usual settings than at what
    was chosen for each."""
    checks = [check for check in studies()[study].rates if check.plain_bits is not None]
    pairs = len(checks) * (len(checks) - 1) // 2
    return f"{len(pairs_turned_by_tuning(checks))} of {pairs}"


def passed(study: str, task: str, name: str) -> str:
    """How many trials learned a task, or one of all tasks for "all"."""
    tasks = studies()[study].sequence_tasks if task == "all" else (task,)
    found = [result for each in tasks for result in _results(study, each, name)]
    return f"{sum(map(has_learned, found))} of {len(found)}"


def scores(study: str, task: str, name: str, place: str) -> str:
    """The score of each seed at a length, or at a variant whose blanks are underscores."""
    found = [
        shown_score(task, case)
        for result in _results(study, task, name)
        for case in result.by_case
        if (case.variant or str(case.length)).replace(" ", "_") == place
    ]
    return join_names([f"{value:.2f}" for value in found if value is not None])


def changed(table: str, length: str, encoding: str, arm: str = "") -> str:
    """By how much an arm of an ablation differs at a length, with Student's interval of its
    paired seeds if there are two or more."""
    value, half = change(table, length, encoding, arm)
    return _interval(value, half) if half else f"{value:+.2f}"


def change(table: str, length: str, encoding: str, arm: str = "") -> tuple[float, float]:
    """Return the same as numbers; of one seed, 0 for the interval."""
    wanted = (encoding, arm, length)
    row = next(
        row
        for row in rows(table)
        if (row["encoding"], row["arm"].replace(" ", "_"), row["length"]) == wanted
    )
    return float(row["difference"]), float(row["half_95"] or 0)


def cells(table: str, column: str, *where: str) -> str:
    """The numbers of a column in the rows where other columns have these values, their blanks
    as underscores."""
    wanted = dict(each.split("=", 1) for each in where)
    found = [
        row[column]
        for row in rows(table)
        if wanted.items() <= {key: value.replace(" ", "_") for key, value in row.items()}.items()
    ]
    assert found, f"{table} has no row {wanted}"
    return join_names([each if each.isdigit() else f"{float(each):.2f}" for each in found])


def agreed(study: str, source: str) -> str:
    """In how many pairs of `published_pairs` we have the same order, and the probability that a
    random order agrees in as many.

    source: begins the names of the tables, blanks as underscores.
    """
    begin = source.replace("_", " ")
    found = [(each.ours, told) for each, told in published_pairs(study, begin)]
    agreeing, pairs = map(sum, zip(*(sign_agreement(*each) for each in found), strict=True))
    return f"{agreeing} of {pairs} (p {agreement_p(found):.3f})"


def published_pairs(study: str, begin: str = "") -> Iterator[tuple[Agreement, list]]:
    """Yield the published tables beyond the training length and the pairs that they order, the
    better first: those that seeds separate, or all of a table of one seed."""
    for each in agreements(as_in_papers(studies()[study])):
        if each.table.startswith(begin) and each.multiple != 1:
            yield each, list(each.separated) or _ordered(each)


def as_in_papers(study: Study) -> Study:
    """Return the study with the settings of published tables under the names of these tables: RoPE
    at base 10,000, and T5 with the usual scale."""
    left_out = {"t5_unscaled"}
    name_of: dict[str, str] = {}
    if BASE_OF_PAPERS in study.encodings:
        left_out.add("rope")
        name_of[BASE_OF_PAPERS] = "rope"
    kept = [trial for trial in study.trials if trial.encoding not in left_out]
    results = [each for each in study.results if each.config.encoding not in left_out]
    return with_labels(
        replace(study, trials=tuple(kept), results=tuple(results), rates=(), labels=name_of)
    )


def _ordered(each: Agreement) -> list[tuple[str, str]]:
    (table,) = (t for t in read_tables(TEXT_TABLES) if each.table == f"{t['name']} ({t['model']})")
    wanted = (each.multiple or 1) * table["train_length"]
    at = min(range(len(table["lengths"])), key=lambda i: abs(table["lengths"][i] - wanted))
    means = {name: table["means"][name][at] for name in each.ours}
    return [(a, b) for a, b in permutations(means, 2) if means[a] < means[b]]


def early(study: str, name: str) -> str:
    """The validation loss after a fifth of the steps, of the trial that chose the rate."""
    return f"{trained(study)[name][0]:.2f}"


def late(study: str, name: str) -> str:
    """The validation loss after all steps, of the same seed."""
    return f"{trained(study)[name][1]:.2f}"


def turned(study: str) -> str:
    """How many pairs have another order early than late."""
    pairs = [*combinations(trained(study).values(), 2)]
    return f"{sum((a[0] < b[0]) != (a[1] < b[1]) for a, b in pairs)} of {len(pairs)}"


def reseeded(study: str, length: str) -> str:
    """How many pairs have another order in one seed than in another."""
    losses = _standing(study, length).pairs.values
    pairs = [*combinations(losses.values(), 2)]
    found = [
        sum((a[one] < b[one]) != (a[two] < b[two]) for a, b in pairs)
        for one, two in combinations(sorted(set.intersection(*map(set, losses.values()))), 2)
    ]
    return f"{join_names([str(count) for count in sorted(found)])} of {len(pairs)}"


def same_order(study: str, other: str, length: str) -> str:
    """How many pairs have the same order in the means of two studies."""
    one, two = (_standing(each, length) for each in (study, other))
    pairs = [*combinations([name for name in one.order if name in two.order], 2)]
    return f"{sum(two.mean(a) < two.mean(b) for a, b in pairs)} of {len(pairs)}"


@cache
def trained(study: str) -> dict[str, tuple[float, float]]:
    """Return what `early` and `late` say, by encoding."""
    board, found = studies()[study], {}
    for check in board.rates:
        first = min(_results(study, check.task, check.encoding), key=lambda r: r.config.seed)
        assert check.best is not None and check.best.bits is not None
        found[check.encoding] = check.best.bits, first.training[-1].valid
    return found


def hours(*names: str) -> str:
    """The hours of one core that the trials of studies took, with those that chose their rates."""
    files = [f"{name}{end}.jsonl" for name in names for end in ("", leaderboard_plan.RATES_SUFFIX)]
    found = [
        timing.train_seconds + timing.test_seconds + timing.tuning_seconds
        for file in files
        if (ROOT / PUBLISHED_FOLDER / file).is_file()
        for row in published_trials.published_rows(file)
        if (timing := row.result.timing) is not None
    ]
    return f"{sum(found) / 3600:.1f}"


def slower(study: str, name: str, other: str) -> str:
    """How many times as long a training step of an encoding takes as one of another: the median of
    the ratios of steps that were taken in turns."""
    seconds = studies()[study].step_seconds
    return f"{median(a / b for a, b in zip(seconds[name], seconds[other], strict=True)):.1f}"


def perplexity(method: str, start: str) -> str:
    """The perplexity of a part of the text in the case of docs/extend.md."""
    text = (ROOT / "results/extend/tuned.csv").read_text(encoding="utf-8")
    found = csv.DictReader(text.splitlines())
    (row,) = (row for row in found if (row["method"], row["start"]) == (method, start))
    value = math.exp(float(row["loss"]))
    return f"{value:.{2 if value < 10 else 0}f}"


def _recorded_check(name: str) -> RateCheck:
    """Return what the recorded search tried and chose for an encoding."""
    recorded = RecordedChoices.from_json(CHOICES_FILE.read_text(encoding="utf-8"))
    (check,) = (check for check in recorded.checks if check.encoding == name)
    return check


def recorded(name: str, what: str) -> str:
    """A part of the recorded choice for an encoding.

    what: "encoding" (its text with the chosen setting), "lr", "encoding_lr", "bits" (validation
        loss), or "edges" (axes of the search at whose edge the choice lies, "none" without any).
    """
    check = _recorded_check(name)
    best = check.best
    assert best is not None and best.bits is not None
    parts = {
        "encoding": best.encoding,
        "lr": f"{best.lr:g}",
        "encoding_lr": f"{best.encoding_lr:g}",
        "bits": f"{best.bits:.3f}",
        "edges": ", ".join(check.edges) or "none",
    }
    return parts[what]


def searched(name: str, text: str, lr: str, encoding_lr: str) -> str:
    """The validation loss of one point of the recorded search of an encoding.

    text: the encoding with the setting that was tried.
    """
    point = (text, float(lr), float(encoding_lr))
    tried = _recorded_check(name).tried
    (bits,) = (each.bits for each in tried if (each.encoding, each.lr, each.encoding_lr) == point)
    return f"{bits:.3f}"


KNOWN: dict[str, Callable[..., str]] = {
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


def rows(table: str) -> list[dict[str, str]]:
    text = (ROOT / f"results/ablations/{table}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _interval(value: float, half: float) -> str:
    """A difference with enough digits to see whether the interval excludes 0."""
    digits = 2 if half >= 0.005 and f"{abs(value):.2f}" != f"{half:.2f}" else 3
    value = round(value, digits) + 0.0  # never -0.00
    return f"{value:+.{digits}f} ± {half:.{digits}f}"


def value_of(call: str) -> str:
    """Return what a call computes; its numbers are joined as in Chinese if it ends in zh. Raises:
    KeyError for an unknown function."""
    name, *arguments = call.removesuffix(" zh").split()
    value = KNOWN[name](*arguments)
    if call.endswith(" zh"):
        words = {", ": "、", " and ": " 和 ", " to ": " 到 ", " of ": "/"}
        for english, chinese in words.items():
            value = value.replace(english, chinese)
    return value


def find_sentence(text: str, sentence: str) -> re.Match[str]:
    """Find the words of a sentence in a document, with a group for each of its numbers.

    Line ends of the document count as blanks. Raises: ValueError unless they stand there once.
    """
    words = []
    for part in CALL.split(sentence)[::2]:
        between_blanks = [re.escape(word) for word in re.split(r"\s+", part)]
        words.append(BLANK.join(between_blanks))
    after = r"(?=\n\n|\s*\Z)" if not words[-1] else r"(?!\d)"
    found = list(re.finditer(NUMBER.join(words) + after, text))
    if len(found) != 1:
        times = "stands nowhere" if not found else f"stands {len(found)} times"
        raise ValueError(
            f'"{sentence}" {times}: change docs/numbers.toml together with the document.'
        )
    return found[0]


def with_numbers(text: str, sentences: list[str]) -> str:
    """Return the document with the numbers of the rows. Raises: ValueError if the words between
    two numbers were lost, so that what would be replaced is more than a number."""
    for sentence in sentences:
        match = find_sentence(text, sentence)
        calls = CALL.findall(sentence)
        for group in range(len(calls), 0, -1):  # from the last, so that earlier places stay
            stands, value = " ".join(match[group].split()), value_of(calls[group - 1])
            if stands == value:
                continue
            if len(stands.split()) > 2 * len(value.split()) + 8:
                raise ValueError(f'"{sentence}": "{stands}" is no number.')
            text = text[: match.start(group)] + value + text[match.end(group) :]
    return text


def documents() -> dict[Path, list[str]]:
    """Return the documents that have numbers, and the sentences of each."""
    listed = tomllib.loads(SENTENCES_FILE.read_text(encoding="utf-8"))
    return {ROOT / name: entry["sentences"] for name, entry in listed.items()}


def main() -> None:
    for path, sentences in documents().items():
        text = path.read_text(encoding="utf-8")
        path.write_text(with_numbers(text, sentences), encoding="utf-8")


if __name__ == "__main__":
    main()
