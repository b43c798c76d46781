"""The two layouts of rotary dimensions: pair t is (2t, 2t+1) if interleaved, (t, t + width/2) if
half-split."""


def order(width: int, *, to_interleaved: bool) -> list[int]:
    """Return the permutation new[i] = old[order[i]] of the `width` rotary dimensions of one head.

    >>> order(6, to_interleaved=False)
    [0, 2, 4, 1, 3, 5]
    """
    half = width // 2
    if to_interleaved:
        return [i for t in range(half) for i in (t, t + half)]
    return [*range(0, width, 2), *range(1, width, 2)]
