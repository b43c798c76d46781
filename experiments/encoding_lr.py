"""Which multiple of the model's learning rate do an encoding's tables and scalars need?

python experiments/encoding_lr.py

Trains each encoding that has some at several values of `ENCODING_LR`, on the leaderboard's text and
model for a fifth of its steps, one seed. Prints bits per byte of validation data at the training
length, nothing beyond it, and adds them to results/ablations/encoding_lr.csv; what that file has is
not trained again.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import numpy as np
import torch
from refused import check_file, refusing
from tables import write_table

from posenc.compare.budget import SUITE_SIZES
from posenc.compare.options import Options
from posenc.compare.plan.plan import make_plan, with_text
from posenc.compare.trial import train
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.files import SPLITS
from posenc.compare.trial.windows import read_split

ROOT = Path(__file__).parents[1]
FACTORS = (1.0, 5.0, 20.0, 80.0)
LEARNED = ("learned", "t5", "kerple", "fire", "shaw", "cope")
COLUMNS = ("encoding", "factor", "lr", "steps", "recipe", "bits_per_byte")


def known(path: Path) -> list[list[str]]:
    """Return the rows of the table, [] before there is one."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]


def measure(given: argparse.Namespace) -> None:
    """Train what the table lacks, and add a row after each. Raises: ValueError, OSError."""
    check_file("--rows", given.rows)
    torch.set_num_threads(1)
    rows = known(given.rows)
    options = Options(given.encodings, seeds=1, steps=given.steps, lr=given.lr, **SUITE_SIZES)
    with tempfile.TemporaryDirectory() as name:
        plan = with_text(make_plan(options), Path(name))
        assert plan.cut
        plan.cut.write(Path(name))
        symbols = {s: read_split(Path(name), s, plan.trials[0].corpus) for s in SPLITS}
        for trial in plan.trials:
            for factor in given.factors:
                cells = [trial.encoding, f"{factor:g}", f"{trial.lr:g}", trial.steps, trial.recipe]
                key = [str(cell) for cell in cells]
                if key in [row[:-1] for row in rows]:
                    continue
                bits = loss(trial, factor, symbols, Path(name) / f"{trial.folder}-{factor:g}")
                rows.append([*key, bits])
                print(*rows[-1], flush=True)
                write_table(given.rows, COLUMNS, rows)


def loss(trial: TrialConfig, factor: float, symbols: dict[str, np.ndarray], folder: Path) -> str:
    """Return bits per byte of validation data, or why the training failed."""
    folder.mkdir()
    train.ENCODING_LR = factor
    try:
        _, cursor = train.train_model(
            trial, symbols["train"], symbols["valid"], folder, lambda *a, **k: None, trial.steps
        )
    except train.TrialFailed as error:
        return str(error)
    return f"{cursor.training[-1].valid:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("encodings", nargs="*", default=list(LEARNED))
    parser.add_argument("--factors", nargs="+", type=float, default=list(FACTORS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--rows", type=Path, default=ROOT / "results/ablations/encoding_lr.csv")
    given = parser.parse_args()
    with refusing(parser):
        measure(given)


if __name__ == "__main__":
    main()
