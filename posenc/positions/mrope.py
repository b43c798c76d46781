"""Positions of M-RoPE: of texts, images and videos that follow each other."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.arguments import FARTHEST_POSITION, check_count, explain_misfits


@explain_misfits
def mrope_positions(
    segments: Sequence[int | tuple[int, int, int]],
    start: int = 0,
    device: torch.device | None = None,
) -> Int[Tensor, "len 3"]:
    """Return the positions (len, 3) of a sequence of texts and of grids, which are images or
    videos.

    segments: the length of each text, and (time, height, width) of each grid. start: the first
    position. Each later segment starts at the largest component so far plus one.

    >>> posenc.mrope_positions([2, (1, 2, 2), 1]).T
    tensor([[0, 1, 2, 2, 2, 2, 4],
            [0, 1, 2, 2, 3, 3, 4],
            [0, 1, 2, 3, 2, 3, 4]])
    """
    caller = "mrope_positions"
    check_count(caller, "start", start, 1 - FARTHEST_POSITION, FARTHEST_POSITION - 1)
    if not isinstance(segments, Sequence) or isinstance(segments, str | bytes) or not segments:
        raise TypeError(
            f"{caller}: segments must be a list of lengths of texts and (time, height, width) of "
            f"grids, got {segments!r}."
        )
    for segment in segments:
        _check_segment(caller, segment)
    positions_of_segments = []
    for segment in segments:
        if isinstance(segment, tuple | list):
            segment_positions = torch.cartesian_prod(
                *(torch.arange(n, device=device) for n in segment)
            )
            extent = max(segment)
        else:
            segment_positions = torch.arange(segment, device=device)[:, None].expand(-1, 3)
            extent = segment
        positions_of_segments.append(segment_positions + start)
        start += extent
    return torch.cat(positions_of_segments)


def _check_segment(caller: str, segment: Any) -> None:
    """Raise TypeError or ValueError unless a segment is the length of a text, or (time, height,
    width) of a grid."""
    if not isinstance(segment, tuple | list):
        check_count(caller, "a size in segments", segment, 0)
        return
    if len(segment) != 3:
        raise ValueError(
            f"{caller}: a grid among segments must be (time, height, width), got {segment!r}."
        )
    for size in segment:
        check_count(caller, "a size in segments", size, 1)
