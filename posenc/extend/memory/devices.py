"""Compare the memory of an extension with that of devices, and report what does not fit."""

import re
import resource
import sys
from collections.abc import Sequence

from posenc.extend.memory.stages import IN_PROCESSES, Stage
from posenc.extend.options import Options
from posenc.hf.checkpoint.loading import memory_of_devices
from posenc.report.report import Report, Section, Table

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
MAPS_ARE_NOT_PLANNED = (
    " Maps of positions (self-extend, rerope, dual-chunk) run with an attention of posenc; their "
    "memory is not planned."
)
DESCRIPTION_OF_CARDS = re.compile(r"(?:(\d{1,3})x)?(\d{1,6}(?:\.\d+)?)")


def program_bytes(device: str) -> int:
    """Return the bytes that the program takes on a device without any model: on the CPU what this
    process has now, which has imported the same libraries."""
    if device != "cpu":
        return CUDA_PROGRAM_BYTES
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


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
    stages: Sequence[Stage],
    kind: str,
    sizes: Sequence[int],
    target_length: int,
    method: str | None,
    options: Options,
) -> tuple[Report, str | None]:
    """Return the report of the stages' memory, and a sentence on what does not fit; None if all
    fits. kind: "cpu" or "cuda". sizes: bytes of each device. method: None for all."""
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
    explanation = ARITHMETIC + (MAPS_ARE_NOT_PLANNED if method is None else "")
    table = Table(header, rows, explanation, name="memory")
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
