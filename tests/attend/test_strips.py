"""The Toeplitz path: the same bits from run to run, and a cut that changes nothing."""

import functools
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import posenc
from posenc import masks
from posenc.attend import torch_faults
from posenc.attend.ways import flash, strips
from posenc.positions.tokens import as_range
from tests.attending import attend


def call(encoding, q, k, v, impl):
    return attend(q, k, v, encoding, impl=impl)


def inputs(length, heads=4):
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, 16, requires_grad=True) for _ in range(3)]


def test_a_learned_tables_gradient_is_right_and_the_same_bits_every_time():
    encoding = posenc.T5Bias(4)
    q, k, v = inputs(600)
    grads = {
        name: torch.autograd.grad(call(encoding, q, k, v, impl).sin().sum(), encoding.weight)[0]
        for name, impl in (("first", "sdpa"), ("second", "sdpa"), ("dense", "reference"))
    }
    assert torch.equal(grads["first"], grads["second"])
    error = (grads["first"] - grads["dense"]).norm() / grads["dense"].norm()
    assert error < 1e-5


class Doubled(posenc.T5Bias):
    """Add T5's bias and a slope, so that no two distances share a parameter."""

    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.slope = torch.nn.Parameter(torch.full((num_heads, 1), 1e-3))

    def bias(self, distance):
        return super().bias(distance) - (self.slope * distance.flatten()).view(-1, *distance.shape)


CASES = {
    "queries and keys": {},
    "two rows and grouped heads": {"batch": 2, "kv_heads": 2},
    "queries after all keys": {"queries": range(1000, 1600), "keys": range(500)},
    "queries just after the keys": {"queries": range(450, 1050), "keys": range(500)},
    "queries before some keys": {"queries": range(600), "keys": range(50, 650)},
    "a window below the last edge": {"window": 64},
    "a window above it": {"window": 300},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("make", [posenc.T5Bias, Doubled])
@pytest.mark.parametrize("case", CASES)
def test_the_gradients_of_a_table_whose_far_entries_are_one_parameter(case, make):
    given = {"batch": 1, "kv_heads": 4, "queries": range(600), "keys": range(600)} | CASES[case]
    torch.manual_seed(0)
    q = torch.randn(given["batch"], 4, len(given["queries"]), 16)
    k, v = (torch.randn(given["batch"], given["kv_heads"], len(given["keys"]), 16) for _ in "kv")
    mask = (
        masks.causal & masks.sliding_window(given["window"]) if "window" in given else masks.causal
    )
    found = {}
    for dtype, impl in ((torch.float32, "sdpa"), (torch.float64, "reference")):
        torch.manual_seed(1)
        encoding = make(4).to(dtype)
        encoding.weight.data = torch.randn(32, 4).to(dtype)
        tensors = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        sinks = torch.zeros(4, dtype=dtype) if "sinks" in given else None
        out = posenc.attention(
            *tensors,
            encoding,
            q_positions=given["queries"],
            kv_positions=given["keys"],
            mask=mask,
            sinks=sinks,
            impl=impl,
        )
        of = [*tensors, *encoding.parameters()]
        found[impl] = [out, *torch.autograd.grad((out * torch.cos(out.detach())).sum(), of)]
    for got, want in zip(found["sdpa"], found["reference"], strict=True):
        size = max(1.0, float(want.detach().abs().max()))
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * size)


@pytest.mark.quick(2)
@pytest.mark.parametrize("spoiled", [None, "q", "k", "v"])
def test_keys_with_tiny_weights_are_left_out_unless_a_number_is_not_finite(spoiled, monkeypatch):
    pairs, plain = [], flash.attend

    def spy(q, k, v, bias, scale):
        pairs.append(q.shape[1] * q.shape[2] * k.shape[2])
        return plain(q, k, v, bias, scale)

    monkeypatch.setattr(flash, "attend", spy)
    tensors = dict(zip("qkv", (t.detach() for t in inputs(1500)), strict=True))
    if spoiled is not None:
        tensors[spoiled][0, 0, 0, 5] = torch.nan
    got = call(posenc.ALiBi(4, bias_max=4), *tensors.values(), "sdpa")
    want = call(posenc.ALiBi(4, bias_max=4), *(t.double() for t in tensors.values()), "reference")
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert sum(pairs) < 4 * 1500**2 / 2 or spoiled is not None


