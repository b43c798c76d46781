"""Dai et al. 2019, section 3.3, pair by pair in float64: logits before the mask."""

import math

import numpy as np


def logits(q, k, u, v, weight, q_positions, kv_positions, clamp_len=None):
    """q, k (heads, len, d), u, v (heads, d), weight (heads * d, width) -> (heads, q_len,
    kv_len)."""
    heads, q_len, d = q.shape
    width = weight.shape[1]
    out = np.zeros((heads, q_len, k.shape[1]))
    for i in range(q_len):
        for j in range(k.shape[1]):
            gap = float(q_positions[i] - kv_positions[j])
            if clamp_len is not None:
                gap = max(-clamp_len, min(clamp_len, gap))
            angle = [gap / 10000 ** (2 * t / width) for t in range(width // 2)]
            r = np.array([math.sin(a) for a in angle] + [math.cos(a) for a in angle])
            projected = (weight @ r).reshape(heads, d)
            for h in range(heads):
                content = (q[h, i] + u[h]) @ k[h, j]
                out[h, i, j] = (content + (q[h, i] + v[h]) @ projected[h]) / math.sqrt(d)
    return out
