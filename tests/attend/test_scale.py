"""The scale of the scores: the usual one unless it is asked for, and the one that is given."""

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import posenc
from posenc import masks
from posenc.encodings import names
from tests.attending import attend, cells
from tests.compilers import needs_whole_graphs
from tests.kinds import one_of_each_kind

HEADS, HEAD_DIM, LENGTH = 4, 16, 9
USUAL = 1 / math.sqrt(HEAD_DIM)
SHAPE = posenc.ModelShape(HEADS * HEAD_DIM, HEADS, train_length=32)


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(3, 2, HEADS, LENGTH, HEAD_DIM, generator=generator, dtype=dtype)
    return made[0], made[1], made[2]


def randomized(encoding: posenc.PositionEncoding) -> posenc.PositionEncoding:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return encoding.double()


def by_loops(encoding: Any, scale: float) -> Tensor:
    """The scores of DeBERTa and Shaw by their equations, (batch, heads, queries, keys): each
    product of vectors is multiplied by the scale."""
    q, k, _ = qkv()
    scores = torch.zeros(2, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    for i in range(LENGTH):
        for j in range(LENGTH):
            row = encoding.table_row(torch.tensor([i - j]))
            at_q, at_k = q[:, :, i], k[:, :, j]
            total = (at_q * at_k).sum(-1)
            if isinstance(encoding, posenc.Shaw):
                total = total + (at_q * encoding.key_table[row]).sum(-1)
            else:
                table = encoding.table[row]
                for layer, vector in ((encoding.pos_key, at_q), (encoding.pos_query, at_k)):
                    projected = layer(table).view(HEADS, HEAD_DIM)
                    total = total + (vector * projected).sum(-1)
            scores[:, :, i, j] = scale * total
    return scores


@pytest.mark.parametrize("scale", [1.0, 0.03, 2])
@pytest.mark.parametrize("impl", ["reference", "blocks", "sdpa"])
@pytest.mark.parametrize("name", ["none", "t5", "alibi"])
def test_a_given_scale_equals_that_of_torch(name, impl, scale):
    q, k, v = qkv()
    encoding: Any = {"none": None, "alibi": posenc.ALiBi(HEADS)}.get(name)
    if name == "t5":
        encoding = randomized(posenc.T5Bias(HEADS))
    at = torch.arange(LENGTH)
    bias = torch.zeros(HEADS, LENGTH, LENGTH).double() if encoding is None else encoding(at, at)
    bias = bias.masked_fill(at[:, None] < at, -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, bias.double(), scale=scale)
    torch.testing.assert_close(attend(q, k, v, encoding, scale=scale, impl=impl), expected)


@pytest.mark.parametrize("scale", [1.0, 0.03])
@pytest.mark.parametrize("impl", ["reference", "blocks", "auto"])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", ["deberta", "shaw"])
def test_terms_that_are_multiplied_by_the_scale_use_the_given_one(name, prepared, impl, scale):
    q, k, v = qkv()
    encoding = randomized(posenc.create(name, SHAPE))
    if name == "shaw":
        encoding.value_table = None
    expected = by_loops(encoding, scale).softmax(-1) @ v
    given = encoding.prepare(range(LENGTH)) if prepared else encoding
    with torch.no_grad():
        attend(q, k, v, given, mask=None)  # a prepared encoding may keep tables of this scale
        out = attend(q, k, v, given, mask=None, scale=scale, impl=impl)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", [n for n in names() if not n.startswith(("rnope", "irope"))])
def test_giving_the_encodings_own_scale_changes_nothing(name):
    encoding = posenc.create(name, SHAPE).for_layer(0)
    positions = cells(torch.arange(LENGTH), encoding.claims.num_axes, side=3)
    state = encoding.state(torch.randn(2, LENGTH, HEADS * HEAD_DIM), positions)
    q, k, v = qkv(torch.float32)
    usual, given = (
        attend(q, k, v, encoding, positions, state=state, scale=scale)
        for scale in (None, encoding.scale(HEAD_DIM))
    )
    assert torch.equal(usual, given)


@pytest.mark.parametrize("name", ["rope+alibi", "rope+shaw", "dape(inner=deberta)"])
def test_a_given_scale_reaches_the_parts_of_a_mixture(name):
    """Twice the scale is the same as twice the queries and, for terms, twice what they add."""
    q, k, v = qkv()
    if name.startswith("dape"):
        inner = posenc.DeBERTa(SHAPE.embed_dim, HEADS, max_distance=4)
        encoding: Any = posenc.DAPE(inner, HEADS)
        encoding = randomized(encoding)
        own = attend(q, k, v, encoding)
        other = attend(q, k, v, encoding, scale=1.0)
        inner.scale = lambda head_dim: 1.0
        torch.testing.assert_close(other, attend(q, k, v, encoding))
        assert not torch.allclose(own, other)
        return
    encoding = randomized(posenc.create(name, SHAPE))
    doubled = 2 * USUAL
    if name == "rope+shaw":  # its term is linear in the queries
        expected = attend(2 * q, k, v, encoding)
        torch.testing.assert_close(attend(q, k, v, encoding, scale=doubled), expected)
        return
    rotated, bias = encoding.encodings
    at = torch.arange(LENGTH)
    turned = rotated(q, k, at)
    scores = doubled * turned[0] @ turned[1].mT + bias(at, at)
    scores = scores.masked_fill(at[:, None] < at, -torch.inf)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(
        attend(q, k, v, encoding, scale=doubled), expected, atol=1e-6, rtol=1e-6
    )


def test_a_table_of_zeros_leaves_the_scale_as_it_is():
    """The usual scale, in attention, in SDPA and in the layer of a model."""
    q, k, v = qkv()
    t5 = posenc.T5Bias(HEADS)
    torch.nn.init.zeros_(t5.weight)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, t5), expected)
    assert t5.scale(HEAD_DIM) == USUAL and not t5.claims.own_scale


