"""Run the round of trials that experiments/leaderboard.toml describes, row by row.

python experiments/leaderboard.py                           # what is done, and what is left
python experiments/leaderboard.py --hours 1.5 --texts ../shared/data      # run the next rows

A row is an encoding in a study, with one seed or more: `posenc compare ENCODING` with the options
of the study, in the folder runs/leaderboard/STUDY. The trials that it has finished are added to
results/equal_tuning/STUDY.jsonl, those by which rates and settings were chosen to
STUDY_rates.jsonl: commit both. The same command goes on with the next missing row: on this machine
from the last checkpoint of what was stopped, on another one from these files, whose trials are not
run again. No row begins that is not expected to end in time, and Ctrl-C keeps what is done.

The leaderboard does not read these files before the round is whole. To see what they say so far:
posenc report runs/leaderboard/code, after `posenc compare` with the encodings and options of a
study, `--reuse runs/leaderboard`.

To add an encoding, add its name to a list of the plan.

All trials of a study have one code. Where posenc has changed since, go on with the code of the
commit that the rows name:

git worktree add ../round COMMIT
PYTHONPATH=../round python experiments/leaderboard.py --hours 1.5 --texts ../shared/data
"""

from __future__ import annotations

import argparse
import subprocess
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from published_trials import (
    RATES_SUFFIX,
    PublishedTrial,
    add_rows,
    read_rows,
    row_of,
    study_of,
)
from refused import check_folder, refusing

import posenc
from posenc.command_line.errors import RunFailed
from posenc.compare.options import Options
from posenc.compare.plan.equal_tuning import search_trial
from posenc.compare.plan.plan import Plan, make_plan, with_text
from posenc.compare.reports.report_runs import joined_by_slashes, recipe_values_of
from posenc.compare.results import RateTried, Study, TrialResult
from posenc.compare.run_study import STUDY_FILE, run_study
from posenc.compare.trial.config import TrialConfig, describe_trial, read_trial
from posenc.compare.trial.result_files import is_done, load_results, save_result
from posenc.compare.trial.train import encoding_shape
from posenc.encodings import RoPE, create
from posenc.encodings.registry.code_hashes import hash_of_posenc_code
from posenc.files.atomic import write_atomically

