"""Compile a C file with the machine's own compiler, once, and load it; share its work out among
torch's threads."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from posenc.report.machine import instructions

FLAGS = (
    "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared",
    "-fPIC",
)  # fmt: skip
HEADERS = Path(__file__).parent
"""Where the C files find what they share."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SYSTEM = (0, 65534)
"""Owners of folders above ours: root, and "nobody" as containers show it."""


@functools.cache
def load(source: Path, symbols: tuple[str, ...]) -> ctypes.CDLL | None:
    """A C file as a loaded library with these functions; None where it cannot be had, or the user
    set POSENC_NATIVE=0.

    The first call on a machine compiles for about half a second; later ones, in any process, load
    what lies in the cache folder ($XDG_CACHE_HOME/posenc, else ~/.cache/posenc). Only a library
    that belongs to this user, that nobody else can write, and whose content is what the compiler
    made is loaded. A damaged one is built again; in a folder that others can write in nothing is
    loaded, and a warning says so.
    """
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None
    )
    if compiler is None or os.environ.get("POSENC_NATIVE") == "0":
        return None
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if problem := _untrusted(folder):
            warnings.warn(
                f"posenc: the compiled kernel is not used: {problem}. Make it yours "
                "only (chmod 700), or name another folder with XDG_CACHE_HOME.",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        stem = f"{source.stem}-{_fingerprint(source, compiler)}"
        for library in _intact(folder, stem):
            if loaded := _with_symbols(library, symbols):
                return loaded
        return _with_symbols(_compile(compiler, source, folder, stem), symbols)
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None  # no home, a full disk, a broken compiler: this costs speed, never a result


def load_if_suited(source: Path) -> ctypes.CDLL | None:
    """A C file whose `suits()` says whether the processor is one for it; None where it is not, or
    where `load` has none."""
    library = load(source, ("suits",))
    return library if library is not None and library.suits() else None


def _cache_folder() -> Path:
    """The XDG rules: a relative path is invalid and ignored."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "posenc"


def _untrusted(folder: Path) -> str | None:
    """Why another user could have put something into the folder, or None. Who can rename a folder
    above it can exchange it, so those count too."""
    if not hasattr(os, "geteuid"):
        return None  # Windows keeps a profile's folders to its user
    folder = folder.absolute()
    if _writable_by_others(folder.stat(), _OTHERS_WRITE) or folder.stat().st_uid != os.geteuid():
        return f"{folder} belongs to another user, or others can write in it"
    resolved = folder.resolve()
    for place in dict.fromkeys((folder, *folder.parents, *resolved.parents)):
        found = place.lstat()
        if found.st_uid not in (os.geteuid(), *_SYSTEM):
            return f"{place} belongs to another user"
        # In a folder like /tmp only the owner of a file can exchange it.
        sticky = found.st_mode & stat.S_ISVTX
        if not sticky and _writable_by_others(found, stat.S_IWOTH):
            return f"everybody can write in {place}"
    return None


def _writable_by_others(found: os.stat_result, bits: int) -> bool:
    return not stat.S_ISLNK(found.st_mode) and bool(found.st_mode & bits)


def _intact(folder: Path, stem: str) -> Iterator[Path]:
    """Libraries whose content is what their name says and that only this user can write; others
    of this stem are deleted."""
    for library in sorted(folder.glob(f"{stem}-*.so")):
        found = library.lstat()
        mine = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
        sole = mine and stat.S_ISREG(found.st_mode) and not found.st_mode & _OTHERS_WRITE
        if sole and library.name == _name(stem, library.read_bytes()):
            yield library
        else:
            library.unlink(missing_ok=True)


def _with_symbols(library: Path, symbols: tuple[str, ...]) -> ctypes.CDLL | None:
    """The library, loaded; deleted where it cannot be or lacks a function."""
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError:
        loaded = None
    if loaded is not None and all(hasattr(loaded, symbol) for symbol in symbols):
        return loaded
    library.unlink(missing_ok=True)
    return None


def _compile(compiler: str, source: Path, folder: Path, stem: str) -> Path:
    """Build beside, write to disk, and move: no process and no crash leaves half a file there."""
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        made = Path(beside) / f"{stem}.so"
        command = [compiler, *FLAGS, f"-I{HEADERS}", "-o", str(made), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        made.chmod(0o700)
        with made.open("rb+") as file:
            content = file.read()
            os.fsync(file.fileno())
        library = folder / _name(stem, content)
        made.replace(library)
    return library


def _name(stem: str, content: bytes) -> str:
    return f"{stem}-{hashlib.sha256(content).hexdigest()}.so"


def _fingerprint(source: Path, compiler: str) -> str:
    """A home folder may be shared by machines with other instructions or compilers."""
    processor = platform.processor() + platform.machine() + instructions()
    sources = [path.read_bytes() for path in (source, *sorted(HEADERS.glob("*.h")))]
    parts = (*sources, processor.encode(), compiler.encode(), repr(FLAGS).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


Argument = torch.Tensor | int | float | tuple[int, ...] | None
"""What C functions are given, see `run`."""

HUGE_PAGE, FRESH = 1 << 21, 1 << 25
"""Bytes of a huge page, and of a tensor whose memory the C library asks the system for each time:
smaller ones get memory that was in use before."""
_MADV_HUGEPAGE = 14


def on_huge_pages(t: torch.Tensor) -> torch.Tensor:
    """A new tensor, its memory in pages of 2 MB where the system offers them: writing 30 MB into
    pages of 4 kB costs as much as the 8,000 faults."""
    length = t.numel() * t.element_size()
    start = -(-t.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    size = (t.data_ptr() + length - start) // HUGE_PAGE * HUGE_PAGE
    if length >= FRESH and sys.platform == "linux":  # a refusal costs nothing but speed
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(_MADV_HUGEPAGE)
        )
    return t


def in_one_piece(t: torch.Tensor) -> torch.Tensor:
    """t with the strides of its shape, copied if it must be: torch calls a tensor contiguous
    whatever the stride of an axis of one."""
    return t.contiguous().view(-1).view(t.shape)


def in_rows(t: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor | None:
    """t in this shape, its keys side by side; what it repeats lies there once."""
    if t is None:
        return None
    t = t.expand(*t.shape[:-1], shape[-1])
    return (t if t.stride(-1) == 1 else t.contiguous()).expand(*shape)


def run(function: Any, count: int, *arguments: Argument, threads: int | None = None) -> None:
    """function(arguments, first, last) of C for 0 .. count, shared out among `threads`, by default
    as many as torch has; without the interpreter's lock.

    C finds the arguments as one struct, 8 bytes each: where a tensor begins (NULL for None), an
    int64, a float64, every number of a tuple. It returns 0, or 1 where there was no memory. What it
    reads may be a view that torch negates when it reads it; then C gets a copy.

    Raises: MemoryError.
    """
    arguments = tuple(map(_in_memory, arguments))
    packed = _packed(arguments)
    threads = min(threads or torch.get_num_threads(), count)
    if threads <= 1:
        failed = function(packed, ctypes.c_int64(0), ctypes.c_int64(count))
    elif parallel := _openmp():
        sizes = ctypes.c_int64(count), ctypes.c_int64(threads)
        failed = parallel[0].share(function, packed, *sizes, *parallel[1:])
    else:
        failed = _by_executor(function, packed, count, threads)
    if failed:
        raise MemoryError(
            f"{function.__name__}: no memory for what it keeps while it computes, with "
            f"{threads} at a time (torch.set_num_threads)."
        )


def _in_memory(argument: Argument) -> Argument:
    """The argument, its numbers in memory as they are: imag(z.conj()) lies there with the other
    sign, and torch's efficient zeros nowhere."""
    if not isinstance(argument, torch.Tensor):
        return argument
    if not (argument.is_neg() or argument._is_zerotensor()):
        return argument
    return argument.new_empty_strided(argument.shape, argument.stride()).copy_(argument)


def _packed(arguments: Sequence[Argument]) -> bytes:
    kinds, values = [], []
    for argument in arguments:
        several = argument if isinstance(argument, tuple) else (argument,)
        for value in several:
            at = 0 if value is None else value
            if isinstance(at, torch.Tensor):
                if at.ndim == 0:  # a place would be made of it
                    raise TypeError("a size is a tensor: a trace looks at this call of C")
                at = at.data_ptr()
            values.append(at)
            kinds.append("d" if isinstance(at, float) else "q")
    return struct.pack("".join(kinds), *values)


@functools.cache
def _openmp() -> tuple[Any, ...] | None:
    """parts.c and what it needs of the OpenMP that torch has loaded, whose threads are awake while
    torch computes; None where it is not to be found, or in a forked child, which has none of its
    threads."""
    library = None if _FORKED else load(HEADERS / "parts.c", ("share",))
    try:
        own = ctypes.CDLL(None)
        return library and (
            library, own.GOMP_parallel, own.omp_get_thread_num, own.omp_get_num_threads,
        )  # fmt: skip
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no such handle
        return None


def _by_executor(function: Any, packed: bytes, count: int, threads: int) -> int:
    bounds = [count * i // threads for i in range(threads + 1)]
    parts = [
        _workers(threads).submit(function, packed, ctypes.c_int64(first), ctypes.c_int64(last))
        for first, last in itertools.pairwise(bounds)
    ]
    wait(parts)  # where one fails, no other may go on writing into what is freed then
    return max(part.result() for part in parts)


@functools.cache
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="posenc-native")


_FORKED = False


def _after_fork() -> None:
    global _FORKED
    _FORKED = True
    _openmp.cache_clear()
    _workers.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
