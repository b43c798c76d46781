"""Near keys by Shaw's vectors and all others by torch's kernel, against all scores at once."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.attend.ways import sdpa
from posenc.bench.measure import peak_bytes

HEADS, WIDTH = 4, 16


def inputs(length: int, kv_heads: int = HEADS, dtype=torch.float64):
    torch.manual_seed(0)
    sides = (HEADS, kv_heads, kv_heads)
    return [torch.randn(2, h, length, WIDTH, dtype=dtype, requires_grad=True) for h in sides]


def attended(shaw, tensors, impl: str, mask=masks.causal, **options):
    positions = torch.arange(tensors[0].shape[2]) + 7
    return posenc.attention(
        *tensors,
        shaw,
        q_positions=positions,
        kv_positions=positions,
        mask=mask,
        impl=impl,
        return_lse=True,
        **options,
    )


def form(shaw, tensors, **options) -> str:
    positions = torch.arange(tensors[0].shape[2])
    where = {"q_positions": positions, "kv_positions": positions, "mask": masks.causal} | options
    return posenc.explain(*tensors, shaw, **where).reason


@pytest.mark.quick(4)
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("distance", [1, 5, 16, 32])
@pytest.mark.parametrize("length", [512, 515, 700])
def test_output_log_sum_exp_and_gradients(length, distance, values, monkeypatch):
    monkeypatch.setattr(sdpa, "NEAR_ROWS_PER_CALL", 300)
    shaw = posenc.Shaw(WIDTH, max_distance=distance, values=values).double()
    tensors = inputs(length, 1 if values else HEADS)
    assert "near keys" in form(shaw, tensors)
    found = []
    for impl in ("sdpa", "reference"):
        out, lse = attended(shaw, tensors, impl)
        wanted = [*tensors, *shaw.parameters()]
        grads = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), wanted)
        found.append([out, lse, *grads])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_other_precisions(dtype, autocast):
    exact = posenc.Shaw(WIDTH).double()
    shaw = posenc.Shaw(WIDTH).to(dtype)
    shaw.load_state_dict(exact.state_dict())
    exact.load_state_dict(shaw.state_dict())
    tensors = [t.detach().to(dtype) for t in inputs(600)]
    want = attended(exact, [t.double() for t in tensors], "reference")[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attended(shaw, tensors, "sdpa")[0]
    assert out.dtype == dtype
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), want, rtol=bound, atol=bound)


def test_parameters_alone_and_second_derivatives():
    shaw = posenc.Shaw(WIDTH).double()
    q, k, v = (t.detach() for t in inputs(512))
    found = []
    for impl in ("sdpa", "reference"):
        out, lse = attended(shaw, (q, k, v), impl)
        loss = out.sin().sum() + lse.sin().sum()
        (first,) = torch.autograd.grad(loss, shaw.key_table, create_graph=True)
        found.append([first, *torch.autograd.grad(first.sin().sum(), shaw.parameters())])
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_what_near_and_far_does_not_cover_runs_as_before():
    class Own(posenc.Shaw):
        def term(self, q, k):
            term = super().term(q, k)
            return type("OwnTerm", (type(term),), {})(q, k, self)

    shaw, tensors = posenc.Shaw(WIDTH).double(), inputs(600)
    assert "near keys" in form(shaw, tensors)
    positions = torch.arange(600)
    apart = {"q_positions": positions, "kv_positions": positions * 2}
    window = {"mask": masks.causal & masks.sliding_window(9)}
    padded = {"mask": masks.causal & masks.padding(torch.ones(2, 600, dtype=torch.bool))}
    for options in (apart, window, padded, {"mask": None}, {"dropout_p": 0.1}):
        assert "near keys" not in form(shaw, tensors, **options)
    rotated = posenc.Compose(posenc.RoPE(WIDTH, interleaved=False), shaw)
    for other in (Own(WIDTH).double(), rotated):
        assert "near keys" not in form(other, tensors)


@torch.no_grad()
def test_a_table_in_another_order_is_read_by_its_own_rows():
    class Reversed(posenc.Shaw):
        def table_row(self, distance):
            return 2 * self.max_distance - super().table_row(distance)

    tensors = inputs(600)
    shaw = Reversed(WIDTH).double()
    assert "near keys" in form(shaw, tensors)
    found = [attended(shaw, tensors, impl) for impl in ("sdpa", "reference")]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_another_default_device_changes_nothing():
    shaw, tensors = posenc.Shaw(WIDTH).double(), inputs(600)
    want = posenc.attention(
        *tensors, shaw, q_positions=range(600), kv_positions=range(600), mask=masks.causal
    )
    with torch.device("meta"):
        got = posenc.attention(
            *tensors, shaw, q_positions=range(600), kv_positions=range(600), mask=masks.causal
        )
    assert torch.equal(got, want)


def test_memory_of_vectors_for_many_distances():
    shaw, tensors = posenc.Shaw(WIDTH, max_distance=64), inputs(1100, dtype=torch.float32)
    for grad in (False, True):
        leaves = [t.detach().requires_grad_(grad) for t in tensors]

        def case():
            out, _ = attended(shaw, leaves, "auto")  # noqa: B023
            return torch.autograd.grad(out.sum(), leaves) if grad else out  # noqa: B023

        positions = torch.arange(1100)
        where = {"q_positions": positions, "kv_positions": positions, "mask": masks.causal}
        with torch.set_grad_enabled(grad):
            said = posenc.explain(*leaves, shaw, **where).extra_bytes
            case()
            held = peak_bytes(case) - (3 if grad else 1) * leaves[0].nbytes
        assert held <= 1.25 * said + 2**20 and said <= 4 * held + 2 * 2**20


def test_values_of_another_width_are_refused():
    q, k, v = inputs(600)
    with pytest.raises(ValueError, match="values=False"):
        attended(posenc.Shaw(WIDTH).double(), (q, k, v[..., :8]), "auto")
    shaw = posenc.Shaw(WIDTH, values=False).double()
    found = [attended(shaw, (q, k, v[..., :8]), impl) for impl in ("sdpa", "reference")]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
