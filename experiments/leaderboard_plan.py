"""What the round of the leaderboard is: its studies, its rows, and what their files hold.

experiments/leaderboard.toml has the plan; experiments/leaderboard.py runs what is missing, and
docs/scripts/update_leaderboard.py shows what is whole.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from published_trials import PublishedTrial, check_whole, read_rows, study_of

from posenc.compare.options import Options
from posenc.compare.plan.equal_tuning import label_with_setting, search_trial
from posenc.compare.plan.plan import Plan, make_plan
from posenc.compare.reports.report_runs import (
    join_distinct_values,
    joined_by_slashes,
    recipe_values_of,
)
from posenc.compare.results import FORMAT, RateCheck, RateTried, Study, TrialResult
from posenc.compare.trial.config import TrialConfig, describe_trial
from posenc.compare.trial.train import encoding_shape
from posenc.encodings import RoPE, create
from posenc.files.sealed_json import unseal

ROOT = Path(__file__).parents[1]
PLAN_FILE = ROOT / "experiments/leaderboard.toml"
ROWS_FOLDER = ROOT / "results/leaderboard"
PRECISION = "bfloat16"
"""The precision of all trials: a CPU that does not multiply it takes four times as long."""
EXPECTED_SEARCH = 9
"""Trials of a search, where it is not known yet how many join the first six."""
RATES_SUFFIX = "_rates"
"""Ends the name, without .jsonl, of a file with the trials that chose a study's rates and
settings."""
TIMED_STUDY = "code"
"""The study whose training steps are timed."""
STEP_SECONDS_FILE = "step_seconds.json"
"""Seconds of training steps of the encodings of TIMED_STUDY, taken in turns."""
TASKS_STUDY = "tasks"
"""The study of all tasks of the plan."""
SIZES = "size-"
"""Begins the names of the studies that differ in the size of the model only."""
ONE_SEED = "-one-seed"
"""Ends the name of a study with the encodings that were trained with one seed only."""


@dataclass(frozen=True, eq=False)
class StudyPlan:
    """A study of the round: a text or a task, and a size.

    minutes: of a trial of RoPE on a free core. options: of `posenc compare`.
    corpus: the hash of its text; "" for a task. text: the name of its file below --texts; "" for
    Python's standard library.
    choices: the study whose rates and settings it takes; "" for one that chooses its own.
    one_rate: take no learning rate from there.
    """

    name: str
    why: str
    minutes: float
    options: dict[str, Any]
    corpus: str = ""
    text: str = ""
    choices: str = ""
    one_rate: bool = False


@dataclass(frozen=True)
class Row:
    """An encoding in a study, with all seeds below `seeds`."""

    study: StudyPlan
    list_name: str
    encoding: str
    seeds: int


@dataclass(frozen=True)
class Round:
    """All studies and rows.

    relative_minutes: by encoding, the time of a trial as a multiple of that of RoPE; 1 for one that
    is not named. labels: the names that the board gives encodings; that of an encoding that is not
    named is its text.
    """

    studies: dict[str, StudyPlan]
    rows: tuple[Row, ...]
    relative_minutes: dict[str, float]
    labels: dict[str, str]


Results = dict[TrialConfig, TrialResult]
"""Results by their trial, whose `source` is "": code is compared apart from this."""


def read_round(path: Path) -> Round:
    """Read the plan. Raises: ValueError for a row of an unknown study or list, or of an encoding
    that nothing chooses rates for."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        studies = {name: StudyPlan(name, **of) for name, of in content["studies"].items()}
        rows = tuple(
            Row(studies[each["study"]], each["list"], encoding, each["seeds"])
            for each in content["rows"]
            for encoding in content["lists"][each["list"]]
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: a study, list or field is missing or unknown: {error}."
        ) from None
    chosen = {(row.study.name, row.encoding) for row in rows}
    for row in rows:
        if row.study.choices and (row.study.choices, row.encoding) not in chosen:
            raise ValueError(
                f"{path}: {row.study.name} takes the choices of {row.study.choices}, and "
                f"{row.encoding} has no row there. Add it to one of its lists."
            )
    return Round(studies, rows, content["relative_minutes"], content.get("labels", {}))