def test_t5_has_no_scale_if_asked_for():
    q, k, v = qkv()
    t5 = posenc.T5Bias(HEADS, unscaled=True)
    torch.nn.init.zeros_(t5.weight)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    torch.testing.assert_close(attend(q, k, v, t5), expected)
    assert t5.claims.own_scale
    assert "unscaled=True" in repr(t5)
    named = posenc.create("t5:unscaled=true", SHAPE)
    assert named.scale(HEAD_DIM) == 1.0
    torch.testing.assert_close(attend(q, k, v, t5, scale=USUAL), attend(q, k, v, None))


@pytest.mark.parametrize(
    "mode", ["eager", "decode", pytest.param("compiled", marks=needs_whole_graphs)]
)
def test_a_layer_of_a_given_scale(mode):
    torch.manual_seed(0)
    layer = posenc.Attention(64, HEADS, encoding="alibi", scale=0.7).eval()
    x, at = torch.randn(1, LENGTH, 64), torch.arange(LENGTH)
    q, k, v = (
        p(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    out = attend(q, k, v, posenc.ALiBi(HEADS), scale=0.7)
    expected = layer.o_proj(out.transpose(1, 2).flatten(2))
    if mode == "decode":
        cache = posenc.KVCache()
        steps = [layer(x[:, i], i, cache=cache, mask=masks.causal) for i in at.split(1)]
        got = torch.cat(steps, 1)
    else:
        run: Any = layer
        if mode == "compiled":
            run = torch.compile(layer, backend="eager", fullgraph=True)
        got = run(x, at, mask=masks.causal)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.quick(1)
@needs_whole_graphs
@pytest.mark.parametrize("name", ["sincos_2d", "deberta", "dape", "rope+shaw"])
def test_compiled_code_uses_the_given_scale(name):
    """Also where an encoding has claims of its own, such as the number of components."""
    encoding = posenc.create(name, SHAPE).for_layer(0)
    axes = encoding.claims.num_axes
    at = cells(torch.arange(LENGTH), axes, side=3)
    q, k, v = qkv(torch.float32)

    def call(q: Tensor) -> Tensor:
        return posenc.attention(q, k, v, encoding, q_positions=at, kv_positions=at, scale=0.7)

    with torch.no_grad():
        compiled = torch.compile(call, backend="eager", fullgraph=True)(q)
        torch.testing.assert_close(compiled, call(q), rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.quick(1)
@needs_whole_graphs
@pytest.mark.parametrize("name", one_of_each_kind(0, 2))
def test_compiled_code_prepares_an_encoding_and_gives_it_a_scale(name):
    """As models with an attached encoding do: each step copies the encoding, and the second copy
    has what the first has."""
    torch.manual_seed(0)
    encoding = posenc.create(name, SHAPE).for_layer(0)
    axes = encoding.claims.num_axes
    at = cells(torch.arange(LENGTH), axes, side=3)
    q, k, v = qkv(torch.float32)
    with torch.no_grad():
        state = encoding.state(torch.randn(2, LENGTH, HEADS * HEAD_DIM), at)

    def call(q: Tensor, encoding: posenc.PositionEncoding) -> Tensor:
        return posenc.attention(
            q,
            k,
            v,
            encoding,
            q_positions=at,
            kv_positions=at,
            q_state=state,
            kv_state=state,
            mask=masks.causal,
            scale=0.7,
        )

    def prepared(q: Tensor) -> Tensor:
        return call(q, encoding.prepare(at))

    def scaled_twice(q: Tensor) -> Tensor:
        return call(q, encoding.with_scale(3.0))

    with torch.no_grad():
        expected = call(q, encoding)
        for way in (prepared, scaled_twice):
            compiled = torch.compile(way, backend="eager", fullgraph=True)(q)
            torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@needs_whole_graphs
def test_compiled_code_keeps_a_scale_when_it_prepares_afterwards():
    alibi, at = posenc.ALiBi(HEADS), torch.arange(LENGTH)
    q, k, v = qkv(torch.float32)

    def call(q: Tensor) -> Tensor:
        prepared = alibi.with_scale(0.7).prepare(at)
        return posenc.attention(q, k, v, prepared, q_positions=at, kv_positions=at)

    compiled = torch.compile(call, backend="eager", fullgraph=True)(q)
    expected = posenc.attention(q, k, v, alibi, q_positions=at, kv_positions=at, scale=0.7)
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


def test_weights_and_sinks_use_the_given_scale():
    q, k, v = qkv()
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0]).double()
    at: dict[str, Any] = {"q_positions": range(LENGTH), "kv_positions": range(LENGTH)}
    weights = posenc.attention_weights(q, k, sinks=sinks, scale=0.9, **at)
    scores = torch.cat([0.9 * q @ k.mT, sinks[:, None, None].expand(2, -1, LENGTH, 1)], dim=-1)
    torch.testing.assert_close(weights, scores.softmax(-1)[..., :-1])
    out, lse = posenc.attention(q, k, v, sinks=sinks, scale=0.9, return_lse=True, **at)
    torch.testing.assert_close(out, weights @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_gradients_with_a_given_scale():
    q, k, v = (t.requires_grad_() for t in qkv())
    for encoding in (None, posenc.T5Bias(HEADS).double(), posenc.ALiBi(HEADS, learned=True)):
        found = []
        for impl in ("reference", "sdpa", "blocks"):
            leaves = [q, k, v, *([] if encoding is None else encoding.parameters())]
            out = attend(q, k, v, encoding, scale=0.6, impl=impl).square().sum()
            found.append(torch.autograd.grad(out, leaves))
        for other in found[1:]:
            torch.testing.assert_close(found[0], other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0, ValueError, "scale must be a finite number above 0, got 0"),
        (-0.5, ValueError, "scale must be a finite number above 0, got -0.5"),
        (math.nan, ValueError, "scale must be a finite number above 0, got nan"),
        (math.inf, ValueError, "scale must be a finite number above 0, got inf"),
        (10**400, ValueError, "scale must be a finite number above 0, got 1000"),
        (True, TypeError, "scale must be a number or None, got True"),
        ("1", TypeError, "scale must be a number or None, got '1'"),
        (torch.ones(()), TypeError, "scale must be a number or None"),
    ],
)
def test_what_is_no_scale_is_refused(scale, error, message):
    q, k, v = qkv()
    at: dict[str, Any] = {"q_positions": range(LENGTH), "kv_positions": range(LENGTH)}
    cache = posenc.KVCache()
    with pytest.raises(error, match=message):
        posenc.attention(q, k, v, scale=scale, cache=cache, **at)
    assert cache.length == 0
    with pytest.raises(error, match=message):
        posenc.attention_weights(q, k, scale=scale, **at)
    with pytest.raises(error, match=message):
        posenc.explain(q, k, v, scale=scale, **at)
    with pytest.raises(error, match=message):
        posenc.score_mod(q, k, posenc.ALiBi(HEADS), scale=scale, **at)
    with pytest.raises(error, match=f"Attention: {message}"):
        posenc.Attention(64, HEADS, scale=scale)


