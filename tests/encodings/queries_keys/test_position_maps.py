"""ReRoPE, Self-Extend and dual chunk attention against the authors' patches, and what they become
where nothing is mapped."""

import pytest
import torch

from posenc import Compose, KVCache, LogN, ModelShape, PositionEncoding, create, masks
from posenc.encodings.queries_keys.position_maps import (
    DualChunk,
    PositionMap,
    ReRoPE,
    SelfExtend,
)
from posenc.encodings.queries_keys.rope import RoPE
from posenc.testing.harness import as_tokens
from tests.attending import attend
from tests.golden_values import Case, cases


def options(case: Case) -> dict:
    return {
        "head_dim": case.params["head_dim"],
        "rope_theta": case.params["base"],
        "interleaved": False,
    }


def logits_of(encoding: PositionEncoding, q, k, positions) -> torch.Tensor:
    """What every pass gives where it is responsible, -inf in the future: (batch, heads, n, n)."""
    n, scale = q.shape[2], encoding.scale(q.shape[-1])
    i, j = torch.arange(n)[:, None], torch.arange(n)
    out = torch.full((*q.shape[:3], n), float("nan"), dtype=q.dtype)
    for part in encoding.passes(positions, positions):
        own_q, own_k = as_tokens(q, k, positions, positions)
        pass_q, pass_k = encoding.transform(own_q.at(part.q_positions), own_k.at(part.kv_positions))
        pass_k = pass_k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        assert part.mask is not None
        own = part.mask.bind(positions, positions)(torch.tensor(0), torch.tensor(0), i, j)
        own = own & (i >= j)
        assert out[..., own].isnan().all(), "two passes are responsible for one pair"
        out = torch.where(own, scale * pass_q @ pass_k.mT, out)
    out = out.masked_fill(i < j, -torch.inf)
    assert not out.isnan().any(), "a pair of the past belongs to no pass"
    return out


def assert_attends(case: Case, encoding: PositionEncoding, trained: int) -> None:
    """`trained`: queries are multiplied by LogN(trained) too, if it is positive."""
    if trained > 0:
        encoding = Compose(encoding, LogN(trained))
    q, k, v, positions = (case.inputs[name] for name in ("q", "k", "v", "positions"))
    logits = logits_of(encoding, q, k, positions)
    case.assert_close("logits", logits)
    case.assert_close("attn", logits.softmax(-1))
    case.assert_close("output", attend(q, k, v, encoding, positions).transpose(1, 2).flatten(2))


@pytest.mark.golden("rerope")
@pytest.mark.parametrize("case", cases("rerope"))
def test_rerope(case: Case):
    encoding = ReRoPE(**options(case), window=case.params["window"])
    assert_attends(case, encoding, case.params["training_length"])


@pytest.mark.golden("leaky_rerope")
@pytest.mark.parametrize("case", cases("leaky_rerope"))
def test_leaky_rerope(case: Case):
    window, leak = case.params["window"], case.params["scaling_factor"]
    encoding = ReRoPE(**options(case), window=window, leak=leak)
    assert_attends(case, encoding, case.params["training_length"])


@pytest.mark.golden("self_extend")
@pytest.mark.parametrize("case", cases("self_extend"))
def test_self_extend(case: Case):
    sizes = {name: case.params[name] for name in ("window", "group_size")}
    encoding = SelfExtend(**options(case), **sizes)
    assert_attends(case, encoding, case.params["scale_base"])
    positions = case.inputs["positions"]
    if positions.max() - positions.min() < encoding.window:
        return  # no pair is far, and the authors leave out the shift
    _, far = encoding.passes(positions, positions)
    case.assert_close("group_q_positions", far.q_positions)
    case.assert_close("group_k_positions", far.kv_positions)


@pytest.mark.golden("dual_chunk")
@pytest.mark.parametrize("case", cases("dual_chunk"))
def test_dual_chunk(case: Case):
    sizes = {name: case.params[name] for name in ("chunk_size", "local_window")}
    encoding = DualChunk(**options(case), **sizes)
    q, k, v, positions = (case.inputs[name] for name in ("q", "k", "v", "positions"))
    case.assert_close("logits", logits_of(encoding, q, k, positions)[0, :, 1:])
    out = attend(q, k, v, encoding, positions)[0].transpose(0, 1).flatten(1)
    case.assert_close("output", out[1:])


