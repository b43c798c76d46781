"""Every door checks what comes in: encodings called on their own, layers, models, generation."""

import math

import pytest
import torch

import posenc
from posenc import masks
from posenc.encodings.base.check_inputs import check_span_of_integers, validated_positions
from posenc.encodings.base.compose import Compose
from posenc.encodings.base.constructor_arguments import are_alike
from tests.attending import attend

SHAPE = posenc.ModelShape(16, 2, train_length=8)
CONFIG = posenc.DecoderConfig(11, 16, 2, 2)
P, X, TOKENS = torch.arange(4), torch.randn(2, 4, 16), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
WRONG = {
    "a list": ([0, 1, 2, 3], TypeError, "must be a tensor of positions or a range, got list"),
    "None": (None, TypeError, "got NoneType"),
    "an int": (4, TypeError, "got int"),
    "booleans": (P.bool(), TypeError, "positions_from_mask"),
    "float16": (P.half(), TypeError, "float16"),
    "bfloat16": (P.bfloat16(), TypeError, "bfloat16"),
    "8 bits": (P.float().to(torch.float8_e4m3fn), TypeError, "float8"),
    "complex": (P.to(torch.complex64), TypeError, "complex"),
    "NaN": (P.float() * math.nan, ValueError, "must be finite, got nan"),
    "infinite": (P.double() + math.inf, ValueError, "must be finite, got inf"),
    "float32 from 2^24": (P.float() + 2**24, ValueError, "float32 rounds them"),
    "float64 from 2^53": (P.double() + 2**53, ValueError, "float64 rounds them"),
}
LENGTHS = {
    "too few": (P[:3], ValueError, r"must have shape \(4"),
    "too many": (torch.arange(16), ValueError, r"must have shape \(4"),
    "rows of another batch": (P.expand(3, 4), ValueError, r"\(2, 4"),
    "two axes too many": (P[None, None].expand(1, 2, 4), ValueError, r"must have shape"),
}
Q = torch.randn(2, 2, 4, 8)
MODELS = ("nope", "rope", "alibi", "learned", "fox", "mrope")


def of(encoding: posenc.PositionEncoding, positions):
    """Return the positions with as many components as the encoding takes."""
    axes = encoding.claims.num_axes
    if axes == 1 or not isinstance(positions, torch.Tensor):
        return positions
    if positions.is_floating_point() and positions.isnan().all():
        pytest.skip("with several components NaN is a token without a place")
    return positions[..., None].expand(*positions.shape, axes)


@pytest.mark.parametrize("case", [*WRONG, *LENGTHS])
@pytest.mark.parametrize("name", ["learned", "sincos_2d"])
def test_an_embedding_checks_positions(name, case):
    encoding = posenc.create(name, SHAPE)
    positions, error, message = (WRONG | LENGTHS)[case]
    for call in (encoding, encoding.embed):
        with pytest.raises(error, match=message):
            call(X, of(encoding, positions))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ("x", TypeError, "x must be a tensor"),
        (X.long(), TypeError, "int64"),
        (X.to(torch.complex64), TypeError, "complex64"),
        (X.to(torch.float8_e4m3fn), TypeError, "float8"),
        (X[..., :8], ValueError, r"must be \(batch, len, 16\), got \(2, 4, 8\)"),
        (X[0, 0], ValueError, r"got \(16,\)"),
    ],
)
@pytest.mark.parametrize("name", ["learned", "sincos_2d"])
def test_an_embedding_checks_what_it_adds_to(name, x, error, message):
    encoding = posenc.create(name, SHAPE)
    with pytest.raises(error, match=message):
        encoding(x, of(encoding, P))


@pytest.mark.parametrize(
    "name", ["sinusoidal", "sinusoidal_fairseq", "learned", "sincos_2d", "learned_2d"]
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_an_embedding_takes_any_integers(name, dtype):
    encoding = posenc.create(name, SHAPE)
    want = encoding(X, of(encoding, P % 3))
    assert torch.equal(encoding(X, of(encoding, (P % 3).to(dtype))), want)
    assert torch.equal(encoding(X, of(encoding, (P % 3)[None])), want)
    assert torch.equal(encoding(X[0], of(encoding, P % 3)), want[0])


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("name", ["alibi", "fire"])
def test_a_bias_on_its_own_checks_positions(name, case):
    bias = posenc.create(name, SHAPE)
    positions, error, message = WRONG[case]
    for where in ((positions, P), (P, positions)):
        with pytest.raises(error, match=message):
            bias(*where)
    with pytest.raises(ValueError, match="must have the same batch size"):
        bias(P.expand(2, 4), P.expand(3, 4))


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "sandwich", "fire"])
def test_unsigned_positions_do_not_wrap_in_a_bias(name):
    bias = posenc.create(name, SHAPE)
    want = bias(P, P)
    for dtype in (torch.uint8, torch.int8):
        assert torch.equal(bias(P.to(dtype), P.to(dtype)), want)


