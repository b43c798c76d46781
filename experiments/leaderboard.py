"""Run the trials of the leaderboard in pieces, and keep a row for each.

python experiments/leaderboard.py --rows new.jsonl --out runs/new     # tasks, one of each family
python experiments/leaderboard.py --rows all.jsonl --out runs/all --all       # every encoding
python experiments/leaderboard.py --seeds 5 --rows five.jsonl --out runs/five rope t5
python experiments/leaderboard.py --steps 9000 --rows longer.jsonl --out runs/longer nope
python experiments/leaderboard.py --tasks text --steps 3000 --batch 16 --lr 0.008 --search-lr \
    --text novel.txt --rows novel.jsonl --out runs/novel      # a text, sizes and rates of its own

A piece is a seed and a task: after each, or where Ctrl-C ends it, the rows of its trials are added
to results/leaderboard/tasks.jsonl. The same command goes on: here from the last checkpoint of what
was stopped, and on another machine from the rows, whose trials are not run again. Trials lie in
runs/leaderboard. Recipe and sizes are those of `posenc compare --suite`. Where the file has rows
of another recipe nothing is run; those of tasks that are published have one, so give --rows, --out.
The trials by which --search-lr chose stand beside the others, in the file with _rates in its name.
"""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import replace
from pathlib import Path

from published_trials import PublishedTrial, add_rows, read_rows, rows_of, study_of
from refused import check_file, check_runs, refusing

import posenc
from posenc.command_line.errors import RunFailed, Stopped
from posenc.compare.defaults import ALL_TASKS, SUITE_SIZES, SUITES
from posenc.compare.options import Options
from posenc.compare.plan.encodings import read_encodings
from posenc.compare.plan.learning_rate_search import rate_trials
from posenc.compare.plan.plan import make_plan, with_text
from posenc.compare.reports.leaderboard import PUBLISHED_FOLDER, TASKS_FILE
from posenc.compare.reports.report_runs import joined_by_slashes, recipe_values_of
from posenc.compare.results import Study
from posenc.compare.run_study import STUDY_FILE, run_study
from posenc.compare.trial.config import RECIPE
from posenc.compare.trial.result_files import is_done, load_results, save_result
from posenc.encodings.base.position_encoding import ModelShape
from posenc.files.atomic import write_atomically
from posenc.tasks.registry import TASKS, TEXT

BOARD_WINDOWS = 512
"""Windows of each test length on the board, four times those of a comparison by default."""
ROOT = Path(__file__).parents[1]
REPRESENTATIVES = (
    "nope",
    "sinusoidal",
    "learned",
    "rope",
    "rove",
    "alibi",
    "t5",
    "kerple",
    "fire",
    "shaw",
    "cope",
    "fox",
    "dape",
)
"""One of each family: none; fixed and learned at the embeddings; rotation of queries and keys, and
of values too; a bias that is fixed, in buckets, a learned kernel, a learned function; keys and
values by distance; counted by content; forgetting; a bias that reads the scores."""


def in_a_row() -> list[str]:
    """Return the names of all encodings whose positions have one component."""
    shape = ModelShape(embed_dim=64, num_heads=4, train_length=64)
    return [name for name in posenc.names() if posenc.create(name, shape).claims.num_axes == 1]


