"""Refuse files from whose bytes nothing can be learned."""

import hashlib
import zlib
from pathlib import Path

import numpy as np

from posenc.compare.plan.ngram_losses import entropy
from posenc.files.find_texts import TextSource
from posenc.files.opening import open_ordinary

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
