"""Leads of a study's rows in models of several sizes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from posenc.compare.results import Study, with_labels
from posenc.compare.rows import rows_of


@dataclass(frozen=True)
class SizeLosses:
    """Mean losses over seeds in models of one size, by row.

    parameters: of the smallest model, an encoding's own included.
    near, far: at the training length, and of far bytes in the longest windows.
    """

    parameters: int
    near: Mapping[str, float]
    far: Mapping[str, float]


def losses_of_size(study: Study) -> SizeLosses:
    """Return the mean losses of a study's rows, with the labels of the user."""
    rows = rows_of(with_labels(study))
    near: dict[str, list[float]] = {}
    far: dict[str, list[float]] = {}
    for row in rows:
        if row.near.bits_per_byte is not None:
            near.setdefault(row.name, []).append(row.near.bits_per_byte)
        score = row.far.get(max(row.trial.test_lengths))
        if score is not None and score.far is not None:
            far.setdefault(row.name, []).append(score.far)
    return SizeLosses(
        min((row.parameters for row in rows), default=0),
        {name: fmean(bits) for name, bits in near.items()},
        {name: fmean(bits) for name, bits in far.items()},
    )


def leads_over_size(sizes: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, list[float]]:
    """Return by how many bits each row is ahead of the best other row, at each size; negative where
    it is behind. Rows that a size lacks are left out.

    sizes: parameters and losses by row, at least two rows.

    >>> leads_over_size([(1000, {"a": 2.0, "b": 2.5}), (2000, {"a": 2.0, "b": 1.75})])
    {'a': [0.5, -0.25], 'b': [-0.5, 0.25]}
    """
    names = [name for name in sizes[0][1] if all(name in losses for _, losses in sizes)]
    if len(names) < 2:
        return {}
    leads: dict[str, list[float]] = {}
    for name in names:
        leads[name] = [
            min(losses[other] for other in names if other != name) - losses[name]
            for _, losses in sizes
        ]
    return leads


def slope_per_doubling(parameters: Sequence[int], leads: Sequence[float]) -> float | None:
    """Return the change of a lead with each doubling of the parameters, by least squares; None for
    fewer than two sizes that differ.

    >>> slope_per_doubling([1000, 2000, 4000], [0.3, 0.2, 0.1])
    -0.1
    """
    x = [math.log2(count) for count in parameters]
    middle = fmean(x)
    spread = sum((each - middle) ** 2 for each in x)
    if not spread > 0:
        return None
    slope = sum((each - middle) * lead for each, lead in zip(x, leads, strict=True)) / spread
    return round(slope, 10)
