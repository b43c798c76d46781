"""Golovneva et al. 2024, section 4, pair by pair in float64: the positional term alone."""

import math

import numpy as np


def term(q, k, e, visible, divide):
    """q (len, d), k (kv_len, d), e (positions, d) -> (len, kv_len)."""
    d = q.shape[-1]
    out = np.zeros((len(q), len(k)))
    for i in range(len(q)):
        count = 0.0
        for j in reversed(range(len(k))):
            if visible[i, j]:
                count += 1 / (1 + math.exp(-(q[i] @ k[j]) / math.sqrt(d)))
            p = min(count, len(e) - 1)
            below = math.floor(p)
            above = min(below + 1, len(e) - 1)
            vector = (1 - (p - below)) * e[below] + (p - below) * e[above]
            out[i, j] = q[i] @ vector / (math.sqrt(d) if divide else 1)
    return out
