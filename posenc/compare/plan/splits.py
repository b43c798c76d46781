"""Split the text of a study, as bytes or tokens, into training, validation and test. With three
files or more, each file is in one split only."""

import hashlib
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posenc.compare.plan.ngram_losses import conditional_entropy, entropy, table_losses
from posenc.compare.plan.tokens import Tokens, covered_bytes, sizes_of_tokens
from posenc.compare.results import CorpusInfo
from posenc.compare.trial.result_files import SPLITS, TOKENIZER_FILE, folder_of_text
from posenc.compare.trial.windows import TOKEN_BYTES_FILE, symbol_dtype, symbol_file
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
"""Symbol after each file of bytes."""
HELD_OUT_FRACTION = 0.05
"""Fraction of the text in validation, and the same in test."""

_CHUNK_BYTES = 1 << 24
"""Bytes, or tokens, of a file that are in memory at a time."""
_COPIES_IN_WORDS, _DISK_ADVICE = (
    "The text's copies",
    "Give less text, or choose an --out on another disk.",
)
"""The subject and the advice of the message that the disk is too small."""

Stretch = tuple[str, int, int]
"""A file's name, and its range of bytes or tokens [start, stop)."""


@dataclass(frozen=True)
class MinimumSizes:
    """The minimum size of each split, in bytes or tokens.

    Training needs one batch of windows without overlap; validation and test need eight of their
    longest windows (chosen, not derived). A window of n bytes needs n + 1: the last one predicts
    the next.

    longest_length: longest window of the test.
    batch: windows of a training step.
    unit: of all sizes.
    """

    train_length: int
    longest_length: int
    batch: int
    unit: str = "bytes"

    @property
    def size_by_split(self) -> dict[str, int]:
        """Return the minimum size by the name of a split."""
        return {
            "train": self.batch * (self.train_length + 1),
            "valid": 8 * (self.train_length + 1),
            "test": 8 * (self.longest_length + 1),
        }

    def too_short_error(self, sizes: dict[str, int], source: TextSource) -> ValueError:
        """Return the error to raise for a text whose splits are too short.

        sizes: of each split.
        """
        needed_sizes = self.size_by_split
        total = sum(sizes.values())
        num_files = len(source.files)
        files_in_words = f"{num_files} {'file' if num_files == 1 else 'files'}"
        needed = f"at least {sum(needed_sizes.values()):,} are needed"
        if total == 0:
            return ValueError(
                f"The text is empty: it has 0 {self.unit} in {files_in_words}, and {needed}. "
                "Give another."
            )
        for option, length in (
            ("--train-length", self.train_length),
            ("--test-lengths", self.longest_length),
        ):
            if total <= length:
                total_in_words = f"{total:,} {self.unit[:-1] if total == 1 else self.unit}"
                return ValueError(
                    f"{option}: a window of {length:,} {self.unit} is longer than the whole text, "
                    f"{total_in_words} in {files_in_words}; {needed}. Give more text or "
                    "shorter lengths."
                )
        splits_in_words = ", ".join(
            f"{split} {sizes[split]:,} of {needed_sizes[split]:,}" for split in SPLITS
        )
        advice = "Give more text or shorter lengths."
        if num_files >= 3 and total >= sum(needed_sizes.values()):
            advice = "A few files cannot be cut well: join them into one, or give more files."
        return ValueError(
            f"The text is too short: it has {total:,} {self.unit} in {files_in_words}; training at "
            f"{self.train_length:,} {self.unit} in batches of {self.batch:,} and testing up to "
            f"{self.longest_length:,} {self.unit} needs at least {sum(needed_sizes.values()):,} "
            f"({splits_in_words}). {advice}"
        )


