"""Every layer gives the numbers of its PyTorch module."""

import math

import keras
import mpmath
import numpy as np
import pytest
import torch
from keras import ops

import posenc
from posenc import keras as pk
from posenc.encodings.embeddings import grow
from posenc.frequencies.scalings import lookup
from posenc.frequencies.scalings.registry import (
    NTK,
    DynamicLinear,
    DynamicNTK,
    DynamicYaRN,
    Linear,
    Llama3,
    LongRoPE,
    NTKByParts,
    Proportional,
    YaRN,
)
from posenc.frequencies.series import inverse_frequencies, turns_in_fixed_point
from posenc.keras.position_layer import Int32Frequencies
from tests.golden_values import cases
from tests.keras_layers.common import (
    array,
    assert_equal_to_torch,
    copy_weights,
    encodings,
    normal,
    run,
    tensor,
)

FAR = np.array([0, 1, 1000, 10**6, 2**31 - 1, -5, -(2**31) + 1], "int32")


def test_angles_are_exact_at_every_int32_position():
    inv_freq = inverse_frequencies(16, 10000.0)
    cos, sin = (array(t).astype("float64") for t in Int32Frequencies(inv_freq).cos_sin(FAR))
    with mpmath.workdps(60):
        angles = [[int(p) * mpmath.mpf(str(f)) for f in inv_freq] for p in FAR]
        want_cos = [[float(mpmath.cos(a)) for a in row] for row in angles]
        want_sin = [[float(mpmath.sin(a)) for a in row] for row in angles]
    np.testing.assert_allclose(cos, want_cos, rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(sin, want_sin, rtol=0, atol=1.5e-7)


def test_angles_are_exact_at_many_positions_and_in_compiled_code():
    positions = np.random.default_rng(0).integers(-(2**31) + 1, 2**31, 4000).astype("int32")
    inv_freq = inverse_frequencies(64, 500000.0)
    phases, turns = Int32Frequencies(inv_freq), turns_in_fixed_point(inv_freq)
    angle = np.array([[p * t % 2**64 for t in turns] for p in positions.tolist()], "float64")
    angle *= 2 * math.pi / 2**64
    compute = phases.cos_sin
    if keras.backend.backend() == "jax":
        import jax

        compute = jax.jit(compute)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow

        compute = tensorflow.function(compute)
    else:
        compute = torch.compile(compute, backend="eager", fullgraph=True)
    for cos, sin in (phases.cos_sin(positions), compute(ops.convert_to_tensor(positions))):
        np.testing.assert_allclose(array(cos), np.cos(angle), rtol=0, atol=1.5e-7)
        np.testing.assert_allclose(array(sin), np.sin(angle), rtol=0, atol=1.5e-7)


def test_real_positions():
    positions = np.array([0.25, -0.5, 1000.5, 65536.25], "float32")
    inv_freq = inverse_frequencies(16, 10000.0)
    cos, _ = Int32Frequencies(inv_freq).cos_sin(positions)
    want = np.cos(positions.astype("float64")[:, None] * [float(f) for f in inv_freq])
    np.testing.assert_allclose(array(cos), want, rtol=0, atol=2e-7)


@pytest.mark.parametrize("case", cases("alibi_slopes"))
def test_alibi_has_the_authors_slopes(case):
    expected = np.asarray(case.expected["slopes"])
    layer = pk.ALiBi(len(expected))
    bias = array(layer.bias(np.array([1], "int32"), np.array([0], "int32")))
    np.testing.assert_allclose(-bias[:, 0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("order", "padding_idx"), [("interleaved", None), ("concatenated", 3), ("fairseq", 1)]
)
def test_sinusoidal(order, padding_idx):
    width = 7 if order == "fairseq" else 8
    x, positions = normal(2, 7, width), FAR
    options = {"order": order, "padding_idx": padding_idx, "base": 500.0, "min_timescale": 2.0}
    layer = pk.SinusoidalPositionEncoding(**options)
    want = posenc.Sinusoidal(width, **options)
    assert_equal_to_torch(run(layer, x, positions=positions), want(tensor(x), tensor(positions)))
    assert_equal_to_torch(run(layer, x, start_index=5), want(tensor(x), torch.arange(5, 12)))


GROWTHS = {
    "none": ({}, lambda t: t),
    "ends": (
        {"growth": "interpolate", "num_positions": 23, "align_corners": True},
        lambda t: grow.interpolate(t, 23, align_corners=True),
    ),
    "centres": (
        {"growth": "interpolate", "num_positions": 23, "align_corners": False},
        lambda t: grow.interpolate(t, 23, align_corners=False),
    ),
    "hierarchical": (
        {"growth": "hierarchical", "num_positions": 60, "alpha": 0.3},
        lambda t: grow.hierarchical(t, 60, alpha=0.3),
    ),
}


@pytest.mark.parametrize("growth", GROWTHS)
def test_learned_and_its_growth(growth):
    options, grown = GROWTHS[growth]
    table = normal(8, 6)
    layer = pk.LearnedPositionEmbedding(8, **options)
    positions = np.arange(layer.num_usable_positions, dtype="int32")[::-1].copy()
    x = normal(2, layer.num_usable_positions, 6, seed=1)
    layer.build(x.shape)
    layer.set_weights([table])
    want = posenc.Learned.from_table(grown(tensor(table)))
    assert_equal_to_torch(run(layer, x, positions=positions), want(tensor(x), tensor(positions)))


def test_bert_embedding():
    tokens = np.array([[3, 1, 0, 2], [5, 5, 0, 0]], "int32")
    segments = np.array([[0, 1, 1, 0], [1, 1, 0, 0]], "int32")
    layer = pk.BertEmbedding(9, 16)
    layer.build(tokens.shape)
    assert not array(layer.words)[0].any() and array(layer.words)[1:].all()
    want = posenc.BertEmbedding(9, 16).eval()
    with torch.no_grad():
        want.words.weight.normal_()  # the padding row too, as in released checkpoints
    assert want.segments is not None
    values = {
        "words": want.words.weight,
        "segments": want.segments.weight,
        "weight": want.encoding.weight,
        "gamma": want.norm.weight,
        "beta": want.norm.bias,
    }
    for weight in layer.weights:
        weight.assign(values[weight.name].detach().numpy())
    positions = np.array([5, 6, 7, 500], "int32")
    got = run(layer, tokens, segments=segments, positions=positions)
    expected = want(tensor(tokens).long(), tensor(positions), tensor(segments).long())
    assert_equal_to_torch(got, expected, atol=2e-6)  # normalised: a few numbers above 2


SCALINGS = [
    None,
    Linear(4.0),
    NTK(4.0),
    NTKByParts(4.0, 32),
    YaRN(4.0, 32),
    YaRN(4.0, 32, truncate=False, mscale=0.7, mscale_all_dim=0.5),
    Llama3(8.0, 64),
    LongRoPE(4.0, 32, short_factor=(1.0, 1.5, 2.0, 3.0), exempt_tokens=3),
    Proportional(0.5, 2.0),
    DynamicLinear(32),
    DynamicNTK(2.0, 32),
    DynamicYaRN(32),
]


def test_every_scaling_is_checked():
    assert {type(x) for x in SCALINGS if x is not None} == set(lookup.SCALINGS.values())


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_rotary_under_every_scaling(scaling):
    interleaved = SCALINGS.index(scaling) % 2 == 0
    options = {"interleaved": interleaved, "rotary_dim": 8, "scaling": scaling}
    layer = pk.RotaryEmbedding(500.0, **options)
    layer = pk.RotaryEmbedding.from_config(layer.get_config())
    want = posenc.RoPE(12, 500.0, **options)
    x = normal(2, 7, 3, 12)
    positions = np.stack([FAR, np.arange(7)])
    lengths = (None, 100) if scaling is not None and scaling.depends_on_length else (None,)
    for length in lengths:
        prepared = want.prepare(tensor(positions), length)
        rotated, _ = prepared(*[tensor(x).transpose(1, 2)] * 2, tensor(positions))
        got = run(layer, x, positions=positions.astype("int32"), length=length)
        assert_equal_to_torch(got, rotated.transpose(1, 2))
    assert layer.scale(12) == want.scale(12)


def test_rotary_without_heads_and_with_whole_heads():
    x = normal(2, 5, 8)
    rotated, _ = posenc.RoPE(8, interleaved=False)(*[tensor(x)[:, None]] * 2, torch.arange(3, 8))
    assert_equal_to_torch(pk.RotaryEmbedding(interleaved=False)(x, start_index=3), rotated[:, 0])


BIASES = {
    "alibi": (lambda: pk.ALiBi(6), lambda: posenc.ALiBi(6)),
    "alibi_left_right": (
        lambda: pk.ALiBi(6, form="left_right", bias_max=4.0),
        lambda: posenc.ALiBi(6, form="left_right", bias_max=4.0),
    ),
    "alibi_learned": (lambda: pk.ALiBi(6, learned=True), lambda: posenc.ALiBi(6, learned=True)),
    "t5": (lambda: pk.T5RelativeBias(6), lambda: posenc.T5Bias(6)),
    "t5_bidirectional": (
        lambda: pk.T5RelativeBias(6, bidirectional=True, num_buckets=10, max_distance=50),
        lambda: posenc.T5Bias(6, bidirectional=True, num_buckets=10, max_distance=50),
    ),
    "kerple": (lambda: pk.KerpleBias(6), lambda: posenc.Kerple(6)),
    "kerple_power": (
        lambda: pk.KerpleBias(6, form="power"),
        lambda: posenc.Kerple(6, form="power"),
    ),
}


@pytest.mark.parametrize("name", BIASES)
def test_biases(name):
    layer, want = (make() for make in BIASES[name])
    q_positions = np.array([[3, 40, 200, 7], [0, 1, 2, 3]], "int32")
    kv_positions = np.array([[0, 3, 50, 199, 300], [4, 3, 2, 1, 0]], "int32")
    layer.build((2, 6, 4, 5))
    if name == "alibi_learned":  # the start itself
        log_slopes = dict(want.named_parameters())["log_slopes"]
        assert_equal_to_torch(layer.log_slopes, log_slopes)
    if name.startswith("kerple"):  # outside of the bounds too
        with torch.no_grad():
            want.r1[:2], want.r2[:2] = -1.0, 2.5
    copy_weights(layer, want)
    scores = normal(2, 6, 4, 5)
    got = run(layer, scores, q_positions=q_positions, kv_positions=kv_positions)
    bias = want(tensor(q_positions), tensor(kv_positions))
    # biases reach 300: rtol speaks there, and 1e-6 for what is near 0
    np.testing.assert_allclose(
        array(got), (tensor(scores) + bias).detach().numpy(), rtol=1e-6, atol=4e-6
    )
    assert_equal_to_torch(
        array(run(layer, scores, start_index=1)) - scores,
        want(torch.arange(1, 5), torch.arange(5)).expand(2, -1, -1, -1),
    )


TORCH = {
    "none": lambda: None,
    "rotary": lambda: posenc.RoPE(8, interleaved=True, rotary_dim=4, scaling=YaRN(4.0, 32)),
    "alibi": lambda: posenc.ALiBi(4, form="left_right", learned=True),
    "t5": lambda: posenc.T5Bias(4, bidirectional=True, num_buckets=8, max_distance=20),
    "t5_unscaled": lambda: posenc.T5Bias(4, unscaled=True),
    "kerple": lambda: posenc.Kerple(4, form="power"),
    "shaw": lambda: posenc.Shaw(8, max_distance=3),
}


@pytest.mark.parametrize(
    ("name", "num_kv_heads"),
    [
        ("none", 4),
        ("rotary", 2),
        ("rotary", 1),
        ("alibi", 1),
        ("t5", 2),
        ("t5_unscaled", 2),
        ("kerple", 4),
        ("shaw", 2),
    ],
)
def test_attention(name, num_kv_heads):
    layer = pk.PositionAwareAttention(
        4, num_kv_heads, encoding=encodings()[name](), use_bias=True, name="attention"
    )
    want = posenc.Attention(32, 4, num_kv_heads, TORCH[name](), bias=True, impl="reference")
    x = normal(2, 9, 32)
    layer.build(x.shape)
    copy_weights(layer, want)
    positions = np.stack([np.arange(9), np.arange(9)[::-1] * 7 + 10**6]).astype("int32")
    valid = np.ones((2, 9), bool)
    valid[0, 6:] = False
    mask = posenc.masks.padding(tensor(valid))
    if name != "alibi":
        mask = mask & posenc.masks.causal
    got = run(layer, x, positions=positions, x_mask=valid, use_causal_mask=name != "alibi")
    expected = want(tensor(x), tensor(positions), mask=mask)
    if name == "alibi":  # padded tokens that see the future alone see nothing
        got, expected = got[:, :6], expected[:, :6]
    assert_equal_to_torch(got, expected)


@pytest.mark.parametrize("name", ["rotary", "t5", "shaw"])
def test_cross_attention(name):
    layer = pk.PositionAwareAttention(4, encoding=encodings()[name](), name="attention")
    want = posenc.Attention(32, 4, None, TORCH[name](), impl="reference")
    x, context = normal(2, 5, 32), normal(2, 7, 32, seed=1)
    layer.build(x.shape, context.shape)
    copy_weights(layer, want)
    got = run(layer, x, context=context, start_index=2)
    expected = want(
        tensor(x), torch.arange(2, 7), context=tensor(context), context_positions=torch.arange(7)
    )
    assert_equal_to_torch(got, expected)
