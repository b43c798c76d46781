"""Causal softmax attention without positions, pair by pair in float64; queries may be sharpened."""

import math

import numpy as np


def log_n(position: int, trained: int) -> float:
    """max(1, log_trained(tokens seen)): Su 2021, kexue.fm/archives/8823."""
    return max(1.0, math.log(position + 1) / math.log(trained))


def llama4(position: int, floor_scale: int, strength: float) -> float:
    """1 + strength ln(1 + floor((position + 1) / floor_scale)): Meta 2025."""
    return 1 + strength * math.log(1 + (position + 1) // floor_scale)


def attend(q, k, v, positions, sharp=lambda position: 1.0):
    """q, k, v (heads, len, d): each query sees keys at its own position and before."""
    num_heads, length, d = q.shape
    result = np.zeros_like(v)
    for h in range(num_heads):
        for i in range(length):
            weights = {
                j: math.exp(sharp(int(positions[i])) * float(q[h, i] @ k[h, j]) / math.sqrt(d))
                for j in range(length)
                if positions[j] <= positions[i]
            }
            for j, weight in weights.items():
                result[h, i] += weight / sum(weights.values()) * v[h, j]
    return result
