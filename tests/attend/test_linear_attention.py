"""Linear attention equals the sums of RoFormer's equation, written out."""

import math

import pytest
import torch

from posenc import RoPE
from posenc.attend.linear_attention import elu_feature_map, linear_attention


@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention_is_equation_19_of_roformer(causal: bool):
    torch.manual_seed(0)
    n, d = 11, 6
    q, k = torch.randn(2, 1, 2, n, d, dtype=torch.float64)
    v = torch.randn(1, 2, n, 3, dtype=torch.float64)
    positions = torch.arange(5, 5 + n)
    got = linear_attention(
        q, k, v, RoPE(d, interleaved=True), positions, causal=causal, chunk_size=4
    )

    def rotated(x: torch.Tensor, p: int) -> torch.Tensor:
        out = []
        for t in range(d // 2):
            c, s = (f(p * 10000.0 ** (-2 * t / d)) for f in (math.cos, math.sin))
            a, b = x[2 * t], x[2 * t + 1]
            out += [a * c - b * s, a * s + b * c]
        return torch.stack(out)

    for head in range(2):
        fq, fk = elu_feature_map(q[0, head]), elu_feature_map(k[0, head])
        for i in range(n):
            above, below = torch.zeros(3, dtype=torch.float64), 0.0
            for j in range(i + 1 if causal else n):
                at_i, at_j = int(positions[i]), int(positions[j])
                above += rotated(fq[i], at_i) @ rotated(fk[j], at_j) * v[0, head, j]
                below += float(fq[i] @ fk[j])
            torch.testing.assert_close(got[0, head, i], above / below, rtol=1e-9, atol=1e-12)


def test_linear_attention_refuses_grouped_heads():
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"\(1, 4, 3, 8\), \(1, 2, 3, 8\)"):
        linear_attention(q, k, k, RoPE(8, interleaved=True), torch.arange(3))