class Steps(posenc.DistanceBias):
    """Add a bias that falls to -1000 from a distance on, which differs between heads, and is -inf
    at distance `blind`."""

    def __init__(self, blind=-1):
        super().__init__()
        self.blind = blind

    def bias(self, distance):
        rows = [torch.where(distance >= at, -1000.0, -20.0) for at in (1499, 1500)]
        return torch.stack(rows).masked_fill(distance == self.blind, -torch.inf)


@pytest.mark.quick(2)
@pytest.mark.parametrize("blind", [-1, 0])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_of_one_call_that_hide_other_keys(kv_heads, blind):
    q, k, v = (t.detach() for t in inputs(2500, 2))
    where = {"q_positions": range(1, 2501), "kv_positions": range(2500), "mask": masks.causal}
    found = []
    for impl, dtype in (("sdpa", torch.float32), ("reference", torch.float64)):
        tensors = (q.to(dtype), *(t[:, :kv_heads].to(dtype) for t in (k, v)))
        found.append(posenc.attention(*tensors, Steps(blind), impl=impl, **where).double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_parts_are_joined_in_16_bits_as_exactly_as_outputs_are_rounded():
    q, k, v = (t.detach().bfloat16() for t in inputs(2000))
    k[:, :, 5] *= 4
    v[:, :, 1990:] *= 30  # a small share of large values
    got = call(posenc.ALiBi(4, bias_max=16), q, k, v, "sdpa").double()
    want = call(posenc.ALiBi(4, bias_max=16), q.double(), k.double(), v.double(), "reference")
    rows = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert rows.max() < 8e-3


def test_a_trace_does_not_keep_what_its_example_hides(monkeypatch):
    """Without torch.jit.trace, after which torch.compile fails in the same process."""
    q, k, v = (t.detach() for t in inputs(1500))
    where = {"q_positions": range(1500), "kv_positions": range(1500), "mask": masks.causal}
    run = functools.partial(
        posenc.attention, q, k, v, posenc.ALiBi(4, bias_max=2), impl="sdpa", **where
    )
    pairs, plain = [], flash.attend

    def spy(q, k, v, bias, scale):
        pairs.append(q.shape[1] * q.shape[2] * k.shape[2])
        return plain(q, k, v, bias, scale)

    monkeypatch.setattr(flash, "attend", spy)
    run()
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    some = sum(pairs)
    assert as_range(torch.arange(5)) is None, "positions may be others in another call"
    run()
    assert some < 0.9 * (sum(pairs) - some)


def test_a_default_device_of_others_is_not_used():
    q, k, v = (t.detach() for t in inputs(1500))
    where = {"q_positions": range(1500), "kv_positions": range(1500), "mask": masks.causal}
    alibi = posenc.ALiBi(4)
    want = posenc.attention(q, k, v, alibi, impl="sdpa", **where)
    with torch.device("meta"):
        assert torch.equal(posenc.attention(q, k, v, alibi, impl="sdpa", **where), want)


def test_a_bias_replaced_on_one_t5_gets_its_gradient():
    encoding, slope = posenc.T5Bias(4), torch.tensor(0.01, requires_grad=True)
    usual, (q, k, v) = encoding.bias, inputs(900)
    encoding.bias = lambda distance: usual(distance) - slope * distance
    found = [
        torch.autograd.grad(call(encoding, q, k, v, impl).sin().sum(), slope)[0]
        for impl in ("sdpa", "reference")
    ]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("far", [-5.0, -10.0, -20.0])
def test_a_far_bucket_that_few_find_has_a_precise_gradient(far):
    """Adam divides by its size."""
    found = []
    for impl, dtype in (("sdpa", torch.float32), ("reference", torch.float64)):
        torch.manual_seed(1)
        encoding = posenc.T5Bias(4).to(dtype)
        encoding.weight.data[-1] = far
        q, k, v = (t.to(dtype) for t in inputs(700))
        out = call(encoding, q, k, v, impl)
        found.append(torch.autograd.grad(out.sin().sum(), encoding.weight)[0][-1].double())
    torch.testing.assert_close(*found, rtol=5e-3, atol=0)


class Rare(posenc.DistanceBias):
    """Add a bias so low at every `period`th distance that keys there have no weight."""

    def __init__(self, period):
        super().__init__()
        self.period = period

    def bias(self, distance):
        low = torch.where(distance % self.period == self.period - 1, -1e3, 0.0)
        return low.expand(4, *distance.shape)


@pytest.mark.parametrize("period", [3, 500])
def test_distances_that_do_not_count_change_nothing(period):
    q, k, v = inputs(1500)
    with torch.no_grad():
        got, expected = (call(Rare(period), q, k, v, impl) for impl in ("sdpa", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("window", [None, 500, 1500])
@pytest.mark.parametrize("form", ["symmetric", "left_right", "left_right, heads together"])
@pytest.mark.parametrize("rows", [1100, 2300])
def test_keys_that_strips_share_are_attended_to_once(rows, form, window, monkeypatch):
    """Unless a head sees none of them, as half of the heads of left_right do."""
    spans, plain = [], flash.attend

    def spy(q, k, v, bias, scale):
        spans.append((q.shape[2], k.shape[2]))
        return plain(q, k, v, bias, scale)

    monkeypatch.setattr(flash, "attend", spy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # heads attend one at a time
    q, k, v = (t.detach() for t in inputs(2300))
    if form.endswith("together"):
        monkeypatch.setattr(strips, "_count_negligible_entries", lambda problem, row: [0] * 4)
    encoding, positions = posenc.ALiBi(4, form=form.split(",")[0]), torch.arange(2300)
    mask = masks.causal if window is None else masks.causal & masks.sliding_window(window)
    q, where = q[:, :, -rows:], {"kv_positions": positions, "mask": mask}
    where["q_positions"] = positions[-rows:]
    got = posenc.attention(q, k, v, encoding, impl="sdpa", **where)
    shared = any(rows > strips.STRIP_ROWS for rows, _ in spans)
    assert shared == (window != 500 and not form.endswith("together"))
    want = posenc.attention(q, k, v, encoding, impl="reference", **where)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_torch_without_the_operators_gives_the_same(monkeypatch):
    q, k, v = inputs(600)
    grad, found = torch.randn(1, 4, 600, 16), {}
    for missing in (False, True):
        if missing:
            monkeypatch.setattr(torch_faults, "FLASH_FORWARD", None)
            monkeypatch.setattr(torch_faults, "_known_faults", None)  # asked again
            with pytest.raises(ValueError, match="impl='sdpa' cannot run"):
                call(posenc.ALiBi(4), q, k, v, "sdpa")
        out = call(posenc.ALiBi(4), q, k, v, "auto")
        found[missing] = out, *torch.autograd.grad(out, [q, k, v], grad)
        with torch.no_grad():
            for rows, impl in itertools.product((1, 600), ("auto", "blocks")):
                got = call(posenc.ALiBi(4), q[:, :, -rows:], k, v, impl)
                torch.testing.assert_close(got, out[:, :, -rows:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("odd", ["q", "k", "v"])
def test_channels_that_do_not_lie_side_by_side(odd):
    q, k, v = inputs(41)
    tensors = {"q": q, "k": k, "v": v}
    tensors[odd] = torch.randn(1, 4, 16, 41).mT.detach().requires_grad_()
    grad = torch.randn(1, 4, 16, 41).mT
    found = {}
    for impl in ("sdpa", "reference"):
        out = call(posenc.ALiBi(4), *tensors.values(), impl)
        found[impl] = out, *torch.autograd.grad(out, list(tensors.values()), grad)
        with torch.no_grad():
            torch.testing.assert_close(call(posenc.ALiBi(4), *tensors.values(), impl), out)
    torch.testing.assert_close(found["sdpa"], found["reference"], rtol=1e-4, atol=1e-5)


class Linear(posenc.DistanceBias):
    """Add a bias whose values for the heads of a distance are adjacent in memory, as a linear layer
    returns them."""

    def bias(self, distance):
        return (distance.float()[..., None] * -torch.tensor([0.1, 0.2, 0.3, 0.4])).movedim(-1, 0)


def test_a_bias_in_any_order_of_memory():
    q, k, v = (t.detach() for t in inputs(41))
    positions = torch.arange(41)
    arguments = {"q_positions": positions, "kv_positions": positions}
    got, want = (
        posenc.attention(q, k, v, Linear(), impl=impl, **arguments)
        for impl in ("sdpa", "reference")
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 8])
def test_a_bias_for_another_number_of_heads_is_refused(heads):
    q, k, v = inputs(41)
    with pytest.raises(ValueError, match="heads"):
        call(posenc.ALiBi(heads), q, k, v, "sdpa")


def test_an_empty_batch_gives_an_empty_result():
    q = torch.randn(0, 4, 41, 16)
    assert call(posenc.ALiBi(4), q, q, q, "sdpa").shape == q.shape


@pytest.mark.parametrize("gap", [1, 100])
def test_queries_before_all_keys_see_nothing(gap):
    q, k, v = inputs(41)
    out = posenc.attention(
        q[:, :, :5],
        k,
        v,
        posenc.ALiBi(4),
        q_positions=torch.arange(5),
        kv_positions=torch.arange(4 + gap, 45 + gap),
        mask=masks.causal,
        impl="sdpa",
    )
    assert not out.any()


def test_a_window_computes_only_what_it_shows():
    q, k, v = inputs(1500)
    positions = torch.arange(1500)
    mask = masks.causal & masks.sliding_window(64)
    arguments = {"q_positions": positions, "kv_positions": positions, "mask": mask}
    plan = posenc.explain(q.detach(), k.detach(), v.detach(), posenc.ALiBi(4), **arguments)
    assert plan.impl == "sdpa"
    assert "64" in plan.time_growth
    assert {"reference", "blocks", "flex"} <= set(plan.rejected)


@pytest.mark.parametrize("far", [0.0, 5.0])
def test_no_weight_in_the_backward_pass_is_below_the_smallest_normal_number(far, monkeypatch):
    """Nor is one lost that counts: with `far`, queries find key 0 in spite of a bias of -100."""
    given, plain = [], flash.gradients

    def spy(rows, keys, bias, scale):
        scores = scale * rows.q @ keys[0].mT + bias
        given.append((scores - rows.lse[..., None]).exp())
        return plain(rows, keys, bias, scale)

    monkeypatch.setattr(flash, "gradients", spy)
    q, k, v = inputs(1000)
    with torch.no_grad():
        q[..., 0] += far
        k[:, :, 0, 0] += 15 * far
    grad = torch.randn(1, 4, 1000, 16)
    got = torch.autograd.grad(call(posenc.ALiBi(4), q, k, v, "sdpa"), [q, k, v], grad)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = call(posenc.ALiBi(4).double(), *exact, "reference")
    want = torch.autograd.grad(out, exact, grad.double())
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), its, rtol=1e-4, atol=1e-4 * its.abs().max())
    weights = torch.cat([t.flatten() for t in given])
    if not far:  # else scores may differ by so much that nothing can be hidden
        assert ((weights == 0) | (weights >= torch.finfo(torch.float32).tiny)).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("positions", [None, range(3000)])
def test_shapes_of_a_long_text_are_found_without_numbers(positions):
    with FakeTensorMode():
        q = torch.empty(1, 4, 3000, 16)
        for encoding in (posenc.ALiBi(4), posenc.Shaw(16)):
            assert attend(q, q, q, encoding, positions).shape == q.shape
