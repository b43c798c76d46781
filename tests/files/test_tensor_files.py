"""Tensors written one at a time are the bytes that safetensors itself writes."""

import hashlib

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save

from posenc.files.tensor_files import write_tensors


@pytest.mark.parametrize("metadata", [None, {"é": "ü"}])
def test_bytes_are_those_of_safetensors(tmp_path, metadata):
    tensors = {
        "model/é.weight": torch.randn(3, 5),
        "a": torch.tensor(3.0, dtype=torch.bfloat16),
        "z": torch.arange(7),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "zz": torch.randn(3, dtype=torch.float64),
    }
    if (0, 8) <= tuple(map(int, safetensors.__version__.split(".")[:2])):
        tensors["zzz"] = torch.polar(torch.ones(3), torch.arange(3.0))
    path = tmp_path / "a.safetensors"
    digest = write_tensors(path, tensors, metadata)
    assert path.read_bytes() == save(tensors, metadata)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_shared_and_strided_tensors_are_written_with_their_values(tmp_path):
    table = torch.randn(4, 6)
    tensors = {"table": table, "tied": table, "turned": table.T, "row": table[1]}
    path = tmp_path / "a.safetensors"
    write_tensors(path, tensors)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_dtype_that_safetensors_lacks_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(KeyError):
        write_tensors(path, {"a": torch.zeros(2, dtype=torch.complex128)})
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
