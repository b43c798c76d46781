"""Checkpoints of unfinished trials: tensors in safetensors, everything else in JSON."""

import base64
import hashlib
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
        cursor,
        rng=_generator_state(),
        tensors=name,
        tensors_sha256=hashlib.sha256(content).hexdigest(),
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
        saved = _read(folder, trial, model)
    except (ValueError, OSError, SafetensorError) as error:
        raise CorruptCheckpoint(str(error)) from error
    weights = {
        name.removeprefix(_MODEL): tensor
        for name, tensor in saved.tensors.items()
        if name.startswith(_MODEL)
    }
    model.load_state_dict(weights)
    _load_moments(optimizer, model, saved.tensors)
    torch.set_rng_state(saved.rng)
    return saved.cursor


class _Saved(NamedTuple):
    """A checkpoint that belongs to the trial: tensors by name, and the state of torch's generator,
    a tensor of bytes."""

    cursor: Cursor
    tensors: dict[str, Tensor]
    rng: Tensor


def _read(folder: Path, trial: str, model: nn.Module) -> _Saved:
    """Read a checkpoint. Raise ValueError unless it is whole and fits the trial and its model."""
    cursor = Cursor.from_json(text_of(folder / STATE))
    if cursor.trial != trial:
        raise ValueError("it belongs to another trial")
    size = sum(value.nbytes for value in model.state_dict().values())
    content = bytes_of(beside(folder, cursor.tensors), 4 * size + HEADER)
    if hashlib.sha256(content).hexdigest() != cursor.tensors_sha256:
        raise ValueError(f"{cursor.tensors} was changed after it was written")
    tensors = load(content)
    if cursor.reused_from:  # a finished trial's weights alone
        tensors = {f"{_MODEL}{name}": value for name, value in tensors.items()}
        cursor = replace(cursor, rng=_generator_state())
    rng = torch.frombuffer(bytearray(base64.b64decode(cursor.rng)), dtype=torch.uint8)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != _shapes(model, tensors):
        raise ValueError(f"{cursor.tensors} belongs to another model")
    return _Saved(cursor, tensors, rng)


def _load_moments(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Give the optimizer what AdamW has stored of each parameter of the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = {}
            for key in _MOMENTS:
                moment = tensors.get(f"{key}/{names[id(p)]}")
                if moment is not None:
                    state[key] = moment.to("cpu" if key == "step" else p.device)
            optimizer.state[p] = state


def _generator_state() -> str:
    """Return the state of torch's generator on the CPU, in base64."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def clear_checkpoint(folder: Path, keep: str | None = None) -> None:
    """Delete the tensors of all checkpoints except `keep`; without it, the whole checkpoint."""
    if keep is None:
        (folder / STATE).unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*.safetensors"):
        if path.name != keep:
            path.unlink(missing_ok=True)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the model's tensors and those of AdamW by name, as copies on the CPU."""
    tensors = {f"{_MODEL}{name}": value for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            tensors[f"{key}/{name}"] = value
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


_MODEL = "model/"
"""Begins the name of a tensor of the model."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of a parameter that has had a gradient."""


def _shapes(model: nn.Module, tensors: Container[str]) -> dict[str, torch.Size]:
    """Return the shapes of the model's tensors, and of AdamW's state for those with gradients."""
    shapes = {f"{_MODEL}{name}": value.shape for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        if not any(f"{key}/{name}" in tensors for key in _MOMENTS):
            continue
        shapes |= {f"exp_avg/{name}": p.shape, f"exp_avg_sq/{name}": p.shape}
        shapes[f"step/{name}"] = torch.Size([])
    return shapes