ROOT = Path(__file__).parents[1]
PLAN_FILE = ROOT / "experiments/leaderboard.toml"
ROWS_FOLDER = ROOT / "results/equal_tuning"
PRECISION = "bfloat16"
"""The precision of all trials: a CPU that does not multiply it takes four times as long."""
EXPECTED_SEARCH = 9
"""Trials of a search, where it is not known yet how many join the first six."""
SEARCH_SHARE = 0.2
"""Time of a trial of a search, as a share of that of a whole one."""


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
    """All studies and rows. relative_minutes: by encoding, the time of a trial as a multiple of
    that of RoPE; 1 for one that is not named."""

    studies: dict[str, StudyPlan]
    rows: tuple[Row, ...]
    relative_minutes: dict[str, float]


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
    return Round(studies, rows, content["relative_minutes"])


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
    missing. best: None while some are."""

    left: int
    best: RateTried | None


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
            return Choice(0, check.best)


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
    assert options.encodings
    trial = replace(
        trial_of(row.study),
        encoding=options.encodings[0],
        source="",
        lr=options.lr,
        encoding_lr=options.encoding_lr,
    )
    results = known[row.study.name]
    seeds = tuple(seed for seed in range(row.seeds) if replace(trial, seed=seed) not in results)
    return Left(search, seeds, options)


def minutes_of(row: Row, plans: Round, num_searches: int, num_trials: int) -> float:
    """Return the minutes that trials of a row take on a free core."""
    trials = SEARCH_SHARE * num_searches + num_trials
    return trials * row.study.minutes * plans.relative_minutes.get(row.encoding, 1.0)


def show_state(plans: Round, known: dict[str, Results]) -> None:
    """Print what is done and what is left, by study and list."""
    counted: set[tuple[str, str, int]] = set()
    table: dict[str, list[float]] = {}
    for row in plans.rows:
        left = left_of(row, plans, known)
        keys = {(row.study.name, row.encoding, seed) for seed in range(row.seeds)} - counted
        missing = [key for key in keys if key[2] in left.seeds]
        is_first = (row.study.name, row.encoding, 0) in keys
        sums = table.setdefault(f"{row.study.name}, {row.list_name}, {row.seeds} seeds", [0, 0, 0])
        sums[0] += len(keys)
        sums[1] += len(missing)
        sums[2] += minutes_of(row, plans, left.search * is_first, len(missing)) / 60
        counted |= keys
    for name, (planned, missing, hours) in table.items():
        print(
            f"{name}: {planned - missing:.0f} of {planned:.0f} trials, {hours:.1f} core-hours left"
        )
    planned, missing, hours = map(sum, zip(*table.values(), strict=True))
    timings = [r.timing for results in known.values() for r in results.values() if r.timing]
    spent = sum(t.train_seconds + t.test_seconds + t.tuning_seconds for t in timings) / 3600
    print(
        f"all: {planned - missing:.0f} of {planned:.0f} trials, about {hours:.1f} core-hours left; "
        f"{spent:.1f} hours so far by the clock, those that chose rates included"
    )


# Running rows.


def commit() -> str:
    """Return the commit of posenc's code, with + where files differ from it. Raises: ValueError."""
    code = Path(posenc.__file__).parents[1]
    said = ["git", "-C", str(code), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(said, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(f"git knows no commit of {code}; run this in a clone.") from None


def check_own(plan: Plan) -> None:
    """Raises: ValueError for an encoding of a file of the user."""
    (entry,) = plan.compared
    if entry.user_code_hash:
        raise ValueError(
            f"{entry.text}: the leaderboard has posenc's own encodings only, and this one is of a "
            "file. Compare it with one of them in one posenc compare."
        )


def check_code(study: StudyPlan, rows: Sequence[PublishedTrial]) -> None:
    """Raises: ValueError where rows of a study are of other code than this."""
    row_by_encoding = {row.result.config.encoding: row for row in rows}
    for encoding, row in row_by_encoding.items():
        if row.result.config.source != hash_of_posenc_code(encoding):
            raise ValueError(
                f"{study.name}: its {describe_trial(row.result.config)} is of other code, that "
                f"of commit {row.commit}. Go on with that code: git worktree add ../round "
                f"{row.commit}, and run this with PYTHONPATH=../round."
            )


def lay_out(rows: Sequence[PublishedTrial], folder: Path) -> None:
    """Write the results of rows into the folder of a study, where posenc compare looks for them."""
    finished = [row for row in rows if row.result.reason is None]
    missing = [row.result for row in finished if not is_done(folder, row.result.config)]
    if missing and not (folder / STUDY_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / STUDY_FILE, study_of(finished[:1]).to_json())
    for result in missing:
        home = folder / result.config.folder
        home.mkdir(exist_ok=True)
        save_result(home, result)


def results_in(folder: Path) -> list[TrialResult]:
    """Return the results of all trials in the folder of a study, those that failed included."""
    trials = []
    for path in folder.glob("*/config.json"):
        try:
            trials.append(read_trial(path.parent))
        except (ValueError, TypeError, OSError):  # of another version
            continue
    found, _ = load_results(folder, trials)
    return list(found.values())


def keep(folder: Path, study: StudyPlan, rows_folder: Path, code: str) -> int:
    """Add the results in the folder of a study to its files: those of its recipe only. Return how
    many are new."""
    if not (folder / STUDY_FILE).is_file():
        return 0
    found = Study.read(folder / STUDY_FILE)
    planned = trial_of(study)
    new: dict[Path, list[PublishedTrial]] = {}
    for result in results_in(folder):
        recipe = recipe_of(result.config)
        row = row_of(result, found, code)
        if recipe == recipe_of(planned) and result.reason is None:
            new.setdefault(rows_file(rows_folder, study), []).append(row)
        elif recipe == recipe_of(search_trial(planned)):
            new.setdefault(rates_file(rows_folder, study), []).append(row)
    return sum(add_rows(file, rows) for file, rows in new.items())


def options_to_run(row: Row, left: Left, given: argparse.Namespace) -> Options | str:
    """Return the options of posenc compare for a row, or why it cannot run now."""
    text = None
    if row.study.text:
        if given.texts is None:
            return f"--texts is needed, a folder with {row.study.text}"
        text = [str(given.texts / row.study.text)]
    options = left.options
    if options is None and row.study.choices:
        return f"{row.study.choices} has not chosen rates yet"
    if options is None or not row.study.choices:  # the search joins its trials by itself
        options = options_of(row.study, row.encoding, row.seeds)
    return replace(options, text=text, workers=given.workers, out=given.out / row.study.name)


def run_row(row: Row, options: Options, given: argparse.Namespace) -> None:
    """Run what a row lacks, and keep the results. Raises: ValueError for another text or an
    encoding of a file; Stopped after Ctrl-C."""
    assert options.out is not None
    rows = read_study(given.rows, row.study)
    plan = with_text(make_plan(options), given.out)
    if plan.splits is not None and plan.splits.info.hash != row.study.corpus:
        raise ValueError(
            f"{row.study.name}: its text has the hash {row.study.corpus}, and that of "
            f"{plan.splits.info.name} has {plan.splits.info.hash}. Use the text that the plan "
            "names."
        )
    check_own(plan)
    lay_out(rows, options.out)
    try:
        run_study(options, show=False)
    except RunFailed as error:  # the others count, and the next call tries it again
        print(f"{row.study.name}, {row.encoding}: {error}", flush=True)
    finally:
        added = keep(options.out, row.study, given.rows, commit())
        print(f"{row.study.name}, {row.encoding}: {added} new rows", flush=True)


def run_rows(plans: Round, known: dict[str, Results], given: argparse.Namespace) -> None:
    """Run the rows that are missing and expected to end in time, the first ones first."""
    deadline = time.monotonic() + 3600 * given.hours
    slowdown = 1.0  # of this machine, next to the plan's minutes
    for row in plans.rows:
        left = left_of(row, plans, known)
        if not left.search and not left.seeds:
            continue
        options = options_to_run(row, left, given)
        if isinstance(options, str):
            print(f"{row.study.name}, {row.encoding}: not run; {options}", flush=True)
            continue
        minutes = minutes_of(row, plans, left.search, len(left.seeds))
        began = time.monotonic()
        if began + 60 * minutes * slowdown > deadline:
            print(f"{row.study.name}, {row.encoding}: not run; it would not end in time")
            continue
        run_row(row, options, given)
        slowdown = max(1.0, (time.monotonic() - began) / (60 * minutes))
        known[row.study.name] = results_of(read_study(given.rows, row.study))


def main() -> None:
    """Read the command line; run rows, or say what is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hours", type=float, help="run rows that end in so many hours")
    parser.add_argument("--texts", type=Path, help="folder with the texts of the plan")
    parser.add_argument("--workers", type=int, help="trials at a time, in place of one per core")
    parser.add_argument("--plan", type=Path, default=PLAN_FILE)
    parser.add_argument("--rows", type=Path, default=ROWS_FOLDER)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/leaderboard")
    given = parser.parse_args()
    with refusing(parser):
        plans = read_round(given.plan)
        check_folder("--rows", given.rows)
        check_folder("--out", given.out)
        rows = {study: read_study(given.rows, study) for study in plans.studies.values()}
        known = {study.name: results_of(of_study) for study, of_study in rows.items()}
        if given.hours is not None:
            if not given.hours > 0:
                raise ValueError(f"--hours must be above 0, got {given.hours:g}.")
            for study, of_study in rows.items():
                check_code(study, of_study)
            run_rows(plans, known, given)
        show_state(plans, known)


if __name__ == "__main__":
    main()
