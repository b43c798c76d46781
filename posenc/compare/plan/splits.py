"""Split the text of a study, as bytes, into training, validation and test. With three files or
more, each file is in one split only. Files from whose bytes nothing can be learned are refused."""

import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posenc.compare.results import CorpusInfo
from posenc.compare.trial.result_files import SPLITS, folder_of_text
from posenc.files.find_texts import TextSource
from posenc.files.folders import new_folder
from posenc.files.opening import (
    make_folder,
    name_path_in_os_errors,
    open_new,
    open_ordinary,
    remove_folder,
)
from posenc.machine.hardware import check_memory_or_disk

SEPARATOR = 256
"""Symbol after each file."""
HELD_OUT_FRACTION = 0.05
"""Fraction of the bytes in validation, and the same in test."""

_CHUNK_BYTES = 1 << 24
"""Bytes of a file that are in memory at a time."""
_COPIES_IN_WORDS, _DISK_ADVICE = (
    "The text's copies",
    "Give less text, or choose an --out on another disk.",
)
"""The subject and the advice of the message that the disk is too small."""

Stretch = tuple[str, int, int]
"""A file's name, and its range of bytes [start, stop)."""


@dataclass(frozen=True)
class MinimumBytes:
    """The minimum of bytes in each split.

    Training needs one batch of windows without overlap; validation and test need eight of their
    longest windows (chosen, not derived). A window of n bytes needs n + 1: the last one predicts
    the next.

    longest_length: longest window of the test.
    batch: windows of a training step.
    """

    train_length: int
    longest_length: int
    batch: int

    @property
    def bytes_by_split(self) -> dict[str, int]:
        """Return the minimum of bytes by the name of a split."""
        return {
            "train": self.batch * (self.train_length + 1),
            "valid": 8 * (self.train_length + 1),
            "test": 8 * (self.longest_length + 1),
        }

    def too_short_error(self, sizes: dict[str, int], source: TextSource) -> ValueError:
        """Return the error to raise for a text whose splits are too short.

        sizes: bytes of each split.
        """
        needed_bytes = self.bytes_by_split
        total = sum(sizes.values())
        num_files = len(source.files)
        files_in_words = f"{num_files} {'file' if num_files == 1 else 'files'}"
        needed = f"at least {sum(needed_bytes.values()):,} are needed"
        if total == 0:
            return ValueError(
                f"The text is empty: it has 0 bytes in {files_in_words}, and {needed}. "
                "Give another."
            )
        for option, length in (
            ("--train-length", self.train_length),
            ("--test-lengths", self.longest_length),
        ):
            if total <= length:
                total_in_words = "1 byte" if total == 1 else f"{total:,} bytes"
                return ValueError(
                    f"{option}: a window of {length:,} bytes is longer than the whole text, "
                    f"{total_in_words} in {files_in_words}; {needed}. Give more text or "
                    "shorter lengths."
                )
        splits_in_words = ", ".join(
            f"{split} {sizes[split]:,} of {needed_bytes[split]:,}" for split in SPLITS
        )
        advice = "Give more text or shorter lengths."
        if num_files >= 3 and total >= sum(needed_bytes.values()):
            advice = "A few files cannot be cut well: join them into one, or give more files."
        return ValueError(
            f"The text is too short: it has {total:,} bytes in {files_in_words}; training at "
            f"{self.train_length:,} bytes in batches of {self.batch:,} and testing up to "
            f"{self.longest_length:,} bytes needs at least {sum(needed_bytes.values()):,} "
            f"({splits_in_words}). {advice}"
        )


