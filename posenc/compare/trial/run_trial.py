"""Run one trial: train, test, and write result.json, timing.json and the model.

result.json depends only on the config.
"""

import dataclasses
import inspect
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posenc.command_line.errors import RunFailed, disk_is_full
from posenc.compare.results import Timing, TrialResult
from posenc.compare.scores import Reading
from posenc.compare.trial import checkpoint, train
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.evaluate import score_cases
from posenc.compare.trial.objectives import NearLosses, objective_of
from posenc.compare.trial.readings import (
    TUNING_FOLDER,
    can_be_tuned,
    read_in_window,
    tune_and_read,
)
from posenc.compare.trial.result_files import (
    SPLITS,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    folder_of_text,
    save_result,
)
from posenc.compare.trial.task_of_trial import max_row_tokens, task_of
from posenc.compare.trial.windows import read_split, read_token_bytes
from posenc.encodings import ModelShape, PositionEncoding, Within, create, entry, parse
from posenc.files.atomic import write_atomically
from posenc.files.opening import read_file_bytes, remove_folder
from posenc.files.tensor_files import write_tensors
from posenc.hf.checkpoint.decoder_as_llama import can_export_llama, export_llama
from posenc.machine import hardware
from posenc.models import Decoder


def run_trial(
    config: TrialConfig, study_folder: Path, folder: Path, tell: train.Tell, checkpoint_steps: int
) -> None:
    """Train the trial from its last checkpoint in `folder`, test it, and write the result.

    tell: called during training, for example tell("step", step=3, loss=2.5).
    checkpoint_steps: steps between two checkpoints; 0: by time.
    """
    _make_deterministic(config.device)
    task = task_of(config)
    symbols: dict[str, np.ndarray] = dict.fromkeys(SPLITS, np.empty(0, np.uint16))
    token_bytes = None
    if task is None:
        symbols = {
            split: read_split(study_folder, split, config.corpus, config.vocabulary)
            for split in SPLITS
        }
        token_bytes = read_token_bytes(study_folder, config)
    model, cursor = train.train_model(
        config, symbols["train"], symbols["valid"], folder, tell, checkpoint_steps, token_bytes
    )
    tell("testing")
    began = time.perf_counter()
    result_fields: dict[str, Any] = {}
    tuning_seconds = 0.0
    if task is None:
        tested = _test_on_text(config, model, symbols, token_bytes, folder)
        result_fields |= tested.result_fields
        tuning_seconds = tested.tuning_seconds
    else:
        result_fields["by_case"] = score_cases(model, task, config)
    test_seconds = time.perf_counter() - began - tuning_seconds
    shape = train.encoding_shape(config)
    encoding = create(config.encoding, shape)  # of one layer, if each has its own
    result = TrialResult(
        config=config,
        parameters=sum(p.numel() for p in model.parameters()),
        encoding_parameters=sum(p.numel() for p in train.encoding_parameters(model)),
        spec=effective_spec(config.encoding, encoding, shape),
        training=cursor.training,
        **result_fields,
        timing=Timing(
            config.steps * config.batch * max_row_tokens(config) / cursor.train_seconds,
            cursor.train_seconds,
            test_seconds,
            hardware.names_of_cpu_and_gpus(config.device),
            cursor.reused_from,
            tuning_seconds,
        ),
    )
    write_tensors(folder / WEIGHTS_FILE, model.state_dict())
    if task is None and type(model) is Decoder and can_export_llama(model):
        export_llama(model, folder / "huggingface", max_positions=config.train_length)
        _export_tokenizer(folder_of_text(study_folder, config.corpus), folder / "huggingface")
    save_result(folder, result)
    checkpoint.delete_unneeded_checkpoint(folder, config)


def _export_tokenizer(text_folder: Path, folder: Path) -> None:
    """Copy the tokenizer of a text of tokens into a Hugging Face folder, if there is one."""
    file = text_folder / TOKENIZER_FILE
    if file.is_file():
        write_atomically(folder / TOKENIZER_FILE, read_file_bytes(file, None))
        # Otherwise transformers takes the class of the model, which may cut text in another way.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        write_atomically(folder / "tokenizer_config.json", json.dumps(settings))


class _TestedOnText(NamedTuple):
    """Fields of a TrialResult with the scores on text, and the seconds of the tuning."""

    result_fields: dict[str, Any]
    tuning_seconds: float


