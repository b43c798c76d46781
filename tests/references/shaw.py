"""Shaw et al. 2018, equations 3-5, pair by pair in float64."""

import numpy as np


def attend(q, k, v, key_table, value_table, q_positions, kv_positions, visible):
    """q (heads, q_len, d), k and v (kv_heads, kv_len, d), visible (q_len, kv_len) -> (heads,
    q_len, d)."""
    heads, q_len, width = q.shape
    group = heads // k.shape[0]
    limit = (key_table.shape[0] - 1) // 2
    out = np.zeros((heads, q_len, v.shape[-1]))
    for h in range(heads):
        for i in range(q_len):
            seen = [j for j in range(k.shape[1]) if visible[i, j]]
            rows = [
                max(-limit, min(limit, int(kv_positions[j] - q_positions[i]))) + limit for j in seen
            ]
            logits = np.array(
                [
                    q[h, i] @ (k[h // group, j] + key_table[r])
                    for j, r in zip(seen, rows, strict=True)
                ]
            ) / np.sqrt(width)
            weight = np.exp(logits - logits.max())
            weight /= weight.sum()
            for w, j, r in zip(weight, seen, rows, strict=True):
                out[h, i] += w * (v[h // group, j] + value_table[r])
    return out
