"""ALiBi for encoders whose heads look one way (ofirpress/attention_with_linear_biases, issue 5), in
float64."""

import math


def bias(num_heads: int, q_positions: list[int], kv_positions: list[int]):
    """bias[h][i][j] for a power of two heads: half of them see the past, half the future."""
    half = num_heads // 2
    out = []
    for head in range(num_heads):
        slope = 2.0 ** (-8.0 * (head % half + 1) / half)
        rows = []
        for i in q_positions:
            row = []
            for j in kv_positions:
                seen = j <= i if head < half else j >= i
                row.append(-slope * abs(i - j) if seen else -math.inf)
            rows.append(row)
        out.append(rows)
    return out
