"""Facts about the CPU, without importing torch."""

import platform
from collections.abc import Iterable
from pathlib import Path


def processor() -> str:
    """Return the name of the CPU, if known."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def processors_of(machines: Iterable[dict[str, str]]) -> dict[str, str]:
    """Name the processors of machines, with a warning if they differ."""
    names = sorted({machine["processor"] for machine in machines})
    processors = ", ".join(names)
    warning = (
        f"the machines have different processors ({processors}), which may differ in the last bits "
        "of a sum: a trial gives the same numbers again only on the same kind"
    )
    return {"processor": processors} | ({"warning": warning} if len(names) > 1 else {})


def instructions() -> str:
    """Return the CPU's extensions as Linux lists them; "" on other systems."""
    return _cpuinfo("flags") or _cpuinfo("Features")


def _cpuinfo(field: str) -> str:
    """Return the value of the first line with this name in Linux's /proc/cpuinfo; "" on others."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((ln.partition(":")[2].strip() for ln in lines if ln.startswith(field)), "")
