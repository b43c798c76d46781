"""The text of a study: bytes, cut into training, validation and test without a file in two of
them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posenc.compare.results import CorpusInfo
from posenc.text.sources import Source

SEPARATOR = 256
"""The symbol after each file."""
VOCABULARY = 257
SPLITS = ("train", "valid", "test")
HELD_OUT = 0.05
"""Share of the bytes in validation, and again in test."""

_CHUNK = 1 << 24

Stretch = tuple[str, int, int]
"""A file's name, and the bytes start .. stop - 1 of it."""


@dataclass(frozen=True)
class Need:
    """The least bytes that each split must have, and why.

    Training: one batch of windows that do not overlap. Validation and test: eight of the longest
    windows.
    """

    train_length: int
    longest: int
    batch: int

    @property
    def bytes(self) -> dict[str, int]:
        return {
            "train": self.batch * (self.train_length + 1),
            "valid": 8 * (self.train_length + 1),
            "test": 8 * (self.longest + 1),
        }

    def complain(self, sizes: dict[str, int], source: Source) -> ValueError:
        need, total = self.bytes, sum(sizes.values())
        parts = ", ".join(f"{split} {sizes[split]:,} of {need[split]:,}" for split in SPLITS)
        advice = "Give more text or shorter lengths."
        if len(source.files) >= 3 and total >= sum(need.values()):
            advice = "A few files cannot be cut well: join them into one, or give more files."
        return ValueError(
            f"The text is too short: it has {total:,} bytes in {len(source.files)} "
            f"{'file' if len(source.files) == 1 else 'files'}; training at {self.train_length} "
            f"bytes in batches of {self.batch} and testing up to {self.longest} bytes needs at "
            f"least {sum(need.values()):,} ({parts}). {advice}"
        )


@dataclass(frozen=True)
class Cut:
    """A text and where it is cut."""

    source: Source
    stretches: dict[str, list[Stretch]]
    info: CorpusInfo

    def write(self, folder: Path) -> None:
        """Write the splits into a folder below `folder` that the hash names, if they are not
        there."""
        target = path_of(folder, self.info.hash)
        files = dict(self.source.files)
        symbols = {s: sum(b - a + 1 for _, a, b in self.stretches[s]) for s in SPLITS}
        written = {s: target / f"{s}.u16" for s in SPLITS}
        if all(p.exists() and p.stat().st_size == 2 * symbols[s] for s, p in written.items()):
            return
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for split in SPLITS:
            with (partial / f"{split}.u16").open("wb") as out:
                for name, start, stop in self.stretches[split]:
                    for chunk in _chunks(files[name], start, stop):
                        np.frombuffer(chunk, np.uint8).astype("<u2").tofile(out)
                    np.array([SEPARATOR], "<u2").tofile(out)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)


def cut_text(source: Source, need: Need) -> Cut:
    """Cut a text into training, validation and test.

    With three files or more each file belongs to one split, chosen by a hash of its name, the
    largest to training; with fewer, each file is cut into three contiguous stretches. The same
    text is cut alike on every machine.

    Raises: ValueError where a split comes out shorter than `need`.
    """
    digest = hashlib.sha256()
    sizes: dict[str, int] = {}
    for name, path in source.files:
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        sizes[name] = 0
        for chunk in _chunks(path, 0, None):
            digest.update(chunk)
            sizes[name] += len(chunk)
    by_file = len(source.files) >= 3
    stretches = _by_file(sizes, need) if by_file else _by_stretch(sizes, need)
    totals = {split: sum(b - a for _, a, b in stretches[split]) for split in SPLITS}
    if any(totals[split] < need.bytes[split] for split in SPLITS):
        raise need.complain(totals, source)
    digest.update(repr(sorted(stretches.items())).encode())
    info = CorpusInfo(
        name=source.name,
        hash=digest.hexdigest()[:16],
        num_files=len(source.files),
        train_bytes=totals["train"],
        valid_bytes=totals["valid"],
        test_bytes=totals["test"],
        split="by file" if by_file else "by contiguous stretches",
    )
    return Cut(source, stretches, info)


def read_split(folder: Path, split: str, corpus_hash: str) -> np.ndarray:
    """The symbols of one split, mapped from disk."""
    return np.memmap(path_of(folder, corpus_hash) / f"{split}.u16", dtype="<u2", mode="r")


def path_of(folder: Path, corpus_hash: str) -> Path:
    """The folder of the corpus with this hash below a study's folder."""
    return folder / f"corpus-{corpus_hash}"


def _by_file(sizes: dict[str, int], need: Need) -> dict[str, list[Stretch]]:
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    largest = max(order, key=lambda name: sizes[name])
    order.remove(largest)
    stretches: dict[str, list[Stretch]] = {split: [] for split in SPLITS}
    total = sum(sizes.values())
    for split in ("test", "valid"):
        goal = max(HELD_OUT * total, need.bytes[split])
        while order and sum(stop for _, _, stop in stretches[split]) < goal:
            name = order.pop(0)
            stretches[split].append((name, 0, sizes[name]))
    stretches["train"] = [(name, 0, sizes[name]) for name in sorted([*order, largest])]
    return stretches


def _by_stretch(sizes: dict[str, int], need: Need) -> dict[str, list[Stretch]]:
    stretches: dict[str, list[Stretch]] = {split: [] for split in SPLITS}
    total = sum(sizes.values())
    for name, size in sizes.items():
        held = {
            split: round(size * max(HELD_OUT, need.bytes[split] / max(total, 1)) + 0.5)
            for split in ("valid", "test")
        }
        test = max(size - held["test"], 0)
        valid = max(test - held["valid"], 0)
        cuts = {"train": (0, valid), "valid": (valid, test), "test": (test, size)}
        for split, (start, stop) in cuts.items():
            stretches[split].append((name, start, stop))
    return stretches


def _chunks(path: Path, start: int, stop: int | None) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        left = None if stop is None else stop - start
        while left is None or left > 0:
            chunk = file.read(_CHUNK if left is None else min(_CHUNK, left))
            if not chunk:
                return
            yield chunk
            left = None if left is None else left - len(chunk)
