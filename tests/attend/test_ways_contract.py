"""Every registered encoding gives the same results and gradients in every way that takes it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import masks
from posenc.attend import choose
from posenc.attend.choose import WAYS
from posenc.attend.ways import (
    blocks,
    key_rows,
    reference,
    sdpa,
    strips,
    strips_backward,
)
from posenc.encodings.scores import sandwich
from tests.attending import cells
from tests.compilers import needs_whole_graphs
from tests.kinds import one_of_each_kind

HEADS, KV_HEADS, HEAD_DIM, EMBED = 4, 2, 16, 64
IMPLS = [n for n in WAYS if n not in ("reference", "flex")]


@dataclass(frozen=True)
class Setup:
    """Hold the arguments of one call of attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    encoding: posenc.PositionEncoding
    q_positions: Tensor
    kv_positions: Tensor
    mask: masks.Mask | None
    q_state: Tensor | None = None
    kv_state: Tensor | None = None

    def run(self, impl: str, **options):
        return posenc.attention(
            self.q,
            self.k,
            self.v,
            self.encoding,
            q_positions=self.q_positions,
            kv_positions=self.kv_positions,
            q_state=self.q_state,
            kv_state=self.kv_state,
            mask=self.mask,
            impl=impl,
            **options,
        )

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.q, self.k, self.v)
        yield from (p for p in self.encoding.parameters() if p.requires_grad)

    def gradients(self, impl: str, weight: Tensor) -> list[Tensor | None]:
        loss = (self.run(impl) * weight).sum()
        return list(torch.autograd.grad(loss, list(self.tensors()), allow_unused=True))


def setup(
    name: str,
    positions: Tensor,
    mask: masks.Mask | None,
    *,
    queries: int | None = None,
    causal: bool = True,
    grad: bool = True,
) -> Setup:
    """Return the arguments of attention with the encoding `name`, for keys at these positions and
    the last `queries` of them as queries."""
    torch.manual_seed(0)
    shape = posenc.ModelShape(EMBED, HEADS, KV_HEADS, HEAD_DIM, train_length=512, causal=causal)
    encoding = posenc.create(name, shape).for_layer(0).double()
    for parameter in encoding.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    length = positions.shape[-1]
    queries = length if queries is None else queries
    batch = 2
    axes = encoding.claims.num_axes
    kv_positions = cells(positions, axes, side=20)
    token_axis = -2 if axes > 1 else -1
    q_positions = kv_positions
    if queries != length:
        q_positions = kv_positions.narrow(token_axis, length - queries, queries)
    x = torch.randn(batch, length, EMBED, dtype=torch.float64)
    state = encoding.state(x, kv_positions)
    state = None if state is None else state.detach()
    q, k, v = (
        torch.randn(batch, heads, n, HEAD_DIM, dtype=torch.float64, requires_grad=grad)
        for heads, n in ((HEADS, queries), (KV_HEADS, length), (KV_HEADS, length))
    )
    return Setup(
        q,
        k,
        v,
        encoding,
        q_positions,
        kv_positions,
        mask,
        None if state is None else state[:, :, length - queries :],
        state,
    )


