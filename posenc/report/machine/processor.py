"""Facts about the CPU, without importing torch."""

import platform
from collections.abc import Iterable
from pathlib import Path


def processor() -> str:
    """Return the name of the CPU or, where the system gives none, of its architecture."""
    return _cpuinfo_value("model name") or platform.processor() or platform.machine()


def processors_of(machines: Iterable[dict[str, str]]) -> dict[str, str]:
    """Return the distinct names of the machines' processors as "processor", joined by commas, and a
    "warning" if there are several."""
    names = sorted({machine["processor"] for machine in machines})
    processors = ", ".join(names)
    warning = (
        f"the machines have different processors ({processors}), which may differ in the last bits "
        "of a sum: a trial gives the same numbers again only on the same kind"
    )
    return {"processor": processors} | ({"warning": warning} if len(names) > 1 else {})


def cpu_extensions() -> str:
    """Return the CPU's extensions as Linux lists them; "" on other systems."""
    return _cpuinfo_value("flags") or _cpuinfo_value("Features")  # of x86, of ARM


def _cpuinfo_value(field: str) -> str:
    """Return the value of the first line with this name in Linux's /proc/cpuinfo; "" on others."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((ln.partition(":")[2].strip() for ln in lines if ln.startswith(field)), "")
