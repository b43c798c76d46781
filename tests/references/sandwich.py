"""Sandwich (arXiv:2212.10356) in float64: inner products of sinusoidal embeddings, one by one."""

import math


def bias(num_heads: int, dim: int, q_positions: list[int], kv_positions: list[int]):
    """bias[h][i][j]: the embeddings' inner product over the compression ratio 8 (h + 1) / heads."""

    def embedding(position: int) -> list[float]:
        row = []
        for t in range(dim // 2):
            angle = position / 10000 ** (2 * t / dim)
            row += [math.sin(angle), math.cos(angle)]
        return row

    q_rows = [embedding(p) for p in q_positions]
    k_rows = [embedding(p) for p in kv_positions]
    out = []
    for head in range(1, num_heads + 1):
        ratio = head * 8 / num_heads
        out.append(
            [
                [sum(a * b for a, b in zip(q, k, strict=True)) / ratio for k in k_rows]
                for q in q_rows
            ]
        )
    return out