def taken(case: Setup, impl: str) -> tuple[bool, bool]:
    """Return two booleans, derived from the encoding's term: whether `impl` can give the output,
    and whether it can give the log-sum-exp too. Otherwise it must refuse."""
    if impl == "blocks":
        return True, True
    passes = case.encoding.passes(case.q_positions, case.kv_positions)
    shown = [m for m in (case.mask, *(p.mask for p in passes)) if m is not None]
    exact = all(m.exact for m in shown)
    if len(passes) > 1:  # joined by their log-sum-exp
        return exact, exact
    axes = case.encoding.claims.num_axes
    k = case.k.repeat_interleave(HEADS // KV_HEADS, 1)
    term = case.encoding.term(
        posenc.Tokens(case.q, case.q_positions, case.q_state, axes),
        posenc.Tokens(k, case.kv_positions, case.kv_state, axes),
    )
    if term is None:
        return True, exact
    if term.sum_values is not None:
        return False, False
    by_distance = term.by_distance is not None and exact
    causal = case.mask is not None and case.mask.causal
    return by_distance or (term.query_and_key_bias is not None and causal), by_distance


def assert_same(case: Setup, impl: str, *, gradients: bool = True):
    """Fail unless output, log-sum-exp and gradients of `impl` equal the reference's, where it can
    run; elsewhere it must refuse."""
    takes = taken(case, impl)
    want, want_lse = case.run("reference", return_lse=True)
    if takes[1]:
        _, got_lse = case.run(impl, return_lse=True)
        torch.testing.assert_close(got_lse, want_lse, rtol=1e-9, atol=1e-9)
    else:
        with pytest.raises(ValueError, match=f"impl='{impl}' cannot run"):
            case.run(impl, return_lse=True)
    if not takes[0]:
        with pytest.raises(ValueError, match=f"impl='{impl}' cannot run"):
            case.run(impl)
        return
    torch.testing.assert_close(case.run(impl), want, rtol=1e-9, atol=1e-9)
    with torch.no_grad():  # ways are leaner there
        torch.testing.assert_close(case.run(impl), want, rtol=1e-9, atol=1e-9)
    if not gradients:
        return
    weight = torch.randn_like(want)
    for ours, theirs in zip(
        case.gradients(impl, weight), case.gradients("reference", weight), strict=True
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_a_way_that_is_refused_what_it_should_run_fails_the_contract(monkeypatch):
    monkeypatch.setattr(choose, "sdpa_form", lambda problem: ("", "it is Sunday"))
    with pytest.raises(ValueError, match="Sunday"):
        assert_same(setup("alibi", torch.arange(9), masks.causal), "sdpa")


def test_a_way_that_runs_what_it_should_be_refused_fails_the_contract(monkeypatch):
    monkeypatch.setattr(choose, "sdpa_form", lambda problem: ("plain", ""))
    monkeypatch.setattr(sdpa, "run", lambda problem, form: reference.run(problem))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_same(setup("cope", torch.arange(9), masks.causal), "sdpa")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Make blocks so small that odd lengths leave a remainder."""
    monkeypatch.setattr(blocks, "rows_per_block", lambda call: 16)
    monkeypatch.setattr(strips, "STRIP_ROWS", 8)
    monkeypatch.setattr(strips, "GROUP_ROWS", 32)
    monkeypatch.setattr(sandwich, "GRID_KEYS", 16)
    monkeypatch.setattr(strips_backward, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(strips_backward, "KEYS_AT_ONCE", 9)
    monkeypatch.setattr(key_rows, "MAX_CHANGE_BY_BLOCK_SIZE", {16: 64, 8: 128})


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", posenc.names())
def test_every_way_equals_the_reference_at_odd_lengths(name, impl):
    assert_same(setup(name, torch.arange(41), masks.causal), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", posenc.names())
def test_every_way_equals_the_reference_without_a_mask(name, impl):
    case = setup(name, torch.arange(41), None, causal=False)
    if case.encoding.claims.causal_only:
        pytest.skip("needs a causal mask")
    assert_same(case, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", posenc.names())
def test_every_way_equals_the_reference_when_decoding(name, impl):
    for queries in (1, 5):
        case = setup(name, torch.arange(423), masks.causal, queries=queries, grad=False)
        assert_same(case, impl, gradients=False)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", posenc.names())
def test_every_way_equals_the_reference_under_padding(name, impl):
    valid = torch.ones(2, 41, dtype=torch.bool)
    valid[0, :7] = False
    valid[1, 30:] = False
    case = setup(name, torch.arange(41), masks.causal & masks.padding(valid))
    assert_same(case, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", posenc.names())
def test_every_way_equals_the_reference_on_packed_documents(name, impl):
    positions = torch.cat([torch.arange(19), torch.arange(22)])
    ids = torch.cat([torch.zeros(19), torch.ones(22)])
    case = setup(name, positions, masks.causal & masks.document(ids))
    assert_same(case, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", posenc.names())
def test_every_way_equals_the_reference_in_a_window(name, impl):
    case = setup(name, torch.arange(41), masks.causal & masks.sliding_window(9))
    assert_same(case, impl)


@pytest.mark.parametrize("name", posenc.names())
def test_blocks_honour_dropout(name):
    case = setup(name, torch.arange(41), masks.causal)
    weight = torch.randn(2, HEADS, 41, HEAD_DIM, dtype=torch.float64)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        out = case.run("blocks", dropout_p=0.5)
        results.append((out, torch.autograd.grad((out * weight).sum(), case.v)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.allclose(results[0][0], case.run("reference"))
    torch.manual_seed(3)
    with torch.no_grad():
        torch.testing.assert_close(case.run("blocks", dropout_p=0.5), results[0][0])
    # Linear in v where place 4 does not add tables: the gradient saw the same dropped weights.
    if 4 not in case.encoding.claims.places:
        out, grad = results[0]
        torch.testing.assert_close((grad * case.v).sum(), (out * weight).sum())


def test_ways_that_cannot_drop_weights_refuse():
    case = setup("alibi", torch.arange(41), masks.causal)
    with pytest.raises(ValueError, match="dropout"):
        case.run("sdpa", dropout_p=0.1)


@pytest.mark.quick(1)
@needs_whole_graphs
@pytest.mark.parametrize("name", one_of_each_kind(1, 2))
def test_the_host_traces_without_a_graph_break(name):
    case = setup(name, torch.arange(41), masks.causal)

    def call(q, k, v):
        return replace(case, q=q, k=k, v=v).run("auto")

    inputs = [t.detach() for t in (case.q, case.k, case.v)]
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs), call(*inputs), rtol=1e-9, atol=1e-9)
    torch.compiler.reset()


@pytest.mark.quick(4)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("name", ["pope", "alibi", "t5", "fox", "cope"])
def test_nothing_beside_the_tensors_is_read(name, width, impl):
    """Values narrower or wider than queries; what was freed before held NaN."""
    case = setup(name, torch.arange(41), masks.causal & masks.sliding_window(9))
    if not taken(case, impl)[0]:
        pytest.skip("another way runs it")
    case = replace(case, v=torch.randn(2, KV_HEADS, 41, width).double().requires_grad_())
    weight = torch.randn(2, HEADS, 41, width).double()
    want = case.gradients("reference", weight)
    for _ in range(20):
        held = [torch.full((256 << size,), torch.nan) for size in range(8) for _ in range(8)]
        del held
        torch.testing.assert_close(case.gradients(impl, weight), want, rtol=1e-8, atol=1e-8)