def _test_on_text(
    config: TrialConfig,
    model: nn.Module,
    symbols: Mapping[str, np.ndarray],
    token_bytes: Tensor | None,
    folder: Path,
) -> _TestedOnText:
    """Test a trained model as trained and in its other readings. symbols: by split. token_bytes:
    see `Objective.test`."""
    near_losses: NearLosses = {}
    scores = objective_of(config).test(
        model, symbols["test"], config, near_losses=near_losses, token_bytes=token_bytes
    )
    readings: list[Reading] = []
    tuning_seconds = 0.0
    if config.test_window:
        assert isinstance(model, Decoder)  # the plan gives no other objective a window
        readings.append(
            read_in_window(model, symbols["test"], config, scores, near_losses, token_bytes)
        )
    if config.tune_steps and can_be_tuned(model):
        assert isinstance(model, Decoder)
        try:
            tuned_reading = tune_and_read(
                model, symbols["train"], symbols["test"], config, folder, token_bytes
            )
            readings.append(tuned_reading.reading)
            tuning_seconds = tuned_reading.seconds
        except (FloatingPointError, RunFailed) as error:
            readings.append(Reading("tuned", cannot=" ".join(str(error).split())[:300]))
        remove_folder(folder / TUNING_FOLDER)
    return _TestedOnText({**scores._asdict(), "readings": tuple(readings)}, tuning_seconds)


def _make_deterministic(device: str) -> None:
    """Set torch to compute the same numbers each time, as far as the device can."""
    torch.set_float32_matmul_precision("highest")  # no TF32, whatever the environment says
    if device == "cpu":
        torch.set_num_threads(1)  # the last bits of sums depend on the number of threads
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)


def failure_reason(error: Exception) -> str:
    """Return one line for the user: why a trial failed with this error. The traceback is in the
    trial's log."""
    message = " ".join(str(error).split())[:300]
    if isinstance(error, train.TrialFailed | FloatingPointError):
        return message
    if disk_is_full(error):
        return f"the disk is full: {message}"
    is_allocation = "can't allocate memory" in message
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or is_allocation:
        return f"out of memory; try a smaller --batch or shorter lengths ({message})"
    return f"{type(error).__name__}: {message}"


AXES_KEY = "components of a position"
"""Key in the spec of an encoding whose positions have several components."""


def effective_spec(name: str, encoding: PositionEncoding, shape: ModelShape) -> dict[str, str]:
    """Return the settings of an encoding as texts, for the report: name, class, every constructor
    argument, given or not, and its claims.

    name: the text that built it; for several encodings together it replaces the arguments.
    """
    spec = {"name": name, "class": type(encoding).__name__}
    parts = parse(name).parts
    spec |= _constructor_arguments(name, encoding, shape) if len(parts) == 1 else {"made of": name}
    limit = encoding.claims.max_positions
    num_axes = encoding.claims.num_axes
    if num_axes > 1:
        spec[AXES_KEY] = f"{num_axes}"
    return spec | {
        "places": ", ".join(map(str, encoding.claims.places)) or "none",
        "logits scaled by": f"{encoding.scale(shape.head_dim):.6g}",  # type: ignore[arg-type]
        "parameters shared by": "the layers"
        if encoding.claims.scope == "model"
        else "no other layer",
        "positions": "no limit" if limit is None else f"{limit}",
        "source": encoding.claims.source,
    }


_NAMES_OF_RNOPE = ("rnope", "rnope_swa", "irope")


def window_of_rotated_layers(result: TrialResult) -> int | None:
    """Return how many keys a query sees in the layers of an RNoPE that have RoPE, counting its own;
    None for other encodings, and where those layers have no window.

    The window of `rnope_swa` follows the training length, which `result.spec` does not say: it has
    the options as they were given.
    """
    encoding_text = result.spec.get("name", "")
    # Results may be a stranger's, and other texts may name a file whose code would be run.
    if encoding_text.partition(":")[0] not in _NAMES_OF_RNOPE:
        return None
    encoding = create(encoding_text, train.encoding_shape(result.config))
    for part in encoding.modules():
        if isinstance(part, Within) and part.mask.window is not None:
            return part.mask.window
    return None


def _constructor_arguments(
    name: str, encoding: PositionEncoding, shape: ModelShape
) -> dict[str, str]:
    """Return the constructor arguments of an encoding as text: its own attributes or, where it
    keeps none, what it was built with."""
    (part,) = parse(name).parts
    shape_fields = {f.name: getattr(shape, f.name) for f in dataclasses.fields(shape)}
    defaults = {} if part.attribute else entry(part.name_or_module).defaults
    known_values = shape_fields | defaults | {option.key: option.value for option in part.options}
    arguments = {}
    for argument, parameter in inspect.signature(type(encoding)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # the class has no constructor of its own
        value: Any = getattr(encoding, argument, known_values.get(argument, parameter.default))
        arguments[argument] = str(value)
    return arguments
