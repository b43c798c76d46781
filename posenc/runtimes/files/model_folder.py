"""Look into a model's folder: which files belong to it, what is in the header of a safetensors file
(names, dtypes and places of tensors), and whether the model has an encoding of posenc attached."""

import os
from pathlib import Path
from typing import Any

from posenc.files.opening import NOT_ORDINARY_MESSAGE, open_ordinary
from posenc.files.sealed_json import parse_bounded_json

TOKENIZER_FILES = tuple(
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json "
    "added_tokens.json vocab.json vocab.txt vocab.bpe merges.txt spiece.model "
    "sentencepiece.bpe.model spm.model tekken.json chat_template.jinja chat_template.json "
    "generation_config.json".split()
)
"""Files copied next to exported weights: data, never code."""


def path_inside(folder: Path, name: str, asker: str) -> Path:
    """Return the path of an ordinary file that is in the folder itself.

    Links of the Hub's cache from a snapshot to its blobs count as inside.

    asker: what names the file, for the message.
    Raises: ValueError where the file is elsewhere or not there.
    """
    path = folder / name
    if Path(name).name != name or "\\" in name:
        raise ValueError(f"{folder}: {asker} names {name!r}, which is not a file of the folder.")
    if not path.exists():
        raise ValueError(f"{folder}: {asker} names {name}, which is not there.")
    real_folder, real_path = folder.resolve(), path.resolve()
    blob_folder = (
        real_folder.parents[1] / "blobs" if real_folder.parent.name == "snapshots" else real_folder
    )
    if real_path.parent not in (real_folder, blob_folder):
        raise ValueError(f"{path}: a link to {real_path}, outside of the folder, is not followed.")
    if not path.is_file():
        raise ValueError(f"{path}: {NOT_ORDINARY_MESSAGE}")
    return path


def paths_inside(folder: Path, pattern: str) -> list[Path]:
    """Return the files of the folder whose names match the pattern, in order.

    Raises: ValueError as `path_inside` does, also for a folder of a matching name.
    """
    return [path_inside(folder, path.name, "its listing") for path in sorted(folder.glob(pattern))]


MOST_BYTES_OF_HEADER = 100 << 20


def read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return dtype, shape and data_offsets by tensor name, and the offset where data begin.

    Raises: ValueError where the file is damaged or announces more than it has.
    """
    with open_ordinary(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        header_size = int.from_bytes(file.read(8), "little")
        if not 2 <= header_size <= min(MOST_BYTES_OF_HEADER, file_size - 8):
            raise ValueError(f"{path}: damaged safetensors file, a header of {header_size} bytes.")
        header_bytes = file.read(header_size)
    try:
        content = parse_bounded_json(header_bytes.decode())
    except ValueError as error:
        raise ValueError(f"{path}: damaged safetensors file: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: damaged safetensors file, its header is no object.")
    tensors = {k: v for k, v in content.items() if k != "__metadata__"}
    for name, tensor_info in tensors.items():
        if not _is_tensor_info(tensor_info, file_size - 8 - header_size):
            raise ValueError(
                f"{path}: damaged safetensors file, {name!r} has no place, or one that ends "
                "outside of the file."
            )
    return tensors, 8 + header_size


def _is_tensor_info(tensor_info: Any, num_data_bytes: int) -> bool:
    """Return True for a tensor's dtype, shape, and two offsets in order up to `num_data_bytes`."""
    if not isinstance(tensor_info, dict) or not isinstance(tensor_info.get("dtype"), str):
        return False
    shape, offsets = tensor_info.get("shape"), tensor_info.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return (
        all(type(n) is int and n >= 0 for n in shape + offsets)
        and offsets[0] <= offsets[1] <= num_data_bytes
    )


ENCODING_FILE = "posenc.json"
"""Describes the encoding; no runtime reads it. It may be left of a model saved here before."""
MARKING_TENSOR = "posenc_encoding.attached"
"""Name of a tensor among the weights of a model with an encoding. It tells them from the same
weights saved after `detach`, beside which an older record may stand, and a loader that does not
know the encoding reports it as left over."""


def refuse_attached_encoding(folder: Path) -> None:
    """Raise ValueError for a folder whose model has an encoding attached: the config and the
    weights by themselves are another model."""
    if not (folder / ENCODING_FILE).is_file():
        return
    if any(
        MARKING_TENSOR in read_safetensors_header(path)[0]
        for path in paths_inside(folder, "*.safetensors")
    ):
        raise ValueError(
            f"{folder}: its model has an encoding attached by posenc ({ENCODING_FILE}), which "
            "stock transformers and the other runtimes leave out: they compute another model. "
            "posenc.hf.load reads both; save it again after posenc.hf.detach to go on without it."
        )
