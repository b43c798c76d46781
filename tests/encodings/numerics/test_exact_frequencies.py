"""Angles: right at every integer position, and whatever is done to the module."""

import copy
import math
import random
from decimal import Decimal, getcontext, localcontext
from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc import ModelShape, create
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.encodings.queries_keys.axial import AxialRoPE
from posenc.encodings.queries_keys.rope import RoPE
from posenc.frequencies.scalings.registry import NTK, Linear, Llama3, LongRoPE, NTKByParts, YaRN
from posenc.frequencies.series import TWO_PI, inverse_frequencies
from tests.golden_values import Case, cases

SCALINGS = [
    None,
    Linear(3.7),
    NTK(5),
    YaRN(16, 4096),
    YaRN(32, 4096, truncate=False),
    Llama3(8, 8192),
    LongRoPE(8, 4096, long_factor=tuple(1 + t / 7 for t in range(32))),
    NTKByParts(8, 4096),
]


@pytest.mark.parametrize("case", cases("angle_precision"))
def test_angles_up_to_two_to_the_fortieth(case: Case):
    rope = RoPE(case.params["head_dim"], case.params["theta"], interleaved=False)
    pairs = case.inputs["pair_index"]
    for name, table in zip(("cos", "sin"), rope.cos_sin(case.inputs["positions"]), strict=True):
        case.assert_close(name, table[:, pairs])
        near = case.inputs["positions"] < 1 << 31
        error = (table[:, pairs].double() - case.expected[name])[near].abs().max()
        assert error <= 1.5e-7, f"{name} is off by {float(error):.2e}"
    inv_freq = rope.frequencies().inv_freq
    for t, text in zip(pairs.tolist(), case.expected["inv_freq_str"], strict=True):
        assert abs(inv_freq[t] / Decimal(text) - 1) < Decimal("1e-28")


def exact_cos_sin(angle: Decimal) -> tuple[float, float]:
    """Return cos and sin of a decimal angle, which is first reduced exactly to one turn."""
    rest = angle - TWO_PI * (angle / TWO_PI).to_integral_value()
    return math.cos(rest), math.sin(rest)


@pytest.mark.parametrize("bits", [31, 53, 62])
@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_scaled_angles_at_random_positions(scaling, bits):
    rope = RoPE(64, 500000.0, interleaved=False, scaling=scaling)
    inv_freq, factor = rope.frequencies()
    drawn = random.Random(0)
    farthest = 1 << bits
    positions = [0, 1, farthest - 1, 1 - farthest]
    positions += [drawn.randrange(farthest) for _ in range(60)]
    cos, sin = (t.double() / factor for t in rope.cos_sin(torch.tensor(positions)))
    worst = 0.0
    with localcontext(prec=60):
        for i, p in enumerate(positions):
            for t, f in enumerate(inv_freq):
                want_cos, want_sin = exact_cos_sin(p * f)
                errors = abs(float(cos[i, t]) - want_cos), abs(float(sin[i, t]) - want_sin)
                worst = max(worst, *errors)
    assert worst <= 1.5e-7


def test_inverse_frequencies_have_forty_five_digits():
    with localcontext(prec=120):
        for t, f in enumerate(inverse_frequencies(128, 500000.0)):
            exact = (Decimal(500000).ln() * Decimal(-2 * t) / 128).exp()
            assert abs(f / exact - 1) < Decimal("1e-45")
    assert getcontext().prec == 28  # the caller's own precision stays


def test_real_positions_are_as_exact_as_they_are_given():
    angles = ExactFrequencies(inverse_frequencies(64))
    steps = torch.tensor([0.5, -3.25, 1000000.125, -(2.0**31) + 0.5], dtype=torch.float64)
    cos, sin = angles.cos_sin(steps, torch.float64)
    with localcontext(prec=50):
        for i, p in enumerate(steps.tolist()):
            for t, f in enumerate(angles.inv_freq):
                want = exact_cos_sin(Decimal(p) * f)
                assert float(cos[i, t]) == pytest.approx(want[0], abs=1e-9)
                assert float(sin[i, t]) == pytest.approx(want[1], abs=1e-9)


