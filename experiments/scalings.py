"""What each scaling of RoPE gives after N steps of tuning, in a model trained on short text.

python experiments/scalings.py                            # every scaling, two seeds
python experiments/scalings.py yarn search --seeds 3 --tune 0 200
python experiments/scalings.py none yarn --tune 0 200 --factor 8 --seeds 3 --steps 3000 \
    --batch 16 --lr 0.008 --trained runs/code --table tuned_code.csv     # of the leaderboard

Trains RoPE with `posenc compare` at 128 bytes and stretches its huggingface/ folder to 512, by
every way and after every number of steps anew, tuned as `posenc extend --tune` does. Tuning reads
the text of the training, the measurement that of the test.

results/ablations/scalings.csv has a row for each way, number of steps, seed and length: bits per
byte of the same last 64 bytes of held-out windows, read with the last 128, 256, 512 ... bytes of
the window. A way that makes use of what it sees further back falls from row to row; `none` at 128
is the model as it was trained. What is done lies in runs/scalings and is not done again
under the same settings; delete it where the code of posenc.extend has changed.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from refused import check_file, check_runs, refusing
from tables import write_table

from posenc.compare.budget import SUITE_SIZES, SUITES
from posenc.compare.options import Options
from posenc.compare.results import Study, TrialResult
from posenc.compare.study import run_study
from posenc.compare.trial.windows import read_split
from posenc.extend.measure.losses import Reader
from posenc.extend.options import DEFAULTS
from posenc.extend.tune.config import TuneConfig
from posenc.extend.tune.tuning import tune
from posenc.extend.variants.candidates import candidates
from posenc.extend.variants.methods import METHODS
from posenc.hf.checkpoint.loading import Checkpoint, load_checkpoint
from posenc.hf.checkpoint.text import Windows
from posenc.report.files.atomic import write_atomically

ROOT = Path(__file__).parents[1]
HEADER = (
    "method", "tuning_steps", "seed", "length", "bits_per_byte", "trained", "recipe", "steps"
)  # fmt: skip
SEARCH = "search"
WAYS = (*METHODS, SEARCH)
WINDOWS = 128
"""Held-out windows; those of tuning are as many as 200 steps of four windows read."""
FITTED = 800


def windows_of(symbols: np.ndarray, length: int, count: int) -> Windows:
    """Windows evenly spread over a text, each a document of its own."""
    starts = np.linspace(0, len(symbols) - length, count).astype(int)
    rows = np.stack([symbols[start : start + length] for start in starts]).astype(np.int64)
    return Windows(torch.from_numpy(rows), torch.arange(count)[:, None].expand(count, length))


def measure(
    checkpoint: Checkpoint, way: str, config: TuneConfig, fitted: Windows, held_out: Windows,
    scratch: Path,
) -> dict[int, float]:  # fmt: skip
    """Bits per byte by length of a checkpoint stretched one way and tuned; its weights change.

    Raises: NotFinite for a loss that is no number.
    """
    trained, target = checkpoint.trained_length, held_out.tokens.shape[1]
    teacher = copy.deepcopy(checkpoint.model) if config.steps and config.distill else None
    options = replace(DEFAULTS, state=scratch)
    found = candidates(checkpoint, target, way, fitted, options, lambda what, share: None)
    variant = found[way]()
    with variant.active() as model:
        if config.steps:
            tune(model, fitted, trained, config, scratch, lambda what, share: None, None, teacher)
        reader = Reader(model, whole=not variant.cache_safe)
        lengths = [trained * 2**i for i in range((target // trained).bit_length())]
        return {
            length: reader.all_losses(held_out.tokens[:, -length:])[:, -trained // 2 :]
            .double().mean().item() / np.log(2)
            for length in lengths
        }  # fmt: skip


@cache
def load_once(folder: Path) -> Checkpoint:
    return load_checkpoint(folder)


def measured_once(
    result: TrialResult,
    way: str,
    steps: int,
    fitted: Windows,
    held_out: Windows,
    out: Path,
    trained: Path,
) -> dict[int, float]:
    """The same from the disk, where it was measured before with the same settings."""
    trial = result.config
    config = TuneConfig(steps=steps, seed=trial.seed)
    decides = repr((trial.hash, way, config, *fitted.tokens.shape, *held_out.tokens.shape))
    digest = hashlib.sha256(decides.encode()).hexdigest()[:12]
    path = out / f"{way}-{steps}-seed{trial.seed}-{digest}.json"
    if not path.exists():
        loaded = load_once(trained / trial.folder / "huggingface")
        checkpoint = replace(loaded, model=copy.deepcopy(loaded.model))
        scratch = path.with_suffix("")
        scratch.mkdir(exist_ok=True)
        bits = measure(checkpoint, way, config, fitted, held_out, scratch)
        write_atomically(path, json.dumps(bits))
        shutil.rmtree(scratch)
    return {int(n): bits for n, bits in json.loads(path.read_text(encoding="utf-8")).items()}


def stretched(study: Study, given: argparse.Namespace) -> list[Sequence[object]]:
    """A row for each seed, way, number of tuning steps and length."""
    torch.set_num_threads(1)
    rows: list[Sequence[object]] = []
    longest = given.factor * given.train_length
    for result in study.finished:
        config = result.config
        fitted, held_out = (
            windows_of(read_split(given.trained, split, config.corpus), longest, count)
            for split, count in (("train", FITTED), ("test", WINDOWS))
        )
        for way in given.ways or WAYS:
            for steps in given.tune:
                bits = measured_once(result, way, steps, fitted, held_out, given.out, given.trained)
                said = ", ".join(f"{n} {b:.3f}" for n, b in bits.items())
                print(f"{way}, {steps} steps, seed {config.seed}: {said}", flush=True)
                ends = (config.train_length, config.recipe, config.steps)
                rows += [(way, steps, config.seed, n, f"{b:.4f}", *ends) for n, b in bits.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("ways", nargs="*", help=f"of {', '.join(WAYS)}; default: all")
    parser.add_argument("--tune", type=int, nargs="+", default=[0, 50, 200], help="steps")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=SUITES["standard"].steps)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float, default=Options.lr)
    parser.add_argument("--train-length", type=int, default=128)
    parser.add_argument("--factor", type=int, default=4, help="of the length, a power of two")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--text", action="append", help="as of posenc compare")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/scalings")
    parser.add_argument("--trained", type=Path, help="run of posenc compare, or none yet")
    parser.add_argument("--tables", type=Path, default=ROOT / "results/ablations")
    parser.add_argument("--table", default="scalings.csv", help="its name in --tables")
    given = parser.parse_args()
    given.trained = given.trained or given.out / "trained"
    unknown = [way for way in given.ways if way not in WAYS]
    if unknown:
        parser.error(f"unknown way {unknown[0]!r}; known: {', '.join(WAYS)}.")
    with refusing(parser):
        negative = [steps for steps in given.tune if steps < 0]
        if negative:
            raise ValueError(f"--tune must be 0 or more steps, got {negative[0]}.")
        if given.factor < 2 or given.factor & (given.factor - 1):
            raise ValueError(f"--factor must be 2, 4, 8 or so on, got {given.factor}.")
        options = Options(
            ["rope"], seeds=given.seeds, steps=given.steps, workers=given.workers, text=given.text,
            train_length=given.train_length, batch=given.batch, lr=given.lr, out=given.trained,
            **SUITE_SIZES,
        )  # fmt: skip
        check_runs([options])
        table = given.tables / given.table
        check_file("--tables", table)
        rows = stretched(run_study(options, show=False), given)
        write_table(table, HEADER, rows)


if __name__ == "__main__":
    main()
