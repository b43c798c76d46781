"""Token positions: from masks, documents and grids, and what is known about them.

>>> posenc.positions.positions_from_mask(torch.tensor([[0, 0, 1, 1, 1]]))
tensor([[0, 0, 0, 1, 2]])
>>> posenc.positions.positions_from_documents(torch.tensor([7, 7, 7, 8, 8]))
tensor([0, 1, 2, 0, 1])
"""

from __future__ import annotations

import torch
from jaxtyping import Int, Real, Shaped
from torch import Tensor


def run(start: int, length: int, device: torch.device | None = None) -> Int[Tensor, " length"]:
    """start, start + 1, ..., start + length - 1, marked as a run on any device."""
    positions = torch.arange(start, start + length, device=device)
    return _mark(positions, start)


def part(
    positions: Real[Tensor, "*batch len"], first: int, last: int
) -> Real[Tensor, "*batch part"]:
    """positions[..., first:last], marked as a run if `positions` are."""
    taken = positions[..., first:last]
    start = _marked(positions)
    return taken if start is None else _mark(taken, start + first)


def run_start(positions: Real[Tensor, "..."]) -> int | None:
    """The first position if all rows are the same run p, p+1, p+2, ...; else, or if unknown, None.

    Runs made by `run` are known. Other positions have to be read, which is done only where it
    costs no synchronisation: on the CPU, and not while tracing.
    """
    if torch.compiler.is_compiling() or positions.is_floating_point():
        return None
    if positions.numel() == 0 or type(positions) is not Tensor:
        return None
    known = _marked(positions)
    if known is not None or positions.device.type != "cpu":
        return known
    start = int(positions.reshape(-1)[0])
    length = positions.shape[-1]
    run = torch.arange(start, start + length)
    return start if bool((positions == run).all()) else None


def _mark(positions: Tensor, start: int) -> Tensor:
    """Mark the tensor as a run, until somebody writes into it."""
    if not (torch.compiler.is_compiling() or positions.is_inference()):
        positions._run = start, positions._version  # type: ignore[attr-defined]
    return positions


def _marked(positions: Tensor) -> int | None:
    if torch.compiler.is_compiling():
        return None
    start, version = getattr(positions, "_run", (None, None))
    return start if start is not None and version == positions._version else None


def positions_from_mask(
    valid: Shaped[Tensor, "*batch len"], *, start: int = 0
) -> Int[Tensor, "*batch len"]:
    """Positions that count real tokens, wherever the padding is.

    Args:
        valid: (batch, len), True or nonzero for real tokens: Hugging Face's attention_mask.
        start: position of the first real token. RoBERTa and fairseq use padding_idx + 1.

    Shapes: (batch, len) -> the same, int64. Padding gets start - 1, or 0 where that is negative.
    """
    valid = valid.bool()
    counted = valid.long().cumsum(-1) + (start - 1)
    return counted.masked_fill(~valid, max(start - 1, 0))


def positions_from_documents(
    documents: Shaped[Tensor, "*batch len"],
) -> Int[Tensor, "*batch len"]:
    """Positions that begin at 0 with every document of a packed sequence.

    Args:
        documents: ids (len) or (batch, len); a document is a run of equal ids.

    Shapes: like `documents`, int64.
    """
    index = torch.arange(documents.shape[-1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return index - (index * begins).cummax(-1).values


def documents_from_positions(
    positions: Int[Tensor, "*batch len"],
) -> Int[Tensor, "*batch len"]:
    """Document ids 0, 1, ... of a packed sequence: a new one where a position is not one more than
    the last.

    Shapes: integer positions (len) or (batch, len) -> the same.
    """
    begins = torch.zeros_like(positions)
    begins[..., 1:] = positions[..., 1:] != positions[..., :-1] + 1
    return begins.cumsum(-1)


def grid(
    height: int, width: int, device: torch.device | None = None
) -> Int[Tensor, "{height*width} 2"]:
    """(row, column) of each cell, row by row: (height * width, 2), for encodings with two axes."""
    cells = torch.arange(height * width, device=device)
    return torch.stack([cells // width, cells % width], dim=-1)


def distances(
    q_positions: Real[Tensor, "*#batch q_len"], kv_positions: Real[Tensor, "*#batch kv_len"]
) -> Real[Tensor, "*batch q_len kv_len"]:
    """(..., q_len, kv_len): q_position - kv_position, positive for the past."""
    return q_positions[..., :, None] - kv_positions[..., None, :]