@dataclass(frozen=True)
class TextSplits:
    """A text, and which bytes of its files are for training, validation and test.

    stretches: the ranges of bytes of each split.
    info: name, hash and sizes of the text.
    modified_ns: modification time of each file when it was split, in nanoseconds.
    """

    source: TextSource
    stretches: dict[str, list[Stretch]]
    info: CorpusInfo
    modified_ns: dict[str, int]

    def write(self, folder: Path, runs: Sequence[Path] = ()) -> str | None:
        """Write the splits into a folder below `folder`, named by the hash. Existing splits are
        compared with the text and written again if they differ. If one of the `runs` has the same
        splits on this disk, they are linked, so that a text is stored once.

        Returns: what was wrong with existing splits, or None.
        Raises: ValueError if the text has changed after it was split, or does not fit on the disk.
        """
        target = folder_of_text(folder, self.info.hash)
        damage = self._damage(target) if target.exists() else None
        if target.exists() and damage is None:
            return None
        make_folder(folder)
        remove_folder(target)
        with new_folder(target) as partial:
            if not any(
                self._link_splits_of(folder_of_text(run, self.info.hash), partial) for run in runs
            ):
                stretches = [stretch for split in SPLITS for stretch in self.stretches[split]]
                # Two bytes for each symbol, and one separator after each stretch.
                num_bytes = 2 * sum(stop - start + 1 for _, start, stop in stretches)
                free_bytes = shutil.disk_usage(folder).free
                check_memory_or_disk(_COPIES_IN_WORDS, num_bytes, free_bytes, _DISK_ADVICE, "disk")
                for split in SPLITS:
                    path = target / f"{split}.u16"
                    with name_path_in_os_errors(path), open_new(partial / path.name) as split_file:
                        for piece in self._encoded_pieces(split):
                            split_file.write(piece)
            self._check_unchanged()
        return damage

    def _link_splits_of(self, other: Path, partial: Path) -> bool:
        """Link the splits in the folder `other` of another run into the folder `partial`. Return
        True if they are those of this text; otherwise leave nothing and return False: `other` lacks
        them, is a link, is on another disk, or has other content."""
        try:
            for split in SPLITS if not other.is_symlink() else ():
                os.link(other / f"{split}.u16", partial / f"{split}.u16", follow_symlinks=False)
            are_same = self._damage(partial) is None
        except OSError:
            are_same = False
        if not are_same:
            for split in SPLITS:
                (partial / f"{split}.u16").unlink(missing_ok=True)
        return are_same

    def _encoded_pieces(self, split: str) -> Iterator[bytes]:
        """Yield the content of a split's file in pieces: 16 bits for each byte of the text, because
        the separator after each stretch is none of the 256."""
        files = dict(self.source.files)
        for name, start, stop in self.stretches[split]:
            for chunk in _read_chunks(files[name], start, stop):
                yield np.frombuffer(chunk, np.uint8).astype("<u2").tobytes()
            yield np.array([SEPARATOR], "<u2").tobytes()

    def _damage(self, target: Path) -> str | None:
        """Return which file of splits in the folder `target` is missing or has other content than
        this text; None if all are right. Raises ValueError if the text has changed since."""
        for split in SPLITS:
            path = target / f"{split}.u16"
            if not path.is_file():
                return f"{path} is missing"
            with open_ordinary(path) as file:
                pieces = self._encoded_pieces(split)
                begins_as_text = all(file.read(len(piece)) == piece for piece in pieces)
                if not begins_as_text or file.read(1):
                    return f"{path} is damaged"
        self._check_unchanged()
        return None

    def _check_unchanged(self) -> None:
        """Raise ValueError if a file was written to after the text was split."""
        for name, path in self.source.files:
            if path.stat().st_mtime_ns != self.modified_ns[name]:
                raise ValueError(f"{path} changed while it was read. Start again.")


def split_text(source: TextSource, need: MinimumBytes, folder: Path) -> TextSplits:
    """Split a text into training, validation and test.

    With three files or more each file belongs to one split, chosen by a hash of its name, the
    largest to training. With fewer, each file is cut into three contiguous stretches. Every machine
    cuts the same text at the same places.

    Raises: ValueError, before the text is read, if a split is shorter than `need` or the text is
    larger than the disk of `folder`.
    """
    stats = {name: path.stat() for name, path in source.files}
    sizes = {name: stat.st_size for name, stat in stats.items()}
    is_split_by_file = len(source.files) >= 3
    stretches = _assign_files(sizes, need) if is_split_by_file else _cut_each_file(sizes, need)
    totals = {split: sum(stop - start for _, start, stop in stretches[split]) for split in SPLITS}
    if any(totals[split] < need.bytes_by_split[split] for split in SPLITS):
        raise need.too_short_error(totals, source)
    folders = (folder.absolute(), *folder.absolute().parents)
    existing_folder = next(parent for parent in folders if parent.exists())
    disk_bytes = shutil.disk_usage(existing_folder).total
    check_memory_or_disk(
        _COPIES_IN_WORDS, 2 * sum(sizes.values()), disk_bytes, _DISK_ADVICE, "disk"
    )  # two bytes for each
    hash_digits, byte_counts = _hash_and_count(source, sizes, stretches)
    pair_counts = _count_pairs(source, stretches["train"])
    info = CorpusInfo(
        name=source.name,
        hash=hash_digits[:16],
        num_files=len(source.files),
        train_bytes=totals["train"],
        valid_bytes=totals["valid"],
        test_bytes=totals["test"],
        split="by file" if is_split_by_file else "by contiguous stretches",
        byte_entropy=entropy(byte_counts),
        pair_entropy=conditional_entropy(pair_counts),
    )
    return TextSplits(
        source, stretches, info, {name: stat.st_mtime_ns for name, stat in stats.items()}
    )


