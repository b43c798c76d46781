"""cos and sin at consecutive positions, made in C from those of few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.numbers import native
from posenc.numbers.tracking import followed

PAYS_FROM = 1 << 12
"""Numbers of a table from which C makes it: a program with only short rows never waits for a
compiler."""
STEP = 64
"""Positions between those from which the others are reached."""
SOURCE = Path(__file__).with_name("runs.c")


def takes(turns: Tensor, count: int) -> bool:
    """Whether `cos_sin_of_run` runs here and pays."""
    large = count * len(turns) >= PAYS_FROM and turns.device.type == "cpu"
    return large and not followed(turns) and _library() is not None


def cos_sin_of_run(
    turns: Tensor, radians: float, factor: float, first: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """cos and sin times `factor` at `count` positions from `first` on, each (count, pairs),
    float32; and the positions, few if any, of which the last bit is not certain.

    turns (pairs,) are frequencies in int64 units of a turn, of `radians` each.
    """
    pairs, tiles = len(turns), -(-count // STEP)
    room = turns.new_empty(2 * (STEP + tiles + 2), pairs, dtype=torch.float64)
    cos, sin = (turns.new_empty(count, pairs, dtype=torch.float32) for _ in range(2))
    unsure = turns.new_empty(count, dtype=torch.bool)
    native.run(
        _library().run, count, turns, room, cos, sin, unsure, pairs, first, count, STEP,
        float(radians), float(factor), threads=1,
    )  # fmt: skip
    return cos, sin, first + unsure.nonzero()[:, 0]


def _library() -> Any:
    return native.load(SOURCE, ("run",))