@pytest.mark.parametrize("case", [*WRONG, *LENGTHS])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_checks_positions(name, case):
    if case == "None":
        pytest.skip("the model's own positions")
    model = posenc.Decoder(CONFIG, posenc.create(name, CONFIG.shape(8))).eval()
    positions, error, message = (WRONG | LENGTHS)[case]
    caches = model.new_caches()
    with pytest.raises(error, match=message):
        model(TOKENS, of(model.encoding, positions), caches=caches)
    assert [cache.length for cache in caches] == [0, 0]


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([[1, 2]], TypeError, "got list"),
        (None, TypeError, "got NoneType"),
        (TOKENS.float(), TypeError, "got torch.float32"),
        (TOKENS.bool(), TypeError, "got torch.bool"),
        (TOKENS[0], ValueError, r"must be \(batch, len\), got \(4,\)"),
        (TOKENS + 10, ValueError, "from 0 to 10, the vocabulary's last, got 18"),
        (TOKENS - 9, ValueError, "got -8"),
    ],
)
def test_a_model_checks_tokens(tokens, error, message):
    rope = posenc.RoPE(8, interleaved=False)
    both = posenc.create("t5", CONFIG.shape(8, causal=False))
    pair = posenc.EncoderDecoder(CONFIG, both, posenc.create("alibi", CONFIG.shape(8)))
    for call in (posenc.Decoder(CONFIG, rope), posenc.Encoder(CONFIG, both), pair.conditioned_on):
        with pytest.raises(error, match=message):
            call(tokens)
    with pytest.raises(error, match=message):
        pair(TOKENS, tokens)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": torch.ones(4, 4)}, TypeError, "must be a posenc.masks.Mask, got a Tensor"),
        ({"mask": "causal"}, TypeError, "got a str"),
        ({"mask": masks.padding}, TypeError, r"padding \(call it"),
        ({"mask": masks.padding(torch.ones(3, 4))}, ValueError, "batch = 2"),
        ({"caches": [None, None]}, TypeError, "list of KVCaches"),
        ({"caches": posenc.KVCache()}, TypeError, "list of KVCaches"),
        ({"length": "long"}, TypeError, "whole number of tokens, got 'long'"),
        ({"length": 32.5}, TypeError, "got 32.5"),
    ],
)
def test_a_model_checks_its_options(options, error, message):
    model = posenc.Decoder(CONFIG, posenc.RoPE(8, interleaved=False))
    with pytest.raises(error, match=message):
        model(TOKENS, **options)


def test_what_is_no_encoding_is_named_at_every_door():
    for build in (
        lambda e: posenc.attention(Q, Q, Q, e, q_positions=P, kv_positions=P),
        lambda e: posenc.Attention(16, 2)(X, P, encoding=e),
        lambda e: posenc.PerLayer([posenc.ALiBi(2), e]),
        lambda e: Compose(posenc.ALiBi(2), e),
        lambda e: posenc.BertEmbedding(11, 16, e),
    ):
        with pytest.raises(TypeError, match="must be a PositionEncoding or None, got the name"):
            build("rope")


