"""Compile a C file of this folder with the machine's own compiler, once, and load it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")


@functools.cache
def load(name: str) -> ctypes.CDLL | None:
    """`name`.c as a loaded library; None where it cannot be built or the user set POSENC_NATIVE=0.

    The first call on a machine compiles for about half a second; later ones, in any process, load
    what lies in the cache folder ($XDG_CACHE_HOME/posenc, else ~/.cache/posenc).
    """
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None
    )
    if compiler is None or os.environ.get("POSENC_NATIVE") == "0":
        return None
    source = Path(__file__).with_name(f"{name}.c")
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posenc"
        library = folder / f"{name}-{_fingerprint(source, compiler)}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None  # no home, a full disk, a broken compiler: this costs speed, never a result


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Written beside and moved, so that no other process loads half a file."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *FLAGS, "-o", str(made), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        made.replace(library)


def _fingerprint(source: Path, compiler: str) -> str:
    """A home folder may be shared by machines with other instructions or compilers."""
    processor = platform.processor() + platform.machine()
    if (cpus := Path("/proc/cpuinfo")).exists():
        lines = cpus.read_text(encoding="utf-8", errors="replace").splitlines()
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = (source.read_bytes(), processor.encode(), compiler.encode(), repr(FLAGS).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
