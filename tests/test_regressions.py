"""Bugs and traps found in other libraries, numbered: each must be impossible here.

B1-B3, B21 rotary-embedding-torch   B4 flash-attn     B5, B6 x-transformers  B7 positional-encodings
B8-B14 transformers (RoPE)          B15 BLOOM         B16 MPT                B17, B18 keras-hub
B19 attention-gym                   B20 torchtune     B22 FlexAttention
T1 length-generalization            T4 vLLM           T5 YaRN and DeepSeek   T7 torch's is_causal
T8 Liger                            T10 torchscale    T11 T5                 T12 BLOOM and MPT
T13 RoBERTa                         T14 DINOv2        T15 transformers

Not in this file, with the reason:
B8-B10 as read from a config.json, T6, T9, T16: what a checkpoint says, the tests of posenc.hf
B13, B21 for every encoding: test_contract.py
T2, averages of windows for averages of tokens: the study counts tokens, its tests
T3, a docstring of an argument that is gone: test_no_option_is_ignored in test_contract.py
"""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from posenc import Attention, KVCache, ModelShape, attention, create, masks
from posenc.encodings.embeddings import grow
from posenc.encodings.embeddings.sinusoidal import Sinusoidal
from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.queries_keys.xpos import XPos
from posenc.encodings.scores.alibi import ALiBi
from posenc.encodings.scores.t5 import T5Bias
from posenc.frequencies.scalings.registry import DynamicNTK, LongRoPE, YaRN
from posenc.frequencies.scalings.scaling import rope_frequencies
from posenc.positions import positions_from_mask
from posenc.testing.harness import transform_queries_keys
from tests.attending import attend

SHAPE = ModelShape(embed_dim=32, num_heads=4, train_length=16)


def randn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)


