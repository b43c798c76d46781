"""The published trials: a row for each, kept as lines of JSON, and the studies that they make.

Each file of rows is a study: of one text, or of tasks. If its learning rates were chosen, the rows
of the trials that chose them are in a file of the same name with RATES.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posenc.compare.reports.board import BOARD, ROWS, published_file
from posenc.compare.reports.merge import joined, recipe_of, shown
from posenc.compare.results import FORMAT, CorpusInfo, Study, TrialResult, chosen_rates
from posenc.compare.trial.config import TrialConfig, name_of
from posenc.compare.trial.material import check_scores
from posenc.report.files.opened import bytes_of
from posenc.report.files.record import Record
from posenc.sentence import listed

RATES = "_rates"


@dataclass(frozen=True)
class Row(Record):
    """A published trial.

    hash: of its config when it ran, which names it; configs of later versions have other hashes.
    commit: of the code that ran.
    corpus: its text; None for tasks.
    """

    hash: str
    commit: str
    versions: dict[str, str]
    hardware: dict[str, str]
    corpus: CorpusInfo | None
    result: TrialResult


def read_rows(path: Path) -> list[Row]:
    """Read rows. Raises ValueError with the number of a line that is damaged or no trial's."""
    rows = []
    for number, line in enumerate(bytes_of(path).splitlines(), 1):
        try:
            rows.append(Row.from_json(line.decode()))
            check_scores(rows[-1].result)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {str(error).rstrip('.')}.") from None
    return rows


def published(name: str = ROWS) -> list[Row]:
    """Return the rows of a published file. Raises: ValueError where there is none."""
    return read_rows(published_file(name))


def boards() -> dict[str, Study]:
    """Return the published studies by the names of their files. Raises: ValueError as `published`
    and `study_of`, and for a file that lacks a trial or is of rates without a study."""
    rows = {path.stem: read_rows(path) for path in published_file(BOARD).parent.glob("*.jsonl")}
    for name, found in rows.items():
        of = name.removesuffix(RATES)
        counts = Counter(row.result.config.encoding for row in found)
        few = [each for each, count in counts.items() if count < max(counts.values())]
        if few or not found or of not in rows:
            why = f"lacks trials of {listed(few)}; run them" if few else "has no row"
            why = why if of in rows else f"has rates for {of}.jsonl, which is missing"
            raise ValueError(f"{published_file(BOARD).parent / name}.jsonl {why}.")
    return {
        name: study_of(rows[name], rows.get(name + RATES, ()), f"{name}.jsonl")
        for name in sorted(rows)
        if not name.endswith(RATES)
    }


def study_of(rows: Sequence[Row], tried: Sequence[Row] = (), of: str = "The leaderboard") -> Study:
    """Return the rows as one study, for tables and page.

    tried, of: rows of the trials that chose the learning rates, and the name that errors give.
    Raises: ValueError for rows of different recipes or of other code, for a trial that is there
    twice, or of another rate than the chosen one.
    """
    if not rows:
        raise ValueError(f"{of} has no row.")
    results, every = [row.result for row in rows], [row.result.config for row in (*rows, *tried)]
    corpora = {row.corpus for row in (*rows, *tried) if row.corpus is not None}
    if len(corpora) > 1:
        raise ValueError(f"{of} has rows of {len(corpora)} texts, which cannot be mixed.")
    codes = {trial.encoding: trial.source for trial in reversed(every) if trial.source}
    counts = Counter(replace(trial, source="") for trial in every)
    for trial in every:
        code, known = trial.code or trial.source, codes.get(trial.encoding, "unknown")
        if code not in ("", known) or counts[replace(trial, source="")] > 1:
            why = "twice" if code in ("", known) else f"of two codes ({code} and {known})"
            raise ValueError(f"{of} has {name_of(trial)} {why}. Remove the row, or run it again.")
    trials = [result.config for result in results]
    rates = chosen_rates([row.result for row in tried])
    chosen = {(each.task, each.encoding): each.chosen for each in rates}
    for t in trials if rates else ():
        if t.lr != (rate := chosen.get((t.task, t.encoding))):
            raise ValueError(f"{of}: {t.name} at a learning rate of {t.lr}, and {rate} was chosen.")
    if rates:  # those that chose them are shorter, but of the same recipe
        usual = {t.task: {"steps": t.steps, "test_lengths": t.test_lengths} for t in trials}
        trials += [replace(t, **usual[t.task]) for t in every[len(rows) :] if t.task in usual]
        trials = [replace(trial, lr=0.0) for trial in trials]
    _check_one_recipe(of, trials)
    return Study(
        format=FORMAT,
        command="posenc leaderboard",
        started="",
        versions=joined([row.versions | {"commit": row.commit} for row in rows]),
        hardware=joined([row.hardware for row in rows]),
        corpus=next(iter(corpora), None),
        trials=tuple(result.config for result in results),
        results=tuple(results),
        rates=rates,
    )


def _check_one_recipe(of: str, trials: Sequence[TrialConfig]) -> None:
    """Raise ValueError if trials of a task differ in more than encoding and seed, or if tasks
    differ in recipe, torch or precision."""
    of_all = recipe_of(trials)
    for task in dict.fromkeys(trial.task for trial in trials):
        fields = recipe_of(trial for trial in trials if trial.task == task)
        fields |= {name: of_all[name] for name in ("recipe", "torch", "precision")}
        said = [f"{name} {shown(found)}" for name, found in fields.items() if len(found) > 1]
        missing = f"if it was chosen, {of.removesuffix('.jsonl')}{RATES}.jsonl is missing"
        said += [missing] if len(fields["lr"]) > 1 and of.endswith(".jsonl") else []
        if said:
            raise ValueError(f"{of} has rows of different recipes for {task}: {', '.join(said)}.")