def test_interpolated_positions_at_multiples_equal_the_original_ones():
    steps = torch.arange(50)
    plain = RoPE(64, interleaved=False).cos_sin(steps)[0]
    interpolated = RoPE(64, interleaved=False, scaling=Linear(4))
    torch.testing.assert_close(interpolated.cos_sin(steps * 4)[0], plain, rtol=0, atol=1.2e-7)
    torch.testing.assert_close(interpolated.cos_sin(steps * 4.0)[0], plain, rtol=0, atol=1.2e-7)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.float32])
def test_the_dtype_of_positions_does_not_matter(dtype: torch.dtype):
    rope = RoPE(16, interleaved=False)
    steps = torch.arange(200)
    want = rope.cos_sin(steps)[0]
    torch.testing.assert_close(rope.cos_sin(steps.to(dtype))[0], want, rtol=0, atol=1.2e-7)


def test_a_position_has_the_same_angle_alone_and_in_any_batch():
    rope = RoPE(32, interleaved=False, scaling=YaRN(4, 64))
    steps = torch.randint(1 << 30, (3, 50))
    together = rope.cos_sin(steps)
    prepared = rope.prepare(steps).cos_sin(steps)
    for row in range(3):
        for i in (0, 17, 49):
            alone = rope.cos_sin(steps[row, i : i + 1])
            for one, many, ready in zip(alone, together, prepared, strict=True):
                assert torch.equal(one[0], many[row, i]) and torch.equal(one[0], ready[row, i])


def test_positions_of_keys_far_away_keep_their_difference():
    """The score of a rotated pair depends on the distance alone, even at 2^31."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, 64)
    rope = RoPE(64, interleaved=False)
    steps = torch.arange(8)
    near_q, near_k = rope(q, k, steps)
    far_q, far_k = rope(q, k, steps + (1 << 31) - 8)
    torch.testing.assert_close(far_q @ far_k.mT, near_q @ near_k.mT, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["rope", "yarn", "longrope", "axial_rope", "mrope", "xpos"])
def test_casts_meta_and_state_dicts_leave_angles_exact(name: str):
    shape = ModelShape(64, 4, train_length=64)
    fresh = create(name, shape)
    positions = torch.tensor([0, 7, 1000, 30000])
    if fresh.claims.num_axes > 1:
        positions = positions[:, None].expand(-1, fresh.claims.num_axes)
    want = fresh.cos_sin(positions)  # pyright: ignore
    with torch.device("meta"):
        from_meta = create(name, shape)
    variants = [
        create(name, shape).to(torch.bfloat16),
        create(name, shape).half().float(),
        from_meta.to_empty(device="cpu"),
        copy.deepcopy(fresh),
    ]
    restored = create(name, shape)
    restored.load_state_dict(fresh.state_dict())
    for variant in [*variants, restored]:
        for got, expected in zip(variant.cos_sin(positions), want, strict=True):  # pyright: ignore
            assert torch.equal(got, expected)
    assert not fresh.state_dict() and not list(fresh.buffers())


def test_a_fake_tensor_never_reaches_a_real_call():
    rope = RoPE(16, interleaved=False)
    with FakeTensorMode():
        rope.cos_sin(torch.arange(4))
    real = rope.cos_sin(torch.arange(4))[0]
    assert type(real) is torch.Tensor
    with FakeTensorMode():
        fake = rope.cos_sin(torch.arange(4))[0]
    assert fake.shape == real.shape


def test_tables_made_for_inference_serve_training():
    rope, axial = RoPE(8, interleaved=False), AxialRoPE(8, interleaved=True)
    with torch.inference_mode():
        rope.cos_sin(torch.arange(4))
        axial.cos_sin(torch.zeros(4, 2))
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    sum(rope(q, q, torch.arange(4))).sum().backward()  # pyright: ignore
    sum(axial(q, q, torch.zeros(4, 2))).sum().backward()  # pyright: ignore
    assert q.grad is not None


def test_turns_are_the_nearest_fixed_point_numbers():
    angles = ExactFrequencies(inverse_frequencies(8, 10000.0))
    turn = Fraction(TWO_PI)
    for f, units in zip(angles.inv_freq, angles.units_per_position.values, strict=True):
        assert abs(Fraction(f) / turn * 2**64 - units) <= Fraction(1, 2) + Fraction(1, 2**20)


def same_bits(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(got, want, strict=True)
    )


CPU = torch.device("cpu")
