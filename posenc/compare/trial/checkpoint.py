"""Checkpoints of unfinished trials: tensors in safetensors, everything else in JSON."""

import base64
import time
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from posenc.compare.trial.config import CONSTANT, TrialConfig
from posenc.compare.trial.result_files import CHECKPOINT_FILE, Cursor
from posenc.files.atomic import write_atomically
from posenc.files.opening import hash_of_file, path_in_folder
from posenc.files.tensor_files import map_tensors, write_tensors

EXTRA_BYTES = 1 << 24
"""Bytes that a checkpoint may have besides the tensors: its header, names and small numbers.
Chosen, far above the need; a larger file is not read."""

SECONDS_BETWEEN = 60.0
"""Time between two checkpoints at least, where no number of steps is given: a minute is not much to
lose, and a short training writes none but the last. Chosen."""
MAX_WRITING_SHARE = 0.03
"""Part of the time that writing checkpoints may take, where no number of steps is given: a model
that takes 10 seconds to write is written every five and a half minutes. Chosen."""


class CheckpointTimes:
    """Says after which steps of a training a checkpoint is due: after every `steps` steps, or by
    time if `steps` is 0, see SECONDS_BETWEEN and MAX_WRITING_SHARE."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds_between = SECONDS_BETWEEN
        self.last_written = time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is to be written after this step, counted from 1."""
        if self.steps:
            return step % self.steps == 0
        return time.perf_counter() - self.last_written >= self.seconds_between

    def count_written(self, seconds: float) -> None:
        """Note that a checkpoint was written just now, which took so many seconds."""
        self.seconds_between = max(SECONDS_BETWEEN, seconds / MAX_WRITING_SHARE)
        self.last_written = time.perf_counter()


class CorruptCheckpoint(Exception):
    """The checkpoint on disk cannot be read."""


def write_checkpoint(
    folder: Path, cursor: Cursor, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Save model, optimizer and cursor into the trial's folder. The JSON names the file of the
    tensors and is replaced last, so that the two always match."""
    tensor_file = f"checkpoint-{cursor.step}.safetensors"
    tensors_sha256 = write_tensors(folder / tensor_file, _tensors_by_name(model, optimizer))
    saved_cursor = replace(
        cursor,
        rng=_generator_state(),
        tensors=tensor_file,
        tensors_sha256=tensors_sha256,
    )
    write_atomically(folder / CHECKPOINT_FILE, saved_cursor.to_json())
    delete_checkpoint(folder, keep=tensor_file)


def restore_checkpoint(
    folder: Path, trial_hash: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Cursor | None:
    """Load the checkpoint in the trial's folder into model and optimizer, and set torch's
    generator. Return its cursor; None if there is no checkpoint.

    trial_hash: hash of the trial's config, which must be that of the checkpoint.
    Raises: CorruptCheckpoint, with model and optimizer untouched.
    """
    if not (folder / CHECKPOINT_FILE).exists():
        return None
    try:
        saved = _read_checkpoint(folder, trial_hash, model)
    except (ValueError, OSError, SafetensorError) as error:
        raise CorruptCheckpoint(str(error)) from error
    weights = {
        name.removeprefix(_MODEL_PREFIX): tensor
        for name, tensor in saved.tensors.items()
        if name.startswith(_MODEL_PREFIX)
    }
    model.load_state_dict(weights)
    _load_optimizer_state(optimizer, model, saved.tensors)
    torch.set_rng_state(saved.rng)
    return saved.cursor


class _StoredCheckpoint(NamedTuple):
    """A checkpoint that was read and belongs to the trial: the cursor, tensors by name, and the
    state of torch's generator, a tensor of bytes."""

    cursor: Cursor
    tensors: dict[str, Tensor]
    rng: Tensor


def _read_checkpoint(folder: Path, trial_hash: str, model: nn.Module) -> _StoredCheckpoint:
    """Read the checkpoint in a trial's folder. Raise ValueError unless it is whole and fits the
    trial, given by its hash, and its model."""
    cursor = Cursor.read(folder / CHECKPOINT_FILE)
    if cursor.trial != trial_hash:
        raise ValueError("it belongs to another trial")
    model_bytes = sum(value.nbytes for value in model.state_dict().values())
    # AdamW's two averages take twice the model's size; the fourth is spare.
    max_bytes = 4 * model_bytes + EXTRA_BYTES
    tensor_file = path_in_folder(folder, cursor.tensors)
    if hash_of_file(tensor_file, max_bytes) != cursor.tensors_sha256:
        raise ValueError(f"{cursor.tensors} was changed after it was written")
    tensors = map_tensors(tensor_file)
    if cursor.reused_from:  # a finished trial's weights alone
        tensors = {f"{_MODEL_PREFIX}{name}": value for name, value in tensors.items()}
        cursor = replace(cursor, rng=_generator_state())
    rng = torch.frombuffer(bytearray(base64.b64decode(cursor.rng)), dtype=torch.uint8)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != _expected_shapes(model, tensors):
        raise ValueError(f"{cursor.tensors} belongs to another model")
    return _StoredCheckpoint(cursor, tensors, rng)


def _load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Give the optimizer AdamW's stored state of each parameter of the model.

    tensors: those of a checkpoint, by name.
    """
    name_by_id = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = {}
            for key in _OPTIMIZER_STATE_KEYS:
                value = tensors.get(f"{key}/{name_by_id[id(p)]}")
                if value is not None:
                    device = "cpu" if key == "step" else p.device
                    state[key] = value.to(device, copy=True)  # or the file would stay mapped
            optimizer.state[p] = state


def _generator_state() -> str:
    """Return the state of torch's generator on the CPU, in base64."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def delete_checkpoint(folder: Path, keep: str | None = None) -> None:
    """Delete the tensors of all checkpoints in a trial's folder except the file `keep`; without it,
    also checkpoint.json."""
    if keep is None:
        (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*.safetensors"):
        if path.name != keep:
            path.unlink(missing_ok=True)


def delete_unneeded_checkpoint(folder: Path, config: TrialConfig) -> None:
    """Delete the checkpoints of a finished trial, except after a constant rate: there more steps
    can go on from the last one, see `posenc.compare.reuse.continue_trials`."""
    if config.schedule != CONSTANT:
        delete_checkpoint(folder)


def _tensors_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the model's tensors and AdamW's state themselves, no copies, by name, such as
    `model/head.weight` and `exp_avg/head.weight`."""
    tensors = {f"{_MODEL_PREFIX}{name}": value for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            tensors[f"{key}/{name}"] = value
    return tensors


_MODEL_PREFIX = "model/"
"""The beginning of the name of a tensor of the model."""
_OPTIMIZER_STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of a parameter that has had a gradient."""


def _expected_shapes(model: nn.Module, tensor_names: Container[str]) -> dict[str, torch.Size]:
    """Return the shape that each tensor of a checkpoint of this model must have, by name. Only a
    parameter that has had a gradient has AdamW's state: one with any of it in `tensor_names`."""
    shapes = {f"{_MODEL_PREFIX}{name}": value.shape for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        if not any(f"{key}/{name}" in tensor_names for key in _OPTIMIZER_STATE_KEYS):
            continue
        shapes |= {f"exp_avg/{name}": p.shape, f"exp_avg_sq/{name}": p.shape}
        shapes[f"step/{name}"] = torch.Size([])
    return shapes
