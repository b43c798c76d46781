"""Refuse files from whose bytes nothing can be learned, before anything is trained."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from posenc.compare.plan.splits import entropy
from posenc.text import Source

UNPACK = "Unpack it and give what is in it."
EXPORT = "Write its text into a text file first."
FORMATS = (
    (b"\x1f\x8b", "gzip", UNPACK),
    (b"\x28\xb5\x2f\xfd", "Zstandard", UNPACK),
    (b"\xfd7zXZ\0", "xz", UNPACK),
    (b"BZh", "bzip2", UNPACK),
    (b"\x04\x22\x4d\x18", "LZ4", UNPACK),
    (b"PK\x03\x04", "zip", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", UNPACK),
    (b"PAR1", "Parquet", EXPORT),
    (b"ARROW1", "Arrow", EXPORT),
    (b"SQLite format 3\0", "SQLite", EXPORT),
    (b"%PDF-", "PDF", EXPORT),
    (b"\x89PNG", "PNG", "It is a picture."),
    (b"\xff\xd8\xff", "JPEG", "It is a picture."),
)
"""First bytes, name and advice. Bytes that are letters count only in a file with zero bytes."""
SAMPLE, PIECES, LEAST = 1 << 20, 4, 1024
"""Bytes that are looked at in all files, in how many pieces of a file, and bytes below which a file
is too small to be called random."""
RANDOM, SAME, HEADER = 0.98, 0.01, 64
"""zlib's output as a fraction of its input, from which bytes count as random, and below which as
repeated, after so many bytes for the first line. Measured: base64 of random bytes 0.76, Chinese
0.46, source code 0.40, DNA letters 0.30, a log whose lines differ in one digit 0.027."""


def check_content(source: Source) -> str:
    """Look at a sample of each file.

    Returns: a note on zero bytes, or "".

    Raises: ValueError for a text that is empty, compressed, encrypted or random, or that repeats
    itself.
    """
    each = max(PIECES * LEAST, SAMPLE // len(source.files))
    seen, size, zeros = [], 0, ""
    for _, path in source.files:
        sample = _sample(path, each)
        zero = b"\0" in sample
        for magic, kind, advice in FORMATS:
            if sample.startswith(magic) and (zero or not magic.isalnum()):
                raise ValueError(f"--text: {path} is a {kind} file, no text. {advice}")
        counts = np.bincount(np.frombuffer(sample, np.uint8), minlength=256)
        packed = len(zlib.compress(sample)) if sample and entropy(counts) > 7 else 0
        if len(sample) >= LEAST and packed >= RANDOM * len(sample):
            raise ValueError(
                f"--text: {path} is compressed, encrypted or random: zlib makes its bytes no "
                "smaller, so there is nothing to learn from them. Give the text itself."
            )
        zeros = zeros or (f"{path} has zero bytes: it is binary or UTF-16" if zero else "")
        if size < SAMPLE:
            seen.append(sample)
            size += len(sample)
    text = b"".join(seen)
    if not text:
        raise ValueError(f"--text: {source.name} is empty. Give a file with text.")
    packed = len(zlib.compress(text, 9))
    if packed < SAME * len(text) + HEADER and len(text) >= LEAST:
        what = f"it is one byte, {text[:1]!r}, again and again"
        if len(set(text)) > 1:
            what = f"it repeats itself: zlib packs {len(text):,} bytes of it into {packed:,}"
        raise ValueError(
            f"--text: there is nothing to learn in {source.name}: {what}. Every encoding would "
            "predict it almost without a mistake; give a text that varies."
        )
    return f"{zeros}; its bytes are compared as they are" if zeros else ""


def _sample(path: Path, most: int) -> bytes:
    """Return at most `most` bytes of a file: its beginning, and pieces up to its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= most:
            return file.read(most)
        piece, found = most // PIECES, b""
        for i in range(PIECES):
            file.seek(i * (size - piece) // (PIECES - 1))
            found += file.read(piece)
    return found
