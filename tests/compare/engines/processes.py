"""Which process started which, read from /proc."""

from __future__ import annotations

from pathlib import Path


def supervisor_of(home: Path) -> int:
    """The process that started the trial with this folder."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(home) in words and "posenc.compare.trial.worker" in words:
            return above(int(path.name))
    raise AssertionError(f"no process runs {home}")


def above(process: int) -> int:
    """The process that started this one."""
    text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    return int(text.rpartition(")")[2].split()[1])


def children_of(parent: int, word: str) -> list[int]:
    """The processes that this one has started, of those with a word in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if word in (path / "cmdline").read_bytes().decode() and above(int(path.name)) == parent:
                found.append(int(path.name))
        except OSError:
            continue
    return found
