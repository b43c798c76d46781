"""Attention checks its arguments once: a wrong call is named and changes nothing."""

import pickle

import pytest
import torch

import posenc
from posenc import Pass, masks
from posenc.attend.problem_builder import build_problems
from tests.attending import cells

ROPE = posenc.RoPE(8, interleaved=False)
P = torch.arange(5)


def qkv(length: int = 5, batch: int = 1, heads: int = 2, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return tuple(torch.randn(batch, heads, length, 8, dtype=dtype) for _ in range(3))


def attend(encoding=None, q_positions=P, kv_positions=None, mask=masks.causal, **options):
    q, k, v = options.pop("qkv", None) or qkv()
    return posenc.attention(
        q,
        k,
        v,
        encoding,
        q_positions=q_positions,
        kv_positions=q_positions if kv_positions is None else kv_positions,
        mask=mask,
        **options,
    )


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        ([0, 1, 2, 3, 4], TypeError, "must be a tensor of positions or a range, got list"),
        (None, TypeError, "got NoneType"),
        (5, TypeError, "got int"),
        (torch.ones(5, dtype=torch.bool), TypeError, "positions_from_mask"),
        (P.half(), TypeError, "float16"),
        (P.bfloat16(), TypeError, "bfloat16"),
        (P.float() + 2**24, ValueError, "float32 rounds them"),
        (torch.full((5,), torch.nan), ValueError, "must be finite"),
        (torch.arange(4), ValueError, r"must have shape \(5,\) or \(1, 5\)"),
        (torch.arange(10).view(2, 5), ValueError, r"got \(2, 5\)"),
    ],
)
def test_wrong_positions_say_what_came(positions, error, message):
    with pytest.raises(error, match=message):
        attend(ROPE, positions)
    with pytest.raises(error, match=message):
        ROPE(*qkv()[:2], positions)


def test_narrow_integers_do_not_wrap():
    far = torch.arange(100, 105)
    assert torch.equal(attend(ROPE, far.to(torch.int8)), attend(ROPE, far))


def test_one_row_of_positions_serves_every_row_of_the_batch():
    inputs = qkv(batch=3)
    mask = masks.causal & masks.sliding_window(3)
    for encoding in (ROPE, posenc.ALiBi(2), None):
        want = attend(encoding, mask=mask, qkv=inputs)
        torch.testing.assert_close(attend(encoding, P[None], mask=mask, qkv=inputs), want)


def test_a_rotation_takes_positions_of_its_own_tokens_only():
    """A decoded query among longer keys used to come back unrotated."""
    q, k, _ = qkv(16)
    for rope in (ROPE, posenc.RoPE(8, interleaved=True), posenc.XPos(8, interleaved=True)):
        with pytest.raises(ValueError, match=r"must have shape \(1,\)"):
            rope(q[:, :, -1:], k[:, :, -1:], torch.arange(16))
        with pytest.raises(ValueError, match="the same batch and length"):
            rope(q[:, :, -1:], k, torch.arange(1))
        with pytest.raises(ValueError, match="must have shape"):  # (batch, len, heads, head_dim)
            rope(q.transpose(1, 2), k.transpose(1, 2), torch.arange(16))


def test_encodings_of_place_1_are_not_ignored():
    embedding = posenc.Sinusoidal(64)
    for encoding in (embedding, posenc.Compose(embedding, posenc.ALiBi(4))):
        with pytest.raises(ValueError, match="acts at the embeddings"):
            posenc.Attention(64, 4, encoding=encoding)
        with pytest.raises(ValueError, match=r"encoding\.for_layer"):
            attend(encoding)
        layer = posenc.Attention(64, 4, encoding=encoding.for_layer(0))
        assert layer(torch.randn(1, 5, 64), P, mask=masks.causal).shape == (1, 5, 64)


@pytest.mark.parametrize("encoding", ["rope", 3, torch.nn.Linear(2, 2)])
def test_what_is_no_encoding_is_named(encoding):
    with pytest.raises(TypeError, match="must be a PositionEncoding or None"):
        attend(encoding)


def test_a_bias_does_not_take_queries_for_positions():
    q, k, _ = qkv()
    for bias in (posenc.ALiBi(2), posenc.T5Bias(2), posenc.Sandwich(2), posenc.Kerple(2)):
        with pytest.raises(ValueError, match="q_positions must have shape"):
            bias(q, k)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(5, 5), TypeError, "must be a posenc.masks.Mask, got a Tensor"),
        ("causal", TypeError, "got a str"),
        (masks.padding, TypeError, r"padding \(call it"),
        (masks.padding(torch.ones(1, 4)), ValueError, r"padding has shape \(1, 4\)"),
        (masks.padding(torch.ones(2, 5)), ValueError, "batch = 1"),
        (masks.document(torch.zeros(6)), ValueError, "documents of queries"),
        (masks.prefix(torch.tensor([1, 2])), ValueError, "prefix"),
        (masks.causal.bind(torch.arange(7), torch.arange(7)), ValueError, "is bound to"),
    ],
)
def test_masks_of_other_kinds_and_sizes_are_refused(mask, error, message):
    with pytest.raises(error, match=message):
        attend(mask=mask)