# What is known, and what a row lacks.


def rows_file(folder: Path, study: StudyPlan) -> Path:
    """Return the file of a study's trials."""
    return folder / f"{study.name}.jsonl"


def rates_file(folder: Path, study: StudyPlan) -> Path:
    """Return the file of the trials by which a study chose rates and settings."""
    return folder / f"{study.name}{RATES_SUFFIX}.jsonl"


def read_study(folder: Path, study: StudyPlan) -> list[PublishedTrial]:
    """Return all rows of a study.

    Raises: ValueError for a damaged row, one of another recipe or text, and one that lacks a
    reading.
    """
    rows = []
    planned = trial_of(study)
    for file, trial in (
        (rows_file(folder, study), planned),
        (rates_file(folder, study), search_trial(planned)),
    ):
        for row in read_rows(file) if file.is_file() else ():
            check_row(file, row.result, trial)
            rows.append(row)
    return rows


def check_row(file: Path, result: TrialResult, planned: TrialConfig) -> None:
    """Raise ValueError for a row that is not of the recipe of a planned trial, or lacks a
    reading."""
    if recipe_of(result.config) != recipe_of(planned):
        wanted = recipe_values_of([recipe_of(planned)])
        found = recipe_values_of([recipe_of(result.config)])
        differ = [
            f"{name} {joined_by_slashes(found[name])} instead of {joined_by_slashes(wanted[name])}"
            for name in wanted
            if found[name] != wanted[name]
        ]
        raise ValueError(
            f"{file}: {describe_trial(result.config)} is of another recipe: {', '.join(differ)}. "
            "Move it to a file of its own."
        )
    missing = readings_of(result.config) - {reading.name for reading in result.readings}
    if missing and result.reason is None:
        raise ValueError(
            f"{file}: {describe_trial(result.config)} lacks the reading {min(missing)}. Remove the "
            "row, and run it again."
        )


def readings_of(trial: TrialConfig) -> set[str]:
    """Return the readings that a trial must have beside the one as trained."""
    readings = {"window"} if trial.test_window else set()
    if trial.tune_steps and isinstance(create(trial.encoding, encoding_shape(trial)), RoPE):
        readings.add("tuned")
    return readings


def recipe_of(trial: TrialConfig) -> TrialConfig:
    """Return a trial without what differs between the trials of a study."""
    return replace(trial, encoding="", seed=0, code="", source="", lr=1.0, encoding_lr=1.0)


def results_of(rows: Sequence[PublishedTrial]) -> Results:
    """Return the results of rows by their trial."""
    return {replace(row.result.config, source=""): row.result for row in rows}


def options_of(study: StudyPlan, encoding: str, seeds: int = 1) -> Options:
    """Return the options of a study of one encoding, before any choice."""
    return Options([encoding], seeds=seeds, precision=PRECISION, device="cpu", **study.options)


def plan_of(options: Options, study: StudyPlan) -> Plan:
    """Return the plan of options, with the hash of the study's text."""
    plan = make_plan(options)
    trials = [replace(t, corpus=study.corpus) if t.is_on_text else t for t in plan.task_trials]
    return replace(plan, task_trials=tuple(trials))


@cache
def trial_of(study: StudyPlan) -> TrialConfig:
    """Return a trial of the study's recipe."""
    return plan_of(options_of(study, "nope"), study).task_trials[0]


@cache
def plan_with_search(encoding: str, study: StudyPlan) -> Plan:
    """Return the plan of a study that chooses rates and settings for an encoding."""
    return plan_of(options_of(study, encoding), study)


class Choice(NamedTuple):
    """How far the search for an encoding's rate and setting is. left: trials that are known to be
    missing. check: what was tried and chosen; None while some are."""

    left: int
    check: RateCheck | None

    @property
    def best(self) -> RateTried | None:
        """Return what was chosen; None while trials are missing."""
        return None if self.check is None else self.check.best


def choice_of(encoding: str, study: StudyPlan, known: Results) -> Choice:
    """Return the choice of a study that chooses its own rates."""
    search = plan_with_search(encoding, study).search
    assert search is not None
    while True:
        trials = {trial: known.get(replace(trial, source="")) for trial in search.trials}
        found = {trial: result for trial, result in trials.items() if result is not None}
        if len(found) < len(trials):
            left = max(EXPECTED_SEARCH, len(trials)) - len(found)
            return Choice(left, None)
        if not search.widen(found):
            (check,) = search.checks(found)
            return Choice(0, check)