def inputs(n: int, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(2, 4, n, 8, dtype=dtype), *torch.randn(2, 2, 2, n, 8, dtype=dtype)


UNMAPPED = [
    ReRoPE(8, interleaved=False, window=20),
    ReRoPE(8, interleaved=False, window=3, leak=1),
    SelfExtend(8, interleaved=False, window=3, group_size=1),
    DualChunk(8, interleaved=False, chunk_size=20, local_window=0),
]


@pytest.mark.parametrize("encoding", UNMAPPED, ids=lambda e: type(e).__name__)
def test_a_map_that_moves_nothing_is_rope(encoding: PositionMap):
    q, k, v = inputs(20)
    positions = torch.arange(20)
    want = attend(q, k, v, RoPE(8, interleaved=False), positions)
    torch.testing.assert_close(attend(q, k, v, encoding, positions), want, atol=2e-6, rtol=1e-5)


MAPPED = [
    ReRoPE(8, interleaved=True, window=4),
    ReRoPE(8, interleaved=False, window=4, leak=3),
    SelfExtend(8, interleaved=False, window=4, group_size=3),
    DualChunk(8, interleaved=False, chunk_size=6, local_window=2),
]


@pytest.mark.parametrize("encoding", MAPPED, ids=lambda e: type(e).__name__)
def test_a_mapped_model_decodes_as_it_prefills(encoding: PositionMap):
    q, k, v = inputs(17)
    positions = torch.arange(17)
    want = attend(q, k, v, encoding, positions)
    assert not torch.allclose(want, attend(q, k, v, RoPE(8, interleaved=False), positions))
    prepared = encoding.prepare(positions)
    torch.testing.assert_close(attend(q, k, v, prepared, positions), want, atol=0, rtol=0)
    cache, steps = KVCache(), []
    for i in range(17):
        step = slice(i, i + 1)
        parts = (t[:, :, step] for t in (q, k, v))
        steps.append(attend(*parts, encoding, positions[step], cache=cache))
    torch.testing.assert_close(torch.cat(steps, 2), want, atol=2e-6, rtol=1e-5)


def test_only_the_passes_can_be_run():
    q, k, _ = inputs(3)
    with pytest.raises(TypeError, match=r"SelfExtend .* posenc\.attention"):
        MAPPED[2](q, k, torch.arange(3))


@pytest.mark.parametrize("name", ["rerope", "leaky_rerope", "self_extend", "dual_chunk"])
def test_defaults_come_from_the_trained_length(name: str):
    shape = ModelShape(32, 4, train_length=64)
    encoding = create(name, shape, rope_theta=500.0, scaling="linear", factor=2.0)
    assert isinstance(encoding, PositionMap) and encoding.claims.needs_raw_k
    assert encoding.rope_theta == 500.0 and encoding.scaling is not None
    sizes = {"rerope": 32, "leaky_rerope": 32, "self_extend": 16, "dual_chunk": 48}
    assert getattr(encoding, "window", 0) + getattr(encoding, "chunk_size", 0) == sizes[name]


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: ReRoPE(8, interleaved=False, window=0), "got window=0, leak=None"),
        (lambda: ReRoPE(8, interleaved=False, window=4, leak=0.5), "got window=4, leak=0.5"),
        (lambda: SelfExtend(8, interleaved=False, window=4, group_size=0), "group_size=0"),
        (
            lambda: DualChunk(8, interleaved=False, chunk_size=4, local_window=4),
            "below chunk_size, got local_window=4, chunk_size=4",
        ),
    ],
)
def test_wrong_sizes_are_refused(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["rerope", "self_extend", "dual_chunk"])
def test_passes_have_second_derivatives(name):
    torch.manual_seed(0)
    encoding = create(name, ModelShape(8, 1, train_length=4)).double()
    tensors = [torch.randn(1, 1, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    shown = torch.tensor([[False, True, True, False, True, True, True]])
    mask = masks.causal & masks.padding(shown)

    def run(q, k, v):
        return attend(q, k, v, encoding, torch.arange(7), mask=mask)

    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)
