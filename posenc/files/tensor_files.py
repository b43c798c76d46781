"""Write and read tensors as safetensors: written one at a time, so that no second copy of all is in
memory. The library's own `save` makes two, and its `save_file` neither keeps the file's mode nor
says that the disk is full."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from posenc.files.atomic import write_pieces_atomically

_NAMES_OF_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""What safetensors calls each dtype. Source: https://github.com/huggingface/safetensors."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write tensors into a safetensors file that replaces `path` at once, see `write_atomically`.
    Tensors may share memory, and may be on any device.

    metadata: texts for the header of the file.
    Returns: the SHA-256 of the file.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> file = Path(tempfile.mkdtemp(), "a.safetensors")
    >>> len(write_tensors(file, {"a": torch.arange(3)})), load_file(file)
    (64, {'a': tensor([0, 1, 2])})
    """
    digest = hashlib.sha256()

    def hashed_pieces() -> Iterator[bytes | memoryview]:
        for piece in _pieces_of_file(tensors, metadata):
            digest.update(piece)
            yield piece

    write_pieces_atomically(path, hashed_pieces())
    return digest.hexdigest()


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, mapped into memory: values are read when
    they are used, and the file stays open as long as one of the tensors.

    Raises: SafetensorError for a damaged file; OSError.
    """
    return load_file(path)


def _pieces_of_file(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file: the length of the header in 8 bytes, the header in
    JSON, and the values of each tensor."""
    # Larger dtypes first, so that each tensor begins at a multiple of the size of its values.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name in names:
        tensor = tensors[name]
        end = begin + tensor.nbytes
        header[name] = {
            "dtype": _NAMES_OF_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)  # the values begin at a multiple of 8
    yield len(header_bytes).to_bytes(8, "little")
    yield header_bytes
    for name in names:
        values = tensors[name].detach().cpu().contiguous().reshape(-1)
        yield values.view(torch.uint8).numpy().data
