"""The processor of this machine, without loading torch."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """The processor's name, if the system says it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """The names of the processor's extensions, as Linux lists them; empty elsewhere."""
    return _cpuinfo("flags") or _cpuinfo("Features")


def _cpuinfo(field: str) -> str:
    """The first line of Linux's /proc/cpuinfo with this name; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((ln.partition(":")[2].strip() for ln in lines if ln.startswith(field)), "")