def _hash_and_count(
    source: TextSource, sizes: dict[str, int], stretches: dict[str, list[Stretch]]
) -> tuple[str, np.ndarray]:
    """Read a text once; return the hash of its files and stretches, and how often each of the 256
    bytes occurs in it.

    sizes: bytes of each file.
    """
    digest = hashlib.sha256()
    counts = np.zeros(256, np.int64)
    for name, path in source.files:
        digest.update(f"{name}\0{sizes[name]}\0".encode(errors="surrogateescape"))
        for chunk in _read_chunks(path, 0, sizes[name]):
            digest.update(chunk)
            counts += np.bincount(np.frombuffer(chunk, np.uint8), minlength=256)
    digest.update(repr(sorted(stretches.items())).encode(errors="surrogateescape"))
    return digest.hexdigest(), counts


def entropy(counts: np.ndarray) -> float:
    """Return the entropy, in bits, of symbols that occur as often as these counts say."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _count_pairs(source: TextSource, stretches: Sequence[Stretch]) -> np.ndarray:
    """Return how often each byte follows each other one in these stretches of a text, (256, 256):
    the first byte chooses the row. A pair never spans two stretches."""
    files = dict(source.files)
    pair_counts = np.zeros(1 << 16, np.int64)
    for name, start, stop in stretches:
        last_byte = np.zeros(0, np.uint8)  # the last byte of the piece before
        for chunk in _read_chunks(files[name], start, stop):
            symbols = np.concatenate([last_byte, np.frombuffer(chunk, np.uint8)]).astype(np.int64)
            pair_counts += np.bincount(256 * symbols[:-1] + symbols[1:], minlength=1 << 16)
            last_byte = symbols[-1:].astype(np.uint8)
    return pair_counts.reshape(256, 256)


def conditional_entropy(pair_counts: np.ndarray) -> float | None:
    """Return the entropy in bits of the second symbol of a pair given the first, from counts of
    pairs (first, second); None without a pair. It is the loss of a table of pairs of bytes on its
    own text.

    >>> conditional_entropy(np.array([[0, 8], [4, 4]]))
    0.5
    """
    total = int(pair_counts.sum())
    if not total:
        return None
    return entropy(pair_counts.ravel()) - entropy(pair_counts.sum(1))


def _assign_files(sizes: dict[str, int], need: MinimumBytes) -> dict[str, list[Stretch]]:
    """Return the stretches of each split where a file belongs to one split only. In an order drawn
    from the names, files go to test and then validation until both have enough; the largest file
    and all others go to training."""
    order = sorted(
        sizes, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    )
    largest_file = max(order, key=lambda name: sizes[name])
    order.remove(largest_file)
    stretches: dict[str, list[Stretch]] = {split: [] for split in SPLITS}
    total = sum(sizes.values())
    for split in ("test", "valid"):
        goal = max(HELD_OUT_FRACTION * total, need.bytes_by_split[split])
        while order and sum(stop for _, _, stop in stretches[split]) < goal:
            name = order.pop(0)
            stretches[split].append((name, 0, sizes[name]))
    stretches["train"] = [(name, 0, sizes[name]) for name in sorted([*order, largest_file])]
    return stretches


def _cut_each_file(sizes: dict[str, int], need: MinimumBytes) -> dict[str, list[Stretch]]:
    """Return the stretches of each split where every file is cut into three: training, validation
    and test."""
    stretches: dict[str, list[Stretch]] = {split: [] for split in SPLITS}
    total = sum(sizes.values())
    for name, size in sizes.items():
        # + 0.5 rounds up, so that the pieces of several files are enough together.
        held_out = {
            split: round(
                size * max(HELD_OUT_FRACTION, need.bytes_by_split[split] / max(total, 1)) + 0.5
            )
            for split in ("valid", "test")
        }
        test_start = max(size - held_out["test"], 0)
        valid_start = max(test_start - held_out["valid"], 0)
        cuts = {
            "train": (0, valid_start),
            "valid": (valid_start, test_start),
            "test": (test_start, size),
        }
        for split, (start, stop) in cuts.items():
            stretches[split].append((name, start, stop))
    return stretches


def _read_chunks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes [start, stop) of a file in pieces of at most _CHUNK_BYTES. Raises ValueError
    if the file is shorter."""
    with open_ordinary(path) as file:
        file.seek(start)
        while start < stop:
            chunk = file.read(min(_CHUNK_BYTES, stop - start))
            if not chunk:
                raise ValueError(
                    f"{path} ends after {start:,} bytes, expected at least {stop:,}. Is it being "
                    "written, or is it not an ordinary file?"
                )
            yield chunk
            start += len(chunk)


