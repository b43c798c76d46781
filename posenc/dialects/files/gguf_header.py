"""The header of a GGUF file, read once from front to back: a vocabulary is skipped, and of the rest
only where it stands is kept.

A header is magic, version, two counts, the keys with their values, and a name, a shape, a type and
an offset for each tensor; data follow at the next multiple of the alignment. Read in ggml's gguf.md
and gguf.cpp (llama.cpp 0c1e57098).
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
FORMATS |= {12: "d"}
"""Type of a number -> its format in struct; 8 is a string, 9 an array."""
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
F32, F16, F64 = 0, 1, 28
"""Types of tensors whose elements are read."""
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 40), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip
"""Type of a tensor -> elements and bytes of a block."""
VERSIONS = (2, 3)
MOST_KEYS = MOST_TENSORS = 1 << 16
"""A file has some fifty keys and a few thousand tensors."""
MOST_ITEMS = 1 << 24
"""Strings in arrays: a vocabulary of a million tokens has two million, with its merges."""
LONGEST_TEXT, LONGEST_KEPT = 16 << 20, 1 << 16
"""Bytes of a string, and of one whose text is kept."""
MOST_NUMBERS = 1 << 12
"""Numbers of an array that is kept, such as one for each layer."""
MOST_FACTORS = 1 << 16
BLOCK = 1 << 20
"""Bytes that are read at once where strings are skipped."""
MOST_DIMENSIONS = 4
SMALLEST_ALIGNMENT, LARGEST_ALIGNMENT = 8, 1 << 16


class Field(NamedTuple):
    """A key. value: None for what is not kept. start, stop: its bytes, key and value together."""

    name: str
    kind: int
    value: Any
    start: int
    stop: int


class Tensor(NamedTuple):
    """A tensor's line of the header. start, stop: its bytes; the last 8 are the offset of its data,
    counted from `Header.data`."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int | None:
        """Return the bytes of its data; None for a type that is not known."""
        if self.kind not in BLOCKS:
            return None
        elements, size = BLOCKS[self.kind]
        return -(-self.elements // elements) * size


@dataclass(frozen=True)
class Header:
    """order: ">" for big endian, "<" otherwise. data: where the tensors' data begin. whole: bytes
    of the file."""

    order: str
    version: int
    fields: Mapping[str, Field]
    tensors: tuple[Tensor, ...]
    alignment: int
    data: int
    whole: int


def read_header(file: BinaryIO, path: Path) -> Header:
    """Read a header. Memory and time are bounded by the size of the file.

    Raises: ValueError where the file is damaged, cut, or announces more than any model has.
    """
    return _Reader(file, path).header()


def read_floats(file: BinaryIO, path: Path, header: Header, tensor: Tensor) -> tuple[float, ...]:
    """Return the elements of a small tensor of floats. Raises: ValueError for another one."""
    if tensor.elements > MOST_FACTORS:
        raise ValueError(f"{path}: {tensor.name} has more than {MOST_FACTORS} elements.")
    letter = {F32: "f", F16: "e", F64: "d"}.get(tensor.kind)
    if letter is None:
        raise ValueError(f"{path}: {tensor.name} must be floats, got the type {tensor.kind}.")
    layout = struct.Struct(f"{header.order}{tensor.elements}{letter}")
    file.seek(header.data + tensor.offset)
    return layout.unpack(file.read(layout.size))


class _Reader:
    """A place in a file, and what is expected of what comes next."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.whole = os.fstat(file.fileno()).st_size
        self.order = "<"
        self.items = 0

    def header(self) -> Header:
        self.file.seek(0)
        version = self.version()
        tensor_count, key_count = self.number("Q"), self.number("Q")
        self.need(tensor_count, 24, "tensors", MOST_TENSORS)
        self.need(key_count, 13, "keys", MOST_KEYS)
        fields = self.fields(key_count)
        tensors = tuple(self.tensor() for _ in range(tensor_count))
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise self.damaged("a tensor is given twice")
        alignment = fields["general.alignment"].value if "general.alignment" in fields else 32
        if type(alignment) is not int or not _is_alignment(alignment):
            raise self.damaged(f"general.alignment is {alignment!r:.40}")
        data = round_up(self.file.tell(), alignment)
        self.check_places(tensors, data, alignment)
        return Header(self.order, version, fields, tensors, alignment, data, self.whole)

    def version(self) -> int:
        """Read the magic word and the version, whose bytes also say the order of all others."""
        if self.take(4) != b"GGUF":
            raise self.damaged("it does not begin with GGUF")
        raw = self.take(4)
        if int.from_bytes(raw, "little") not in VERSIONS and int.from_bytes(raw) in VERSIONS:
            self.order = ">"
        version = struct.unpack(f"{self.order}I", raw)[0]
        if version not in VERSIONS:
            raise self.damaged(f"version {version}, expected 2 or 3")
        return version

    def fields(self, count: int) -> dict[str, Field]:
        fields: dict[str, Field] = {}
        for _ in range(count):
            field = self.field()
            if field.name in fields:
                raise self.damaged(f"the key {field.name!r:.80} is given twice")
            fields[field.name] = field
        return fields

    def check_places(self, tensors: tuple[Tensor, ...], data: int, alignment: int) -> None:
        """Raise ValueError unless the data of each tensor are aligned, and inside of the file."""
        for tensor in tensors:
            stop = data + tensor.offset + (tensor.size or 0)
            if tensor.offset % alignment or stop > self.whole:
                raise self.damaged(
                    f"the tensor {tensor.name!r:.80} begins at no multiple of {alignment}, or ends "
                    "outside of the file"
                )

    def field(self) -> Field:
        start = self.file.tell()
        name = self.text()
        kind = self.number("I")
        value = self.value(kind)
        return Field("" if name is None else name, kind, value, start, self.file.tell())

    def tensor(self) -> Tensor:
        start = self.file.tell()
        name, dimensions = self.text(), self.number("I")
        self.need(dimensions, 8, "dimensions", MOST_DIMENSIONS)
        shape = tuple(self.number("Q") for _ in range(dimensions))
        kind, offset = self.number("I"), self.number("Q")
        return Tensor("" if name is None else name, shape, kind, offset, start, self.file.tell())

    def value(self, kind: int) -> Any:
        """Return a value that is small, and None for what is skipped."""
        if kind in FORMATS:
            return self.number(FORMATS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise self.damaged(f"a value of the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in FORMATS:
            width = struct.calcsize(f"={FORMATS[inner]}")
            self.need(count, width, "values")
            if count > MOST_NUMBERS:
                self.file.seek(count * width, 1)
                return None
            layout = f"{self.order}{count}{FORMATS[inner]}"
            return list(struct.unpack(layout, self.take(count * width)))
        if inner != STRING:  # nor does libllama read arrays in arrays
            raise self.damaged(f"an array of the unknown type {inner}")
        self.need(count, 8, "values")
        self.items += count
        if self.items > MOST_ITEMS:
            raise self.damaged(f"more than {MOST_ITEMS} texts announced in arrays")
        self.skip_texts(count)
        return None

    def text(self) -> str | None:
        """Return a string; None for a long one."""
        length = self.number("Q")
        self.need(length, 1, "bytes of text", LONGEST_TEXT)
        if length > LONGEST_KEPT:
            self.file.seek(length, 1)
            return None
        return self.take(length).decode("utf-8", "replace")

    def skip_texts(self, count: int) -> None:
        """Move behind strings, of which only the lengths are looked at."""
        length_at = struct.Struct(f"{self.order}Q").unpack_from
        start, block, at = self.file.tell(), b"", 0
        for _ in range(count):
            if at + 8 > len(block):
                start, at = start + at, 0
                if start + 8 > self.whole:
                    raise self.damaged("it is cut")
                self.file.seek(start)
                block = self.file.read(BLOCK)
            at += 8 + length_at(block, at)[0]
        if start + at > self.whole:
            raise self.damaged("it is cut")
        self.file.seek(start + at)

    def number(self, letter: str) -> Any:
        layout = f"{self.order}{letter}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def take(self, count: int) -> bytes:
        found = self.file.read(count)
        if len(found) < count:
            raise self.damaged("it is cut")
        return found

    def need(self, count: int, width: int, what: str, most: int | None = None) -> None:
        """Raise ValueError if the file cannot hold so much, or no model has so much."""
        left = self.whole - self.file.tell()
        if count * width > left or (most is not None and count > most):
            expected = "" if most is None else f" and at most {most} expected"
            raise self.damaged(f"{count} {what} announced, with {left} bytes left{expected}")

    def damaged(self, why: str) -> ValueError:
        return ValueError(f"{self.path}: damaged GGUF file: {why}.")


def _is_alignment(value: int) -> bool:
    power = value > 0 and value & (value - 1) == 0
    return power and SMALLEST_ALIGNMENT <= value <= LARGEST_ALIGNMENT


def round_up(place: int, alignment: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-place // alignment) * alignment
