"""Results that must not depend on memory layout, length, or gradients and tracers."""

import copy

import pytest
import torch
from torch.autograd import forward_ad

import posenc
from posenc import masks
from tests.attending import attend

FOX, ALIBI = posenc.FoX(16, 2), posenc.ALiBi(2)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize("encoding", [FOX, ALIBI, posenc.Compose(ALIBI, FOX)])
@pytest.mark.parametrize("layout", ["transposed", "strided"])
@torch.no_grad()
def test_channels_may_lie_anywhere_in_memory(encoding, layout):
    """torch's kernel reads channels as if they lay side by side."""
    positions, state = torch.arange(40), FOX.state(random(1, 40, 16), torch.arange(40))
    state = None if encoding is ALIBI else state

    def laid_out():
        if layout == "strided":
            return random(1, 2, 40, 16)[..., ::2]
        return random(1, 2, 8, 40).mT

    q, k, v = (laid_out() for _ in range(3))
    want = attend(q, k, v, encoding, positions, state=state, impl="reference")
    got = attend(q, k, v, encoding, positions, state=state, impl="sdpa")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", ["alibi", "fox"])
@torch.no_grad()
def test_folding_is_as_exact_among_131_thousand_keys_as_among_a_thousand(encoding, dtype):
    torch.manual_seed(0)
    keys, queries = 131_072, 3
    errors = []
    for length in (1024, keys):
        positions = torch.arange(length)
        q = random(1, 2, queries, 8).to(dtype)
        k, v = random(1, 2, length, 8).to(dtype), random(1, 2, length, 8).to(dtype)
        state = None
        if encoding == "fox":  # gates of one half: the sums reach 90,000
            state = -0.69 * torch.arange(length).double().expand(1, 2, -1)
        valid = torch.ones(1, length, dtype=torch.bool)
        valid[0, :5] = False
        mask = masks.causal & masks.padding(valid)
        kind = FOX if encoding == "fox" else ALIBI
        wide = [t.double() for t in (q, k, v)]
        want = attend(*wide, kind, positions, mask, state, impl="blocks")
        got = attend(q, k, v, kind, positions, mask, state, impl="sdpa")
        errors.append((got.double() - want).abs().max().item())
    assert errors[1] <= 4 * max(errors[0], torch.finfo(dtype).eps)


