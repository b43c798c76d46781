"""The comparison on two texts at 38 million parameters: trained at 1,024 bytes, tested to 16,384.

python experiments/gpu_recipe.py --text A --text B          # eight encodings, three seeds, on CUDA
python experiments/gpu_recipe.py --count                    # what it takes, counted; nothing runs
python experiments/gpu_recipe.py --text A --text B --tiny   # the same in small, on a CPU

Each text is a study of its own: an order that holds on one of them may be a matter of that text.
Each encoding first gets its own learning rate, of three, by its loss at the training length.
Not run at full size: no device was at hand. The small one is tested, which shows that the recipe
can be run, and nothing of its speed, memory or results. The same command goes on where it stopped.
Give two texts of a gigabyte or more: a trial reads 786 million bytes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from refused import check_runs, refusing
from torch import nn

from posenc.compare.options import Options, check_options
from posenc.compare.plan.cost import FLOPS_PER_SECOND, seconds_of
from posenc.compare.plan.dry_run import tokens_of
from posenc.compare.plan.encodings import read_encodings
from posenc.compare.plan.plan import plan_trials
from posenc.compare.results import FACTORS
from posenc.compare.study import run_study
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.material import vocabulary_of
from posenc.compare.trial.train import build_model, learned_by_encodings
from posenc.report.files.bounds import readable_size

ROOT = Path(__file__).parents[1]
ENCODINGS = ("t5", "alibi", "fire", "cope", "fox", "kerple", "rope", "nope")
"""Those that are ahead beyond the training length in docs/findings.md, with RoPE and NoPE, which
most models use or are compared with."""
TEXTS = 2
RECIPE: dict[str, Any] = {
    "train_length": 1024, "test_lengths": "2048,4096,8192,16384", "seeds": 3, "steps": 24_000,
    "batch": 32, "width": 512, "layers": 12, "heads": 8, "lr": 6e-4, "device": "cuda",
    "precision": "bfloat16", "checkpoint_steps": 1000, "check_lr": True,
    "yes": True,  # a CPU, of which the check of a run's time knows, would need months
}  # fmt: skip
TINY: dict[str, Any] = RECIPE | {
    "train_length": 32, "test_lengths": "64,128,256,512", "seeds": 1, "steps": 4, "batch": 2,
    "width": 32, "layers": 2, "heads": 2, "device": "cpu", "checkpoint_steps": 2,
}  # fmt: skip
SHARES = (0.4, 0.1)
"""Of a device's peak: what well-tuned trainings of large models reach, and a quarter of it."""


def planned(options: Options) -> list[TrialConfig]:
    """A trial of each encoding; this machine needs no device for that."""
    compared = read_encodings(options.encodings or ENCODINGS)
    (trial,) = plan_trials(replace(options, engine="slurm"), compared)
    return [replace(trial, encoding=each.text) for each in compared]


def unallocated(trial: TrialConfig) -> nn.Module:
    """The model of a trial, without memory."""
    with torch.device("meta"):
        return build_model(replace(trial, device="meta"))


def training_bytes(trial: TrialConfig, parameters: int) -> int:
    """Roughly the memory of a step: weights, gradients and AdamW's averages in float32, the logits
    and their gradients, and what layers keep for the way back, by equation 1 of Korthikanti et al.
    2022, arXiv:2205.05198, which holds the scores of attention whole. CoPE may take more."""
    length, width = trial.train_length, trial.width
    kept = length * trial.batch * (34 * width + 5 * trial.heads * length)
    logits = 8 * trial.batch * length * vocabulary_of(trial)
    return 16 * parameters + logits + trial.layers * kept


def testing_bytes(trial: TrialConfig) -> int:
    """Of the longest window: scores, bias and weights of one layer in float32, held whole."""
    return 3 * 4 * trial.heads * max(trial.test_lengths) ** 2


def count(options: Options, teraflops: float) -> Iterator[str]:
    """What the recipe takes, line by line."""
    trials = planned(options)
    yield "Counted, not measured:"
    sizes = []
    for trial in trials:
        model = unallocated(trial)
        sizes.append(sum(p.numel() for p in model.parameters()))
        own = sum(p.numel() for p in learned_by_encodings(model))
        yield f"  {trial.encoding}: {sizes[-1]:,} parameters, {own:,} of them the encoding's"
    trial, seeds = trials[0], options.seeds or 1
    number = TEXTS * (seeds + len(FACTORS)) * len(trials)
    yield (
        f"  {number} trials on {TEXTS} texts, {TEXTS * len(FACTORS) * len(trials)} of them for the "
        f"learning rates, of {trial.steps:,} steps in {trial.precision}: {tokens_of(trial):,} "
        f"bytes each, {number * tokens_of(trial):,} in all"
    )
    yield (
        f"  memory: about {readable_size(training_bytes(trial, max(sizes)))} in training, "
        f"{readable_size(testing_bytes(trial))} at {max(trial.test_lengths):,} bytes"
    )
    kept, moving = number * 4 * max(sizes), 12 * max(sizes)
    yield (
        f"  disk: {readable_size(kept)} for the models, {readable_size(moving)} for a checkpoint, "
        "twice the text"
    )
    operations = number * seconds_of(trial, 1, 1) * FLOPS_PER_SECOND[trial.precision]
    hours = [operations / (share * teraflops * 1e12) / 3600 for share in SHARES]
    yield (
        f"  time: {operations:.1e} operations; {hours[0]:.1f} to {hours[1]:.1f} hours at "
        f"{SHARES[0]:.0%} to {SHARES[1]:.0%} of {teraflops:g} teraFLOP/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("encodings", nargs="*", default=list(ENCODINGS))
    parser.add_argument("--text", action="append", help="a file or folder; give it twice")
    parser.add_argument("--tiny", action="store_true", help="the same in small, on a CPU")
    parser.add_argument("--count", action="store_true", help="say what it takes, and stop")
    parser.add_argument(
        "--teraflops", type=float, default=989, help="the device's peak in bfloat16, for --count"
    )
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--engine", default="local", help="local, ray or slurm")
    parser.add_argument("--address", help="as of posenc compare")
    parser.add_argument("--storage", help="as of posenc compare")
    parser.add_argument("--partition", help="as of posenc compare")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu")
    given = parser.parse_args()
    recipe = TINY if given.tiny else RECIPE
    texts = given.text or []
    options = Options(
        given.encodings, engine=given.engine, address=given.address,
        storage=given.storage, partition=given.partition, out=given.out,
        **recipe | ({} if given.seeds is None else {"seeds": given.seeds}),
    )  # fmt: skip
    with refusing(parser):
        check_options(options)
        if not 0 < given.teraflops < math.inf:
            raise ValueError(f"--teraflops must be positive and finite, got {given.teraflops:g}.")
        if given.count:
            print("\n".join(count(options, given.teraflops)))
            return
        if len({Path(each).resolve() for each in texts}) != TEXTS or len(texts) != TEXTS:
            raise ValueError(f"--text: give it {TEXTS} times, with different texts.")
        runs = [
            replace(options, text=[each], out=given.out / f"{number}-{Path(each).name}")
            for number, each in enumerate(texts, 1)
        ]
        for run in runs:
            check_runs([run])
        for run in runs:
            run_study(run)


if __name__ == "__main__":
    main()
