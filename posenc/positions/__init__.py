"""Token positions: make them from masks, documents and grids, and compare them.

A Python range is accepted wherever positions are; it is known to be consecutive.

>>> posenc.positions.positions_from_mask(torch.tensor([[0, 0, 1, 1, 1]]))
tensor([[0, 0, 0, 1, 2]])
>>> posenc.positions.positions_from_documents(torch.tensor([7, 7, 7, 8, 8]))
tensor([0, 1, 2, 0, 1])
"""

from posenc.positions.grids import grid, normalized_grid
from posenc.positions.tokens import (
    distances,
    documents_from_positions,
    positions_from_documents,
    positions_from_mask,
)

__all__ = [
    "distances",
    "documents_from_positions",
    "grid",
    "normalized_grid",
    "positions_from_documents",
    "positions_from_mask",
]


def __dir__() -> list[str]:
    return __all__
