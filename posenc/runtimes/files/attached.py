"""Recognize a folder whose model has an encoding of posenc attached."""

from pathlib import Path

from posenc.runtimes.files.paths_inside import paths_inside
from posenc.runtimes.files.safetensors_header import read_header

RECORD = "posenc.json"
"""Describes the encoding; no runtime reads it. It may be left of a model saved here before."""
MARK = "posenc_encoding.attached"
"""Name of a tensor among the weights of a model with an encoding. It tells them from the same
weights saved after `detach`, beside which an older record may stand, and a loader that does not
know the encoding reports it as left over."""


def refuse_attached_encoding(folder: Path) -> None:
    """Raise ValueError for a folder whose model has an encoding attached: the config and the
    weights by themselves are another model."""
    if not (folder / RECORD).is_file():
        return
    if any(MARK in read_header(path)[0] for path in paths_inside(folder, "*.safetensors")):
        raise ValueError(
            f"{folder}: its model has an encoding attached by posenc ({RECORD}), which stock "
            "transformers and the other runtimes leave out: they compute another model. "
            "posenc.hf.load reads both; save it again after posenc.hf.detach to go on without it."
        )
