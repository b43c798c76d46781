"""Find out what this machine has (CPU, cores, memory, the fastest precision), and refuse work that
needs more memory, disk or time."""

import os
import platform
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from posenc.machine.fingerprint import cpu_extensions, processor

MAX_DAYS = 7
"""Longest expected time, in days, that needs no --yes."""
_SECONDS_PER_DAY = 86400


def default_precision(device: str) -> str:
    """Return "bfloat16" (autocast) if the hardware multiplies it, otherwise "float32". For every
    device but "cuda", the CPU decides."""
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if cpu_multiplies_bfloat16() else "float32"


def check_device(device: str, advice: str = "Use --device cpu.") -> None:
    """Raise ValueError if torch cannot run on "cuda" or "mps" here, and say whether a device is
    missing or torch is built without it. advice: a sentence that says what to do instead."""
    backend, device_in_words = {
        "cuda": (torch.cuda, "CUDA device"),
        "mps": (torch.backends.mps, "MPS device"),
    }[device]
    if backend.is_available():
        return
    is_built = (torch.backends.cuda if device == "cuda" else torch.backends.mps).is_built()
    reason_clause = (
        "" if is_built else f", because torch {torch.__version__} is built without {device.upper()}"
    )
    raise ValueError(
        f"--device {device}: torch sees no {device_in_words} here{reason_clause}. {advice}"
    )


def check_bfloat16(device: str) -> None:
    """Raise ValueError for a GPU that does not multiply bfloat16, such as a V100 or T4, where it
    would be emulated."""
    if device == "cuda" and default_precision(device) != "bfloat16":
        gpu_name = torch.cuda.get_device_name()
        raise ValueError(
            f"--precision bfloat16: {gpu_name} does not multiply bfloat16. Give float32, or auto."
        )


def cpu_multiplies_bfloat16() -> bool:
    """Return True if the CPU has AVX512-BF16 or AMX-BF16, without which autocast is slower than
    float32."""
    extensions = set(cpu_extensions().split())
    if extensions:
        return bool(extensions & {"avx512_bf16", "amx_bf16"})
    # Not on Linux: torch has a private function that asks the CPU, but not in every release.
    ask_cpu = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(ask_cpu is not None and ask_cpu())


def missing_compiler(device: str) -> str | None:
    """Return the name of what torch.compile needs and lacks to make code for the device, such as
    "Triton"; None if it lacks nothing."""
    if device == "cuda":
        return None if find_spec("triton") else "Triton"
    default_compiler = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", default_compiler)  # as torch chooses it
    return None if shutil.which(compiler) else f"a C++ compiler ({compiler} is not in PATH)"


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Return the memory in bytes that this process may use: that of the machine, or the limit of
    its control group if that is less. Return None where the system does not tell, as Windows."""
    try:
        limits_in_bytes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):  # Windows
        return None
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits_in_bytes.append(int(Path(limit_file).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no control group, or "max"
            continue
    return min(limits_in_bytes)


def gpus() -> list[str]:
    """Return the GPUs that torch sees, each by the number or name that CUDA_VISIBLE_DEVICES of a
    child process takes for it; [] without GPUs."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    listed_gpus = [name.strip() for name in visible_devices.split(",")] if visible_devices else []
    return [listed_gpus[i] if listed_gpus else str(i) for i in range(torch.cuda.device_count())]


def names_of_cpu_and_gpus(device: str) -> str:
    """Return the names of the CPU and, for "cuda", of the GPUs that torch sees, as one text with
    semicolons."""
    gpu_indices = range(torch.cuda.device_count() if device == "cuda" else 0)
    return "; ".join([*sorted({torch.cuda.get_device_name(i) for i in gpu_indices}), processor()])


def facts_for_report(device: str, precision: str, workers: int) -> dict[str, str]:
    """Return the facts of the machine for a report, as texts by name: "processor" (CPU and GPUs),
    "cores", "system", and the arguments "device", "precision" and "workers"."""
    return {
        "processor": names_of_cpu_and_gpus(device),
        "cores": str(num_cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "precision": precision,
        "workers": str(workers),
    }


def check_memory_or_disk(
    subject: str, needed_bytes: int, available_bytes: int | None, advice: str, place: str = "memory"
) -> None:
    """Refuse work that cannot fit in memory or on the disk.

    Args:
        subject: subject of the message.
        needed_bytes: a lower bound in bytes.
        available_bytes: bytes; None if unknown, which refuses nothing.
        advice: a sentence that says what to do instead.
        place: "memory" or "disk".

    Raises: ValueError with both numbers if more is needed than available.
    """
    if available_bytes is not None and needed_bytes > available_bytes:
        needs_in_words = f"{subject} need at least {readable_size(needed_bytes)} of {place}"
        raise ValueError(
            f"{needs_in_words}, and there are {readable_size(available_bytes)}. {advice}"
        )


def check_time(subject: str, seconds: int, may_take_longer: bool, advice: str) -> None:
    """Refuse work that is expected to take more than MAX_DAYS.

    Args:
        subject: subject of the message.
        seconds: expected time.
        may_take_longer: True if the user allows any time (--yes); then nothing is refused.
        advice: a sentence that says what to do instead.

    Raises: ValueError with the number of days.
    """
    if seconds > MAX_DAYS * _SECONDS_PER_DAY and not may_take_longer:
        raise ValueError(
            f"{subject} would take about {seconds // _SECONDS_PER_DAY:,} days. {advice}"
        )


def readable_size(num_bytes: int) -> str:
    """Return a number of bytes with its unit.

    >>> readable_size(900), readable_size(3 * 2**20), readable_size(5 * 2**40)
    ('900 bytes', '3.0 MiB', '5,120.0 GiB')
    """
    if num_bytes < 2**20:
        return f"{num_bytes:,} bytes"
    unit_bytes, unit_name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    tenths = 10 * num_bytes // unit_bytes  # whole numbers, because floats round large sizes
    return f"{tenths // 10:,}.{tenths % 10} {unit_name}"
