"""Sandwich against the paper in float64 and NeMo's version."""

import pytest
import torch

from posenc.encodings.scores.sandwich import Sandwich
from tests.golden_values import Case, cases
from tests.references import sandwich


@pytest.mark.parametrize("case", cases("sandwich_nemo"))
def test_nemo_form(case: Case):
    encoding = Sandwich(case.params["heads"], dim=case.params["dim"], form="nemo")
    q, kv = case.inputs["q_positions"], case.inputs["kv_positions"]
    # NeMo puts distance 0 in the future when causal
    seen = kv[None, :] <= q[:, None] if not case.params["bidirectional"] else None
    case.assert_close("bias", encoding(q, kv), where=seen)


@pytest.mark.reference("sandwich")
@pytest.mark.parametrize("dim", [128, 6])
@pytest.mark.parametrize("num_heads", [3, 8])
def test_paper_form(dim: int, num_heads: int):
    q, kv = [0, 5, 1000, 4095], [0, 1, 777, 4095, 5000]
    want = torch.tensor(sandwich.bias(num_heads, dim, q, kv), dtype=torch.float64)
    encoding = Sandwich(num_heads, dim=dim)
    got = encoding(torch.tensor(q), torch.tensor(kv))
    assert got.dtype == torch.float32
    # entries cancel to below their summands' size: relative to the largest possible value
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-7 * num_heads * dim / 16)
    exact = encoding(torch.tensor(q).double(), torch.tensor(kv).double())
    torch.testing.assert_close(exact, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", ["paper", "nemo"])
def test_bias_of_distances_is_the_product_of_positions(form):
    positions = torch.tensor([[3.0, 8.5, 100.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    encoding = Sandwich(4, form=form)
    distance = positions[:, :, None] - positions[:, None, :]
    got = encoding(positions, positions)
    torch.testing.assert_close(got, encoding.bias(distance).movedim(0, 1), rtol=1e-12, atol=1e-12)


def test_odd_dim_is_refused():
    with pytest.raises(ValueError, match="got 7"):
        Sandwich(2, dim=7)
