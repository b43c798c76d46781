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

STRUCT_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
STRUCT_FORMATS |= {12: "d"}
"""Type of a number -> its format in struct; 8 is a string, 9 an array."""
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
F32, F16, F64 = 0, 1, 28
"""Types of tensors whose elements are read."""
BLOCK_SIZES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 40), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip
"""Type of a tensor -> elements and bytes of a block."""
KNOWN_VERSIONS = (2, 3)
MOST_KEYS = MOST_TENSORS = 1 << 16
"""A file has some fifty keys and a few thousand tensors."""
MOST_TEXTS = 1 << 24
"""Strings in arrays: a vocabulary of a million tokens has two million, with its merges."""
MOST_BYTES_OF_TEXT, MOST_BYTES_KEPT = 16 << 20, 1 << 16
"""Bytes of a string, and of one whose text is kept."""
MOST_NUMBERS = 1 << 12
"""Numbers of an array that is kept, such as one for each layer."""
MOST_FACTORS = 1 << 16
"""Numbers of a list of factors, one for each pair of channels: no head has nearly as many."""
BYTES_AT_ONCE = 1 << 20
"""Bytes that are read at once where strings are skipped."""
MOST_DIMENSIONS = 4
"""Dimensions of a tensor, of which ggml has no more."""
SMALLEST_ALIGNMENT, LARGEST_ALIGNMENT = 8, 1 << 16
"""Bytes to whose multiples data are aligned; 32 unless the file says otherwise. Chosen, not
derived: real files say 32 or 64."""


class Field(NamedTuple):
    """A key of the header with its value.

    kind: the type of the value, see STRUCT_FORMATS. value: None for what is not kept. start, stop:
    the offsets of its bytes in the file, key and value together.
    """

    name: str
    kind: int
    value: Any
    start: int
    stop: int


class TensorLine(NamedTuple):
    """A tensor's line of the header. start, stop: its bytes; the last 8 are the offset of its data,
    counted from `Header.data_start`."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int | None:
        """Return the bytes of its data; None for a type that is not known."""
        if self.kind not in BLOCK_SIZES:
            return None
        block_elements, block_bytes = BLOCK_SIZES[self.kind]
        return -(-self.num_elements // block_elements) * block_bytes


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    byte_order: ">" for big endian, "<" otherwise. data_start: the offset at which the tensors' data
    begin. file_size: bytes of the whole file.
    """

    byte_order: str
    version: int
    fields: Mapping[str, Field]
    tensors: tuple[TensorLine, ...]
    alignment: int
    data_start: int
    file_size: int


def read_gguf_header(file: BinaryIO, path: Path) -> Header:
    """Read a header. Memory and time are bounded by the size of the file.

    Raises: ValueError where the file is damaged, cut, or announces more than any model has.
    """
    return _Reader(file, path).read_header()


def read_floats(
    file: BinaryIO, path: Path, header: Header, tensor: TensorLine
) -> tuple[float, ...]:
    """Return the elements of a small tensor of floats. Raises: ValueError for another one."""
    if tensor.num_elements > MOST_FACTORS:
        raise ValueError(f"{path}: {tensor.name} has more than {MOST_FACTORS} elements.")
    struct_letter = {F32: "f", F16: "e", F64: "d"}.get(tensor.kind)
    if struct_letter is None:
        raise ValueError(f"{path}: {tensor.name} must be floats, got the type {tensor.kind}.")
    layout = struct.Struct(f"{header.byte_order}{tensor.num_elements}{struct_letter}")
    file.seek(header.data_start + tensor.offset)
    return layout.unpack(file.read(layout.size))