@dataclass(frozen=True)
class TextSplits:
    """A text, and which parts of its files are for training, validation and test.

    stretches: the ranges of bytes, or tokens, of each split.
    info: name, hash and sizes of the text.
    modified_ns: modification time of each file when it was split, in nanoseconds.
    tokens: of the files; None for a text of bytes.
    """

    source: TextSource
    stretches: dict[str, list[Stretch]]
    info: CorpusInfo
    modified_ns: dict[str, int]
    tokens: Tokens | None = None

    @property
    def vocabulary(self) -> int:
        """Return the number of different tokens; 0 for a text of bytes."""
        return 0 if self.tokens is None else self.tokens.vocabulary

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
            is_linked = any(
                self._link_splits_of(folder_of_text(run, self.info.hash), partial) for run in runs
            )
            if not is_linked:
                self._check_disk(folder)
                for name, pieces in self._contents():
                    with (
                        name_path_in_os_errors(target / name),
                        open_new(partial / name) as text_file,
                    ):
                        for piece in pieces:
                            text_file.write(piece)
            self._check_unchanged()
        return damage

    def _check_disk(self, folder: Path) -> None:
        """Raise ValueError if the disk of `folder` has no room for the splits."""
        stretches = [stretch for split in SPLITS for stretch in self.stretches[split]]
        # One separator follows each stretch.
        num_symbols = sum(stop - start + 1 for _, start, stop in stretches)
        num_bytes = symbol_dtype(self.vocabulary).itemsize * num_symbols
        free_bytes = shutil.disk_usage(folder).free
        check_memory_or_disk(_COPIES_IN_WORDS, num_bytes, free_bytes, _DISK_ADVICE, "disk")

    def _link_splits_of(self, other: Path, partial: Path) -> bool:
        """Link the splits in the folder `other` of another run into the folder `partial`. Return
        True if they are those of this text; otherwise leave nothing and return False: `other` lacks
        them, is a link, is on another disk, or has other content."""
        names = [name for name, _ in self._contents()]
        try:
            for name in names if not other.is_symlink() else ():
                os.link(other / name, partial / name, follow_symlinks=False)
            are_same = self._damage(partial) is None
        except OSError:
            are_same = False
        if not are_same:
            for name in names:
                (partial / name).unlink(missing_ok=True)
        return are_same

    def _contents(self) -> Iterator[tuple[str, Iterable[bytes]]]:
        """Yield the name of each file of the text, and its content in pieces: the symbols of each
        split and, for tokens whose bytes are known, how many each covers, and the tokenizer."""
        for split in SPLITS:
            yield symbol_file(Path(), split, self.vocabulary).name, self._encoded_pieces(split)
        if self.tokens is None or self.tokens.tokenizer is None:
            return
        counts = self.tokens.token_bytes
        assert counts is not None  # there is a tokenizer
        counts_in_file = counts.astype(symbol_dtype(self.vocabulary)).tobytes()
        counts_file = symbol_file(Path(), TOKEN_BYTES_FILE, self.vocabulary).name
        yield counts_file, [counts_in_file]
        yield TOKENIZER_FILE, [self.tokens.tokenizer.content.encode()]

    def _encoded_pieces(self, split: str) -> Iterator[bytes]:
        """Yield the content of a split's file in pieces. A byte of the text has 16 bits, because
        the separator after each stretch is none of the 256."""
        files = dict(self.source.files)
        for name, start, stop in self.stretches[split]:
            if self.tokens is not None:
                for ids in self.tokens.pieces(name, start, stop, _CHUNK_BYTES):
                    yield ids.tobytes()
                document_end = np.array([self.tokens.document_end])
                yield document_end.astype(symbol_dtype(self.vocabulary)).tobytes()
                continue
            for chunk in _read_chunks(files[name], start, stop):
                yield np.frombuffer(chunk, np.uint8).astype("<u2").tobytes()
            yield np.array([SEPARATOR], "<u2").tobytes()

    def _damage(self, target: Path) -> str | None:
        """Return which file of splits in the folder `target` is missing or has other content than
        this text; None if all are right. Raises ValueError if the text has changed since."""
        for name, pieces in self._contents():
            path = target / name
            if not path.is_file():
                return f"{path} is missing"
            with open_ordinary(path) as file:
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


def split_text(
    source: TextSource, need: MinimumSizes, folder: Path, tokens: Tokens | None = None
) -> TextSplits:
    """Split a text into training, validation and test.

    With three files or more each file belongs to one split, chosen by a hash of its name, the
    largest to training. With fewer, each file is cut into three contiguous stretches. Every machine
    cuts the same text at the same places.

    tokens: of the files; None to split their bytes.
    Raises: ValueError, before the text is read, if a split is shorter than `need` or the text is
    larger than the disk of `folder`.
    """
    stats = {name: path.stat() for name, path in source.files}
    if tokens is None:
        sizes = {name: stat.st_size for name, stat in stats.items()}
    else:
        sizes = sizes_of_tokens(tokens)
    is_split_by_file = len(source.files) >= 3
    if tokens is not None and tokens.split_of_file:
        stretches = _stretches_by_name(sizes, tokens.split_of_file, need)
        split_in_words = "by the names of files"
    elif is_split_by_file:
        stretches = _assign_files(sizes, need)
        split_in_words = "by file"
    else:
        stretches = _cut_each_file(sizes, need)
        split_in_words = "by contiguous stretches"
    totals = {split: sum(stop - start for _, start, stop in stretches[split]) for split in SPLITS}
    if any(totals[split] < need.size_by_split[split] for split in SPLITS):
        raise need.too_short_error(totals, source)
    folders = (folder.absolute(), *folder.absolute().parents)
    existing_folder = next(parent for parent in folders if parent.exists())
    disk_bytes = shutil.disk_usage(existing_folder).total
    bytes_per_symbol = symbol_dtype(0 if tokens is None else tokens.vocabulary).itemsize
    check_memory_or_disk(
        _COPIES_IN_WORDS, bytes_per_symbol * sum(sizes.values()), disk_bytes, _DISK_ADVICE, "disk"
    )
    if tokens is None:
        info = _info_on_bytes(source, sizes, stretches, split_in_words)
    else:
        info = _info_on_tokens(source, tokens, stretches, split_in_words)
    return TextSplits(
        source, stretches, info, {name: stat.st_mtime_ns for name, stat in stats.items()}, tokens
    )