def test_a_bound_mask_sees_its_tensors_change():
    valid = torch.ones(1, 5, dtype=torch.bool)
    mask = (masks.causal & masks.padding(valid)).bind(P, P)
    before = attend(mask=mask, impl="reference")
    valid[0, 0] = False
    after = attend(mask=mask, impl="reference")
    fresh = attend(mask=masks.causal & masks.padding(valid), impl="reference")
    assert torch.equal(after, fresh) and not torch.equal(after, before)
    positions = torch.arange(5)
    mask = masks.causal.bind(positions, positions)
    attend(mask=mask, impl="reference")
    positions += torch.tensor([9, 0, 0, 0, 0])  # the first token comes last
    assert attend(mask=mask, impl="reference").ne(attend(impl="reference")).any()


def test_positions_changed_after_prepare_are_noticed():
    positions = torch.arange(5)
    prepared = ROPE.prepare(positions)
    positions += torch.tensor([0, 1, 2, 3, 4])
    q, k, _ = qkv()
    assert torch.equal(prepared(q, k, positions)[0], ROPE(q, k, positions)[0])


@pytest.mark.parametrize("name", ["fire", "kerple", "t5", "shaw", "dape", "rope", "nope"])
def test_tensors_are_floating_and_of_one_dtype(name):
    encoding = posenc.create(name, posenc.ModelShape(16, 2, train_length=8)).for_layer(0)
    whole = tuple(t.long() for t in qkv())
    with pytest.raises(TypeError, match="floating-point"):
        attend(encoding, qkv=whole)
    q, k, v = qkv()
    with pytest.raises(TypeError, match="one dtype"):
        attend(encoding, qkv=(q, k.double(), v))


def test_a_failed_call_leaves_its_cache_as_it_was():
    q, k, v = qkv()
    cache = posenc.KVCache()
    attend(ROPE, qkv=(q, k, v), cache=cache)
    for wrong in ({"impl": "no such"}, {"q_state": torch.zeros(1, 1)}, {"mask": "causal"}):
        with pytest.raises((ValueError, TypeError)):
            attend(ROPE, P + 5, P + 5, qkv=(q, k, v), cache=cache, **wrong)
        assert cache.length == 5 and cache.positions.tolist() == P.tolist()
    refused = posenc.RoPE(8, interleaved=False)
    with pytest.raises(ValueError, match="cannot run"):  # appended, then refused by the kernel
        posenc.attention(
            q,
            k,
            v,
            refused,
            q_positions=P + 5,
            kv_positions=P + 5,
            cache=cache,
            impl="sdpa",
            dropout_p=0.5,
        )
    assert cache.length == 5
    both = torch.cat([P, P + 5])
    want = attend(ROPE, both, qkv=tuple(torch.cat([t, t], 2) for t in (q, k, v)))[:, :, 5:]
    torch.testing.assert_close(attend(ROPE, P + 5, qkv=(q, k, v), cache=cache), want)


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (qkv(batch=2), ValueError, "batch, heads and width must not change"),
        (qkv(heads=4), ValueError, "batch, heads and width must not change"),
        (qkv(dtype=torch.float64), TypeError, "it has k in torch.float32"),
    ],
)
def test_a_cache_holds_one_kind_of_token(other, error, message):
    cache = posenc.KVCache()
    attend(cache=cache)
    with pytest.raises(error, match=message):
        attend(None, P + 5, qkv=other, cache=cache)
    assert cache.length == 5


def test_a_cache_serves_the_encoding_that_made_its_keys():
    cache = posenc.KVCache()
    attend(ROPE, cache=cache)
    for other in (None, posenc.ALiBi(2), posenc.XPos(8, interleaved=False)):
        with pytest.raises(ValueError, match="its keys were made for RoPE"):
            attend(other, P + 5, cache=cache)
        assert cache.length == 5
    attend(ROPE.prepare(P + 5), P + 5, cache=cache)
    assert cache.length == 10