@pytest.mark.parametrize(
    ("encoding", "scale", "value", "line"),
    [
        (None, None, 0.25, "scale 0.25: 1/sqrt(head_dim)"),
        (posenc.T5Bias(HEADS), None, 0.25, "scale 0.25: 1/sqrt(head_dim)"),
        (
            posenc.T5Bias(HEADS, unscaled=True),
            None,
            1.0,
            "scale 1: T5Bias's own, 4 times 1/sqrt(head_dim)",
        ),
        (
            posenc.DeBERTa(64, HEADS),
            None,
            0.25 / math.sqrt(3),
            "scale 0.144338: DeBERTa's own, 0.57735 times 1/sqrt(head_dim)",
        ),
        (posenc.DeBERTa(64, HEADS), 0.5, 0.5, "scale 0.5: as given"),
    ],
)
def test_explain_names_the_scale(encoding, scale, value, line):
    q, k, v = qkv(torch.float32)
    where: dict[str, Any] = {"q_positions": range(LENGTH), "kv_positions": range(LENGTH)}
    plan = posenc.explain(q, k, v, encoding, scale=scale, **where)
    assert plan.scale == pytest.approx(value, rel=1e-12)
    assert line in str(plan)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("name", ["t5", "deberta"])
def test_a_score_mod_with_a_given_scale(name, unscaled):
    """The scores of a pair are scale * q . k and what the score_mod adds to them."""
    q, k, v = qkv(torch.float32)
    encoding: Any = randomized(posenc.create(name, SHAPE)).float()
    scale = 1.0 if unscaled else None
    where: dict[str, Any] = {"q_positions": range(LENGTH), "kv_positions": range(LENGTH)}
    mod = posenc.score_mod(q, k, encoding, scale=scale, **where)
    used = posenc.explain(q, k, v, encoding, scale=scale, **where).scale
    index = torch.meshgrid(*(torch.arange(n) for n in (2, HEADS, LENGTH, LENGTH)), indexing="ij")
    weights = mod(used * q @ k.mT, *index).softmax(-1)
    expected = posenc.attention_weights(q, k, encoding, scale=scale, **where)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_a_cache_of_a_scaled_attention_is_pickled_and_goes_on():
    encoding = posenc.create("rope", posenc.encodings.ModelShape(32, 4))
    q, k, v = torch.randn(3, 1, 4, 5, 8).unbind()
    options = {"encoding": encoding, "mask": posenc.masks.causal, "scale": 0.3}
    whole = posenc.attention(q, k, v, q_positions=range(5), kv_positions=range(5), **options)
    cache = posenc.KVCache()
    first = {"q_positions": range(4), "kv_positions": range(4)}
    posenc.attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], cache=cache, **first, **options)
    copy = pickle.loads(pickle.dumps(cache))
    last = {"q_positions": range(4, 5), "kv_positions": range(4, 5)}
    row = posenc.attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], cache=copy, **last, **options)
    torch.testing.assert_close(row, whole[:, :, 4:])
