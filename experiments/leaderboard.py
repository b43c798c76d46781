"""Run the round of trials that experiments/leaderboard.toml describes, row by row.

python experiments/leaderboard.py                           # what is done, and what is left
python experiments/leaderboard.py --hours 1.5 --texts ../shared/data      # run the next rows
python experiments/leaderboard.py --time          # time a training step of each encoding on code

A row is an encoding in a study, with one seed or more: `posenc compare ENCODING` with the options
of the study, in the folder runs/leaderboard/STUDY. The trials that it has finished are added to
results/leaderboard/STUDY.jsonl, those by which rates and settings were chosen to
STUDY_rates.jsonl: commit both. The same command goes on with the next missing row: on this machine
from the last checkpoint of what was stopped, on another one from these files, whose trials are not
run again. No row begins that is not expected to end in time, and Ctrl-C keeps what is done.

A study is on the board as soon as each of its encodings has one seed, and then with as many seeds
as all of them have: run `make readme`.

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from leaderboard_plan import (
    PLAN_FILE,
    ROOT,
    ROWS_FOLDER,
    STEP_SECONDS_FILE,
    TIMED_STUDY,
    Left,
    Results,
    Round,
    Row,
    StudyPlan,
    chosen_trial,
    left_of,
    options_of,
    rates_file,
    read_round,
    read_study,
    recipe_of,
    results_of,
    rows_file,
    trial_of,
)
from published_trials import PublishedTrial, add_rows, row_of, study_of
from refused import check_folder, refusing

import posenc
from posenc.command_line.errors import RunFailed
from posenc.compare.options import Options
from posenc.compare.plan.equal_tuning import search_trial
from posenc.compare.plan.plan import Plan, make_plan, with_text
from posenc.compare.results import Study, TrialResult
from posenc.compare.run_study import STUDY_FILE, run_study
from posenc.compare.trial.config import describe_trial, read_trial
from posenc.compare.trial.result_files import is_done, load_results, save_result
from posenc.compare.trial.train import build_model, optimizer_for, take_step
from posenc.encodings.registry.code_hashes import hash_of_posenc_code
from posenc.files.atomic import write_atomically
from posenc.files.sealed_json import seal
from posenc.machine.fingerprint import processor

SEARCH_SHARE = 0.2
"""Time of a trial of a search, as a share of that of a whole one."""
NUM_TURNS = 20
"""Timed steps of each encoding."""


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


def time_steps(plans: Round, known: dict[str, Results], rows_folder: Path) -> None:
    """Take training steps of every encoding of TIMED_STUDY in turns, so that what else the machine
    does slows all alike, and write their seconds. The text does not matter for them."""
    study = plans.studies[TIMED_STUDY]
    rows = [row for row in plans.rows if row.study == study]
    options = [left_of(row, plans, known).options for row in rows]
    trials = {chosen_trial(study, each) for each in options if each is not None}
    torch.set_num_threads(1)
    text = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    models = {}
    for trial in sorted(trials, key=lambda trial: trial.encoding):
        model = build_model(trial)
        models[trial.encoding] = (trial, model, optimizer_for(model, trial))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step in range(NUM_TURNS + 1):
        for name, (trial, model, optimizer) in models.items():
            began = time.perf_counter()
            take_step(model, optimizer, trial, text, step)
            seconds[name].append(time.perf_counter() - began)
    content = {
        "processor": processor(),
        "torch": torch.__version__,
        "seconds": {name: found[1:] for name, found in seconds.items()},  # the first allocates
    }
    write_atomically(rows_folder / STEP_SECONDS_FILE, seal(content) + "\n")


def main() -> None:
    """Read the command line; run rows, or say what is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hours", type=float, help="run rows that end in so many hours")
    parser.add_argument("--texts", type=Path, help="folder with the texts of the plan")
    parser.add_argument("--workers", type=int, help="trials at a time, in place of one per core")
    parser.add_argument("--time", action="store_true", help="time training steps of all encodings")
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
        if given.time:
            time_steps(plans, known, given.rows)
        show_state(plans, known)


if __name__ == "__main__":
    main()
