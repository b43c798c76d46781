"""Parameters stored in half types are widened before anything is computed with them."""

import copy

import pytest
import torch

import posenc
from posenc.testing.harness import successive_positions

SHAPE, LENGTH = posenc.ModelShape(32, 2, 2, 16, train_length=16), 100
NAMES = [n for n in posenc.names() if posenc.create(n, SHAPE).claims.places == (3,)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_score_is_as_exact_as_with_the_same_numbers_in_float32(name, dtype):
    """Starts that are moved by 0.3 pass the bounds that some methods put on their parameters."""
    torch.manual_seed(0)
    wide = posenc.create(name, SHAPE).for_layer(0).double()
    for parameter in wide.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
        parameter.copy_(parameter.to(dtype))
    half = posenc.create(name, SHAPE).for_layer(0).to(dtype)
    half.load_state_dict(wide.state_dict())
    if name.startswith("kerple"):
        assert (half.r1 < 0.01).any() or (half.r2 < 0.01).any()
    x, positions = torch.randn(1, LENGTH, 32).to(dtype), successive_positions(wide, LENGTH)
    q, k, v = (torch.randn(1, 2, LENGTH, 16).to(dtype) for _ in range(3))

    def log_sum_exp(encoding: posenc.PositionEncoding, like: torch.dtype) -> torch.Tensor:
        state = encoding.state(x.to(like), positions)
        _, lse = posenc.attention(
            q.to(like),
            k.to(like),
            v.to(like),
            encoding,
            q_positions=positions,
            kv_positions=positions,
            q_state=state,
            kv_state=state,
            mask=posenc.masks.causal,
            impl="reference",
            return_lse=True,
        )
        return lse.double()

    want = log_sum_exp(wide, torch.float64)
    torch.testing.assert_close(log_sum_exp(half, dtype), want, rtol=2e-6, atol=2e-6)


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_parameters_are_those_of_wide_products(name):
    """With q, k and v in bfloat16. Sums over keys that cancel would show what was rounded."""
    torch.manual_seed(0)
    length = 600
    encoding = posenc.create(name, SHAPE).for_layer(0)
    positions = successive_positions(encoding, length)
    x, weight = torch.randn(1, length, 32), torch.randn(1, 2, length, 16)
    vectors = [torch.randn(1, 2, length, 16).bfloat16() for _ in range(3)]

    def gradients(like: torch.dtype) -> list[torch.Tensor]:
        own = copy.deepcopy(encoding).to(torch.float64 if like == torch.float64 else torch.float32)
        state = own.state(x.to(next(own.parameters()).dtype), positions)
        out = posenc.attention(
            *(t.to(like) for t in vectors),
            own,
            q_positions=positions,
            kv_positions=positions,
            q_state=state,
            kv_state=state,
            mask=posenc.masks.causal,
        )
        found = torch.autograd.grad((out.double() * weight).sum(), [*own.parameters()])
        return [t.double() for t in found]

    if not [*encoding.parameters()]:
        pytest.skip("no parameters")
    for got, want in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        # Some vanish: what adds the same to all keys changes nothing.
        assert (got - want).norm() <= 0.05 * want.norm() + 1e-5
