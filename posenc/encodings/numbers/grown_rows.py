"""Compute which rows of a learned table make up a longer one, in Python for all frameworks."""


def source_rows(
    num_rows: int, num_positions: int, align_corners: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Return (lower, upper, fraction), each num_positions long, that lengthen a table of num_rows
    by linear interpolation: new row p is (1 - fraction[p]) * table[lower[p]] + fraction[p] *
    table[upper[p]].

    align_corners=True: row p reads p * (old - 1) / (new - 1); False: (p + 0.5) * old / new - 0.5,
    within the table. Computed in whole numbers until the last division.
    """
    if align_corners:
        steps = max(num_positions - 1, 1)
        places = [divmod(p * (num_rows - 1), steps) for p in range(num_positions)]
    else:
        steps = 2 * num_positions
        places = [
            divmod(max((2 * p + 1) * num_rows - num_positions, 0), steps)
            for p in range(num_positions)
        ]
    lower = tuple(row for row, _ in places)
    upper = tuple(min(row + 1, num_rows - 1) for row in lower)
    return lower, upper, tuple(rest / steps for _, rest in places)


def check_hierarchical(num_rows: int, num_positions: int, alpha: float) -> None:
    """Raise ValueError unless two digits in base `num_rows` give each position a row of its own."""
    if not 0 < alpha < 1 or alpha == 0.5:
        raise ValueError(f"hierarchical: alpha must be in (0, 1) and not 0.5, got {alpha}.")
    if num_positions > num_rows**2:
        raise ValueError(
            f"hierarchical: {num_rows} rows give at most {num_rows**2} positions, "
            f"got num_positions={num_positions}."
        )