FORMAT_OF_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"%PDF-": "PDF",
}
"""The format of a file by its first bytes. Those that are letters (BZh, PAR1) may also begin a
text, which has no zero byte."""
SAMPLE_BYTES = 1 << 20
"""Bytes read of all files together."""
PIECES_OF_A_FILE = 4
"""A sample is read in so many pieces, spread over its file."""
MIN_SAMPLE_BYTES = 1024
"""A shorter sample is not judged."""
RANDOM_RATIO = 0.98
"""zlib's output as a fraction of its input from which on bytes count as random. Measured: base64 of
random bytes 0.76, Chinese 0.46, source code 0.40, DNA letters 0.30."""
REPEATED_RATIO, FIRST_LINE_BYTES = 0.01, 64
"""A text counts as repeated below this fraction, with so many bytes more for the first line.
Measured: a log whose lines differ in one digit 0.027."""
RANDOM_BITS = 7
"""Bytes with less entropy, in bits per byte, are not random, which have nearly 8: zlib need not
try.
"""


def check_content(source: TextSource) -> str:
    """Look at a sample of each file, and return a note for the user: on the last file with zero
    bytes, and on the last copy of another file. "; " joins the two; "" if there is neither.

    Raises: ValueError for a text that is compressed, encrypted or random, or repeats itself.
    """
    joined_samples = b""
    note_on_zeros = ""
    note_on_copies = ""
    first_path_by_hash: dict[bytes, Path] = {}
    is_split_by_file = len(source.files) > 2
    for _, path in source.files:
        sample = _read_sample(
            path, max(PIECES_OF_A_FILE * MIN_SAMPLE_BYTES, SAMPLE_BYTES // len(source.files))
        )
        _refuse_other_file_format(path, sample)
        _refuse_random(path, sample)
        if b"\0" in sample:
            note_on_zeros = (
                f"{path} is binary or UTF-16, with zero bytes; it is compared byte by byte"
            )
        first_path = first_path_by_hash.setdefault(hashlib.sha256(sample).digest(), path)
        is_copy = first_path != path and len(sample) >= MIN_SAMPLE_BYTES
        if is_copy and is_split_by_file:
            note_on_copies = (
                f"{path} looks like a copy of {first_path}; copies may bring training text into "
                "the test"
            )
        if len(joined_samples) < SAMPLE_BYTES:
            joined_samples += sample
    _refuse_repetition(source.name, joined_samples)
    return "; ".join(note for note in (note_on_zeros, note_on_copies) if note)


def _refuse_other_file_format(path: Path, sample: bytes) -> None:
    """Raise ValueError for a file that begins like one of FORMAT_OF_MAGIC."""
    for magic, format_name in FORMAT_OF_MAGIC.items():
        may_be_text = magic.isalnum() and b"\0" not in sample
        if sample.startswith(magic) and not may_be_text:
            advice = "Unpack it, or write its text into a text file."
            raise ValueError(f"--text: {path} is a {format_name} file, no text. {advice}")


def _refuse_random(path: Path, sample: bytes) -> None:
    """Raise ValueError for bytes that are random, or look random: compressed or encrypted."""
    counts = np.bincount(np.frombuffer(sample, np.uint8), minlength=256)
    if len(sample) < MIN_SAMPLE_BYTES or entropy(counts) <= RANDOM_BITS:
        return
    if len(zlib.compress(sample)) >= RANDOM_RATIO * len(sample):
        raise ValueError(
            f"--text: {path} is compressed, encrypted or random: zlib makes its bytes no "
            "smaller, so there is nothing to learn from them. Give the text itself."
        )


def _refuse_repetition(name: str, sample: bytes) -> None:
    """Raise ValueError for the sample of a text that repeats itself."""
    num_packed_bytes = len(zlib.compress(sample, 9))
    if (
        len(sample) < MIN_SAMPLE_BYTES
        or num_packed_bytes >= REPEATED_RATIO * len(sample) + FIRST_LINE_BYTES
    ):
        return
    repetition_in_words = (
        f"it repeats itself: zlib packs {len(sample):,} bytes of it into {num_packed_bytes:,}"
    )
    if len(set(sample)) == 1:
        repetition_in_words = f"it is one byte, {sample[:1]!r}, again and again"
    raise ValueError(
        f"--text: there is nothing to learn in {name}: {repetition_in_words}. Every encoding would "
        "predict it almost without a mistake; give a text that varies."
    )


def _read_sample(path: Path, max_bytes: int) -> bytes:
    """Return at most `max_bytes` bytes of a file: all of it, or pieces of equal size from its
    beginning to its end."""
    size = path.stat().st_size
    sample = b""
    with open_ordinary(path) as file:
        if size <= max_bytes:
            return file.read(max_bytes)
        for i in range(PIECES_OF_A_FILE):
            file.seek(i * (size - max_bytes // PIECES_OF_A_FILE) // (PIECES_OF_A_FILE - 1))
            sample += file.read(max_bytes // PIECES_OF_A_FILE)
    return sample