def commit() -> str:
    """Return the commit of this code, with + where files differ from it. Raises: ValueError."""
    said = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(said, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(f"--commit: git knows none of {ROOT}; say which it is.") from None


def lay_out(rows: list[PublishedTrial], folder: Path) -> int:
    """Write the results of published trials of today's recipe into `folder`, where a study looks
    for them. Return how many it lacked."""
    rows = [row for row in rows if row.result.config.recipe == RECIPE]
    missing = [row.result for row in rows if not is_done(folder, row.result.config)]
    if missing and not (folder / STUDY_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / STUDY_FILE, study_of(rows[:1]).to_json())
    for result in missing:
        home = folder / result.config.folder
        home.mkdir(exist_ok=True)
        save_result(home, result)
    return len(missing)


def piece(names: list[str], task: str, seeds: int, given: argparse.Namespace) -> Options:
    """Return the options of a study of one task, with the seeds before `seeds`."""
    steps = SUITES["standard"].steps if task == TEXT and given.steps is None else given.steps
    return Options(
        names,
        task=[task],
        seeds=seeds,
        steps=steps,
        precision=given.precision,
        lr=given.lr,
        search_lr=given.search_lr,
        text=given.text if task == TEXT else None,
        workers=given.workers,
        batch=given.batch,
        num_windows=BOARD_WINDOWS,
        out=given.out,
        **SUITE_SIZES,
    )


def run_piece(
    names: list[str], task: str, seeds: int, given: argparse.Namespace
) -> tuple[Study, bool]:
    """Run a piece. Return its study, and True if Ctrl-C ended it."""
    try:
        return run_study(piece(names, task, seeds, given), show=False), False
    except (RunFailed, Stopped) as error:  # what is done counts, and the next call goes on
        print(f"{task}, seed {seeds - 1}: {error}", flush=True)
        study = Study.from_json((given.out / STUDY_FILE).read_text(encoding="utf-8"))
        return study, isinstance(error, Stopped)


def rates_file(rows: Path) -> Path:
    """Return the path of the file with the trials of --search-lr, beside that of the rows."""
    return rows.with_stem(f"{rows.stem}_rates")


def rates_of(study: Study, given: argparse.Namespace) -> Study:
    """Return the trials by which the rates of a study were chosen, as a study of their own."""
    checks = rate_trials([replace(trial, lr=given.lr) for trial in study.trials])
    found, _ = load_results(given.out, checks)
    return replace(study, trials=checks, results=tuple(found.values()))


def check_recipes(given: argparse.Namespace, pieces: list[Options]) -> None:
    """Raises: ValueError where rows of a task are of another recipe than those that its piece would
    add, or only some of both at checked rates: they do not mix."""
    rates, rows = rates_file(given.rows), {given.rows: []}
    for file in filter(Path.is_file, (given.rows, rates)):
        rows[file] = [row.result.config for row in read_rows(file)]
    for options in pieces if any(rows.values()) else ():
        plan = with_text(make_plan(options), given.out)
        (planned,) = plan.task_trials
        now = {each.text: each.posenc_code_hash for each in plan.compared}
        of_task = {f: [c for c in each if c.task == planned.task] for f, each in rows.items()}
        new = f"{planned.task}-2"
        own = f"Give --rows and --out of their own: --rows {new}.jsonl --out runs/{new}"
        tried = rate_trials([planned])
        for file, configs in of_task.items():
            would = recipe_values_of(tried if file == rates else [planned])
            would["lr"] |= {trial.lr for trial in tried if given.search_lr}
            differ = [
                f"{name} {joined_by_slashes(found)}, and these would have "
                f"{joined_by_slashes(would[name])}"
                for name, found in recipe_values_of(configs).items()
                if not found <= would[name]
            ]
            differ += [
                f"{c.encoding} of source {c.source}, and these would have {now[c.encoding]}"
                for c in configs
                if c.source and c.source != now.get(c.encoding, c.source)
            ][:1]
            if differ:
                option = "--rows" if file == given.rows else file
                raise ValueError(
                    f"{option}: its trials of {planned.task} have {'; '.join(differ)}. {own}"
                )
        if of_task[given.rows] and bool(of_task.get(rates)) != given.search_lr:
            has, do = ("no", "without") if given.search_lr else ("the", "with")
            raise ValueError(
                f"--search-lr: {rates} has {has} trials that chose rates of {planned.task}. Run "
                f"this {do} --search-lr. Or: {own}"
            )


def run_pieces(given: argparse.Namespace) -> None:
    """Refuse what cannot be run, then run the pieces and keep their rows.

    Raises: ValueError, OSError; SystemExit after Ctrl-C.
    """
    names, code = in_a_row() if given.all else given.encodings, given.commit or commit()
    check_file("--rows", given.rows)
    if own := [each.text for each in read_encodings(names) if each.user_code_hash]:
        raise ValueError(
            f"{own[0]}: the leaderboard has posenc's own encodings only, and this one is of a "
            "file. Compare it with one of them in one posenc compare."
        )
    pieces = [piece(names, task, given.seeds, given) for task in given.tasks]
    check_runs(pieces)
    check_recipes(given, pieces)
    rates = rates_file(given.rows)
    for file in (given.rows, rates):
        if file.is_file():
            print(f"{lay_out(read_rows(file), given.out)} trials are taken from {file}")
    for seeds in range(1, given.seeds + 1):
        for task in given.tasks:
            study, stopped = run_piece(names, task, seeds, given)
            if given.search_lr:
                add_rows(rates, rows_of(rates_of(study, given), code))
            added = add_rows(given.rows, rows_of(study, code))
            print(f"{task}, seed {seeds - 1}: {added} new rows in {given.rows}", flush=True)
            if stopped:
                raise SystemExit(130)


def main() -> None:
    """Read the command line and run the pieces."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("encodings", nargs="*", default=list(REPRESENTATIVES))
    parser.add_argument("--all", action="store_true", help="every encoding of a row of tokens")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=list(ALL_TASKS[1:]), choices=[TEXT, *TASKS])
    parser.add_argument("--steps", type=int, help="in place of the suite's; with its own --rows")
    parser.add_argument("--batch", type=int, help="in place of the task's")
    parser.add_argument("--lr", type=float, default=Options.lr)
    parser.add_argument("--search-lr", action="store_true", help="choose it for each encoding")
    parser.add_argument("--text", action="append", help="in place of Python's standard library")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/leaderboard")
    parser.add_argument("--rows", type=Path, default=ROOT / PUBLISHED_FOLDER / TASKS_FILE)
    parser.add_argument("--commit", help="of the code, where this is no clone")
    given = parser.parse_args()
    with refusing(parser):
        run_pieces(given)


if __name__ == "__main__":
    main()