def test_a_name_builds_the_encoding_where_the_sizes_are_known():
    both = posenc.EncoderDecoder(CONFIG, "rope", "t5", "alibi")
    for module, name, causal in (
        (posenc.Attention(16, 2, encoding="rope"), "rope", True),
        (posenc.Decoder(CONFIG, "t5"), "t5", True),
        (posenc.Encoder(CONFIG, "t5"), "t5", False),
        (both.encoder, "rope", False),
        (both.decoder, "t5", True),
        (
            posenc.nn.MultiheadAttention(16, 2, encoding="rope:rope_theta=5e5"),
            "rope:rope_theta=5e5",
            True,
        ),
        (posenc.nn.TransformerEncoderLayer(16, 2, encoding="alibi").self_attn, "alibi", True),
    ):
        want = posenc.create(name, posenc.ModelShape(16, 2, causal=causal))
        assert are_alike(module.encoding, want), name
    assert are_alike(both.cross_encoding, posenc.ALiBi(2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: posenc.Attention(16, 2, encoding="t5"),
            "'t5' is built from causal, which Attention",
        ),
        (
            lambda: posenc.Decoder(CONFIG, "yarn"),
            "'yarn' is built from train_length, which Decoder",
        ),
        (lambda: posenc.Decoder(CONFIG, "learned"), "from train_length"),
        (lambda: posenc.Decoder(CONFIG, "alibbi"), "Did you mean 'alibi'"),
        (lambda: posenc.Attention(16, 2, encoding="sinusoidal"), "acts at the embeddings"),
    ],
)
def test_a_name_is_refused_where_a_size_is_unknown(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_embeddings_do_not_ignore_an_encoding_of_attention():
    for name in ("rope", "alibi", "shaw"):
        with pytest.raises(ValueError, match="acts in attention, not at the embeddings"):
            posenc.BertEmbedding(11, 16, posenc.create(name, SHAPE))


@pytest.mark.parametrize("case", [*WRONG, *LENGTHS])
@pytest.mark.parametrize("name", ["rope", "mrope"])
@pytest.mark.parametrize("what", ["x", "context", "memory"])
def test_a_layer_checks_positions(name, what, case):
    layer = posenc.Attention(16, 2, encoding=posenc.create(name, SHAPE))
    positions, error, message = (WRONG | LENGTHS)[case]
    positions, good = of(layer.encoding, positions), of(layer.encoding, P)
    if positions is None and what != "x":
        error, message = ValueError, f"{what} needs {what}_positions"
    own = {what: X, f"{what}_positions": positions} if what != "x" else {}
    with pytest.raises(error, match=message):
        layer(X, positions if what == "x" else good, **own)


def test_a_layers_memory_may_have_positions_row_by_row():
    layer = posenc.Attention(16, 2, encoding=posenc.RoPE(8, interleaved=False))
    want = layer(X, P, memory=X, memory_positions=P - 4)
    rows = (P - 4).expand(2, 4)
    torch.testing.assert_close(layer(X, P, memory=X, memory_positions=rows), want)
    with pytest.raises(ValueError, match=r"memory must be \(batch, len, 16\)"):
        layer(X, P, memory=X[..., :8], memory_positions=P)
    for cache in ("a cache", [posenc.KVCache()]):
        with pytest.raises(TypeError, match="must be a KVCache"):
            layer(X, P, cache=cache)


@pytest.mark.parametrize("name", ["num_heads", "num_kv_heads", "head_dim"])
def test_sizes_from_one_on(name):
    sizes = {"num_heads": 2, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        posenc.Attention(16, **sizes)
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        posenc.ModelShape(16, **sizes)
    with pytest.raises(TypeError, match=f"{name} must be a whole number, got 2.0"):
        posenc.ModelShape(16, **{"num_heads": 2, name: 2.0})
    for wrong in (math.nan, 1.0, -0.5):
        with pytest.raises(ValueError, match="dropout must be"):
            posenc.Attention(16, 2, dropout=wrong)


def test_linear_attention_checks_its_arguments():
    q, rope = torch.randn(1, 2, 4, 8), posenc.RoPE(8, interleaved=False)
    for wrong in ((q.long(),) * 3, (q, q.double(), q), (q, q, q.double()), ("q", q, q)):
        with pytest.raises(TypeError, match="linear_attention: "):
            posenc.linear_attention(*wrong, rope, P)
    for encoding in (posenc.ALiBi(2), "rope"):
        with pytest.raises(TypeError, match="rope must be a rotation"):
            posenc.linear_attention(q, q, q, encoding, P)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        posenc.linear_attention(q, q, q, rope, P, chunk_size=0)
    none = q[:, :, :0]
    assert posenc.linear_attention(none, none, none, rope, P[:0]).shape == none.shape


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1.5},
        {"max_new_tokens": 0},
        {"num_beams": 2.0},
        {"temperature": math.nan},
        {"num_beams": 2, "length_penalty": math.nan},
        {"temperature": 1.0, "top_p": math.nan},
        {"stop_token": 99},
        {"num_beams": 2, "stop_token": -1},
        {"valid": [[1, 1, 1, 1]] * 2},
    ],
    ids=str,
)
def test_generation_checks_its_options(options):
    model = posenc.Decoder(CONFIG, posenc.RoPE(8, interleaved=False))
    wrong = "valid" if "valid" in options else [*options][-1]
    with pytest.raises((ValueError, TypeError), match=f"generate: {wrong} "):
        posenc.generate(model, TOKENS, **{"max_new_tokens": 2, **options})


