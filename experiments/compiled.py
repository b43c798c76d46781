"""What `posenc compare --compile` gains in a training step, and what compiling costs.

python experiments/compiled.py rope t5 --out results/compare/compiled.csv

A row for each encoding: CPU milliseconds of a step (median of interleaved rounds), plain and
compiled, on one thread, and the wall seconds of the first compiled step. Not run on a GPU.
"""

import argparse
import csv
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from refused import refusing

from posenc.compare.options import Options, check_options
from posenc.compare.plan.encodings import read_encodings
from posenc.compare.plan.plan import plan_trials
from posenc.compare.trial.train import build_model, maybe_compiled, optimizer_for, take_step

HEADER = ("encoding", "batch", "layers", "plain_ms", "compiled_ms", "first_step_s")


def measured(trial, rounds: int) -> tuple[float, float, float]:
    """Milliseconds of a step without and with --compile, and seconds of the first with it."""
    symbols = np.random.Generator(np.random.Philox(0)).integers(0, 256, 1 << 16).astype(np.uint16)
    runs, first = [], 0.0
    for config in (replace(trial, compile=False), replace(trial, compile=True)):
        model = build_model(config).train()
        runs.append((maybe_compiled(model, config), optimizer_for(model, config), config, []))
        began = time.perf_counter()
        take_step(*runs[-1][:3], symbols, 0)
        first = time.perf_counter() - began
    for step in range(1, rounds + 1):
        for model, optimizer, config, found in runs:
            began = time.process_time()
            take_step(model, optimizer, config, symbols, step)
            found.append(1000 * (time.process_time() - began))
    plain, compiled = (statistics.median(found) for *_, found in runs)
    return plain, compiled, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("encodings", nargs="+")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a CSV; without it, to the terminal")
    given = parser.parse_args()
    options = Options(
        given.encodings, compile=True, device="cpu", precision="float32", batch=given.batch,
        layers=given.layers,
    )  # fmt: skip
    torch.set_num_threads(1)
    with refusing(parser):
        check_options(options)
        if given.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {given.rounds}.")
        compared = read_encodings(options.encodings)
        (trial,) = plan_trials(options, compared)
    rows = []
    for each in compared:
        one = replace(trial, encoding=each.text)
        found = measured(one, given.rounds)
        rows.append((each.text, one.batch, one.layers, *(f"{value:.1f}" for value in found)))
        print(*rows[-1], file=sys.stderr, flush=True)
    target = sys.stdout if given.out is None else given.out.open("w", encoding="utf-8", newline="")
    with target:
        csv.writer(target, lineterminator="\n").writerows([HEADER, *rows])


if __name__ == "__main__":
    main()
