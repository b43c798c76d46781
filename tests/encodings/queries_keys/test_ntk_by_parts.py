"""NTK-by-parts against the paper, pair by pair: no released code has its ramp."""

import pytest

from posenc.encodings.queries_keys.rope import RoPE
from posenc.frequencies.scalings.registry import NTKByParts
from tests.references import ntk_by_parts as paper


@pytest.mark.reference("ntk_by_parts")
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("base", [100.0, 10000.0, 500000.0])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 32.0), (2.5, 4.0)])
def test_frequencies_are_the_papers(head_dim: int, base: float, alpha: float, beta: float):
    rope = RoPE(head_dim, base, interleaved=False, scaling=NTKByParts(8.0, 512, alpha, beta))
    found, factor = rope.frequencies()
    want = paper.frequencies(head_dim, base, 8.0, 512, alpha, beta)
    assert [float(f) for f in found] == pytest.approx(want, rel=1e-12)
    assert factor == 1
