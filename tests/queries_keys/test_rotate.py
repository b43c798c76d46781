"""The rotation that every rotary method shares: one result for all sizes, layouts and dtypes."""

import pytest
import torch

from posenc.queries_keys.rotation import rotate as module
from posenc.queries_keys.rotation.rotate import rotate


def by_hand(x, cos, sin, interleaved):
    """Pair by pair in float64."""
    out = x.double().clone()
    pairs = cos.shape[-1]
    for t in range(pairs):
        a, b = (2 * t, 2 * t + 1) if interleaved else (t, t + pairs)
        c, s = cos[..., None, :, t].double(), sin[..., None, :, t].double()
        first, second = x[..., a].double(), x[..., b].double()
        out[..., a] = first * c - second * s
        out[..., b] = second * c + first * s
    return out


def tensors(layout, dtype, batched, rotary_dim):
    torch.manual_seed(0)
    if layout == "tokens first":
        x = torch.randn(2, 41, 3, 16).transpose(1, 2)
    elif layout == "heads first":
        x = torch.randn(2, 3, 41, 16)
    else:  # a slice of something wider, starting at an odd place
        x = torch.randn(2, 3, 41, 19)[..., 1:17]
    angle = torch.randn(*((2,) if batched else ()), 41, rotary_dim // 2)
    return x.to(dtype), angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 6])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("layout", ["tokens first", "heads first", "slice"])
def test_rotation_equals_pairs_by_hand_in_every_layout(
    layout, batched, rotary_dim, interleaved, monkeypatch
):
    monkeypatch.setattr(module, "CHUNK", 500)  # several chunks and a remainder
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)):
        x, cos, sin = tensors(layout, dtype, batched, rotary_dim)
        want = by_hand(x, cos, sin, interleaved)
        got = rotate(x, cos, sin, interleaved=interleaved)
        assert got.dtype == dtype
        # Rounded once: within one unit of the last place of the exact value.
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_and_its_gradients_pass_gradcheck(interleaved, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 500)
    x, cos, sin = tensors("tokens first", torch.float64, True, 6)
    cos, sin = cos.double() * 1.1, sin.double()  # no pure rotation: the transpose, not the inverse

    cos, sin = cos[:, :5], sin[:, :5]
    x = x[:, :1, :5].clone().requires_grad_()

    def call(x):
        return rotate(x, cos, sin, interleaved=interleaved)

    assert torch.autograd.gradcheck(call, (x,))
    assert torch.autograd.gradgradcheck(call, (x,))


@pytest.mark.parametrize("interleaved", [False, True])
def test_learned_angles_get_their_gradient(interleaved):
    x, cos, sin = tensors("heads first", torch.float64, False, 16)
    angle = torch.atan2(sin, cos)[:4].double().requires_grad_()

    def call(angle):
        return rotate(x[:, :, :4], angle.cos(), angle.sin(), interleaved=interleaved)

    assert torch.autograd.gradcheck(call, (angle,))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_traces_without_a_graph_break(interleaved):
    x, cos, sin = tensors("tokens first", torch.float32, False, 16)
    traced = torch.compile(rotate, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        traced(x.requires_grad_(), cos, sin, interleaved=interleaved),
        rotate(x, cos, sin, interleaved=interleaved),
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_tokens_stay_no_tokens(interleaved):
    x, table = torch.randn(1, 2, 0, 8), torch.randn(0, 4)
    assert rotate(x, table, table, interleaved=interleaved).shape == x.shape