def chosen_options(row: Row, plans: Round, best: RateTried) -> Options:
    """Return the options of a row whose rates and setting are chosen: its trials without a
    search."""
    options = options_of(row.study, row.encoding, row.seeds)
    chooser = plans.studies[row.study.choices or row.study.name]
    factor = 1.0 if row.study.one_rate else best.lr / chooser.options["lr"]
    return replace(
        options,
        encodings=[best.encoding or row.encoding],
        lr=float(f"{options.lr * factor:.6g}"),
        encoding_lr=best.encoding_lr,
        tune=False,
    )


def chosen_trial(study: StudyPlan, options: Options) -> TrialConfig:
    """Return the trial, of seed 0, of a row's options; `source` is "", as in `Results`."""
    assert options.encodings
    (encoding,) = options.encodings
    return replace(
        trial_of(study),
        encoding=encoding,
        source="",
        lr=options.lr,
        encoding_lr=options.encoding_lr,
    )


class Left(NamedTuple):
    """What a row lacks: trials of a search, seeds, and the options of its trials; None while the
    choice is not made."""

    search: int
    seeds: tuple[int, ...]
    options: Options | None


def left_of(row: Row, plans: Round, known: dict[str, Results]) -> Left:
    """Return what a row lacks. known: results by the name of their study."""
    chooser = plans.studies[row.study.choices or row.study.name]
    choice = choice_of(row.encoding, chooser, known[chooser.name])
    search = 0 if row.study.choices else choice.left
    if choice.best is None:
        return Left(search, tuple(range(row.seeds)), None)
    options = chosen_options(row, plans, choice.best)
    trial = chosen_trial(row.study, options)
    results = known[row.study.name]
    seeds = tuple(seed for seed in range(row.seeds) if replace(trial, seed=seed) not in results)
    return Left(search, seeds, options)


# The studies of the board.


def published_studies(folder: Path = ROWS_FOLDER, plan: Path = PLAN_FILE) -> dict[str, Study]:
    """Return the studies of the board by their names: those of the plan, see `studies_of_plan`, and
    then each file of rows that the plan does not name, which is a study by itself. The tasks of
    the plan are one study, TASKS_STUDY, as soon as all of them are there.

    Raises: ValueError as `read_round`, `read_study`, `check_whole` and `study_of`.
    """
    plans = read_round(plan)
    rows = {name: read_study(folder, study) for name, study in plans.studies.items()}
    seconds = read_step_seconds(folder)
    studies = {}
    for study in plans.studies.values():
        for name, found in studies_of_plan(study, plans, rows).items():
            own = {text: seconds[text] for text in found.encodings if text in seconds}
            is_timed = study.name == TIMED_STUDY and own.keys() == {*found.encodings}
            studies[name] = replace(found, step_seconds=own if is_timed else {})
    tasks = [name for name, study in plans.studies.items() if not trial_of(study).is_on_text]
    of_tasks = [studies.pop(name) for name in tasks if name in studies]
    if tasks and len(of_tasks) == len(tasks):
        studies[TASKS_STUDY] = joined(of_tasks)
    planned_files = {rows_file(folder, study) for study in plans.studies.values()}
    planned_files |= {rates_file(folder, study) for study in plans.studies.values()}
    for path in sorted({*folder.glob("*.jsonl")} - planned_files):
        rows_of_file = read_rows(path)
        check_whole(path.name, rows_of_file)
        studies[path.stem] = study_of(rows_of_file, path.name)
    return studies


def joined(studies: Sequence[Study]) -> Study:
    """Return studies of one task each, with the same encodings, as one."""
    first = studies[0]
    return replace(
        first,
        versions=join_distinct_values([study.versions for study in studies]),
        hardware=join_distinct_values([study.hardware for study in studies]),
        trials=tuple(trial for study in studies for trial in study.trials),
        results=tuple(result for study in studies for result in study.results),
    )


