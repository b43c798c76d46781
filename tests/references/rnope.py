"""RoPE or no position, seen through a window, a chunk or not at all, pair by pair in float64."""

import cmath
import math

import numpy as np


def attend(q, k, v, positions, *, rotates, window=None, chunk=None, floor_scale=None, base=10000.0):
    """Causal attention of one head, (len, d); pairs are (2t, 2t+1)."""
    length, d = q.shape

    def turned(x, position):
        if not rotates:
            return x
        out = np.array(x)
        for t in range(d // 2):
            z = complex(x[2 * t], x[2 * t + 1])
            z *= cmath.exp(1j * position * base ** (-2 * t / d))
            out[2 * t], out[2 * t + 1] = z.real, z.imag
        return out

    result = np.zeros_like(v)
    for i in range(length):
        p = int(positions[i])
        sharp = 1.0
        if floor_scale is not None:
            sharp = 1 + 0.1 * math.log(1 + (p + 1) // floor_scale)
        weights = {}
        for j in range(length):
            gap = p - int(positions[j])
            inside = window is None or gap < window
            together = chunk is None or p // chunk == int(positions[j]) // chunk
            if gap >= 0 and inside and together:
                score = sharp * turned(q[i], p) @ turned(k[j], int(positions[j]))
                weights[j] = math.exp(score / math.sqrt(d))
        for j, weight in weights.items():
            result[i] += weight / sum(weights.values()) * v[j]
    return result
