"""Plan the memory of an extension from the config and the headers of the weights, and say whether
it fits; give memory that is freed back to the system, as the plan counts it.

    on a device = (weights + trained + kept) / number of devices + at work

kept: values of the forward pass that the backward pass needs; they lie where their layer is.
at work: what exists for a moment in one layer, or for one chunk of logits.
"""

import ctypes
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posenc.extend.measure.losses import MAX_TOKENS_PER_BATCH, next_token_losses, piece_length
from posenc.extend.options import Options
from posenc.extend.refusals import check_new_length, with_trained_length
from posenc.hf.checkpoint.loading import Checkpoint, load_on_meta, memory_of_devices
from posenc.hf.checkpoint.simulated_memory import (
    SimulatedMemory,
    bytes_of_weights,
    meta_device_like_others,
)
from posenc.hf.lora import add_lora
from posenc.hf.teacher import SameWeights, Teacher
from posenc.hf.tune_config import TuneConfig
from posenc.hf.tuning import (
    MasterWeights,
    next_token_loss,
    rows_at_once,
    set_gradient_checkpointing,
)
from posenc.report.report import Report, Section, Table

IN_PROCESSES = "tuning, torchrun"
"""The name of the stage of tuning in several processes."""
CUDA_PROGRAM_BYTES = 1 << 30
"""What CUDA's kernels and libraries take of a GPU; about this much, not derived."""
GB = 10**9
ARITHMETIC = (
    "On a device: (weights + trained + kept) / devices + at work + program. trained: adapters, "
    "float32 copies and AdamW's states of what is trained. kept: values that the backward pass "
    "needs. at work: one layer and one chunk of logits, and the cache while measuring. They are "
    "from the shapes of all tensors, with fused attention; no model was loaded. Under torchrun "
    "each device keeps what its own rows need (with --recompute one layer's, the rest in main "
    "memory), and embeddings, head, adapters and two layers whole: all under at work."
)
DESCRIPTION_OF_CARDS = re.compile(r"(?:(\d{1,3})x)?(\d{1,6}(?:\.\d+)?)")
_LARGE_BYTES = 1 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of these settings in glibc's malloc.h."""


