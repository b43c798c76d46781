"""Settings of fine-tuning. The module is light to import, because annotated fields are options
of the command."""

import math
from dataclasses import dataclass
from typing import Annotated

from posenc.command_line.options import option


@dataclass(frozen=True)
class TuneConfig:
    """Settings of fine-tuning, most with the command's help; the defaults are Position
    Interpolation's, adapted to the model's size.

    Args:
        lr: peak learning rate; None: 2e-5 for models of a billion parameters or more, as in the
            papers, and growing with the inverse root of the size below, up to 1e-3.
        lora_rank: rank of the adapters; None or 0 tunes all weights.
        distill: causal models only.
        warmup: steps of linear warm-up; from half of the steps on the rate falls to zero.
        seed: seed of the order of windows.
        short_share: fraction of batches cut to the training length, so that short texts are not
            forgotten.

    Source: Chen et al. 2023, arXiv:2306.15595, section 3.1 (AdamW 0.9/0.95, no weight decay, 20
    warm-up steps).
    """

    steps: Annotated[
        int, option("Steps of fine-tuning before the export.", "--tune", min=0, panel="Training")
    ] = 0
    batch: Annotated[
        int, option("Windows of the new length per tuning step.", min=1, panel="Training")
    ] = 4
    lr: Annotated[
        float | None,
        option(
            "Learning rate of the tuning.",
            shown="2e-5, more for models below 1e9 parameters",
            panel="Training",
        ),
    ] = None
    lora_rank: Annotated[
        int | None,
        option("Rank of LoRA adapters.", "--lora", shown="all weights", min=0, panel="Training"),
    ] = None
    distill: Annotated[
        bool,
        option(
            "Within the training length, tune on the predictions of the original model, so "
            "that short texts lose nothing; without --lora it reads the folder's weights again.",
            panel="Training",
        ),
    ] = True
    adapter: Annotated[
        bool,
        option(
            "With --lora: train only the adapters, and also write them to OUT/adapter as peft "
            "reads them.",
            "--adapter",
            panel="Training",
        ),
    ] = False
    recompute: Annotated[
        bool,
        option(
            "Tune in less memory by recomputing each layer in the backward pass (gradient "
            "checkpointing).",
            "--recompute",
            panel="Training",
        ),
    ] = False
    warmup: int = 20
    seed: int = 0
    short_share: float = 0.75

    def __post_init__(self) -> None:
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"--lr must be a positive number, got {self.lr}.")
        if self.adapter and not self.lora_rank:
            raise ValueError("--adapter: there are none without --lora RANK.")

    def schedule(self, step: int) -> float:
        """Return the learning rate at a step, counted from 0, as a fraction of the peak: a rise
        over `warmup` steps, then constant, then a fall to zero over the second half."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (0.5 * self.steps))

    def rate(self, num_parameters: int) -> float:
        """Return the peak learning rate for a model with this many parameters."""
        if self.lr is not None:
            return self.lr
        return min(1e-3, 2e-5 * math.sqrt(max(1.0, 1e9 / num_parameters)))