def _info_on_bytes(
    source: TextSource,
    sizes: dict[str, int],
    stretches: dict[str, list[Stretch]],
    split_in_words: str,
) -> CorpusInfo:
    """Return the hash and the sizes of a text of bytes, and what tables of bytes lose."""
    hash_digits, byte_counts = _hash_and_count(source, sizes, stretches)
    pair_counts = _count_pairs(source, stretches["train"])
    return CorpusInfo(
        name=source.name,
        hash=hash_digits[:16],
        num_files=len(source.files),
        train_bytes=_total(stretches["train"]),
        valid_bytes=_total(stretches["valid"]),
        test_bytes=_total(stretches["test"]),
        split=split_in_words,
        byte_entropy=entropy(byte_counts),
        pair_entropy=conditional_entropy(pair_counts),
    )


def _info_on_tokens(
    source: TextSource,
    tokens: Tokens,
    stretches: dict[str, list[Stretch]],
    split_in_words: str,
) -> CorpusInfo:
    """Return the hash and the sizes of a text of tokens, and what tables of tokens lose: in bits
    per byte, or per token where the tokens' bytes are not known."""
    tokenizer_hash = "" if tokens.tokenizer is None else tokens.tokenizer.hash
    digest = hashlib.sha256(
        f"{tokenizer_hash}\0{tokens.vocabulary}\0{tokens.document_end}\0".encode()
    )
    for name, ids in tokens.ids.items():
        digest.update(f"{name}\0{len(ids)}\0".encode(errors="surrogateescape"))
        for piece in tokens.pieces(name, 0, len(ids), _CHUNK_BYTES):
            digest.update(piece.tobytes())
    digest.update(repr(sorted(stretches.items())).encode(errors="surrogateescape"))
    num_bytes = {split: covered_bytes(tokens, stretches[split], _CHUNK_BYTES) for split in SPLITS}
    train_ids, test_ids = (
        np.concatenate([tokens.ids[name][start:stop] for name, start, stop in stretches[split]])
        for split in ("train", "test")
    )
    bytes_per_token = num_bytes["test"] / len(test_ids) if num_bytes["test"] else 1.0
    token_bits, pair_bits = table_losses(train_ids, test_ids, tokens.vocabulary)
    return CorpusInfo(
        name=source.name,
        hash=digest.hexdigest()[:16],
        num_files=len(source.files),
        train_bytes=num_bytes["train"],
        valid_bytes=num_bytes["valid"],
        test_bytes=num_bytes["test"],
        split=split_in_words,
        train_tokens=_total(stretches["train"]),
        valid_tokens=_total(stretches["valid"]),
        test_tokens=_total(stretches["test"]),
        tokenizer="" if tokens.tokenizer is None else Path(tokens.tokenizer.name).name,
        token_bits=token_bits / bytes_per_token,
        token_pair_bits=pair_bits / bytes_per_token,
    )


def _total(stretches: Sequence[Stretch]) -> int:
    """Return the size of stretches together."""
    return sum(stop - start for _, start, stop in stretches)


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


def _assign_files(sizes: dict[str, int], need: MinimumSizes) -> dict[str, list[Stretch]]:
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
        goal = max(HELD_OUT_FRACTION * total, need.size_by_split[split])
        while order and sum(stop for _, _, stop in stretches[split]) < goal:
            name = order.pop(0)
            stretches[split].append((name, 0, sizes[name]))
    stretches["train"] = [(name, 0, sizes[name]) for name in sorted([*order, largest_file])]
    return stretches


def _stretches_by_name(
    sizes: dict[str, int], split_of_file: Mapping[str, str], need: MinimumSizes
) -> dict[str, list[Stretch]]:
    """Return the stretches of each split where the names of files say what they are for. Without a
    file for the test, the second half of each one for validation is, or more where the test needs
    it."""
    stretches: dict[str, list[Stretch]] = {split: [] for split in SPLITS}
    has_test = "test" in split_of_file.values()
    total_of_valid = sum(size for name, size in sizes.items() if split_of_file[name] == "valid")
    test_share = max(0.5, need.size_by_split["test"] / max(total_of_valid, 1))
    for name, size in sizes.items():
        split = split_of_file[name]
        if split != "valid" or has_test:
            stretches[split].append((name, 0, size))
            continue
        test_start = max(0, size - math.ceil(size * test_share))
        stretches["valid"].append((name, 0, test_start))
        stretches["test"].append((name, test_start, size))
    return stretches


def _cut_each_file(sizes: dict[str, int], need: MinimumSizes) -> dict[str, list[Stretch]]:
    """Return the stretches of each split where every file is cut into three: training, validation
    and test."""
    stretches: dict[str, list[Stretch]] = {split: [] for split in SPLITS}
    total = sum(sizes.values())
    for name, size in sizes.items():
        # + 0.5 rounds up, or more, so that the pieces of several files are enough together.
        held_out = {
            split: round(
                size * max(HELD_OUT_FRACTION, need.size_by_split[split] / max(total, 1)) + 0.5
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
