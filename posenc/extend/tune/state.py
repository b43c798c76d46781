"""Store unfinished tuning: tensors in safetensors, everything else in JSON."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from posenc.extend.restart import Identity, read_sealed, sha256, start_again, write_sealed
from posenc.report.files.atomic import write_atomically
from posenc.report.files.opened import beside, bytes_of, make_inside

STATE, TENSORS = "tune.json", "tune-{step}.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of each weight."""
Trainable = dict[str, nn.Parameter]


def save_tuning(
    folder: Path,
    whose: Identity,
    trainable: Trainable,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
) -> None:
    """Save weights and optimizer after the last of `losses`."""
    tensors: dict[str, Tensor] = {f"weight/{name}": p for name, p in trainable.items()}
    for name, p in trainable.items():
        tensors |= {f"{key}/{name}": optimizer.state[p][key] for key in MOMENTS}
    content = save({name: t.detach().contiguous().clone() for name, t in tensors.items()})
    path = folder / TENSORS.format(step=len(losses))
    make_inside(folder)
    write_atomically(path, content)
    # The JSON is replaced last, so that it never names tensors that are not there.
    kept = {"losses": losses, "tensors": path.name, "tensors_sha256": sha256(content)}
    write_sealed(folder / STATE, whose, kept)
    for old in folder.glob(TENSORS.format(step="*")):
        if old != path:
            old.unlink()


def restore_tuning(
    folder: Path, whose: Identity, trainable: Trainable, optimizer: torch.optim.Optimizer
) -> list[float]:
    """Load saved state and return its losses; [] if there is no complete state.

    Raises: ValueError if the folder has the state of another tuning.
    """
    kept = read_sealed(folder / STATE, whose)
    if kept is None:
        return []
    try:
        content = bytes_of(beside(folder, kept["tensors"]), None)
        if sha256(content) != kept["tensors_sha256"]:
            raise ValueError(f"{kept['tensors']} is not what was written")
        tensors = load(content)
    except (OSError, ValueError, SafetensorError) as error:
        start_again(folder / STATE, error)
        return []
    with torch.no_grad():
        for name, p in trainable.items():
            p.copy_(tensors[f"weight/{name}"])
            moments = {key: tensors[f"{key}/{name}"] for key in MOMENTS}
            # AdamW keeps its count of steps on the CPU.
            optimizer.state[p] = {
                key: moment if key == "step" else moment.to(p.device)
                for key, moment in moments.items()
            }
    return kept["losses"]
