"""Run the trials of the leaderboard in pieces, and keep a row for each.

python experiments/leaderboard.py                     # one representative of every family
python experiments/leaderboard.py --all               # every encoding that counts tokens in a row
python experiments/leaderboard.py --seeds 5 rope t5   # more seeds where tiers touch

A piece is a seed and a task: after each, its rows are added to results/leaderboard/trials.jsonl,
and the same command goes on from the last checkpoint of what was stopped. Trials lie in
runs/leaderboard. Recipe and sizes are those of `posenc compare --suite`.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import posenc
from posenc.compare.budget import ALL_TASKS, SUITE_SIZES, SUITES
from posenc.compare.leaderboard import PUBLISHED, ROWS, add_rows, rows_of
from posenc.compare.options import Options
from posenc.compare.results import Study
from posenc.compare.study import run_study
from posenc.encoding.shape import ModelShape
from posenc.report.failure import RunFailed
from posenc.tasks.known import TEXT

ROOT = Path(__file__).parents[1]
REPRESENTATIVES = (
    "nope", "sinusoidal", "learned", "rope", "alibi", "t5", "kerple", "fire", "shaw", "cope", "fox",
    "dape",
)  # fmt: skip
"""One of each family: none; fixed and learned at the embeddings; rotation; a bias that is fixed, in
buckets, a learned kernel, a learned function; keys and values by distance; counted by content;
forgetting; a bias that reads the scores."""


def in_a_row() -> list[str]:
    """Every encoding whose positions have one component."""
    shape = ModelShape(embed_dim=64, num_heads=4, train_length=64)
    return [name for name in posenc.names() if posenc.create(name, shape).claims.num_axes == 1]


def commit() -> str:
    """The commit of this code, with + where files differ from it."""
    said = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(said, capture_output=True, text=True, check=True).stdout.strip()


def run_piece(names: list[str], task: str, seeds: int, given: argparse.Namespace) -> Study | None:
    steps = SUITES["standard"].steps if task == TEXT else None
    options = Options(
        names, task=[task], seeds=seeds, steps=steps, precision=given.precision,
        workers=given.workers, out=given.out, **SUITE_SIZES,
    )  # fmt: skip
    try:
        return run_study(options, show=False)
    except RunFailed as error:  # the others' rows count, and the next call tries it again
        print(f"{task}, seed {seeds - 1}: {error}", flush=True)
        return Study.from_json((given.out / "study.json").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("encodings", nargs="*", default=list(REPRESENTATIVES))
    parser.add_argument("--all", action="store_true", help="every encoding of a row of tokens")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", default=list(ALL_TASKS), choices=ALL_TASKS)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/leaderboard")
    parser.add_argument("--rows", type=Path, default=ROOT / PUBLISHED / ROWS)
    parser.add_argument("--commit", help="of the code, where this is no clone")
    given = parser.parse_args()
    names, code = in_a_row() if given.all else given.encodings, given.commit or commit()
    for seeds in range(1, given.seeds + 1):
        for task in given.tasks:
            study = run_piece(names, task, seeds, given)
            added = add_rows(given.rows, rows_of(study, code)) if study else 0
            print(f"{task}, seed {seeds - 1}: {added} new rows in {given.rows}", flush=True)


if __name__ == "__main__":
    main()
