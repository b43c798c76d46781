"""YaRN's extrapolation_factor, which no golden case sets."""

import math

import pytest

import posenc
from posenc.frequencies.scalings.registry import YaRN


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_yarns_extrapolation_factor_is_how_much_of_fast_pairs_is_kept(share):
    """As in the authors' code, in floats and by hand."""
    shape = posenc.ModelShape(64, 1, train_length=4096)
    rope = posenc.create("yarn", shape, factor=40.0, extrapolation_factor=share)
    turning = [4096 / (2 * math.pi * turns) for turns in (32, 1)]
    ends = [64 * math.log(length) / (2 * math.log(10000)) for length in turning]
    low, high = math.floor(ends[0]), math.ceil(ends[1])
    for t, found in enumerate(rope.frequencies().inv_freq):
        plain = 10000 ** (-t / 32)
        kept = (1 - min(max((t - low) / (high - low), 0), 1)) * share
        assert float(found) == pytest.approx(plain / 40 * (1 - kept) + plain * kept, rel=1e-12)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_yarn_keeps_between_nothing_and_all(share):
    with pytest.raises(ValueError, match=r"extrapolation_factor must be (between|a finite)"):
        YaRN(40, 4096, extrapolation_factor=share)