def test_a_cache_tells_encodings_of_one_class_apart_by_their_arguments():
    def rope(**options):
        return posenc.RoPE(8, **{"interleaved": False, **options})

    twins = [(rope(), rope(rope_theta=10_000)), (rope(rotary_dim=8), rope())]
    twins += [(posenc.Compose(rope(), posenc.ALiBi(2)), posenc.Compose(rope(), posenc.ALiBi(2)))]
    strangers = [(rope(), rope(rope_theta=500.0)), (rope(), rope(interleaved=True))]
    yarn = [posenc.create("yarn", posenc.ModelShape(16, 2), factor=f) for f in (2.0, 4.0)]
    strangers += [(yarn[0], yarn[1]), (yarn[0].prepare(P), yarn[1].prepare(P))]
    strangers += [tuple(posenc.Compose(rope(rope_theta=t), posenc.ALiBi(2)) for t in (1e4, 1e5))]
    for first, second in twins + strangers:
        cache = posenc.KVCache()
        attend(first, cache=cache)
        if (first, second) in twins:
            attend(second, P + 5, cache=cache)
            assert cache.length == 10
            continue
        with pytest.raises(ValueError, match=r"its keys were made for .* but attention has"):
            attend(second, P + 5, cache=cache)
        assert cache.length == 5


def test_a_layer_that_fails_leaves_every_cache_of_a_model_as_it_was():
    config = posenc.DecoderConfig(11, 16, 2, 2)
    model = posenc.Decoder(config, posenc.RoPE(8, interleaved=False)).eval()
    caches, tokens = model.new_caches(), torch.tensor([[1, 2, 3]])
    want = model(tokens)
    model(tokens[:, :2], caches=caches)
    broken = model.layers[1].attention.impl
    model.layers[1].attention.impl = "no such"
    with pytest.raises(ValueError, match="unknown impl"):
        model(tokens[:, 2:], caches=caches)
    model.layers[1].attention.impl = broken
    assert [cache.length for cache in caches] == [2, 2]
    torch.testing.assert_close(model(tokens[:, 2:], caches=caches), want[:, 2:])


def test_empty_inputs_give_empty_or_zero_outputs():
    q, k, v = (t.requires_grad_() for t in qkv())
    none = torch.arange(0)
    for encoding in (None, ROPE, posenc.ALiBi(2), posenc.FIRE(2)):
        for impl in ("auto", "reference", "blocks"):
            out = attend(encoding, none, P, qkv=(q[:, :, :0], k, v), mask=None, impl=impl)
            assert out.shape == (1, 2, 0, 8)
            out = attend(encoding, P, none, qkv=(q, k[:, :, :0], v[:, :, :0]), mask=None, impl=impl)
            assert not out.any()
            assert not torch.autograd.grad(out.sum(), q)[0].any()


def test_the_output_has_the_dtype_of_q_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        for encoding in (None, posenc.ALiBi(2), ROPE):
            for impl in ("reference", "blocks", "sdpa"):
                assert attend(encoding, impl=impl).dtype == torch.float32


@pytest.mark.parametrize("name", ["rnope_swa", "irope", "rope", "t5", "fox", "deberta"])
def test_encodings_are_pickled(name):
    encoding = posenc.create(name, posenc.ModelShape(16, 2, train_length=8))
    copied = pickle.loads(pickle.dumps(encoding))
    assert type(copied) is type(encoding)


@pytest.mark.parametrize("name", ["nope", "alibi", "t5"])
def test_no_tensor_is_made_of_a_range_that_no_pass_maps(name):
    encoding = posenc.create(name, posenc.ModelShape(embed_dim=16, num_heads=2))
    (problem,) = build_problems(*qkv(), encoding, q_positions=range(5), kv_positions=range(5))
    assert problem.keys._position_tensor is None


@pytest.mark.parametrize("name", posenc.names())
def test_attention_reads_no_positions_of_a_device(name):
    """Masks of an encoding's own passes are bound to tensors, which cannot be compared there."""
    encoding = posenc.create(name, posenc.ModelShape(32, 2, train_length=32))
    layer, encoding = posenc.Attention(32, 2).to("meta"), encoding.to("meta")
    positions, axes = range(5), encoding.claims.num_axes
    if axes > 1:
        positions = torch.zeros(5, axes, dtype=torch.int64, device="meta")
    x = torch.empty(1, 5, 32, device="meta")
    out = layer(x, positions, mask=masks.causal, encoding=encoding.for_layer(0))
    assert out.shape == x.shape


def test_a_cache_keeps_positions_that_the_caller_changes_in_place():
    q, k, v = qkv()
    cache, step = posenc.KVCache(), torch.tensor([0.0])
    for i in range(5):
        span = slice(i, i + 1)
        posenc.attention(
            q[:, :, span],
            k[:, :, span],
            v[:, :, span],
            ROPE,
            q_positions=step,
            kv_positions=step,
            cache=cache,
        )
        step += 1
    assert cache.positions is not None and cache.positions.tolist() == [0, 1, 2, 3, 4]


