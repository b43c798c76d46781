"""One trial on several processes: torchrun starts them, and each takes its rows of every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from posenc.compare import process
from posenc.compare.trial import read_trial


class Ranks:
    """The processes that share a trial, seen from one of them.

    Every rank has the same model, and so the same optimizer after gradients are summed; the order
    of a sum differs from that in one process, and with it the last bits.
    """

    def __init__(self) -> None:
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()

    @property
    def first(self) -> bool:
        """Whether this rank writes and tells."""
        return self.rank == 0

    def rows(self, batch: Any) -> Any:
        """This rank's rows of a batch that is the same on all ranks."""
        return batch[self.rank :: self.count]

    def total(self, value: float) -> float:
        """The sum of a number over all ranks."""
        found = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(found)
        return found.item()

    def sum_gradients(self, model: nn.Module) -> None:
        """Put the sum over all ranks into every gradient."""
        for p in model.parameters():
            if p.grad is not None:
                distributed.all_reduce(p.grad)

    def check_same(self, what: str, value: str) -> None:
        """Refuse ranks that disagree. Raises: ValueError, on every rank."""
        found: list[str] = [""] * self.count
        distributed.all_gather_object(found, value)
        others = [f"rank {rank} has {other}" for rank, other in enumerate(found)]
        if len(set(found)) > 1:
            raise ValueError(f"The ranks disagree on {what}: {', '.join(others)}.")


def main(parent: str, study_folder: str, trial_folder: str, checkpoint_steps: str) -> int:
    """The process of a trial with several ranks, which is torchrun's agent: it starts them."""
    process.end_with_parent(int(parent))
    from torch.distributed.run import main as torchrun

    count = read_trial(Path(trial_folder)).ranks
    command = process.command("posenc.compare.rank", study_folder, trial_folder, checkpoint_steps)
    torchrun(["--standalone", "--nproc-per-node", str(count), "--no-python", *command])
    return 0
