"""Compute slopes, buckets and rows of tables for the encodings of both PyTorch and Keras.

It needs only Python, so that Keras needs no torch.
"""

from functools import lru_cache


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """Return ALiBi's slopes for any number of heads, as the authors' code computes them.

    With P the largest power of two up to num_heads: 2^(-bias_max h / P) for h = 1 .. P. Further
    heads get every second slope of 2P heads. alibi_slopes(3) -> (0.0625, 0.00390625, 0.25).
    """
    largest_power_of_two = 1 << (num_heads.bit_length() - 1)
    first_slopes = [
        2 ** (-bias_max * h / largest_power_of_two) for h in range(1, largest_power_of_two + 1)
    ]
    further_slopes = [
        2 ** (-bias_max * h / (2 * largest_power_of_two))
        for h in range(1, 2 * largest_power_of_two + 1, 2)
    ]
    return tuple(first_slopes + further_slopes[: num_heads - largest_power_of_two])


def alibi_slopes_and_sides(
    num_heads: int, left_right: bool, bias_max: float = 8.0
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return two tuples with a number for each head: ALiBi's slope, and the side that the head
    sees. If `left_right`, the side is 1 (the past) for the first half of the heads and -1 (the
    future) for the others; otherwise it has no meaning.

    alibi_slopes_and_sides(4, True) -> ((0.0625, 0.00390625, 0.0625, 0.00390625), (1.0, 1.0, -1.0,
    -1.0))
    """
    num_parts = 2 if left_right else 1  # each half has the slopes of num_heads / 2 heads
    sides = [1.0] * (num_heads // 2) + [-1.0] * (num_heads - num_heads // 2)
    return alibi_slopes(num_heads // num_parts, bias_max) * num_parts, tuple(sides)


def bucket_edges(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Return the first distance of each of the buckets 1, 2, ..., num_buckets - 1. The first half
    of the buckets has one distance each, the others grow logarithmically.

    Bucket b >= e = num_buckets / 2 starts at the least x with ln(x/e) / ln(max_distance/e) *
    (num_buckets - e) >= b - e. Computed in whole numbers, so that distances on a boundary are
    exact.
    """
    num_exact = num_buckets // 2
    num_steps = num_buckets - num_exact
    edges = list(range(1, num_exact + 1))
    edge = num_exact
    for step in range(1, num_steps):
        while edge**num_steps * num_exact**step < max_distance**step * num_exact**num_steps:
            edge += 1
        edges.append(edge)
    return tuple(edges)


def t5_bucket_edges(
    num_buckets: int, max_distance: int, bidirectional: bool, name: str
) -> tuple[int, ...]:
    """Return the first distance of each of T5's buckets 1, 2, ... for one direction, see
    bucket_edges. Raise ValueError for sizes that do not fit; its message begins with `name`."""
    buckets_per_side = num_buckets // 2 if bidirectional else num_buckets
    is_odd = bidirectional and num_buckets % 2
    if buckets_per_side < 2 or is_odd or max_distance <= buckets_per_side // 2:
        raise ValueError(
            f"{name}: num_buckets must be {'even and at least 4' if bidirectional else '>= 2'} "
            f"and max_distance above {max(buckets_per_side // 2, 1)}, "
            f"got num_buckets={num_buckets}, max_distance={max_distance}."
        )
    return bucket_edges(buckets_per_side, max_distance)


@lru_cache(maxsize=16)
def deberta_bucket_ends(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Return the largest distance in each of DeBERTa's buckets m to 2m - 2, with m = num_buckets /
    2.

    Distance x > m is in bucket m + ceil(ln(x/m) / ln((max_distance-1)/m) * (m-1)), at most the
    last. Computed in whole numbers, so that distances on a boundary are exact.
    """
    middle = num_buckets // 2
    furthest = max_distance - 1
    num_steps = middle - 1
    ends = [middle]
    end = middle
    for step in range(1, num_steps):
        while (end + 1) ** num_steps * middle**step <= middle**num_steps * furthest**step:
            end += 1
        ends.append(end)
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
        denominator = max(num_positions - 1, 1)
        rows_and_remainders = [
            divmod(p * (num_rows - 1), denominator) for p in range(num_positions)
        ]
    else:
        denominator = 2 * num_positions
        rows_and_remainders = [
            divmod(max((2 * p + 1) * num_rows - num_positions, 0), denominator)
            for p in range(num_positions)
        ]
    lower = tuple(row for row, _ in rows_and_remainders)
    upper = tuple(min(row + 1, num_rows - 1) for row in lower)
    return lower, upper, tuple(remainder / denominator for _, remainder in rows_and_remainders)


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