@pytest.mark.parametrize("padded", [False, True])
def test_terms_of_queries_and_keys_are_exact_with_gradients(padded):
    torch.manual_seed(0)
    length = 2048
    valid = (torch.arange(length) > 4 * padded - 1)[None]
    mask = masks.causal & masks.padding(valid) if padded else masks.causal
    positions, state = torch.arange(length), -0.69 * torch.arange(length).double().expand(1, 2, -1)
    inputs = [random(1, 2, length, 8) for _ in range(3)]

    def gradients(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        sums = state.clone().requires_grad_()
        out = attend(*leaves, FOX, positions, mask, sums, impl=impl)
        return [g.double() for g in torch.autograd.grad(out.square().sum(), [*leaves, sums])]

    exact = gradients("blocks", torch.float64)
    ours, plain = gradients("sdpa", torch.float32), gradients("blocks", torch.float32)
    for got, also, want in zip(ours, plain, exact, strict=True):
        # Terms within a block of queries reach 44, which float32 rounds at 2e-6; folded, they are
        # divided by the scale and summed with the products.
        assert (got - want).abs().max() <= (64 if padded else 16) * (also - want).abs().max()


@pytest.mark.parametrize(
    "mask",
    [masks.padding((torch.arange(900) < 400)[None]), masks.Mask(lambda s: s.kv_position % 256 < 4)],
)
def test_far_keys_are_kept_where_a_mask_hides_the_queries_own(mask):
    inputs = [random(1, 2, 900, 8) for _ in range(3)]

    def gradients(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        state = -torch.arange(900).double().expand(1, 2, -1)
        out = attend(*leaves, FOX, torch.arange(900), masks.causal & mask, state, impl=impl)
        return [out.double(), *torch.autograd.grad(out.square().sum().double(), leaves)]

    for got, want in zip(
        gradients("sdpa", torch.float32), gradients("reference", torch.float64), strict=True
    ):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_of_queries_and_keys_with_shared_heads_and_rows(dtype):
    """Keys and values of fewer heads, terms that all sequences share, and queries that see nothing
    of the far past."""
    torch.manual_seed(0)
    length, sums = 300, -3.0 * torch.arange(300).double().expand(1, 4, -1)
    inputs = [random(2, heads, length, 8) for heads in (4, 2, 2)]

    def gradients(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        state = sums.clone().requires_grad_()
        out = attend(*leaves, posenc.FoX(16, 4), state=state.expand(2, -1, -1), impl=impl)
        return [g.double() for g in torch.autograd.grad(out.square().sum(), [*leaves, state])]

    close = 1e-4 if dtype == torch.float32 else 0.05
    for got, want in zip(
        gradients("sdpa", dtype), gradients("reference", torch.float64), strict=True
    ):
        assert (got - want).abs().max() <= close * want.abs().max()


def test_terms_of_queries_and_keys_have_second_gradients():
    torch.manual_seed(0)
    inputs = [random(1, 2, 4, 4).double().requires_grad_() for _ in range(3)]
    sums = (-torch.rand(1, 2, 4).double().cumsum(-1)).requires_grad_()

    def run(q, k, v, state):
        return attend(q, k, v, FOX, torch.arange(4), state=state, impl="sdpa")

    assert torch.autograd.gradgradcheck(run, (*inputs, sums), fast_mode=True)


@torch.no_grad()
def test_hidden_keys_may_be_nan():
    valid = torch.ones(1, 12, dtype=torch.bool)
    valid[0, :3] = False
    q, k, v = (random(1, 2, 12, 8) for _ in range(3))
    mask, positions = masks.causal & masks.padding(valid), torch.arange(12)
    for encoding in (None, ALIBI):
        want = attend(q, k, v, encoding, positions, mask, impl="sdpa")
        dirty = k.clone()
        dirty[:, :, :3] = torch.nan
        got = attend(q, dirty, v, encoding, positions, mask, impl="sdpa")
        torch.testing.assert_close(got[:, :, 3:], want[:, :, 3:])


BIASES = {
    "t5": posenc.T5Bias(2, init_std=1.0),
    "kerple": posenc.Kerple(2),
    "rerope": posenc.ReRoPE(4, interleaved=False, window=3),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("window", [None, 4])
def test_gradients_of_gradients_are_right(name, window):
    torch.manual_seed(0)
    encoding = copy.deepcopy(BIASES[name]).double()
    mask = masks.causal if window is None else masks.causal & masks.sliding_window(window)
    positions = torch.arange(6)
    q, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    k = torch.randn(1, 1, 6, 4, dtype=torch.float64, requires_grad=True)

    def run(q, k):
        return attend(q, k, v[:, :1], encoding, positions, mask)

    assert torch.autograd.gradgradcheck(run, (q, k), atol=1e-6, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inside torch
def test_forward_mode_keeps_a_rotations_tangent():
    rope = posenc.RoPE(64, interleaved=False)
    q, positions = random(1, 4, 256, 64), torch.arange(256)  # enough for the compiled rotation
    tangent = random(1, 4, 256, 64)
    with forward_ad.dual_level():
        turned, _ = rope(forward_ad.make_dual(q, tangent), q, positions)
        got = forward_ad.unpack_dual(turned).tangent
    torch.testing.assert_close(got, rope(tangent, tangent, positions)[0])


@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "shaw", "fire", "deberta"])
def test_functorch_gradients_equal_autograds(name):
    torch.manual_seed(0)
    encoding = posenc.create(name, posenc.ModelShape(16, 2, train_length=8)).for_layer(0)
    positions = torch.arange(6)
    q, k, v = (random(1, 2, 6, 8) for _ in range(3))

    def loss(q):
        return attend(q, k, v, encoding, positions).square().sum()

    leaf = q.clone().requires_grad_()
    want = torch.autograd.grad(loss(leaf), leaf)[0]
    torch.testing.assert_close(torch.func.grad(loss)(q), want, rtol=1e-4, atol=1e-5)
    copy.deepcopy(encoding)  # nothing of the transform is kept


def test_a_gradient_through_a_whole_decoder_under_functorch():
    model = posenc.Decoder(posenc.DecoderConfig(11, 16, 1, 2), ALIBI)
    tokens = torch.tensor([[1, 2, 3]])
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (tokens,)).square().mean()

    got = torch.func.grad(loss)(parameters)
    want = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for g, w in zip(got.values(), want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)


def test_a_powers_gradient_is_exact_where_every_key_is_far():
    torch.manual_seed(0)
    encoding = posenc.Kerple(2, form="power")
    with torch.no_grad():
        encoding.r2.fill_(1.0)
    q, k, v = (random(1, 2, 9, 8) for _ in range(3))
    where = {"q_positions": torch.arange(100_000, 100_009), "kv_positions": torch.arange(9)}
    got = torch.autograd.grad(
        posenc.attention(q, k, v, encoding, **where, impl="sdpa").square().sum(), encoding.r1
    )[0]
    wide = copy.deepcopy(encoding).double()
    inputs = [t.double() for t in (q, k, v)]
    out = posenc.attention(*inputs, wide, **where, impl="reference")
    want = torch.autograd.grad(out.square().sum(), wide.r1)[0]
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("kind", [posenc.ReRoPE, posenc.SelfExtend])
def test_others_see_true_positions_beside_a_position_map(kind):
    """LogN multiplies q by a factor of the true position, whatever the map makes of it."""
    torch.manual_seed(0)
    map_ = kind(8, interleaved=False, window=4)
    q, k, v = (random(1, 2, 40, 8).double() for _ in range(3))
    positions, logn = torch.arange(40), posenc.LogN(8)
    want = attend(logn(q, k, positions)[0], k, v, map_, positions)
    got = attend(q, k, v, posenc.Compose(map_, logn), positions)
    torch.testing.assert_close(got, want)
    bias = posenc.Compose(map_, posenc.ALiBi(2))
    assert attend(q, k, v, bias, positions, impl="reference").isfinite().all()


def test_dape_takes_float64_positions_with_float32_queries():
    encoding = posenc.DAPE(posenc.ALiBi(2), 2)
    q = random(1, 2, 5, 8)
    assert attend(q, q, q, encoding, torch.arange(5).double()).dtype == torch.float32


@pytest.mark.parametrize("name", ["irope", "llama4_temperature", "logn"])
def test_negative_positions_are_finite(name):
    encoding = posenc.create(name, posenc.ModelShape(16, 2, train_length=8)).for_layer(3)
    q = random(1, 2, 5, 8)
    assert attend(q, q, q, encoding, torch.arange(-7, -2)).isfinite().all()
