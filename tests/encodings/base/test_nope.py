"""Attention without positions, and query temperatures, against loops in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc import PositionEncoding
from posenc.encodings.queries_keys.query_temperature import Llama4Temperature, LogN
from tests.attending import attend
from tests.references import attention as paper

POSITIONS = torch.tensor([0, 1, 2, 30, 31, 500, 501])


def run(encoding: PositionEncoding, q: Tensor, k: Tensor, v: Tensor, impl: str) -> np.ndarray:
    out = attend(q[None], k[None], v[None], encoding, POSITIONS, impl=impl)
    assert isinstance(out, Tensor)
    return out[0].numpy()


@pytest.mark.reference("nope", "logn", "llama4_temperature")
@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("kind", ["nope", "log_n", "llama4"])
def test_no_position_but_in_the_temperature(kind: str, impl: str):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 7, 6, generator=generator, dtype=torch.float64)
    encoding, sharp = {
        "nope": (PositionEncoding(), lambda p: 1.0),
        "log_n": (LogN(16), lambda p: paper.log_n(p, 16)),
        "llama4": (Llama4Temperature(32, 0.1), lambda p: paper.llama4(p, 32, 0.1)),
    }[kind]
    want = paper.attend(q.numpy(), k.numpy(), v.numpy(), POSITIONS.tolist(), sharp)
    np.testing.assert_allclose(run(encoding, q, k, v, impl), want, rtol=0, atol=1e-12)