def test_the_smallest_temperature_takes_the_likeliest_token():
    model = posenc.Decoder(CONFIG, posenc.RoPE(8, interleaved=False))
    cold = posenc.generate(model, TOKENS, 3, temperature=1e-40)
    assert torch.equal(cold, posenc.generate(model, TOKENS, 3))


FAR = "alibi t5 kerple kerple_power sandwich dape leaky_rerope rerope rope".split()


@pytest.mark.parametrize("offset", [2**53, -(2**60), 2**62 - 16])
@pytest.mark.parametrize("name", FAR)
def test_far_integers_keep_their_neighbours_in_float64(name, offset):
    torch.manual_seed(0)
    encoding = posenc.create(name, posenc.ModelShape(16, 2, train_length=8)).for_layer(0).double()
    q, k, v = (torch.randn(1, 2, 16, 8, dtype=torch.float64) for _ in range(3))

    def from_(first: int) -> torch.Tensor:
        return attend(q, k, v, encoding, torch.arange(16) + first, impl="reference")

    torch.testing.assert_close(from_(offset), from_(0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", FAR)
def test_integers_whose_differences_overflow_are_refused(name):
    encoding = posenc.create(name, posenc.ModelShape(16, 2, train_length=8)).for_layer(0)
    q = torch.randn(1, 2, 16, 8)
    with pytest.raises(ValueError, match=r"fit int64 only below 2\^62"):
        attend(q, q, q, encoding, torch.arange(16) + 2**62 - 15)


@pytest.mark.parametrize(
    ("fitting", "too_far"),
    [
        (range(2**62 - 8, 2**62), range(2**62 - 7, 2**62 + 1)),
        (range(2**62 - 15, 2**62 + 1, 2), range(2**62 - 14, 2**62 + 2, 2)),
        (range(1 - 2**62, 9 - 2**62), range(-(2**62), 8 - 2**62)),
        (range(8 - 2**62, -(2**62), -1), range(7 - 2**62, -(2**62) - 1, -1)),
    ],
)
def test_a_range_is_checked_by_its_first_and_last_position(fitting, too_far):
    x = torch.randn(1, 2, 8, 4)
    got = validated_positions("f", "positions", fitting, x)
    assert list(got) == list(fitting)
    check_span_of_integers("f", "positions", fitting)
    with pytest.raises(ValueError, match=r"fit int64 only below 2\^62"):
        validated_positions("f", "positions", too_far, x)
    with pytest.raises(ValueError, match=r"fit int64 only below 2\^62"):
        check_span_of_integers("f", "positions", too_far)


def test_fire_keeps_far_neighbours_apart():
    fire, far = posenc.FIRE(2).double(), 2**54
    bias = fire(torch.arange(16) + far, torch.arange(16) + far)
    terms = fire.term(
        *(posenc.Tokens(torch.randn(1, 2, 16, 8).double(), torch.arange(16) + far) for _ in "qk")
    )
    got = terms.add(torch.zeros(1, 2, 16, 16).double(), slice(0, 16), slice(0, 16), None)
    assert len(got[0, 0, 15].unique()) == 16
    torch.testing.assert_close(got[0], bias)


@pytest.mark.parametrize("position", [2**32, 2**53, -(2**60)])
def test_learned_directions_refuse_positions_whose_angles_are_rounded(position):
    rope, q = posenc.MixedRoPE(8, 2), torch.randn(1, 2, 3, 8)
    positions = torch.zeros(3, 2, dtype=torch.int64)
    positions[1, 1] = position
    with pytest.raises(ValueError, match=r"below 2\^32"):
        rope(q, q, positions)


def test_a_layer_of_another_dtype_than_its_input():
    layer = posenc.Attention(16, 2)
    with pytest.raises(TypeError, match=r"x is torch.bfloat16 and the layer's weights are torch.f"):
        layer(X.bfloat16(), P)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(X, P).dtype == layer(X.bfloat16(), P).dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [TOKENS.float(), TOKENS + 7, TOKENS - 2, TOKENS[0]])
def test_tokens_that_an_embedding_does_not_have(tokens):
    embed = posenc.BertEmbedding(11, 16)
    with pytest.raises((TypeError, ValueError), match="BertEmbedding: tokens must be"):
        embed(tokens, P)
    with pytest.raises((TypeError, ValueError), match="BertEmbedding: segments must be"):
        embed(TOKENS, P, segments=tokens)
