"""Why does T5 copy 40 symbols and not 24, after 20? Its biases, and what it copies without some.

python experiments/t5_buckets.py                   # the leaderboard's three trials, 3 minutes each
python experiments/t5_buckets.py --seeds 1 --steps 50 --out tried --tables tried

Trains the published trials of T5 on copying again. results/ablations/t5_biases.csv has the bias of
each head for each bucket; t5_copies.csv what the models copy as trained, and with zeros where
training shows distances that copying never needs: in buckets that lie beyond the longest way back
to a symbol's source, and within the longest sequence.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from refused import check_folder, refusing
from safetensors.torch import load_file
from tables import write_table

from posenc.compare.reports.leaderboard import published
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.evaluate import score_cases
from posenc.compare.trial.files import load_result
from posenc.compare.trial.run_trial import run_trial
from posenc.compare.trial.train import build_model
from posenc.encodings.scores.t5 import T5Bias
from posenc.tasks.known import task_named
from posenc.tasks.task import Case

ROOT = Path(__file__).parents[1]
TASK = "copy"
FARTHEST = 200
"""Distances that are looked at."""


def trials(seeds: int) -> list[TrialConfig]:
    """The first trials of T5 on copying in the leaderboard, by seed."""
    found = [row.result.config for row in published() if row.result.config.encoding == "t5"]
    mine = [config for config in found if config.task == TASK]
    return sorted(mine, key=lambda config: config.seed)[:seeds]


def trained(config: TrialConfig, out: Path) -> torch.nn.Module:
    """The trial's model, from `out` where it lies there."""
    folder = out / config.folder
    weights = folder / "model.safetensors"
    if load_result(out, config) is None or not weights.exists():
        folder.mkdir(parents=True, exist_ok=True)
        run_trial(config, out, folder, lambda *kind, **what: None, config.steps)
    model = build_model(config)
    model.load_state_dict(load_file(weights))
    return model.eval()


def ends(encoding: T5Bias) -> list[tuple[int, int]]:
    """The nearest and the farthest distance of each bucket, of those that are looked at."""
    distances = torch.arange(FARTHEST)
    buckets = encoding.bucket(distances)
    each = [distances[buckets == bucket] for bucket in range(int(buckets.max()) + 1)]
    return [(int(found[0]), int(found[-1])) for found in each]


def not_needed(encoding: T5Bias, config: TrialConfig) -> list[int]:
    """Buckets whose distances training shows, and copying never needs."""
    longest = task_named(TASK).tokens(Case(config.train_length))
    return [
        bucket
        for bucket, (near, far) in enumerate(ends(encoding))
        if near > config.train_length and far < longest
    ]


def copies(model: torch.nn.Module, config: TrialConfig, seen: str) -> list[Sequence[object]]:
    """A row for every length: how many sequences, and how many of their symbols, are right."""
    return [
        (config.seed, seen, s.length, f"{s.exact_match:.4f}", f"{s.token_accuracy:.4f}")
        for s in score_cases(model, task_named(TASK), config)
    ]


def look(given: argparse.Namespace) -> None:
    """Train, look at the biases, copy with and without those that are not needed; two tables."""
    biases: list[Sequence[object]] = []
    copied: list[Sequence[object]] = []
    for published_config in trials(given.seeds):
        config = replace(published_config, steps=given.steps or published_config.steps)
        model = trained(config, given.out)
        encoding = model.encoding
        assert isinstance(encoding, T5Bias)
        weight = encoding.weight.detach()
        unused = not_needed(encoding, config)
        for bucket, (near, far) in enumerate(ends(encoding)):
            heads = [f"{bias:.3f}" for bias in weight[bucket].tolist()]
            biases.append((config.seed, bucket, near, far, bucket in unused, *heads))
        copied += copies(model, config, "as trained")
        weight[unused] = 0
        near, far = ends(encoding)[unused[0]][0], ends(encoding)[unused[-1]][1]
        copied += copies(model, config, f"zeros at distances {near} to {far}")
    heads = [f"head {index}" for index in range(len(biases[0]) - 5)]
    write_table(
        given.tables / "t5_biases.csv",
        ("seed", "bucket", "from", "to", "shown and not needed", *heads),
        biases,
    )
    write_table(
        given.tables / "t5_copies.csv",
        ("seed", "weights", "symbols", "exact_match", "token_accuracy"),
        copied,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="default: the leaderboard's")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/t5_buckets")
    parser.add_argument("--tables", type=Path, default=ROOT / "results/ablations")
    given = parser.parse_args()
    with refusing(parser):
        for option, number in (("--seeds", given.seeds), ("--steps", given.steps)):
            if number is not None and number < 1:
                raise ValueError(f"{option} must be at least 1, got {number}.")
        check_folder("--out", given.out)
        check_folder("--tables", given.tables)
        look(given)


if __name__ == "__main__":
    main()
