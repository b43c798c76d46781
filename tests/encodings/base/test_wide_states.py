"""States may be wider than queries: what is computed from them comes back in the scores' dtype."""

import pytest
import torch

import posenc
from tests.attending import attend


@pytest.mark.parametrize("name", ["inkling", "fox"])
@pytest.mark.parametrize("impl", ["auto", "reference", "blocks"])
@pytest.mark.parametrize("scattered", [False, True])
def test_float64_states_serve_float32_queries(name, impl, scattered):
    torch.manual_seed(0)
    encoding = posenc.create(name, posenc.ModelShape(16, 2, train_length=8))
    positions = torch.tensor([0, 2, 3, 9]) if scattered else torch.arange(4)
    state = encoding.state(torch.randn(1, 4, 16), positions).double().detach()
    q = torch.randn(1, 2, 4, 8)
    out = attend(q, q, q, encoding, positions, state=state, impl=impl)
    assert out.dtype == torch.float32 and out.isfinite().all()
