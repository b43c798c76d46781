"""He et al. 2020, equation 4, pair by pair in float64; the released code's index or the paper's."""

import math

import numpy as np


def bucket(x: int, num_buckets: int | None, max_distance: int) -> int:
    if num_buckets is None:
        return x
    x = max(-(max_distance - 1), min(max_distance - 1, x))
    middle = num_buckets // 2
    if abs(x) <= middle:
        return x
    share = math.log(abs(x) / middle) / math.log((max_distance - 1) / middle)
    return int(math.copysign(math.ceil(round(share * (middle - 1), 9)) + middle, x))


def logits(q, k, keys, queries, positions, num_buckets, max_distance, paper_p2c=False):
    """q, k (heads, len, d); keys, queries (heads, 2 span, d): the projected tables."""
    heads, length, d = q.shape
    span = keys.shape[1] // 2

    def row(gap: int) -> int:
        return max(0, min(2 * span - 1, bucket(int(gap), num_buckets, max_distance) + span))

    out = np.zeros((heads, length, length))
    for h in range(heads):
        for i in range(length):
            for j in range(length):
                gap = positions[i] - positions[j]
                last = row(-gap) if paper_p2c else row(gap)
                terms = q[h, i] @ k[h, j] + q[h, i] @ keys[h, row(gap)] + k[h, j] @ queries[h, last]
                out[h, i, j] = terms / math.sqrt(3 * d)
    return out
