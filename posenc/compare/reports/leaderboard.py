"""The leaderboard: one row for each trial, kept as lines of JSON, and studies made from them.

Each file of rows is a study: of one text, or of tasks. If its learning rates were chosen, the rows
of the trials that chose them are in a file of the same name with RATES.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posenc.compare.reports.board import BOARD, ROWS, published_file
from posenc.compare.reports.merge import check_recipe, joined, merge_checked, recipe_of, shown
from posenc.compare.results import FORMAT, CorpusInfo, Study, TrialResult, chosen_rates
from posenc.compare.trial.config import TrialConfig
from posenc.report.files.opened import text_of
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

    @property
    def folder(self) -> str:
        """Name of the folder that the trial had."""
        return f"{self.result.config.name}-{self.hash}"


def read_rows(path: Path) -> list[Row]:
    """Read rows. Raises ValueError with the number of a damaged line."""
    rows = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        try:
            rows.append(Row.from_json(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}.") from None
    return rows


def published(name: str = ROWS) -> list[Row]:
    """Return the rows of a file that the package brings, or the repository that it runs from.

    Raises: ValueError where there is none.
    """
    return read_rows(published_file(name))


def boards() -> dict[str, Study]:
    """Return the published studies by the names of their files. Raises: ValueError as `published`
    and `study_of`."""
    rows = {path.stem: read_rows(path) for path in published_file(BOARD).parent.glob("*.jsonl")}
    return {
        name: study_of(rows[name], rows.get(name + RATES, ()))
        for name in sorted(rows)
        if not name.endswith(RATES)
    }


def study_of(rows: Sequence[Row], tried: Sequence[Row] = ()) -> Study:
    """Return the rows as one study, for tables and page.

    tried: rows of the trials that chose the learning rates.
    Raises: ValueError for rows of different recipes, or of another rate than the chosen one.
    """
    if not rows:
        raise ValueError("The leaderboard has no row.")
    results = [row.result for row in rows]
    corpora = {row.corpus for row in (*rows, *tried) if row.corpus is not None}
    if len(corpora) > 1:
        raise ValueError(
            f"The leaderboard has rows of {len(corpora)} texts, which cannot be mixed."
        )
    trials = [result.config for result in results]
    rates = chosen_rates([row.result for row in tried])
    chosen = {(each.task, each.encoding): each.chosen for each in rates}
    for trial in trials if rates else ():
        rate = chosen.get((trial.task, trial.encoding))
        if trial.lr != rate:
            raise ValueError(
                f"The leaderboard has {trial.name} at a learning rate of {trial.lr}, and {rate} "
                "was chosen for it."
            )
    if rates:  # those that chose them are shorter, but of the same recipe
        usual = {trial.task: (trial.steps, trial.test_lengths) for trial in trials}
        for config in (row.result.config for row in tried if row.result.config.task in usual):
            steps, lengths = usual[config.task]
            trials.append(replace(config, steps=steps, test_lengths=lengths))
        trials = [replace(trial, lr=0.0) for trial in trials]
    _check_one_recipe(trials)
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


def _without_source(study: Study) -> Study:
    """Return the study without the hashes of posenc's source, which older rows lack, so that equal
    trials count once."""
    results = [replace(r, config=replace(r.config, source="")) for r in study.results]
    trials = [replace(trial, source="") for trial in study.trials]
    return replace(study, trials=tuple(trials), results=tuple(results))


def _check_one_recipe(trials: Sequence[TrialConfig]) -> None:
    """Raise ValueError if trials of a task differ in more than encoding and seed, or if tasks
    differ in recipe, torch or precision."""
    of_all = recipe_of(trials)
    for task in dict.fromkeys(trial.task for trial in trials):
        fields = recipe_of(trial for trial in trials if trial.task == task)
        fields |= {name: of_all[name] for name in ("recipe", "torch", "precision")}
        if said := [f"{name} {shown(found)}" for name, found in fields.items() if len(found) > 1]:
            raise ValueError(
                f"The leaderboard has rows of different recipes for {task}: {', '.join(said)}."
            )


def beside(board: Study, mine: Sequence[tuple[Path, Study]]) -> tuple[Study, list[str]]:
    """Return the leaderboard joined with your runs, for tasks that one of yours has with the same
    recipe, and a line about each task that is left out.

    Raises: ValueError where no task is left.
    """
    here = Path("the leaderboard")
    board, mine = _without_source(board), [(folder, _without_source(each)) for folder, each in mine]
    runs = [(here, board), *mine]
    kept: list[str] = []
    left: dict[str, list[str]] = {}
    for task in dict.fromkeys(trial.task for trial in board.trials):
        parts = [(folder, study.of_task(task)) for folder, study in mine]
        parts = [(folder, part) for folder, part in parts if part.trials]
        try:
            for folder, part in parts:
                check_recipe(here, board.of_task(task), folder, part)
        except ValueError as error:
            left.setdefault(str(error), []).append(task)
            continue
        if parts:
            kept.append(task)
        else:
            left.setdefault("you have no trial of it.", []).append(task)
    lines = [
        f"{listed(tasks)} {'is' if len(tasks) == 1 else 'are'} left out: {reason}"
        for reason, tasks in left.items()
    ]
    if not kept:
        raise ValueError(" ".join(lines))
    merged, conflicts = merge_checked(
        [
            (
                folder,
                replace(
                    study,
                    trials=tuple(t for t in study.trials if t.task in kept),
                    results=tuple(r for r in study.results if r.config.task in kept),
                ),
            )
            for folder, study in runs
            if any(trial.task in kept for trial in study.trials)
        ]
    )
    text = any(trial.of_text for trial in merged.trials)
    return replace(merged, corpus=board.corpus if text else None), lines + conflicts
