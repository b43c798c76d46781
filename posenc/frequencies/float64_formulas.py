"""Compute the frequencies of the RoPE variants as plain floats, one formula each.

Frequencies are in radians per position, fastest pair first. Runtimes compute in float32, so float64
is exact enough for the tolerance of 1e-6.
"""

import math
from collections.abc import Sequence

LARGEST_DIM = 1 << 14
"""Maximum number of rotated channels of a head for which frequencies are computed; the largest
heads in use have 512."""


def unscaled_frequencies(dim: int, theta: float) -> tuple[float, ...]:
    """Return the frequencies of RoPE without scaling: theta^(-2i/dim) for every i with 2i < dim.

    For an odd dim this is one frequency more than there are pairs, as in the runtimes.

    Raises: ValueError for a dim below 0 or above LARGEST_DIM.

    >>> unscaled_frequencies(4, 10000.0)
    (1.0, 0.01)
    """
    if not 0 <= dim <= LARGEST_DIM:
        raise ValueError(f"{dim} rotated dims, expected at most {LARGEST_DIM}")
    return tuple(theta ** (-2 * i / dim) for i in range((dim + 1) // 2))


def divide_each(inv_freq: Sequence[float], factors: Sequence[float]) -> tuple[float, ...]:
    """Return the frequencies, each divided by the factor at its index, as in longrope and llama3.
    Raise ValueError if there are not as many factors as frequencies."""
    return tuple(f / factor for f, factor in zip(inv_freq, factors, strict=True))


def linear_frequencies(inv_freq: Sequence[float], factor: float) -> tuple[float, ...]:
    """Return the frequencies, all divided by one factor: position interpolation."""
    return tuple(f / factor for f in inv_freq)


def ntk_theta(theta: float, factor: float, dim: int) -> float:
    """Return the base that divides the slowest frequency by factor: theta factor^(dim/(dim-2))."""
    return theta * factor ** (dim / (dim - 2))


def dynamic_theta(
    theta: float, factor: float, length: float, trained_length: float, dim: int
) -> float:
    """Return the base of dynamic NTK: theta up to the length `trained_length`, and a larger one
    beyond it. Both lengths are in tokens."""
    current_length = max(length, trained_length)
    # The stretch is 1 at the trained length, and grows by `factor` with each trained length more.
    stretch = factor * current_length / trained_length - (factor - 1)
    return ntk_theta(theta, stretch, dim)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return the number by which YaRN multiplies cos and sin: 0.1 mscale ln(factor) + 1, or 1 for a
    factor of at most 1. Logits are multiplied by its square."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_frequencies(
    dim: int,
    theta: float,
    factor: float,
    original_length: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    extrapolation_factor: float = 1.0,
) -> tuple[float, ...]:
    """Return YaRN's frequencies. A pair that makes more than beta_fast turns within the original
    length, in tokens, keeps its frequency. That of a pair with less than beta_slow turns is divided
    by `factor`. Between the two there is a linear ramp over the index of the pair.

    truncate: round the ends of the ramp outward to whole pairs.
    extrapolation_factor: the fraction of its own frequency that a fast pair keeps, from 0 to 1. The
    rest of it is divided by `factor`.

    Raises: ValueError for an odd dim, at which the runtimes fail too: they have a frequency more
    than the ramp has entries.
    """
    if dim % 2:
        raise ValueError(f"yarn's ramp needs pairs, and {dim} channels rotate, an odd number")

    def index_of_pair_with(turns: float) -> float:
        """Return the index of a pair that would make `turns` turns in `original_length` tokens, as
        a real number."""
        return dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = index_of_pair_with(beta_fast)
    high = index_of_pair_with(beta_slow)
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    width = high - low or 0.001  # as the authors' code does, against a division by 0
    scaled = []
    for i, frequency in zip(range(dim // 2), unscaled_frequencies(dim, theta), strict=True):
        # 0 for fast pairs, 1 for slow ones.
        ramp_value = min(max((i - low) / width, 0.0), 1.0)
        # Of a fast pair the share (1 - ramp_value) is kept, times extrapolation_factor; the rest is
        # divided.
        divided_share = 1 - (1 - ramp_value) * extrapolation_factor
        scaled.append(frequency * (1 - divided_share) + frequency / factor * divided_share)
    return tuple(scaled)


def longrope_attention_factor(ratio: float, original_length: float) -> float:
    """Return the number by which longrope multiplies cos and sin: sqrt(1 + ln(ratio) /
    ln(original_length)), or 1 for a ratio of at most 1.

    ratio: the longest length divided by the original one. original_length: in tokens, above 1.
    """
    return math.sqrt(1 + math.log(ratio) / math.log(original_length)) if ratio > 1 else 1.0


def llama3_divisors(
    dim: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_length: float,
) -> tuple[float, ...]:
    """Return Llama 3.1's divisor of each frequency.

    It is 1 for wavelengths below original_length / high_freq_factor tokens, `factor` for those
    above original_length / low_freq_factor, and between 1 and `factor` for the others.
    """

    def divisor(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength > original_length / low_freq_factor:
            return factor
        if wavelength < original_length / high_freq_factor:
            return 1.0
        # Between the two the frequency is a mean of f / factor and f, weighted by `kept_share`:
        # (1 - kept_share) f / factor + kept_share f = f / divisor.
        turns = original_length / wavelength
        kept_share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        return 1 / ((1 - kept_share) / factor + kept_share)

    return tuple(divisor(frequency) for frequency in unscaled_frequencies(dim, theta))


def proportional_frequencies(
    head_dim: int, theta: float, rotated_fraction: float, factor: float = 1.0
) -> tuple[float, ...]:
    """Return head_dim / 2 frequencies: the fastest int(rotated_fraction * head_dim / 2) of RoPE's,
    each divided by `factor`, and then 0 for the other pairs, which do not rotate.

    >>> proportional_frequencies(4, 10000.0, rotated_fraction=0.5)
    (1.0, 0.0)
    """
    num_rotated = int(rotated_fraction * head_dim // 2)
    kept_frequencies = unscaled_frequencies(head_dim, theta)[:num_rotated]
    return tuple(f / factor for f in kept_frequencies) + (0.0,) * (head_dim // 2 - num_rotated)
