"""Write golden files: shared by the scripts beside it, which run other projects' code."""

import json
from pathlib import Path

import numpy
import torch


def plain(tensor):
    """The tensor as nested lists, each number in the fewest digits that give its float32 back."""
    if tensor.ndim:
        return [plain(part) for part in tensor]
    if tensor.dtype == torch.float32:
        return float(str(numpy.float32(tensor.item())))
    return tensor.item()


def case(params, inputs, expected, tolerance=1e-5):
    """One recorded call, with the dtypes of its tensors."""
    return {
        "params": params,
        "inputs": {name: plain(tensor) for name, tensor in inputs.items()},
        "expected": {name: plain(tensor) for name, tensor in expected.items()},
        "tolerance": {"rtol": tolerance, "atol": tolerance},
        "dtypes": {
            "inputs": {name: str(t.dtype).removeprefix("torch.") for name, t in inputs.items()},
            "expected": {name: str(t.dtype).removeprefix("torch.") for name, t in expected.items()},
        },
    }


def write(method, source, notes, cases):
    """Write tests/golden/METHOD.json."""
    record = {"method": method, "source": source, "notes": notes, "cases": cases}
    path = Path(__file__).parent / f"{method}.json"
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