class _Reader:
    """Read a GGUF header from front to back, and refuse what the rest of the file cannot hold."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.file_size = os.fstat(file.fileno()).st_size
        self.byte_order = "<"
        self.num_texts_in_arrays = 0

    def read_header(self) -> Header:
        """Return the header, which begins the file."""
        self.file.seek(0)
        version = self.read_version()
        tensor_count, key_count = self.read_number("Q"), self.read_number("Q")
        # The fewest bytes: a tensor has the length of its name, dimensions, type and offset (8 + 4
        # + 4 + 8), a key the length of its name, its type and a value of one byte (8 + 4 + 1).
        self.require_left(tensor_count, 24, "tensors", MOST_TENSORS)
        self.require_left(key_count, 13, "keys", MOST_KEYS)
        fields = self.read_fields(key_count)
        tensors = tuple(self.read_tensor() for _ in range(tensor_count))
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise self.damaged_error("a tensor is given twice")
        alignment = fields["general.alignment"].value if "general.alignment" in fields else 32
        if type(alignment) is not int or not _is_alignment(alignment):
            raise self.damaged_error(f"general.alignment is {alignment!r:.40}")
        data_start = round_up(self.file.tell(), alignment)
        self.check_tensor_places(tensors, data_start, alignment)
        return Header(
            self.byte_order, version, fields, tensors, alignment, data_start, self.file_size
        )

    def read_version(self) -> int:
        """Read the magic word and the version, whose bytes also say the order of all others."""
        if self.next_bytes(4) != b"GGUF":
            raise self.damaged_error("it does not begin with GGUF")
        version_bytes = self.next_bytes(4)
        if (
            int.from_bytes(version_bytes, "little") not in KNOWN_VERSIONS
            and int.from_bytes(version_bytes) in KNOWN_VERSIONS
        ):
            self.byte_order = ">"
        version = struct.unpack(f"{self.byte_order}I", version_bytes)[0]
        if version not in KNOWN_VERSIONS:
            raise self.damaged_error(f"version {version}, expected 2 or 3")
        return version

    def read_fields(self, count: int) -> dict[str, Field]:
        """Return the next `count` keys with their values, by name."""
        fields: dict[str, Field] = {}
        for _ in range(count):
            field = self.read_field()
            if field.name in fields:
                raise self.damaged_error(f"the key {field.name!r:.80} is given twice")
            fields[field.name] = field
        return fields

    def check_tensor_places(
        self, tensors: tuple[TensorLine, ...], data_start: int, alignment: int
    ) -> None:
        """Raise ValueError unless the data of each tensor are aligned, and inside of the file."""
        for tensor in tensors:
            stop = data_start + tensor.offset + (tensor.num_bytes or 0)
            if tensor.offset % alignment or stop > self.file_size:
                raise self.damaged_error(
                    f"the tensor {tensor.name!r:.80} begins at no multiple of {alignment}, or ends "
                    "outside of the file"
                )

    def read_field(self) -> Field:
        """Return the next key with its value."""
        start = self.file.tell()
        name = self.next_text()
        kind = self.read_number("I")
        value = self.read_value(kind)
        return Field("" if name is None else name, kind, value, start, self.file.tell())

    def read_tensor(self) -> TensorLine:
        """Return the next tensor's line of the header."""
        start = self.file.tell()
        name, num_dimensions = self.next_text(), self.read_number("I")
        self.require_left(num_dimensions, 8, "dimensions", MOST_DIMENSIONS)
        shape = tuple(self.read_number("Q") for _ in range(num_dimensions))
        kind, offset = self.read_number("I"), self.read_number("Q")
        return TensorLine(
            "" if name is None else name, shape, kind, offset, start, self.file.tell()
        )

    def read_value(self, kind: int) -> Any:
        """Return the next value, of this type; None for a long text or array, which is skipped."""
        if kind in STRUCT_FORMATS:
            return self.read_number(STRUCT_FORMATS[kind])
        if kind == STRING:
            return self.next_text()
        if kind != ARRAY:
            raise self.damaged_error(f"a value of the unknown type {kind}")
        item_kind, count = self.read_number("I"), self.read_number("Q")
        if item_kind in STRUCT_FORMATS:
            bytes_per_item = struct.calcsize(f"={STRUCT_FORMATS[item_kind]}")
            self.require_left(count, bytes_per_item, "values")
            if count > MOST_NUMBERS:
                self.file.seek(count * bytes_per_item, 1)
                return None
            struct_format = f"{self.byte_order}{count}{STRUCT_FORMATS[item_kind]}"
            return list(struct.unpack(struct_format, self.next_bytes(count * bytes_per_item)))
        if item_kind != STRING:  # nor does libllama read arrays in arrays
            raise self.damaged_error(f"an array of the unknown type {item_kind}")
        self.require_left(count, 8, "values")
        self.num_texts_in_arrays += count
        if self.num_texts_in_arrays > MOST_TEXTS:
            raise self.damaged_error(f"more than {MOST_TEXTS} texts announced in arrays")
        self.skip_texts(count)
        return None

    def next_text(self) -> str | None:
        """Return the next string; None for a long one, which is skipped."""
        length = self.read_number("Q")
        self.require_left(length, 1, "bytes of text", MOST_BYTES_OF_TEXT)
        if length > MOST_BYTES_KEPT:
            self.file.seek(length, 1)
            return None
        return self.next_bytes(length).decode("utf-8", "replace")

    def skip_texts(self, count: int) -> None:
        """Move behind the next `count` strings, of which only the lengths are read."""
        read_length_at = struct.Struct(f"{self.byte_order}Q").unpack_from
        start, content, offset = self.file.tell(), b"", 0
        for _ in range(count):
            if offset + 8 > len(content):
                start, offset = start + offset, 0
                if start + 8 > self.file_size:
                    raise self.damaged_error("it is cut")
                self.file.seek(start)
                content = self.file.read(BYTES_AT_ONCE)
            offset += 8 + read_length_at(content, offset)[0]
        if start + offset > self.file_size:
            raise self.damaged_error("it is cut")
        self.file.seek(start + offset)

    def read_number(self, struct_format: str) -> Any:
        """Return the next number, in this format of struct."""
        ordered_format = f"{self.byte_order}{struct_format}"
        return struct.unpack(ordered_format, self.next_bytes(struct.calcsize(ordered_format)))[0]

    def next_bytes(self, count: int) -> bytes:
        """Return the next bytes. Raises: ValueError where the file ends before."""
        content = self.file.read(count)
        if len(content) < count:
            raise self.damaged_error("it is cut")
        return content

    def require_left(
        self, count: int, bytes_each: int, things: str, most_expected: int | None = None
    ) -> None:
        """Raise ValueError if the rest of the file is shorter than `count` times `bytes_each`
        bytes, or `count` is above `most_expected`."""
        bytes_left = self.file_size - self.file.tell()
        if count * bytes_each > bytes_left or (most_expected is not None and count > most_expected):
            limit_in_words = (
                "" if most_expected is None else f" and at most {most_expected} expected"
            )
            raise self.damaged_error(
                f"{count} {things} announced, with {bytes_left} bytes left{limit_in_words}"
            )

    def damaged_error(self, why: str) -> ValueError:
        """Return the error to raise for a damaged file."""
        return ValueError(f"{self.path}: damaged GGUF file: {why}.")


def _is_alignment(value: int) -> bool:
    is_power_of_two = value > 0 and value & (value - 1) == 0
    return is_power_of_two and SMALLEST_ALIGNMENT <= value <= LARGEST_ALIGNMENT


def round_up(offset: int, alignment: int) -> int:
    """Return the first multiple of the alignment that is not below `offset`."""
    return -(-offset // alignment) * alignment