def exact_cos(position: int, exponent: int) -> float:
    """cos(position / 10^exponent), reduced in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
        return math.cos(Decimal(position).scaleb(-exponent) % (2 * pi))


def distinct_rows(rope: RoPE, q: Tensor) -> int:
    rotated, _ = rope(q, q, torch.arange(q.shape[2]))
    return len(rotated[0, 0].float().unique(dim=0))


def test_b1_positions_are_not_made_in_the_queries_dtype():
    q = torch.ones(1, 1, 4096, 64, dtype=torch.bfloat16)
    rope, positions = RoPE(64, interleaved=True), torch.arange(4096)
    got, _ = rope(q, q, positions)
    want, _ = rope(q.double(), q.double(), positions)
    assert distinct_rows(rope, q) > 4000, "rotary-embedding-torch has 769"
    assert (got - want).abs().max() < 2**-7, "rotary-embedding-torch is off by up to 2"


def test_b2_a_bfloat16_call_does_not_poison_the_next_float32_call():
    q, positions = randn(1, 1, 600, 16), torch.arange(600)
    rope = RoPE(16, interleaved=True)
    want, _ = RoPE(16, interleaved=True)(q, q, positions)
    rope(q.bfloat16(), q.bfloat16(), positions)
    assert torch.equal(rope(q, q, positions)[0], want)


def test_b3_xpos_scales_a_decoded_query_as_in_the_full_run():
    xpos, q, k = XPos(16, interleaved=True), randn(1, 1, 100, 16), randn(1, 1, 100, 16, seed=1)
    positions = torch.arange(100)
    full_q, full_k = xpos(q, k, positions)
    last_q, all_k = transform_queries_keys(xpos, q[:, :, 99:], k, positions[99:], positions)
    torch.testing.assert_close(last_q @ all_k.mT, full_q[:, :, 99:] @ full_k.mT)


def test_b4_cached_xpos_keys_stay_right_as_the_sequence_grows():
    xpos, q, k = XPos(16, interleaved=True), randn(1, 1, 1536, 16), randn(1, 1, 1536, 16, seed=1)
    positions = torch.arange(1536)
    _, early = xpos(q[:, :, :512], k[:, :, :512], positions[:512])
    late_q, late_k = xpos(q[:, :, 512:], k[:, :, 512:], positions[512:])
    full_q, full_k = xpos(q, k, positions)
    torch.testing.assert_close(
        late_q @ torch.cat([early, late_k], 2).mT, full_q[:, :, 512:] @ full_k.mT
    )


def test_b5_casting_the_module_leaves_positions_apart():
    rope = RoPE(64, interleaved=True).bfloat16()
    assert not rope.state_dict() and not list(rope.buffers())
    assert distinct_rows(rope, torch.ones(1, 1, 4096, 64)) == 4096


def test_b6_sinusoidal_takes_positions_of_each_row():
    x = randn(2, 3, 8)
    positions = torch.tensor([[0, 1, 2], [7, 0, 1]])
    out = Sinusoidal(8)(x, positions)
    for row in range(2):
        assert torch.equal(out[row], Sinusoidal(8)(x[row : row + 1], positions[row])[0])


def test_b7_sinusoidal_answers_in_the_dtype_of_this_call():
    encoding, positions = Sinusoidal(64), torch.arange(1000)
    assert not encoding.state_dict()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert encoding(torch.zeros(1, 1000, 64, dtype=dtype), positions).dtype == dtype
    rows = encoding.bfloat16().vectors(positions)
    assert len(rows.unique(dim=0)) == 1000


def test_b8_yarns_truncate_reaches_the_frequencies():
    shape = ModelShape(embed_dim=64, num_heads=1, train_length=4096)
    rounded, exact = (
        create("yarn", shape, factor=32.0, rope_theta=150_000.0, truncate=truncate)
        for truncate in (True, False)
    )
    pairs = zip(rounded.frequencies().inv_freq, exact.frequencies().inv_freq, strict=True)
    assert max(float(a / b) for a, b in pairs) > 1.1


def test_b9_yarn_knows_the_trained_length_or_refuses():
    with pytest.raises(TypeError, match="original_max_positions"):
        YaRN(4.0)  # type: ignore[call-arg]
    assert create("yarn", SHAPE).scaling.original_max_positions == 16


@pytest.mark.parametrize("name", ["yarn", "dynamic_ntk", "longrope", "linear", "llama3"])
def test_b10_a_head_dim_of_none_is_computed(name: str):
    assert create(name, ModelShape(embed_dim=64, num_heads=4, head_dim=None)).head_dim == 16


def stack(scaling: DynamicNTK | LongRoPE) -> Attention:
    torch.manual_seed(0)
    return Attention(32, 4, encoding=RoPE(8, interleaved=False, scaling=scaling)).double()


def run(layer: Attention, x: Tensor, positions: Tensor, length: int | None, cache=None) -> Tensor:
    encoding = layer.encoding.prepare(positions, length)
    return layer(x, positions, mask=masks.causal, cache=cache, encoding=encoding)


SCALINGS = [DynamicNTK(2.0, 16), LongRoPE(4.0, 16)]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_b11_b12_decoding_past_the_trained_length_equals_the_full_run(scaling):
    layer, x, positions = stack(scaling), randn(1, 40, 32, dtype=torch.float64), torch.arange(40)
    full, cache = run(layer, x, positions, 40), KVCache()
    steps = [run(layer, x[:, t : t + 1], positions[t : t + 1], 40, cache) for t in range(40)]
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=0, atol=1e-12)
    assert (run(layer, x, positions, 16) - full).abs().max() > 1e-3, "the length matters"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_b11_b12_a_short_row_does_not_feel_a_long_one(scaling):
    layer, x = stack(scaling), randn(2, 40, 32, dtype=torch.float64)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[0, 9:] = False
    positions = positions_from_mask(valid)
    encoding = layer.encoding.prepare(positions)
    mask = masks.causal & masks.padding(valid)
    together = layer(x, positions, mask=mask, encoding=encoding)[:1, :9]
    alone = run(layer, x[:1, :9], torch.arange(9), None)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_b11_no_result_depends_on_the_call_before(scaling):
    layer, x = stack(scaling), randn(1, 128, 32, dtype=torch.float64)
    want = run(stack(scaling), x[:, :80], torch.arange(80), 80)
    run(layer, x, torch.arange(128), 128)
    assert torch.equal(run(layer, x[:, :80], torch.arange(80), 80), want)


def test_b12_longrope_switches_after_the_trained_length_and_not_at_it():
    scaling = LongRoPE(4.0, 16)
    short, at, past = (rope_frequencies(8, scaling=scaling, length=n) for n in (3, 16, 17))
    assert short == at and float(past.inv_freq[0]) == pytest.approx(0.25)


def test_b13_dynamic_ntk_compiles_without_a_graph_break():
    rope, q = RoPE(8, interleaved=False, scaling=DynamicNTK(2.0, 16)), randn(1, 1, 40, 8)
    positions = torch.arange(40)

    def rotate(q: Tensor, positions: Tensor) -> Tensor:
        return rope.prepare(positions, q.shape[2])(q, q, positions)[0]

    torch._dynamo.reset()
    compiled = torch.compile(rotate, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, positions), rotate(q, positions))


@pytest.mark.parametrize("position", [131_071, 10**6, 4 * 10**6 + 1, 17 * 10**6 + 3, 2**31 - 1])
def test_b14_angles_are_right_at_far_positions(position: int):
    cos, _ = RoPE(8, interleaved=False).cos_sin(torch.tensor([position]))
    want = [exact_cos(position, t) for t in range(4)]  # base 10^4: frequencies 1, 0.1, 0.01, 0.001
    assert cos[0].tolist() == pytest.approx(want, rel=0, abs=1.5e-7)


def test_b14_scores_do_not_change_with_a_far_shift():
    rope, q, k = RoPE(64, interleaved=False), randn(1, 1, 9, 64), randn(1, 1, 9, 64, seed=1)
    near_q, near_k = rope(q, k, torch.arange(9))
    far_q, far_k = rope(q, k, torch.arange(9) + 16_000_000)
    torch.testing.assert_close(far_q @ far_k.mT, near_q @ near_k.mT, rtol=0, atol=2e-5)


def test_b15_alibi_in_bfloat16_keeps_neighbours_apart_at_8192():
    last, keys = torch.tensor([8191]), torch.arange(8192)
    zeros = torch.zeros(1, 8, 1, 8, dtype=torch.bfloat16)
    k, v = torch.zeros(1, 8, 8192, 8, dtype=torch.bfloat16), randn(1, 8, 8192, 8).bfloat16()
    got = attention(zeros, k, v, ALiBi(8), q_positions=last, kv_positions=keys)
    slopes = torch.tensor([2.0**-h for h in range(1, 9)], dtype=torch.float64)
    weights = (-slopes[:, None] * (8191 - keys)).softmax(-1)
    want = (weights[:, None] @ v[0].double())[None]
    assert (got - want).abs().max() < 2**-8 * want.abs().max()


def test_b16_alibi_runs_beyond_the_length_it_was_built_for():
    layer = Attention(32, 4, encoding=create("alibi", SHAPE))
    assert layer(randn(1, 64, 32), torch.arange(64), mask=masks.causal).isfinite().all()


def test_b17_dynamic_ntk_leaves_the_fastest_pair_and_divides_the_slowest():
    plain = rope_frequencies(64).inv_freq
    found = rope_frequencies(64, scaling=DynamicNTK(1.0, 16), length=64).inv_freq
    ratios = [float(a / b) for a, b in zip(found, plain, strict=True)]
    assert ratios[0] == 1 and ratios[-1] == pytest.approx(0.25, rel=1e-12)
    assert ratios == sorted(ratios, reverse=True)


def test_b18_yarn_never_clamps_positions():
    rope = create("yarn", SHAPE)
    q = torch.ones(1, 1, 80, 8)
    assert len(rope(q, q, torch.arange(80))[0][0, 0].unique(dim=0)) == 80
    assert rope.bfloat16().frequencies().attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_b19_alibi_slopes_of_twelve_heads_are_the_authors():
    slopes = ALiBi(12).slopes
    assert slopes[:8] == tuple(2.0**-h for h in range(1, 9))
    assert slopes[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_b19_alibi_does_not_reward_the_future():
    assert (ALiBi(4)(torch.tensor([5]), torch.arange(20)) <= 0).all()


def test_b20_positions_beyond_what_was_prepared_are_computed():
    rope, q = RoPE(8, interleaved=False), randn(1, 1, 32, 8)
    prepared = rope.prepare(torch.arange(16))
    for positions in (torch.arange(32), torch.arange(32) + 10_000):
        assert torch.equal(prepared(q, q, positions)[0], rope(q, q, positions)[0])


def test_b21_eight_lengths_do_not_compile_eight_times():
    rope = RoPE(8, interleaved=False)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(rope, fullgraph=True, backend=counter)
    for length in range(3, 11):
        q = randn(1, 1, length, 8)
        compiled(q, q, torch.arange(length))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("length", [9, 600])
def test_b22_learned_biases_train_on_the_cpu(length: int):
    torch.manual_seed(0)
    q, k, v = (randn(1, 2, length, 8, dtype=torch.float64, seed=s) for s in range(3))
    positions, bias = torch.arange(length), T5Bias(2).double()
    grads = []
    for impl in ("auto", "reference"):
        out = attend(q, k, v, bias, positions, impl=impl)
        grads.append(torch.autograd.grad(out.square().sum(), bias.weight)[0])
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-9)


def test_t1_the_rotary_dim_asked_for_is_the_one_used():
    q = randn(1, 1, 5, 16)
    for rotary_dim in (4, 8, 16):
        rope = create("rope", ModelShape(embed_dim=64, num_heads=4), rotary_dim=rotary_dim)
        changed = (rope(q, q, torch.arange(5) + 1)[0] != q).any((0, 1, 2))
        assert changed.tolist() == [c < rotary_dim for c in range(16)]


def test_t4_rotated_bfloat16_is_rounded_once():
    q, positions = randn(1, 1, 50, 64).bfloat16(), torch.arange(50)
    rope = RoPE(64, interleaved=False)
    got, want = rope(q, q, positions)[0], rope(q.double(), q.double(), positions)[0]
    ulp = torch.exp2(want.abs().clamp(min=1e-9).log2().floor() - 7)
    assert ((got - want).abs() <= 0.51 * ulp).all(), "half a unit, and float32's own rounding"


def test_t5_attention_factor_squares_in_the_rotated_part_alone():
    q = randn(1, 1, 1, 16, dtype=torch.float64)
    scaling = YaRN(4.0, 16, attention_factor=1.5)
    rope = RoPE(16, interleaved=False, rotary_dim=8, scaling=scaling)
    got_q, got_k = rope(q, q, torch.tensor([7]))
    own, passed = q[..., :8].square().sum(), q[..., 8:].square().sum()
    torch.testing.assert_close((got_q * got_k).sum(), 1.5**2 * own + passed)
    in_scale = YaRN(4.0, 16, mscale=1.0, mscale_all_dim=1.0)
    assert rope_frequencies(8, scaling=in_scale).attention_factor == 1
    assert in_scale.logit_scale == pytest.approx((0.1 * math.log(4) + 1) ** 2)


@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa"])
def test_t7_one_causal_query_sees_the_whole_cache(impl: str):
    q, k, v = (randn(1, 1, n, 8, seed=n) for n in (1, 6, 6))
    seen = {"q_positions": torch.tensor([5]), "kv_positions": torch.arange(6)}
    got = attention(q, k, v, mask=masks.causal, impl=impl, **seen)
    torch.testing.assert_close(got, attention(q, k, v, impl="reference", **seen))


def test_t8_positions_count_and_inputs_are_left_alone():
    rope, q, k = RoPE(8, interleaved=False), randn(1, 2, 5, 8), randn(1, 2, 5, 8, seed=1)
    kept_q, kept_k = q.clone(), k.clone()
    first, _ = rope(q, k, torch.arange(5))
    other, _ = rope(q, k, torch.tensor([4, 9, 2, 0, 7]))
    assert not torch.equal(first[:, :, 1], other[:, :, 1])
    assert torch.equal(q, kept_q) and torch.equal(k, kept_k)


def test_t10_xpos_refuses_positions_that_overflow_float16():
    xpos = XPos(64, interleaved=True, scale_base=64)
    q = randn(1, 1, 1, 64).half()
    near, _ = xpos(q, q, torch.tensor([200]))
    assert near.isfinite().all()
    with pytest.raises(ValueError, match="2000"):
        xpos(q, q, torch.tensor([2000]))


def test_t11_t5_buckets_at_exact_powers():
    bucket = T5Bias(1).bucket(torch.tensor([15, 16, 31, 32, 63, 64, 127, 128, 10**9]))
    # 16 + floor(16 log(x/16) / log(8)): 16 ratios of 2^(3/16), whole ones at powers of two.
    assert bucket.tolist() == [15, 16, 21, 21, 26, 26, 31, 31, 31]
    for power, expected in ((16, 16), (128, 31)):
        assert T5Bias(1).bucket(torch.tensor(power)) == expected


def test_t12_key_only_and_row_centred_alibi_agree_after_softmax():
    keys = torch.arange(9)
    bias = ALiBi(4).bias(torch.tensor([8])[:, None].double() - keys)
    key_only = torch.tensor(ALiBi(4).slopes, dtype=torch.float64)[:, None, None] * keys
    torch.testing.assert_close(bias.softmax(-1), key_only.softmax(-1))


def test_t12_left_padded_alibi_takes_positions_from_the_mask():
    layer, x = Attention(32, 4, encoding=ALiBi(4)).double(), randn(1, 7, 32, dtype=torch.float64)
    valid = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    mask = masks.causal & masks.padding(valid)
    padded = layer(x, positions_from_mask(valid), mask=mask)[:, 2:]
    torch.testing.assert_close(padded, layer(x[:, 2:], torch.arange(5), mask=masks.causal))


def test_t13_robertas_rows_are_512_positions_and_an_offset_of_two():
    rows = randn(514, 4)
    grown = grow.interpolate(rows, 1024, align_corners=True, offset_rows=2)
    assert grown.shape == (1026, 4)
    assert torch.equal(grown[[0, 1, 2, -1]], rows[[0, 1, 2, -1]])
    first = positions_from_mask(torch.ones(1, 512), start=2)
    assert first.min() == 2 and first.max() == 513


@pytest.mark.parametrize("size", [(37, 37), (16, 9), (3, 50)])
def test_t14_patch_tables_have_the_size_asked_for_and_keep_extra_rows(size: tuple[int, int]):
    rows = randn(5 + 14 * 14, 4)
    grown = grow.interpolate_2d(rows, (14, 14), size, extra_rows=5)
    assert grown.shape == (5 + size[0] * size[1], 4) and torch.equal(grown[:5], rows[:5])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_t15_a_far_position_in_the_batch_does_not_change_the_method(scaling):
    rope, q = RoPE(8, interleaved=False, scaling=scaling), randn(2, 1, 5, 8)
    near = torch.arange(5)
    positions = torch.stack([near, near + 10_000])
    assert torch.equal(rope(q, q, positions)[0][:1], rope(q[:1], q[:1], near)[0])