def read_step_seconds(folder: Path) -> dict[str, tuple[float, ...]]:
    """Return the seconds of training steps of TIMED_STUDY that were taken in turns, by encoding; {}
    without the file. Raises: ValueError for a changed file."""
    path = folder / STEP_SECONDS_FILE
    if not path.is_file():
        return {}
    content = unseal(path.read_text(encoding="utf-8"))
    return {text: tuple(seconds) for text, seconds in content["seconds"].items()}


def studies_of_plan(
    study: StudyPlan, plans: Round, rows: Mapping[str, Sequence[PublishedTrial]]
) -> dict[str, Study]:
    """Return the studies that the rows of a planned one make; {} while an encoding has no trial.

    The encodings that the plan gives the most seeds make the study, with as many seeds as all of
    them have. The first seed of these and of those with fewer makes another one, whose name ends in
    ONE_SEED, as soon as one of the latter is there.

    rows: by the name of their study.
    """
    seeds_of: dict[str, int] = {}
    for row in plans.rows:
        if row.study == study:
            seeds_of[row.encoding] = max(row.seeds, seeds_of.get(row.encoding, 0))
    if not seeds_of:
        return {}
    most_seeds = max(seeds_of.values())
    with_most = [encoding for encoding, seeds in seeds_of.items() if seeds == most_seeds]
    made = (study_of_rows(study, with_most, n, plans, rows) for n in range(most_seeds, 0, -1))
    whole = next((found for found in made if found is not None), None)
    if whole is None:
        return {}
    with_fewer = [
        encoding
        for encoding, seeds in seeds_of.items()
        if seeds < most_seeds and study_of_rows(study, [encoding], 1, plans, rows) is not None
    ]
    if not with_fewer:
        return {study.name: whole}
    one_seed = study_of_rows(study, [*with_most, *with_fewer], 1, plans, rows)
    assert one_seed is not None
    return {study.name: whole, study.name + ONE_SEED: one_seed}


def study_of_rows(
    study: StudyPlan,
    encodings: Sequence[str],
    num_seeds: int,
    plans: Round,
    rows: Mapping[str, Sequence[PublishedTrial]],
) -> Study | None:
    """Return the study of these encodings and all seeds below `num_seeds`, as posenc compare with
    all of them would have it, with labels that name chosen settings; None while a trial is missing.

    rows: by the name of their study.
    """
    chooser = plans.studies[study.choices or study.name]
    known_of_chooser = results_of(rows[chooser.name])
    known = results_of(rows[study.name])
    results: list[TrialResult] = []
    checks: list[RateCheck] = []
    labels: dict[str, str] = {}
    for encoding in encodings:
        check = choice_of(encoding, chooser, known_of_chooser).check
        if check is None or check.best is None:
            return None
        row = Row(study, "", encoding, num_seeds)
        trial = chosen_trial(study, chosen_options(row, plans, check.best))
        trials = [replace(trial, seed=seed) for seed in range(num_seeds)]
        if not known.keys() >= {*trials}:
            return None
        results += [known[each] for each in trials]
        (entry,) = plan_with_search(encoding, chooser).compared
        entry = replace(entry, label=plans.labels.get(encoding, entry.label))
        label = label_with_setting(entry, trial.encoding)
        if label != trial.encoding:
            labels[trial.encoding] = label
        checks.append(
            replace(check if chooser == study else chosen_elsewhere(check), encoding=label)
        )
    return Study(
        format=FORMAT,
        command="posenc leaderboard",
        started="",
        versions=join_distinct_values(
            [row.versions | {"commit": row.commit} for row in rows[study.name]]
        ),
        hardware=join_distinct_values([row.hardware for row in rows[study.name]]),
        corpus=next((row.corpus for row in rows[study.name] if row.corpus is not None), None),
        trials=tuple(result.config for result in results),
        results=tuple(results),
        labels=labels,
        rates=tuple(checks),
    )


def chosen_elsewhere(check: RateCheck) -> RateCheck:
    """Return a choice for a study that took it from another one: without losses, which are of that
    study's text."""
    tried = tuple(
        replace(each, bits=None, reason="it was tried in another study") for each in check.tried
    )
    return replace(check, tried=tried)