@dataclass(frozen=True)
class Stage:
    """Hold the bytes that one stage of an extension takes, over all devices.

    name: "measuring", "tuning", IN_PROCESSES or "proving". weights: of the model, and of its
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
    is_exported: bool,
    device: str = "cpu",
    num_devices: int = 1,
) -> list[Stage]:
    """Return the stages of an extension. device: "cpu" or "cuda"; what is proved is streamed to a
    GPU. num_devices: where there are several, tuning under torchrun is a stage of its own.

    Raises: ValueError for a folder that cannot be loaded, a masked model, or a length that is not
    beyond that of training.
    """
    checkpoint = load_on_meta(folder, dtype=options.precision)
    if checkpoint.masked:
        raise ValueError(
            "--plan: the memory of masked models, and of BERT's kind without a head, is not "
            "planned; leave it out."
        )
    if options.trained_length is not None:
        checkpoint = with_trained_length(checkpoint, options.trained_length)
    check_new_length(checkpoint, target_length)
    stages = [_measuring(checkpoint, target_length, options.windows)]
    if options.tune is not None:
        stages.append(_tuning(checkpoint, target_length, options.tune, device))
        if num_devices > 1:
            # The model of the checkpoint has adapters now.
            fresh_model = load_on_meta(folder, dtype=options.precision).model
            checkpoint = replace(checkpoint, model=fresh_model)
            stages.append(_in_processes(checkpoint, target_length, options.tune, num_devices))
    if is_exported:
        stages.append(_proving(load_on_meta(folder, dtype=options.precision), device))
    return stages


def program_bytes(device: str) -> int:
    """Return the bytes that the program takes on a device without any model: on the CPU what this
    process has now, which has imported the same libraries."""
    if device != "cpu":
        return CUDA_PROGRAM_BYTES
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _peak_of_reading(model: Any, num_windows: int, length: int) -> int:
    """Return the most bytes that exist while the losses of windows are computed, besides the
    weights."""
    with meta_device_like_others(), SimulatedMemory(model) as memory:
        next_token_losses(model, _tokens(num_windows, length))
    return memory.peak


def _measuring(checkpoint: Checkpoint, target_length: int, num_windows: int) -> Stage:
    """Return the stage of measuring `num_windows` windows of the new length."""
    model = checkpoint.model
    num_windows = min(num_windows, max(1, MAX_TOKENS_PER_BATCH // target_length))
    piece_len = piece_length(model, num_windows)
    num_pieces = -(-target_length // piece_len)
    if num_pieces <= 4:
        peak = _peak_of_reading(model, num_windows, target_length)
        return Stage("measuring", bytes_of_weights(model), at_work=peak)
    # Each further piece finds as much more in the cache: two lengths give the line.
    peaks = [_peak_of_reading(model, num_windows, count * piece_len) for count in (2, 4)]
    bytes_per_piece = (peaks[1] - peaks[0]) / 2
    at_work = round(peaks[1] + (num_pieces - 4) * bytes_per_piece)
    return Stage("measuring", bytes_of_weights(model), at_work=at_work)


def _tuning(checkpoint: Checkpoint, target_length: int, config: TuneConfig, device: str) -> Stage:
    """Return the stage of tuning: a step on windows of the new length, and one on short rows. If
    all weights are tuned, their teacher is the original folder, loaded again."""
    weights = bytes_of_weights(checkpoint.model)
    second_weights, second_at_work = _bytes_of_teacher(checkpoint.model, config, device)
    step = _step_of_tuning(checkpoint, target_length, config)
    return Stage(
        "tuning",
        weights + second_weights,
        step.trained,
        step.kept,
        step.at_work + second_at_work,
    )


def _in_processes(
    checkpoint: Checkpoint, target_length: int, config: TuneConfig, num_processes: int
) -> Stage:
    """Return the stage of tuning under torchrun on GPUs. Each process has a part of the layers, of
    their gradients and of the optimizer's states, and whole what is outside of the layers, the
    adapters, what its own rows keep, and two layers: while one runs, the next is gathered. With
    --recompute what is kept lies in main memory, but for the input of the layer at work."""
    model = checkpoint.model
    layers = _layers_of(model)
    outside, one_layer = _bytes_outside_and_in_a_layer(model)
    weights = bytes_of_weights(model)
    _, second_at_work = _bytes_of_teacher(model, config, "cuda")
    divided = [] if config.lora_rank else [p for layer in layers for p in layer.parameters()]
    config = replace(config, batch=max(1, config.batch // num_processes))
    step = _step_of_tuning(checkpoint, target_length, config, divided)
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
    checkpoint: Checkpoint,
    target_length: int,
    config: TuneConfig,
    divided: Sequence[nn.Parameter] = (),
) -> _Step:
    """Return what a step takes, of windows of the new length or of short rows. The model is then
    one with adapters, if there are any. divided: weights whose gradients go to the process that has
    the part, as soon as they are computed."""
    model = checkpoint.model
    for parameter in divided:
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    with meta_device_like_others(), SimulatedMemory(model) as memory:
        teacher = None
        if config.distill:
            teacher = SameWeights(model) if config.lora_rank else Teacher(model)
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
        for length in (checkpoint.trained_length, target_length):
            num_rows = min(config.batch * (target_length // length), rows_at_once(length))
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


def _bytes_of_teacher(model: Any, config: TuneConfig, device: str) -> tuple[int, int]:
    """Return what the teacher takes beside the model: the bytes of its weights, and those at work.
    With adapters it is the same model."""
    if config.lora_rank or not config.distill:
        return 0, 0
    return _bytes_of_second_model(model, device)


def _proving(checkpoint: Checkpoint, device: str) -> Stage:
    """Return the stage of the proof: the model in memory and the one that a fresh process loads,
    which read a text a little beyond the training length."""
    model = checkpoint.model
    length = checkpoint.trained_length + 64
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


def device_sizes(device: str, cards: str | None) -> tuple[str, list[int]]:
    """Return the kind of device to plan for, "cpu" or "cuda", and the bytes of each.

    device: that of --device. cards: GB of other devices than those here, as "80", "8x80" or
    "80,24"; None for those here.

    Raises: ValueError for other texts, or a machine that does not say its memory.
    """
    if cards is not None:
        return "cuda", [size for part in cards.split(",") for size in _sizes_in_words(part, cards)]
    kind, sizes = memory_of_devices(device)
    if sizes is None:
        raise ValueError("--plan: this system does not say its memory; give --cards GB.")
    return kind, sizes


def _sizes_in_words(part: str, cards: str) -> list[int]:
    """Return the bytes of the devices in one part of --cards, such as "8x80"."""
    match = DESCRIPTION_OF_CARDS.fullmatch(part.strip())
    if match is None or not float(match[2]) or match[1] == "0":
        raise ValueError(f"--cards must be GB such as 80, 8x80 or 80,24, got {cards!r}.")
    return [round(float(match[2]) * GB)] * int(match[1] or 1)


def bytes_on_devices(stage: Stage, sizes: Sequence[int], program: int) -> list[int] | None:
    """Return what a stage takes on devices of these sizes, in bytes: each has what is at work, and
    of the rest as large a share as it has room; the processes of torchrun have equal shares. None
    if there is no room for the rest."""
    if stage.name == IN_PROCESSES:
        on_each = stage.on_a_device(len(sizes), program)
        return [on_each] * len(sizes) if on_each <= min(sizes) else None
    spread = stage.weights + stage.trained + stage.kept
    rooms = [size - stage.at_work - program for size in sizes]
    if min(rooms) <= 0 or sum(rooms) < spread:
        return None
    return [round(spread * room / sum(rooms)) + stage.at_work + program for room in rooms]


def report_of_plan(
    stages: Sequence[Stage], kind: str, sizes: Sequence[int], target_length: int, options: Options
) -> tuple[Report, str | None]:
    """Return the report of the stages' memory, and a sentence on what does not fit; None if all
    fits. kind: "cpu" or "cuda". sizes: bytes of each device."""
    program = program_bytes(kind)
    rows = []
    too_large = []
    for stage in stages:
        on_devices = bytes_on_devices(stage, sizes, program)
        # Where several processes have no room, one may have, and the other way round.
        if on_devices is None and stage.name != IN_PROCESSES:
            too_large.append(stage)
        columns = (stage.weights, stage.trained, stage.kept, stage.at_work, program)
        needed = stage.on_a_device(len(sizes), program)
        largest = "does not fit" if on_devices is None else _gb(max(on_devices))
        rows.append([stage.name, *map(_gb, columns), _gb(needed), largest])
    sizes_in_words = ", ".join(map(_gb, sizes))
    what = f"{target_length:,} tokens on {kind} with {sizes_in_words} GB"
    problem = None
    if too_large:
        needs = ", ".join(
            f"{stage.name} needs {_gb(stage.on_a_device(len(sizes), program))}"
            for stage in too_large
        )
        problem = f"{what}: {needs} GB on each device.{_advice(too_large, options)}"
    headline = f"{what}: it fits." if problem is None else f"{what}: it does not fit."
    header = ("GB", "weights", "trained", "kept", "at work", "program", "on each", "on the largest")
    table = Table(header, rows, ARITHMETIC, name="memory")
    facts = {"fits": problem is None, "devices": list(sizes), "stages": list(stages)}
    return Report("The memory of an extension", headline, facts, [Section("", [table])]), problem


def _advice(too_large: Sequence[Stage], options: Options) -> str:
    """Return a space and a sentence that names options that take less memory; "" for none."""
    config = options.tune
    if config is None or all(stage.name != "tuning" for stage in too_large):
        return ""
    missing_options = []
    if not config.lora_rank:
        missing_options.append("--lora 16")
    if not config.adapter:
        missing_options.append("--adapter")
    if not config.recompute:
        missing_options.append("--recompute")
    if config.batch > 1:
        missing_options.append("--batch 1")
    return f" Less memory: {', '.join(missing_options)}." if missing_options else ""


def _gb(num_bytes: int) -> str:
    """Return bytes in units of 10^9, as text."""
    return f"{num_bytes / GB:.1f}"


def return_freed_memory() -> None:
    """Let this process give back each block of 1 MiB or more when it is freed.

    glibc raises that size up to 32 MiB as larger blocks are freed, and keeps what it may need
    again, with holes in it: a step of tuning a Llama of 1.2 B took 0.6 GB more than what lived at
    its peak, a sixth of all. Other C libraries have no such setting.
    """
    if not sys.platform.startswith("linux"):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        set_option(option, _LARGE_BYTES)
