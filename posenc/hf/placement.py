"""Where a model's weights go, and in which dtype."""

from __future__ import annotations

import importlib.util

import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "mps")


def has_accelerate() -> bool:
    """Whether transformers can load weights straight to their device."""
    return importlib.util.find_spec("accelerate") is not None


def place_of(device: str) -> str:
    """The device that a model goes to. "auto" is the GPU where there is one, and stays "auto" where
    accelerate can spread the weights over all of them and on to the CPU.

    Raises: ValueError for a device that torch does not see.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}.")
    seen = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device in seen and not seen[device]:
        raise ValueError(f"--device {device}: torch sees no such device here; take cpu or auto.")
    if device == "auto":
        device = next((name for name, there in seen.items() if there), "cpu")
        if device == "cuda" and has_accelerate():
            return "auto"
    return device
