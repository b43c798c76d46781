"""The folder of a running trial, kept in the storage too, so that it can go on elsewhere."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from posenc.compare.engines.storage import Storage
from posenc.compare.trial.files import STATE, Cursor
from posenc.report.atomic import is_partial, write_atomically

PAUSE = 0.5
"""Seconds between two looks for a new checkpoint."""


class Mirror:
    """Copies each new checkpoint in `home` to the storage while the block runs.

    A copy that fails is tried again with the next checkpoint; `wrong` keeps why.
    """

    def __init__(self, storage: Storage, home: Path) -> None:
        self.storage, self.home = storage, home
        self.copied, self.wrong = "", ""
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Mirror:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(PAUSE):
            try:
                self.copy_checkpoint()
            except Exception as error:  # of any of fsspec's file systems
                self.wrong = str(error)

    def copy_checkpoint(self) -> None:
        """Copy the checkpoint if it is new; tensors first, for the state names them."""
        try:
            state = (self.home / STATE).read_text(encoding="utf-8")
            if state == self.copied:
                return
            name = Cursor.from_json(state).tensors
            tensors = (self.home / name).read_bytes()
        except FileNotFoundError:  # there is none, or a newer one has just replaced it
            return
        self.storage.write(f"{self.home.name}/{name}", tensors)
        self.storage.write(f"{self.home.name}/{STATE}", state.encode())
        self.copied = state
        self._remove_checkpoints(keep=(STATE, name))

    def copy_result(self) -> None:
        """Copy all that a finished trial wrote, its result last, and forget its checkpoint."""
        names = [
            path.relative_to(self.home).as_posix()
            for path in sorted(self.home.rglob("*"))
            if path.is_file() and not is_partial(path) and not path.name.startswith("checkpoint")
        ]
        for name in sorted(names, key=lambda name: name == "result.json"):
            self.storage.write(f"{self.home.name}/{name}", (self.home / name).read_bytes())
        self._remove_checkpoints()

    def _remove_checkpoints(self, keep: tuple[str, ...] = ()) -> None:
        names = self.storage.names(self.home.name)
        old = [n for n in names if n.startswith("checkpoint") and n not in keep]
        self.storage.remove(f"{self.home.name}/{name}" for name in old)


def take_checkpoint(storage: Storage, home: Path) -> None:
    """Make `home` anew with the checkpoint that the storage holds of it, if there is one."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    for name in storage.names(home.name):
        content = storage.read(f"{home.name}/{name}") if name.startswith("checkpoint") else None
        if content is not None:
            write_atomically(home / name, content)


def take_result(storage: Storage, home: Path) -> None:
    """Copy a finished trial from the storage into `home`, its result last."""
    names = [n for n in storage.names(home.name) if not n.startswith("checkpoint")]
    for name in sorted(names, key=lambda name: name == "result.json"):
        content = storage.read(f"{home.name}/{name}")
        if content is not None:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(home / name, content)
