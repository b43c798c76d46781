"""Split the text of a study, as bytes, into training, validation and test. With three files or
more, each file is in one split only."""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posenc.compare.results import CorpusInfo
from posenc.compare.trial.files import SPLITS, path_of
from posenc.report.files.bounds import check_room
from posenc.report.files.new_folder import new_folder
from posenc.report.files.opened import make_folder, naming, open_new, open_ordinary, remove_folder
from posenc.text import Source

SEPARATOR = 256
"""Symbol after each file."""
HELD_OUT = 0.05
"""Fraction of the bytes in validation, and the same in test."""

_CHUNK = 1 << 24
COPIES, ADVICE = "The text's copies", "Give less text, or choose an --out on another disk."

Stretch = tuple[str, int, int]
"""A file's name, and its range of bytes [start, stop)."""


@dataclass(frozen=True)
class Need:
    """Minimum of bytes in each split.

    Training needs one batch of windows without overlap; validation and test need eight of their
    longest windows.
    """

    train_length: int
    longest: int
    batch: int

    @property
    def bytes(self) -> dict[str, int]:
        """Return the fewest bytes of each split."""
        return {
            "train": self.batch * (self.train_length + 1),
            "valid": 8 * (self.train_length + 1),
            "test": 8 * (self.longest + 1),
        }

    def complain(self, sizes: dict[str, int], source: Source) -> ValueError:
        """Return the error for a text whose splits, in bytes, are too short."""
        need = self.bytes
        total = sum(sizes.values())
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
    """A text and its splits.

    written: modification time of each file when it was cut, in nanoseconds.
    """

    source: Source
    stretches: dict[str, list[Stretch]]
    info: CorpusInfo
    written: dict[str, int]

    def write(self, folder: Path, runs: Sequence[Path] = ()) -> str | None:
        """Write the splits into a folder below `folder`, named by the hash. Existing splits are
        compared with the text and written again if they differ. If one of the `runs` has the same
        splits on this disk, they are linked, so that a text is stored once.
        Returns: what was wrong with existing splits, or None.
        Raises: ValueError if the text has changed after it was cut, or does not fit on the disk.
        """
        target = path_of(folder, self.info.hash)
        wrong = self._difference(target) if target.exists() else None
        if target.exists() and wrong is None:
            return None
        make_folder(folder)
        remove_folder(target)
        with new_folder(target) as partial:
            if not any(self._link(path_of(run, self.info.hash), partial) for run in runs):
                size = 2 * sum(b - a + 1 for s in SPLITS for _, a, b in self.stretches[s])
                free = shutil.disk_usage(folder).free
                check_room(COPIES, size, free, ADVICE, "disk")
                for split in SPLITS:
                    path = target / f"{split}.u16"
                    with naming(path), open_new(partial / path.name) as out:
                        for symbols in self._symbols(split):
                            out.write(symbols)
            self._check_unchanged()
        return wrong

    def _link(self, other: Path, partial: Path) -> bool:
        """Link the splits of another run into `partial`. Return False, and leave nothing, if it
        lacks them, is a link, is on another disk, or has other content."""
        try:
            for split in SPLITS if not other.is_symlink() else ():
                os.link(other / f"{split}.u16", partial / f"{split}.u16", follow_symlinks=False)
            same = self._difference(partial) is None
        except OSError:
            same = False
        if not same:
            for split in SPLITS:
                (partial / f"{split}.u16").unlink(missing_ok=True)
        return same

    def _symbols(self, split: str) -> Iterator[bytes]:
        """Yield the content of a split's file, in pieces."""
        files = dict(self.source.files)
        for name, start, stop in self.stretches[split]:
            for chunk in _chunks(files[name], start, stop):
                yield np.frombuffer(chunk, np.uint8).astype("<u2").tobytes()
            yield np.array([SEPARATOR], "<u2").tobytes()

    def _difference(self, target: Path) -> str | None:
        """Say in which way the files of splits in the folder `target` are not those of this text:
        one is missing or damaged. None if they are. Raises ValueError if the text has changed."""
        for split in SPLITS:
            path = target / f"{split}.u16"
            if not path.is_file():
                return f"{path} is missing"
            with open_ordinary(path) as file:
                same = all(file.read(len(part)) == part for part in self._symbols(split))
                if not same or file.read(1):
                    return f"{path} is damaged"
        self._check_unchanged()
        return None

    def _check_unchanged(self) -> None:
        """Raise ValueError if a file was written to after the text was cut."""
        for name, path in self.source.files:
            if path.stat().st_mtime_ns != self.written[name]:
                raise ValueError(f"{path} changed while it was read. Start again.")


