"""Processes of this machine, read from /proc."""

from pathlib import Path


def processes(*words: str, parent: int | None = None) -> list[int]:
    """Those that are not dead, with these words in their command, that `parent` has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, above = _state_and_parent(path)
            command = (path / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        ours = parent in (None, above) and all(word.encode() in command for word in words)
        if ours and state not in "ZX":  # dead, and nobody has noticed
            found.append(int(path.name))
    return found


def supervisor_of(home: Path) -> int:
    """The process that started the trial with this folder."""
    (trial,) = processes(f"\0{home}\0", "posenc.compare.trial.process")
    return above(trial)


def above(process: int) -> int:
    """The process that started this one."""
    return _state_and_parent(Path(f"/proc/{process}"))[1]


def _state_and_parent(path: Path) -> tuple[str, int]:
    state, parent = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
    return state, int(parent)
