"""What a checkpoint says without its tensors; loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from posenc.compare.results import TrainingPoint
from posenc.report.record import Record

STATE = "checkpoint.json"


@dataclass(frozen=True)
class Cursor(Record):
    """Where training stands. The batches and the learning rate of a step follow from its number.

    trial: hash of the trial's config.
    loss_sum and loss_count: nats since the last point of the training curve.
    rng: torch's generator state, base64.
    tensors and tensors_sha256: the file that holds model and optimizer, and its hash.
    """

    trial: str
    step: int
    loss_sum: float = 0.0
    loss_count: int = 0
    training: tuple[TrainingPoint, ...] = ()
    train_seconds: float = 0.0
    rng: str = ""
    tensors: str = ""
    tensors_sha256: str = ""
