"""Add up the memory of each stage of an extension, from the config and the headers of the weights.

    on a device = (weights + trained + kept) / number of devices + at work

kept: values of the forward pass that the backward pass needs; they lie where their layer is.
at work: what exists for a moment in one layer, or for one chunk of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posenc.extend.measure.losses import (
    MAX_TOKENS_PER_BATCH,
    last_logits,
    next_token_losses,
    piece_length,
)
from posenc.extend.measure.tasks import DEPTHS, PasskeyGrid, parse_task_names
from posenc.extend.memory.readings import Reading, readings_of, shapes_of_method
from posenc.extend.methods import METHODS
from posenc.extend.options import Options
from posenc.extend.refusals import check_after_loading, with_trained_length
from posenc.extend.variants import DROPE, DUAL_CHUNK, only_rotation_changes
from posenc.hf.checkpoint.loading import Checkpoint, load_on_meta
from posenc.hf.checkpoint.simulated_memory import (
    SimulatedMemory,
    bytes_of_weights,
    meta_device_like_others,
)
from posenc.hf.checkpoint.tokenization import tokenization_kind
from posenc.hf.lora import add_lora
from posenc.hf.teacher import SameWeights, Teacher
from posenc.hf.tune_config import TuneConfig
from posenc.hf.tuning import (
    MasterWeights,
    next_token_loss,
    rows_at_once,
    set_gradient_checkpointing,
)

IN_PROCESSES = "tuning, torchrun"
"""The name of the stage of tuning in several processes."""


@dataclass(frozen=True)
class Stage:
    """Hold the bytes that one stage of an extension takes, over all devices.

    name: "measuring", with the names of methods that are read in a way of their own, "tuning",
    IN_PROCESSES or "proving". weights: of the model, and of its
    copies. trained: float32 copies of what is trained, the states of the optimizer, adapters. kept,
    at_work: see above.
    """

    name: str
    weights: int
    trained: int = 0
    kept: int = 0
    at_work: int = 0

    def on_a_device(self, num_devices: int, program: int) -> int:
        """Return the bytes on each of `num_devices` devices, with those of the program itself."""
        spread = self.weights + self.trained + self.kept
        return -(-spread // num_devices) + self.at_work + program


def plan_stages(
    folder: Path,
    target_length: int,
    options: Options,
    *,
    method: str | None = None,
    is_exported: bool,
    as_bytes: bool = False,
    as_ids: bool = False,
    device: str = "cpu",
    num_devices: int = 1,
) -> list[Stage]:
    """Return the stages of an extension; the arguments before `device` are those of `extend`.

    device: "cpu" or "cuda"; what is proved is streamed to a GPU. num_devices: where there are
    several, tuning under torchrun is a stage of its own.

    Raises: ValueError for what `extend` refuses before it reads weights, for a masked model or one
    without a head, and for a map of positions: what these take is not planned.
    """
    checkpoint = _load_without_values(folder, options)
    if as_bytes or as_ids:
        tokenization_kind(folder, checkpoint.config.vocab_size, as_bytes=as_bytes, as_ids=as_ids)
    check_after_loading(
        checkpoint,
        target_length,
        method,
        is_exported=is_exported,
        options=options,
        can_read_words=not as_ids,
    )
    if method == DUAL_CHUNK:
        raise ValueError(
            f"--plan: the memory of {DUAL_CHUNK}, which runs with an attention of posenc, is not "
            "planned; leave it out."
        )
    stages = [
        _measuring(checkpoint.model, reading, options)
        for reading in readings_of(checkpoint, target_length, method, options)
    ]
    if options.tune is not None:
        stages.append(_tuning_stage(checkpoint, target_length, method, options.tune, device))
        # Under torchrun a method must be named, one of METHODS: see `check_before_loading`.
        is_for_processes = bool(checkpoint.rope_settings) and method in (None, *METHODS)
        if num_devices > 1 and is_for_processes:
            # The model of the checkpoint has adapters now.
            checkpoint = _load_without_values(folder, options)
            stages.append(
                _in_processes(checkpoint, target_length, method, options.tune, num_devices)
            )
    if is_exported:
        stages.append(
            _proving(_load_without_values(folder, options), target_length, method, device)
        )
    return stages


def _load_without_values(folder: Path, options: Options) -> Checkpoint:
    """Return the checkpoint of a folder on the meta device, with the training length of
    --trained-length. Raises: ValueError for a folder whose memory is not planned."""
    checkpoint = load_on_meta(folder, dtype=options.precision, allow_no_head=True)
    if checkpoint.masked or not checkpoint.has_head:
        raise ValueError(
            "--plan: the memory of masked models, and of models without a head, is not planned; "
            "leave it out."
        )
    if options.trained_length is not None:
        checkpoint = with_trained_length(checkpoint, options.trained_length)
    return checkpoint


def _peak_of_reading(
    model: Any, num_windows: int, length: int, *, in_one_piece: bool = False
) -> int:
    """Return the most bytes that exist while the losses of windows are computed, besides the
    weights."""
    with meta_device_like_others(), SimulatedMemory(model) as memory:
        next_token_losses(model, _tokens(num_windows, length), in_one_piece=in_one_piece)
    return memory.peak


def _peak_of_answers(model: Any, length: int, options: Options) -> int:
    """Return the most bytes that exist while the prompts of --task are read, besides the weights.
    Each is read at once, and its last logits are kept."""
    if not parse_task_names(options.task):
        return 0
    num_prompts = min(len(DEPTHS) * options.task_trials, _texts_at_once(length))
    with meta_device_like_others(), SimulatedMemory(model) as memory:
        last_logits(model, _tokens(num_prompts, length), PasskeyGrid.key_len + 1)
    return memory.peak


def _texts_at_once(length: int) -> int:
    """Return how many texts of `length` tokens are read in one batch, where there are enough."""
    return max(1, MAX_TOKENS_PER_BATCH // length)


def _measuring(model: Any, reading: Reading, options: Options) -> Stage:
    """Return the stage of measuring variants that are read alike: losses of windows, and answers to
    tasks."""
    num_windows = min(reading.num_windows, _texts_at_once(reading.length))
    with reading.applied(model):
        at_work = max(
            _peak_of_losses(model, num_windows, reading),
            _peak_of_answers(model, reading.length, options),
        )
        weights = bytes_of_weights(model)
    name = " ".join(("measuring", ", ".join(reading.names))).strip()
    return Stage(name, weights, at_work=at_work)


def _peak_of_losses(model: Any, num_windows: int, reading: Reading) -> int:
    """Return the most bytes that exist while windows are read, besides the weights."""
    length = reading.length
    piece_len = piece_length(model, num_windows)
    num_pieces = -(-length // piece_len)
    if reading.in_one_piece or num_pieces <= 4:
        return _peak_of_reading(model, num_windows, length, in_one_piece=reading.in_one_piece)
    if reading.cache_length is not None:
        # One piece more than the cache holds: from there on it grows no more.
        num_pieces = min(num_pieces, max(4, -(-reading.cache_length // piece_len) + 1))
    # Each further piece finds as much more in the cache: two lengths give the line.
    peaks = [_peak_of_reading(model, num_windows, count * piece_len) for count in (2, 4)]
    bytes_per_piece = (peaks[1] - peaks[0]) / 2
    return round(peaks[1] + (num_pieces - 4) * bytes_per_piece)


class _Tuning(NamedTuple):
    """Describe a tuning and what its method makes of its memory.

    rows: how many rows go through the model together and the tokens of each, for every length of
        row that a step may have.
    has_second_model: True if the predictions that are kept come from the original folder, loaded
        again, and not from the weights of the tuned model.
    """

    config: TuneConfig
    rows: tuple[tuple[int, int], ...]
    has_second_model: bool


def _tuning_of(
    checkpoint: Checkpoint, target_length: int, method: str | None, config: TuneConfig
) -> _Tuning:
    """Return the tuning of `method`; None is the method that the command chooses."""
    lengths = (checkpoint.trained_length, target_length)
    if method == DROPE:
        lengths = (checkpoint.trained_length,)  # it is recalibrated on short rows alone
    rows = tuple(
        (min(config.batch * (target_length // length), rows_at_once(length)), length)
        for length in lengths
    )
    weights_are_kept = bool(config.lora_rank) and only_rotation_changes(checkpoint, method)
    return _Tuning(config, rows, config.distill and not weights_are_kept)


def _tuning_stage(
    checkpoint: Checkpoint, target_length: int, method: str | None, config: TuneConfig, device: str
) -> Stage:
    """Return the stage of tuning: a step on windows of the new length, and one on short rows."""
    model = checkpoint.model
    tuning = _tuning_of(checkpoint, target_length, method, config)
    second_weights, second_at_work = _bytes_of_teacher(model, tuning, device)
    with shapes_of_method(checkpoint, method, target_length)(model):
        weights = bytes_of_weights(model)
        step = _step_of_tuning(checkpoint, tuning)
    return Stage(
        "tuning",
        weights + second_weights,
        step.trained,
        step.kept,
        step.at_work + second_at_work,
    )


def _in_processes(
    checkpoint: Checkpoint,
    target_length: int,
    method: str | None,
    config: TuneConfig,
    num_processes: int,
) -> Stage:
    """Return the stage of tuning under torchrun on GPUs. Each process has a part of the layers, of
    their gradients and of the optimizer's states, and whole what is outside of the layers, the
    adapters, what its own rows keep, and two layers: while one runs, the next is gathered. With
    --recompute what is kept lies in main memory, but for the input of the layer at work."""
    model = checkpoint.model
    layers = _layers_of(model)
    outside, one_layer = _bytes_outside_and_in_a_layer(model)
    weights = bytes_of_weights(model)
    divided = [] if config.lora_rank else [p for layer in layers for p in layer.parameters()]
    config = replace(config, batch=max(1, config.batch // num_processes))
    tuning = _tuning_of(checkpoint, target_length, method, config)
    _, second_at_work = _bytes_of_teacher(model, tuning, "cuda")
    step = _step_of_tuning(checkpoint, tuning, divided)
    trained_outside = step.trained - step.trained_in_parts
    kept = step.kept // max(1, len(layers)) if config.recompute else step.kept
    at_work = step.at_work + kept + outside + 2 * one_layer + trained_outside + second_at_work
    return Stage(IN_PROCESSES, weights - outside, step.trained_in_parts, at_work=at_work)


class _Step(NamedTuple):
    """Hold the bytes that a step of tuning takes beside the weights.

    trained: float32 copies, gradients and AdamW's states. trained_in_parts: the part of it that
    processes divide. kept, at_work: see above.
    """

    trained: int
    trained_in_parts: int
    kept: int
    at_work: int


def _step_of_tuning(
    checkpoint: Checkpoint, tuning: _Tuning, divided: Sequence[nn.Parameter] = ()
) -> _Step:
    """Return what a step takes, of rows of the length that needs most. The model is then
    one with adapters, if there are any. divided: weights whose gradients go to the process that has
    the part, as soon as they are computed."""
    model = checkpoint.model
    config = tuning.config
    for parameter in divided:
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    with meta_device_like_others(), SimulatedMemory(model) as memory:
        teacher = None
        if config.distill:
            teacher = Teacher(model) if tuning.has_second_model else SameWeights(model)
        if config.lora_rank:
            add_lora(model, config.lora_rank, only_adapters=config.adapter)
        if isinstance(teacher, SameWeights):
            teacher.keep_trained_weights()
        if config.recompute:
            set_gradient_checkpointing(model, True)
        masters = MasterWeights({n: p for n, p in model.named_parameters() if p.requires_grad})
        # AdamW's two moments, which are there from the second step on, and the gradients of rows
        # that went through the model before.
        states = [torch.zeros_like(p) for p in masters.weights.values() for _ in range(2)]
        for master in masters.weights.values():
            master.grad = torch.zeros_like(master)
        model.train()
        trained = memory.live
        kept = 0
        for num_rows, length in tuning.rows:
            tokens = _tokens(num_rows, length)
            loss = next_token_loss(model, tokens, checkpoint.trained_length, teacher)
            kept = max(kept, memory.live - trained)
            loss.backward()
            masters.take_gradients()
        if not divided:  # AdamW's copy for a moment
            copies = [torch.empty_like(p) for p in masters.weights.values()]
            del copies
        del states
    share = sum(p.numel() for p in divided) / sum(p.numel() for p in masters.weights.values())
    return _Step(trained, round(share * trained), kept, memory.peak - trained - kept)


def _drop_gradient(parameter: Tensor) -> None:
    """Forget the gradient of a weight."""
    parameter.grad = None


def _bytes_of_teacher(model: Any, tuning: _Tuning, device: str) -> tuple[int, int]:
    """Return what the teacher takes beside the model: the bytes of its weights, and those at
    work."""
    if not tuning.has_second_model:
        return 0, 0
    return _bytes_of_second_model(model, device)


def _proving(checkpoint: Checkpoint, target_length: int, method: str | None, device: str) -> Stage:
    """Return the stage of the proof: the model in memory and the one that a fresh process loads,
    which read a text a little beyond the training length."""
    model = checkpoint.model
    length = checkpoint.trained_length + 64
    with shapes_of_method(checkpoint, method, target_length)(model):
        peak = _peak_of_reading(model, 1, length)
        second_weights, second_at_work = _bytes_of_second_model(model, device)
        weights = bytes_of_weights(model) + second_weights
    return Stage("proving", weights, at_work=2 * peak + second_at_work)


def _bytes_of_second_model(model: Any, device: str) -> tuple[int, int]:
    """Return what the original model takes that is loaded beside the one in memory: the bytes of
    its weights, and those at work. On the CPU its weights are a map of the files, all of which it
    reads. A GPU has what is outside of its layers and one layer at a time, see `stream_layers`."""
    if device == "cpu":
        return bytes_of_weights(model), 0
    outside, one_layer = _bytes_outside_and_in_a_layer(model)
    return 0, outside + one_layer


def _bytes_outside_and_in_a_layer(model: Any) -> tuple[int, int]:
    """Return the bytes of the weights outside of the layers, and of the largest layer."""
    bytes_of_layers = [bytes_of_weights(layer) for layer in _layers_of(model)]
    outside = bytes_of_weights(model) - sum(bytes_of_layers)
    return outside, max(bytes_of_layers, default=0)


def _layers_of(model: Any) -> list[nn.Module]:
    """Return the layers of a model: those modules that transformers says must stay together."""
    layer_classes = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in layer_classes]


def _tokens(rows: int, length: int) -> Any:
    """Return token ids without values, (rows, length)."""
    return torch.empty(rows, length, dtype=torch.int64, device="meta")