def cut_text(source: Source, need: Need, folder: Path) -> Cut:
    """Cut a text into training, validation and test.

    With three files or more each file belongs to one split, chosen by a hash of its name, the
    largest to training. With fewer, each file is cut into three contiguous stretches. Every machine
    cuts the same text at the same places.

    Raises: ValueError, before the text is read, if a split is shorter than `need` or the text is
    larger than the disk of `folder`.
    """
    stats = {name: path.stat() for name, path in source.files}
    sizes = {name: stat.st_size for name, stat in stats.items()}
    by_file = len(source.files) >= 3
    stretches = _by_file(sizes, need) if by_file else _by_stretch(sizes, need)
    totals = {split: sum(b - a for _, a, b in stretches[split]) for split in SPLITS}
    if any(totals[split] < need.bytes[split] for split in SPLITS):
        raise need.complain(totals, source)
    folders = (folder.absolute(), *folder.absolute().parents)
    existing = next(parent for parent in folders if parent.exists())
    disk = shutil.disk_usage(existing).total
    check_room(COPIES, 2 * sum(sizes.values()), disk, ADVICE, "disk")
    digest, counts = _read_all(source, sizes, stretches)
    info = CorpusInfo(
        name=source.name,
        hash=digest[:16],
        num_files=len(source.files),
        train_bytes=totals["train"],
        valid_bytes=totals["valid"],
        test_bytes=totals["test"],
        split="by file" if by_file else "by contiguous stretches",
        byte_entropy=entropy(counts),
    )
    return Cut(source, stretches, info, {name: stat.st_mtime_ns for name, stat in stats.items()})


def _read_all(
    source: Source, sizes: dict[str, int], stretches: dict[str, list[Stretch]]
) -> tuple[str, np.ndarray]:
    """Read a text once; return the hash of its files and cuts, and how often it has each byte."""
    digest = hashlib.sha256()
    counts = np.zeros(256, np.int64)
    for name, path in source.files:
        digest.update(f"{name}\0{sizes[name]}\0".encode(errors="surrogateescape"))
        for chunk in _chunks(path, 0, sizes[name]):
            digest.update(chunk)
            counts += np.bincount(np.frombuffer(chunk, np.uint8), minlength=256)
    digest.update(repr(sorted(stretches.items())).encode(errors="surrogateescape"))
    return digest.hexdigest(), counts


def entropy(counts: np.ndarray) -> float:
    """Return the entropy of these frequencies in bits."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _by_file(sizes: dict[str, int], need: Need) -> dict[str, list[Stretch]]:
    """Give each file to one split, in an order drawn from the names: test and validation until they
    have enough, the largest file and all others to training."""
    order = sorted(
        sizes, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    )
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
    """Cut each file into three stretches: training, validation and test."""
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


def _chunks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes [start, stop) of a file in pieces. Raises ValueError if it is shorter."""
    with open_ordinary(path) as file:
        file.seek(start)
        while start < stop:
            chunk = file.read(min(_CHUNK, stop - start))
            if not chunk:
                raise ValueError(
                    f"{path} ends after {start:,} bytes, expected at least {stop:,}. Is it being "
                    "written, or is it not an ordinary file?"
                )
            yield chunk
            start += len(chunk)
