"""Inkling's relative logits in float64 loops."""

import math


def logits(scores, states, profiles, q_positions, kv_positions, log_scaling=None):
    """scores[h][i][j] with the bias added; states[h][i][r], profiles[r][distance]."""
    out = []
    for head, rows in enumerate(scores):
        new_rows = []
        for i, row in enumerate(rows):
            tau = 1.0
            if log_scaling is not None:
                start, alpha = log_scaling
                tau += alpha * math.log(max(1.0, (q_positions[i] + 1) / start))
            new_row = []
            for j, score in enumerate(row):
                distance = q_positions[i] - kv_positions[j]
                extra = 0.0
                if 0 <= distance < len(profiles[0]):
                    for r, share in enumerate(states[head][i]):
                        extra += share * profiles[r][distance]
                new_row.append(tau * (score + extra))
            new_rows.append(new_row)
        out.append(new_rows)
    return out
