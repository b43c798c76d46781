"""NTK-by-parts from definition 2 of Peng et al. 2023, arXiv:2309.00071, one pair at a time."""

import math


def frequencies(dim, base, factor, trained, alpha, beta):
    result = []
    for t in range(dim // 2):
        theta = base ** (-2 * t / dim)
        wavelength = 2 * math.pi / theta
        turns = trained / wavelength
        if turns < alpha:
            gamma = 0.0
        elif turns > beta:
            gamma = 1.0
        else:
            gamma = (turns - alpha) / (beta - alpha)
        result.append((1 - gamma) * theta / factor + gamma * theta)
    return result
