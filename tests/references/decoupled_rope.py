"""DeepSeek-V2, equations 14-19: scores of content and rotary parts, pair by pair in float64."""

import cmath
import math

import numpy as np


def scores(q_content, q_rotary, k_content, k_rotary, q_positions, kv_positions, base=10000.0):
    """(heads, len, c) and (heads, len, r) for q; (heads, len, c) and one (len, r) for k; pairs are
    (2t, 2t+1)."""
    heads, q_len, width = q_content.shape
    r = q_rotary.shape[-1]

    def turned(x, position):
        return [
            complex(x[2 * t], x[2 * t + 1]) * cmath.exp(1j * position * base ** (-2 * t / r))
            for t in range(r // 2)
        ]

    out = np.zeros((heads, q_len, k_content.shape[1]))
    for h in range(heads):
        for i in range(q_len):
            for j in range(k_content.shape[1]):
                a = turned(q_rotary[h, i], float(q_positions[i]))
                b = turned(k_rotary[j], float(kv_positions[j]))
                rotary = sum((x * y.conjugate()).real for x, y in zip(a, b, strict=True))
                out[h, i, j] = q_content[h, i] @ k_content[h, j] + rotary
    return out / math.sqrt(width + r)
