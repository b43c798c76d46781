"""Facts of a machine that decide the numbers of a trial, without importing torch, and how two
machines differ in them."""

import functools
import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path

from posenc import __version__
from posenc.lazy import installed_version


def processor() -> str:
    """Return the name of the CPU; if the system gives none, the name of its architecture."""
    return _cpuinfo_value("model name") or platform.processor() or platform.machine()


def processor_facts(machines: Iterable[dict[str, str]]) -> dict[str, str]:
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


def machine_facts() -> dict[str, str]:
    """Return the facts that decide the numbers of a trial on this machine, as texts: versions by
    "python", "posenc", "torch", "numpy" and "build of torch", the hash of posenc's source by
    "code", and the CPU's name by "processor"."""
    # Loads no torch, which would take as long as the shortest trials.
    build_of_torch = installed_version("torch")
    return {
        "python": platform.python_version(),
        "posenc": __version__,
        "code": code_hash(),
        "torch": build_of_torch.partition("+")[0],  # 2.13.0+cpu may start trials on 2.13.0+cu126
        "numpy": installed_version("numpy"),
        "build of torch": build_of_torch,
        "processor": processor(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Return versions by name: that of posenc, those of `packages`, and that of Python. Packages
    that are not installed are missing."""
    installed_versions = {
        name: version for name in packages if (version := installed_version(name))
    }
    return {"posenc": __version__, **installed_versions, "python": platform.python_version()}


def describe_difference(facts_here: dict[str, str], facts_there: dict[str, str]) -> str | None:
    """Return as text how another machine's facts differ from this one's, its CPU and its build of
    torch aside; None if they do not.

    >>> here = {"python": "3.11.9", "torch": "2.13.0"}
    >>> describe_difference(here, {"python": "3.12.1", "torch": "2.13.0"})
    'it has python 3.12.1, and here is 3.11.9'
    """
    for name, value in facts_here.items():
        if name not in ("processor", "build of torch") and facts_there.get(name) != value:
            fact = "posenc with other files, hash" if name == "code" else name
            return f"it has {fact} {facts_there.get(name)}, and here is {value}"
    return None


@functools.cache
def code_hash() -> str:
    """Return a hash of posenc's own source, which differs between two checkouts of one version: 12
    hex digits."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
