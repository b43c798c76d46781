"""Measure how exact an encoding's angles are, by position, against 50-digit arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext

import torch
from torch import Tensor

from posenc.encodings import DECIMAL_CONTEXT, TWO_PI, ExactFrequencies, PositionEncoding
from posenc.testing.harness import encoding_of_first_layer

LARGEST_ANGLE_ERROR = 1e-3
"""Radians; a smaller error of an angle counts as exact."""
LAST_TESTED_POSITION = 2**31
"""Last position tested of an encoding that has no limit; chosen, not derived."""
NUM_NEIGHBOURS = 64
"""Pairs of neighbouring positions compared after each power of two; chosen, not derived."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """Up to which position angles are exact, and where neighbouring positions collide.

    An angle is exact within LARGEST_ANGLE_ERROR of 50-digit arithmetic.
    plain: by dtype, the largest tested position up to which all angles are exact, if position times
        inverse frequency is computed in that dtype, as many codebases do.
    as_used: the same position for the angles as this encoding computes them, below its limit.
    starts: positions, powers of two.
    apart: for each way to compute angles, a fraction for each of `starts`: of the neighbouring
        positions just after the start, those that differ in at least one angle. The others collide.
    """

    plain: dict[str, int]
    as_used: int
    starts: list[int]
    apart: dict[str, list[float]]


def exact_frequencies_of(encoding: PositionEncoding) -> ExactFrequencies | None:
    """Return the frequencies by which the encoding of layer 0 rotates; None if it has none of its
    own."""
    for module in encoding_of_first_layer(encoding).modules():
        frequencies = getattr(module, "exact_frequencies", None)
        if isinstance(frequencies, ExactFrequencies):
            return frequencies
    return None


def measure(encoding: PositionEncoding) -> Precision | None:
    """Return up to where the encoding's angles are exact, and where positions collide; None for an
    encoding without angles."""
    frequencies = exact_frequencies_of(encoding)
    if frequencies is None:
        return None
    limit = (
        LAST_TESTED_POSITION
        if encoding.claims.max_positions is None
        else encoding.claims.max_positions - 1
    )
    positions = positions_to_test(limit)
    true_angles = exact_angles(frequencies.inv_freq, positions)
    cos, sin = _cos_sin(frequencies, positions)
    angles_in_use = torch.atan2(sin, cos).double()
    last_exact_plain = {
        name: _last_exact_position(
            positions,
            angle_between(
                _plain_angles(frequencies.inv_freq, positions, dtype).double(), true_angles
            ),
        )
        for name, dtype in DTYPES.items()
    }
    starts = [2**i for i in range(limit.bit_length()) if 2**i + NUM_NEIGHBOURS <= limit]
    neighbourhoods = [torch.arange(start, start + NUM_NEIGHBOURS + 1) for start in starts]
    distinct_fractions = {
        "as used": [
            _fraction_of_distinct_neighbours(torch.cat(_cos_sin(frequencies, p), -1))
            for p in neighbourhoods
        ]
    }
    for name, dtype in DTYPES.items():
        distinct_fractions[f"plain {name}"] = [
            _fraction_of_distinct_neighbours(_plain_angles(frequencies.inv_freq, p, dtype))
            for p in neighbourhoods
        ]
    return Precision(
        last_exact_plain,
        _last_exact_position(positions, angle_between(angles_in_use, true_angles)),
        starts,
        distinct_fractions,
    )


def _cos_sin(frequencies: ExactFrequencies, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (positions, pairs), as the encoding computes them. A position of several
    components gets the same number in each."""
    positions_by_axis = positions[:, None].expand(-1, 1 + max(frequencies.axes or (0,)))
    return frequencies.cos_sin(positions_by_axis if frequencies.axes else positions)


def _fraction_of_distinct_neighbours(rows: Tensor) -> float:
    """Return the fraction of neighbouring rows that differ in any column."""
    return (rows[1:] != rows[:-1]).any(-1).double().mean().item()


def positions_to_test(limit: int) -> Tensor:
    """Return increasing positions to test, about four to each doubling, up to `limit`.

    They are odd, except perhaps `limit`: every float format represents powers of two exactly.
    """
    positions_tested = {min(limit, int(2 ** (i / 4)) | 1) for i in range(4 * limit.bit_length())}
    return torch.tensor(sorted(positions_tested), dtype=torch.int64)


def exact_angles(inv_freq: Sequence[Decimal | float], positions: Tensor) -> Tensor:
    """Return position * inv_freq modulo a turn, (positions, pairs), from 50-digit decimals."""
    with localcontext(DECIMAL_CONTEXT):
        angle_rows = [
            [float(Decimal(p) * Decimal(f) % TWO_PI) for f in inv_freq] for p in positions.tolist()
        ]
    return torch.tensor(angle_rows, dtype=torch.float64)


def _plain_angles(
    inv_freq: Sequence[Decimal | float], positions: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return position * inv_freq in radians, (positions, pairs), with both factors and the product
    in `dtype`."""
    frequencies = torch.tensor([float(f) for f in inv_freq], dtype=torch.float64).to(dtype)
    return positions.to(dtype)[:, None] * frequencies


def angle_between(a: Tensor, b: Tensor) -> Tensor:
    """Return the angle between two directions, which are angles themselves: 0 to pi, in radians."""
    full_turn = float(TWO_PI)
    gap = torch.remainder(a - b, full_turn)
    return torch.minimum(gap, full_turn - gap)


def _last_exact_position(positions: Tensor, errors: Tensor) -> int:
    """Return the last position before the first with an error of LARGEST_ANGLE_ERROR or more; 0 if
    the first has one.

    errors: radians, (positions, pairs).
    """
    num_exact = int((errors.amax(-1) < LARGEST_ANGLE_ERROR).cumprod(0).sum())
    return int(positions[num_exact - 1]) if num_exact else 0
