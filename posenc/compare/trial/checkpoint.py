"""Checkpoints of unfinished trials: tensors in safetensors, everything else in JSON."""

import base64
import hashlib
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from posenc.compare.trial.files import STATE, Cursor
from posenc.report.files.atomic import write_atomically
from posenc.report.files.opened import beside, bytes_of, text_of

HEADER = 1 << 24
"""Bytes that a checkpoint may have besides the model and AdamW's two moments."""


class CorruptCheckpoint(Exception):
    """The checkpoint on disk cannot be read."""


def write_checkpoint(
    folder: Path, cursor: Cursor, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Save model, optimizer and cursor. The JSON names the file of the tensors and is replaced
    last, so the two always match."""
    content = save(_tensors(model, optimizer))
    name = f"checkpoint-{cursor.step}.safetensors"
    write_atomically(folder / name, content)
    state = replace(
        cursor, rng=_rng(), tensors=name, tensors_sha256=hashlib.sha256(content).hexdigest()
    )
    write_atomically(folder / STATE, state.to_json())
    clear_checkpoint(folder, keep=name)


def restore_checkpoint(
    folder: Path, trial: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Cursor | None:
    """Load the checkpoint into model and optimizer; return None if there is none.

    Raises: CorruptCheckpoint, with model and optimizer untouched.
    """
    if not (folder / STATE).exists():
        return None
    try:
        cursor = Cursor.from_json(text_of(folder / STATE))
        if cursor.trial != trial:
            raise ValueError("it belongs to another trial")
        size = sum(value.nbytes for value in model.state_dict().values())
        content = bytes_of(beside(folder, cursor.tensors), 4 * size + HEADER)
        if hashlib.sha256(content).hexdigest() != cursor.tensors_sha256:
            raise ValueError(f"{cursor.tensors} was changed after it was written")
        tensors = load(content)
        if cursor.reused_from:
            tensors = {f"model/{name}": value for name, value in tensors.items()}
            cursor = replace(cursor, rng=_rng())
        rng = torch.frombuffer(bytearray(base64.b64decode(cursor.rng)), dtype=torch.uint8)
        if {k: v.shape for k, v in tensors.items()} != _shapes(model, tensors):
            raise ValueError(f"{cursor.tensors} belongs to another model")
    except (ValueError, OSError, SafetensorError) as error:
        raise CorruptCheckpoint(str(error)) from error
    model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model/")})
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                key: tensors[f"{key}/{names[id(p)]}"].to(p.device if key != "step" else "cpu")
                for key in _MOMENTS
                if f"{key}/{names[id(p)]}" in tensors
            }
    torch.set_rng_state(rng)
    return cursor


def _rng() -> str:
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def clear_checkpoint(folder: Path, keep: str | None = None) -> None:
    """Delete the tensors of all checkpoints except `keep`; without it, the whole checkpoint."""
    if keep is None:
        (folder / STATE).unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*.safetensors"):
        if path.name != keep:
            path.unlink(missing_ok=True)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            tensors[f"{key}/{name}"] = value
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of a parameter that has had a gradient."""


def _shapes(model: nn.Module, tensors: Container[str]) -> dict[str, torch.Size]:
    """Return the shapes of the model's tensors, and of AdamW's state for those with gradients."""
    shapes = {f"model/{name}": value.shape for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        if not any(f"{key}/{name}" in tensors for key in _MOMENTS):
            continue
        shapes |= {f"exp_avg/{name}": p.shape, f"exp_avg_sq/{name}": p.shape}
        shapes[f"step/{name}"] = torch.Size([])
    return shapes