def written_over(*tensors):
    for t in tensors:
        t.detach().fill_(7)


@pytest.mark.parametrize("keep_last_state", [False, True])
@pytest.mark.parametrize("kind", [torch.arange, lambda n: torch.arange(n)[None].expand(1, n) * 2])
def test_a_cache_holds_copies_of_all_that_it_is_given(kind, keep_last_state):
    cache, returned = posenc.KVCache(), []
    for n in (3, 1):
        positions = kind(n).clone() + cache.length
        k, v, state = torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n)
        found = cache.append(k, v, positions, state, keep_last_state=keep_last_state)
        before = [t.clone() for t in (*found, cache.k, cache.v, cache.positions, cache.state)]
        written_over(k, v, positions, state)
        after = (*found, cache.k, cache.v, cache.positions, cache.state)
        assert all(map(torch.equal, before, after))
        returned.append(found)
    memory = {t.untyped_storage().data_ptr() for t in (cache.k, cache.v, cache.state)}
    for t in (k, v, state):
        assert t.untyped_storage().data_ptr() not in memory


@pytest.mark.parametrize("name", posenc.names())
def test_no_output_or_cache_shares_memory_with_what_the_caller_gave(name):
    shape = posenc.ModelShape(16, 2, train_length=8)
    encoding = posenc.create(name, shape).for_layer(0)
    axes, cache = encoding.claims.num_axes, posenc.KVCache()
    for n, impl in ((4, "auto"), (1, "auto"), (1, "reference")):
        where = torch.arange(cache.length, cache.length + n)
        where = cells(where, axes, side=3)
        q, k, v = (torch.randn(1, 2, n, 8) for _ in range(3))
        state = encoding.state(torch.randn(1, n, 16), where)
        state = None if state is None else state.detach()
        with torch.no_grad():
            out = posenc.attention(
                q,
                k,
                v,
                encoding,
                q_positions=where,
                kv_positions=where,
                q_state=state,
                kv_state=state,
                mask=masks.causal,
                cache=cache,
                impl=impl,
            )
        held = [out, cache.k, cache.v, cache.positions, cache.state]
        before = [None if t is None else t.clone() for t in held]
        written_over(q, k, v, where, *([] if state is None else [state]))
        held[1:] = [cache.k, cache.v, cache.positions, cache.state]
        for a, b in zip(before, held, strict=True):
            assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("name", ["rerope", "self_extend", "dual_chunk", "rope"])
def test_a_prepared_encoding_holds_a_copy_of_its_positions(name):
    encoding = posenc.create(name, posenc.ModelShape(16, 2, train_length=4))
    q, positions = torch.randn(1, 2, 9, 8), torch.arange(9)
    prepared, later = encoding.prepare(positions), positions.clone()
    positions += torch.arange(9)
    want = attend(encoding, later, qkv=(q, q, q))
    assert torch.equal(attend(prepared, later, qkv=(q, q, q)), want)


def test_a_list_is_no_cache():
    with pytest.raises(TypeError, match="cache must be a KVCache, got list"):
        attend(cache=[posenc.KVCache()])


@pytest.mark.parametrize("name", ["context_positions", "memory_positions"])
def test_positions_of_nothing_are_refused(name):
    layer = posenc.Attention(16, 2)
    with pytest.raises(ValueError, match=name):
        layer(torch.randn(1, 5, 16), P, **{name: P})


class TwoDistances(posenc.PositionEncoding):
    """Rotates near and far tokens by other positions, and does not claim needs_raw_k."""

    claims = posenc.Claims(places=(2,), source="a test, 2026")

    def passes(self, q_positions, kv_positions):
        near = masks.sliding_window(3)
        return (
            Pass(q_positions, kv_positions, near),
            Pass(q_positions // 2, kv_positions // 2, ~near),
        )

    def transform(self, q, k):
        return posenc.RoPE(8, interleaved=False).transform(q, k)


def test_several_passes_with_a_cache_of_changed_keys_are_refused():
    q = torch.randn(1, 2, 6, 8)
    at = {"q_positions": torch.arange(6), "kv_positions": torch.arange(6), "mask": masks.causal}
    posenc.attention(q, q, q, TwoDistances(), **at)
    cache = posenc.KVCache()
    with pytest.raises(ValueError, match=r"in each of its 2 passes.*must claim needs_raw_k"):
        posenc.attention(q, q, q, TwoDistances(), **at, cache=cache)
    assert cache.length == 0
