"""Compute slopes, buckets and rows of tables for the encodings of both PyTorch and Keras.

It needs only Python, so that Keras needs no torch.
"""

from functools import lru_cache


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """Return ALiBi's slopes for any number of heads, as the authors' code computes them.

    With P the largest power of two up to num_heads: 2^(-bias_max h / P) for h = 1 .. P. Further
    heads get every second slope of 2P heads. alibi_slopes(3) -> (0.0625, 0.00390625, 0.25).
    """
    power = 1 << (num_heads.bit_length() - 1)
    of_power = [2 ** (-bias_max * h / power) for h in range(1, power + 1)]
    between = [2 ** (-bias_max * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return tuple(of_power + between[: num_heads - power])


def alibi_slopes_and_sides(
    num_heads: int, left_right: bool, bias_max: float = 8.0
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return two tuples with a number for each head: ALiBi's slope, and the side that the head
    sees. If `left_right`, the side is 1 (the past) for the first half of the heads and -1 (the
    future) for the others; otherwise it has no meaning.

    alibi_slopes_and_sides(4, True) -> ((0.0625, 0.00390625, 0.0625, 0.00390625), (1.0, 1.0, -1.0,
    -1.0))
    """
    halves = 2 if left_right else 1  # each half has the slopes of num_heads / 2 heads
    sides = [1.0] * (num_heads // 2) + [-1.0] * (num_heads - num_heads // 2)
    return alibi_slopes(num_heads // halves, bias_max) * halves, tuple(sides)


def bucket_edges(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Return the first distance of each of the buckets 1, 2, ..., num_buckets - 1. The first half
    of the buckets has one distance each, the others grow logarithmically.

    Bucket b >= e = num_buckets / 2 starts at the least x with ln(x/e) / ln(max_distance/e) *
    (num_buckets - e) >= b - e. Computed in whole numbers, so that distances on a boundary are
    exact.
    """
    exact = num_buckets // 2
    steps = num_buckets - exact
    edges = list(range(1, exact + 1))
    x = exact
    for step in range(1, steps):
        while x**steps * exact**step < max_distance**step * exact**steps:
            x += 1
        edges.append(x)
    return tuple(edges)


def t5_bucket_edges(
    num_buckets: int, max_distance: int, bidirectional: bool, name: str
) -> tuple[int, ...]:
    """Return the first distance of each of T5's buckets 1, 2, ... for one direction, see
    bucket_edges. Raise ValueError for sizes that do not fit; its message begins with `name`."""
    per_side = num_buckets // 2 if bidirectional else num_buckets
    odd = bidirectional and num_buckets % 2
    if per_side < 2 or odd or max_distance <= per_side // 2:
        raise ValueError(
            f"{name}: num_buckets must be {'even and at least 4' if bidirectional else '>= 2'} "
            f"and max_distance above {max(per_side // 2, 1)}, "
            f"got num_buckets={num_buckets}, max_distance={max_distance}."
        )
    return bucket_edges(per_side, max_distance)


@lru_cache(maxsize=16)
def deberta_bucket_ends(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Return the largest distance in each of DeBERTa's buckets m to 2m - 2, with m = num_buckets /
    2.

    Distance x > m is in bucket m + ceil(ln(x/m) / ln((max_distance-1)/m) * (m-1)), at most the
    last. Computed in whole numbers, so that distances on a boundary are exact.
    """
    middle = num_buckets // 2
    furthest = max_distance - 1
    steps = middle - 1
    ends = [middle]
    x = middle
    for step in range(1, steps):
        while (x + 1) ** steps * middle**step <= middle**steps * furthest**step:
            x += 1
        ends.append(x)
    return tuple(ends)


KERPLE_MIN = 0.01
KERPLE_POWER_MAX = 2.0
"""Bounds to which the authors' code clamps KERPLE's r1 and r2: KERPLE_MIN from below, and for
form="power" KERPLE_POWER_MAX from above."""
KERPLE_INITIAL_MAX = {"log": (2.0, 1.0), "power": (1.0, 2.0)}
"""Upper ends of the uniform distributions, from 0, of the initial r1 and r2."""


def rows_to_interpolate(
    num_rows: int, num_positions: int, align_corners: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Return (lower, upper, fraction), each num_positions long, with which linear interpolation
    lengthens a table of num_rows rows: new row p is (1 - fraction[p]) * table[lower[p]] +
    fraction[p] * table[upper[p]].

    With align_corners, row p reads the table at p * (num_rows - 1) / (num_positions - 1), otherwise
    at (p + 0.5) * num_rows / num_positions - 0.5, within the table. Computed in whole numbers until
    the last division.
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
    """Raise ValueError unless a table of `num_rows` rows can be lengthened to `num_positions`
    hierarchically: at most num_rows^2 positions, and alpha in (0, 1) but not 0.5."""
    if not 0 < alpha < 1 or alpha == 0.5:
        raise ValueError(f"hierarchical: alpha must be in (0, 1) and not 0.5, got {alpha}.")
    if num_positions > num_rows**2:
        raise ValueError(
            f"hierarchical: {num_rows} rows give at most {num_rows**2} positions, "
            f"got num_positions={num_positions}."
        )
