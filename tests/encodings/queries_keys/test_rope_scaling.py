"""Scaled RoPE frequencies against the released code of every method, and their identities."""

import math
import pickle
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import posenc
from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.queries_keys.rotate import rotate as rotate_pairs
from posenc.frequencies.float64_formulas import longrope_attention_factor, yarn_attention_factor
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
from posenc.frequencies.scalings.scaling import Scaling, rope_frequencies
from posenc.frequencies.series import inverse_frequencies
from posenc.testing.harness import transform_queries_keys
from tests.compilers import needs_whole_graphs
from tests.golden_values import Case, cases
from tests.references import ntk_by_parts as paper

RENAMED = {"original_length": "original_max_positions", "alpha": "factor"}
NOT_THE_SCALINGS = {"head_dim", "base", "max_position_embeddings"}


def scaling_of(kind: type[Scaling], case: Case, **more) -> Scaling:
    params = {RENAMED.get(k, k): v for k, v in case.params.items() if k not in NOT_THE_SCALINGS}
    return kind(**{**params, **more})


def frequencies_of(case: Case, scaling: Scaling | None, length: int | None = None):
    found = rope_frequencies(case.params["head_dim"], case.params["base"], scaling, length)
    return torch.tensor([float(f) for f in found.inv_freq]), found.attention_factor


def assert_static(case: Case, scaling: Scaling) -> None:
    inv_freq, attention_factor = frequencies_of(case, scaling)
    case.assert_close("inv_freq", inv_freq)
    case.assert_close("attention_factor", attention_factor)


@pytest.mark.golden("linear")
@pytest.mark.parametrize("case", cases("scaling_linear"))
def test_linear(case: Case):
    assert_static(case, Linear(case.params["factor"]))


@pytest.mark.golden("ntk")
@pytest.mark.parametrize("case", cases("scaling_ntk_aware"))
def test_ntk_aware(case: Case):
    assert_static(case, scaling_of(NTK, case))
    base, dim = case.expected["effective_base"], case.params["head_dim"]
    found = rope_frequencies(dim, case.params["base"], scaling_of(NTK, case)).inv_freq
    assert float(found[1]) == pytest.approx(base ** (-2 / dim), rel=1e-12)


@pytest.mark.golden("yarn")
@pytest.mark.parametrize("case", cases("scaling_yarn_hf") + cases("scaling_yarn_repo"))
def test_yarn(case: Case):
    """Hugging Face reads mscale only beside mscale_all_dim, and neither beside attention_factor."""
    params = dict(case.params)
    pair = params.get("mscale") and params.get("mscale_all_dim")
    if params.get("attention_factor") is not None or not pair:
        params = {k: v for k, v in params.items() if not k.startswith("mscale")}
    if "attn_factor" in params:  # the repository's: multiplies the temperature
        factor = params.pop("attn_factor") * yarn_attention_factor(params["factor"])
        params = {**params, "attention_factor": factor}
    assert_static(case, scaling_of(YaRN, replace(case, params=params)))


@pytest.mark.golden("llama3")
@pytest.mark.parametrize("case", cases("scaling_llama3"))
def test_llama3(case: Case):
    assert_static(case, scaling_of(Llama3, case))
    if "inv_freq_meta" in case.expected:
        inv_freq, _ = frequencies_of(case, scaling_of(Llama3, case))
        case.assert_close("inv_freq_meta", inv_freq)


@pytest.mark.golden("dynamic_ntk")
@pytest.mark.parametrize("case", cases("scaling_dynamic_ntk"))
def test_dynamic_ntk(case: Case):
    scaling = scaling_of(DynamicNTK, case)
    rows = [frequencies_of(case, scaling, int(n)) for n in case.inputs["seq_lens"]]
    case.assert_close("inv_freq", torch.stack([row for row, _ in rows]))
    assert {factor for _, factor in rows} == {case.expected["attention_factor"]}


@pytest.mark.parametrize("case", cases("scaling_dynamic_ntk_yarnrepo"))
def test_dynamic_ntk_and_dynamic_linear_of_the_yarn_repository(case: Case):
    dim, base, trained = (case.params[k] for k in ("head_dim", "base", "original_length"))
    interpolates = case.params["alpha"] == 0
    scaling = DynamicLinear(trained) if interpolates else DynamicNTK(case.params["alpha"], trained)
    rope = RoPE(dim, base, interleaved=False, scaling=scaling)
    last, rows = [], []
    for length in case.inputs["seq_lens"].tolist():
        position = torch.tensor([length - 1])
        last.append(rope.prepare(position, length).cos_sin(position)[0][0])
        # The repository interpolates by scaling positions: its inv_freq stay.
        rows.append(frequencies_of(case, None if interpolates else scaling, length)[0])
    case.assert_close("inv_freq", torch.stack(rows))
    width = case.expected["cos_last"].shape[-1]
    case.assert_close("cos_last", torch.stack(last).repeat(1, width // (dim // 2)))


@pytest.mark.parametrize("case", cases("scaling_dynamic_yarn_yarnrepo"))
def test_dynamic_yarn(case: Case):
    scaling = scaling_of(DynamicYaRN, case)
    rows = [frequencies_of(case, scaling, int(n)) for n in case.inputs["seq_lens"]]
    case.assert_close("inv_freq", torch.stack([row for row, _ in rows]))
    case.assert_close("attention_factor", torch.tensor([factor for _, factor in rows]))


def longrope(case: Case, **more) -> LongRoPE:
    trained = case.params["original_length"]
    return LongRoPE(
        case.params.get("factor", case.params["max_position_embeddings"] / trained),
        trained,
        long_factor=case.inputs["long_factor"].tolist(),
        **more,
    )


@pytest.mark.golden("longrope")
@pytest.mark.parametrize("case", cases("scaling_longrope"))
def test_longrope(case: Case):
    short = case.inputs["short_factor"].tolist()
    given = case.params.get("attention_factor")
    scaling = longrope(case, short_factor=short, attention_factor=given)
    rows = [frequencies_of(case, scaling, int(n)) for n in case.inputs["seq_lens"]]
    case.assert_close("inv_freq", torch.stack([row for row, _ in rows]))
    case.assert_close("inv_freq_ms", frequencies_of(case, scaling, 1 << 20)[0])
    for _, factor in rows:
        case.assert_close("attention_factor", factor)
    assert frequencies_of(case, scaling)[0].tolist() == rows[0][0].tolist()  # None: as trained
    trained = case.params["original_length"]
    ratio = case.params["max_position_embeddings"] / trained
    case.assert_close("mscale_ms_su", longrope_attention_factor(ratio, trained))
    case.assert_close("mscale_ms_yarn", yarn_attention_factor(ratio))


@pytest.mark.parametrize("case", cases("scaling_longrope_mixed"))
def test_longrope_leaves_the_first_tokens_unscaled(case: Case):
    scaling = longrope(case, exempt_tokens=case.params["start_token_idx"])
    rope = RoPE(case.params["head_dim"], case.params["base"], interleaved=False, scaling=scaling)
    positions = case.inputs["positions"]
    cos, sin = rope.prepare(positions, length=case.params["max_position_embeddings"]).cos_sin(
        positions
    )
    case.assert_close("cos", torch.cat([cos, cos], -1))
    case.assert_close("sin", torch.cat([sin, sin], -1))
    case.assert_close("mscale", rope.attention_factor)
    assert not rope.claims.shift_invariant and not rope.claims.cache_safe


@pytest.mark.parametrize("dim, theta", [(64, 10000.0), (128, 500000.0), (6, 100.0)])
def test_identities_between_scalings(dim: int, theta: float):
    plain = inverse_frequencies(dim, theta)

    def of(scaling: Scaling, length: int | None = None):
        return pytest.approx(
            [float(f) for f in rope_frequencies(dim, theta, scaling, length).inv_freq], rel=1e-14
        )

    interpolated = [float(f / 8) for f in plain]
    unchanged = [float(f) for f in plain]
    assert interpolated == of(Linear(8))
    assert interpolated == of(NTKByParts(8, 4096, 1e300, 1e300))
    assert unchanged == of(NTKByParts(8, 4096, 0, 0))
    assert unchanged == of(YaRN(1, 4096))
    assert unchanged == of(Proportional(1.0))
    assert [0.0] * len(plain) == of(Proportional(0.0))
    assert interpolated == of(LongRoPE(8, 4096), 4097)
    assert unchanged == of(LongRoPE(8, 4096), 4096)
    assert unchanged == of(DynamicNTK(2, 4096), 4096)
    ntk = rope_frequencies(dim, theta, NTK(8)).inv_freq
    assert ntk[0] == 1
    assert float(ntk[-1]) == pytest.approx(float(plain[-1] / 8), rel=1e-14)
    llama3 = rope_frequencies(dim, theta, Llama3(8, 8192)).inv_freq
    assert [float(f) for f in llama3] == of(NTKByParts(8, 8192, 1, 4))
    assert rope_frequencies(dim, theta, DynamicNTK(1, 4096), 8192) == rope_frequencies(
        dim, theta, NTK(2)
    )
    assert rope_frequencies(dim, theta, YaRN(1, 4096)).attention_factor == 1


def test_by_parts_is_the_papers_ramp_and_not_the_released_one():
    """Definition 2 of the YaRN paper, in float64 and from its text: linear in turns."""
    dim, theta, factor, trained = 128, 10000.0, 16.0, 4096
    expected = []
    for t in range(dim // 2):
        f = theta ** (-2 * t / dim)
        turns = trained * f / (2 * math.pi)
        gamma = min(max((turns - 1) / (32 - 1), 0), 1)
        expected.append((1 - gamma) * f / factor + gamma * f)
    found = rope_frequencies(dim, theta, NTKByParts(factor, trained)).inv_freq
    assert [float(f) for f in found] == pytest.approx(expected, rel=1e-12)
    released = rope_frequencies(dim, theta, YaRN(factor, trained)).inv_freq
    assert max(b / a for a, b in zip(found, released, strict=True)) > 3


def test_yarn_divides_slow_pairs_and_keeps_fast_ones():
    found = rope_frequencies(64, 10000.0, YaRN(40, 4096)).inv_freq
    plain = inverse_frequencies(64)
    assert found[0] == plain[0]
    assert float(found[-1]) == pytest.approx(float(plain[-1] / 40), rel=1e-14)


def test_deepseeks_pair_of_mscales_moves_the_temperature_to_the_scale():
    even = YaRN(40, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert rope_frequencies(64, 10000.0, even).attention_factor == 1
    m = 0.1 * math.log(40) + 1
    assert even.logit_scale == pytest.approx(m * m)
    rope = RoPE(64, interleaved=True, scaling=even)
    assert rope.scale(64) == pytest.approx(m * m / 8)
    uneven = YaRN(40, 4096, mscale=0.707, mscale_all_dim=1.0)
    expected = (0.0707 * math.log(40) + 1) / m
    assert rope_frequencies(64, 10000.0, uneven).attention_factor == pytest.approx(expected)


def test_rotated_logits_grow_by_the_square_of_the_attention_factor():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 5, 16).double()
    positions = torch.arange(5)
    for rotary_dim in (16, 8):
        options = {"interleaved": False, "rotary_dim": rotary_dim}
        plain = RoPE(16, scaling=YaRN(4, 64, attention_factor=1.0), **options)
        warm = RoPE(16, scaling=YaRN(4, 64, attention_factor=1.5), **options)
        q0, k0 = plain(q, k, positions)
        q1, k1 = warm(q, k, positions)
        rotated = slice(None, rotary_dim)
        logits = q0[..., rotated] @ k0[..., rotated].mT * 2.25
        torch.testing.assert_close(q1[..., rotated] @ k1[..., rotated].mT, logits)
        assert torch.equal(q1[..., rotary_dim:], q[..., rotary_dim:])


@pytest.mark.parametrize(
    "scaling", [DynamicNTK(2, 8), DynamicYaRN(8), DynamicLinear(8), LongRoPE(4, 8)]
)
def test_frequencies_follow_the_length_asked_for_and_nothing_else(scaling: Scaling):
    rope = RoPE(8, interleaved=False, scaling=scaling)
    assert not rope.claims.cache_safe
    positions = torch.arange(40)
    short = rope.cos_sin(positions)[0]
    long = rope.prepare(positions, length=32).cos_sin(positions)[0]
    assert not torch.equal(short, long)
    # No earlier call and no position changes an answer; None means the trained length.
    assert torch.equal(rope.cos_sin(positions)[0], short)
    assert torch.equal(rope.prepare(positions).cos_sin(positions)[0], short)
    assert torch.equal(rope.prepare(positions, length=8).cos_sin(positions)[0], short)


@pytest.mark.quick(1)
@needs_whole_graphs
@pytest.mark.parametrize("scaling", [DynamicNTK(2, 16), LongRoPE(4, 16, exempt_tokens=3)])
def test_two_graphs_serve_all_lengths_that_frequencies_follow(scaling: Scaling):
    rope = pickle.loads(pickle.dumps(RoPE(8, interleaved=False, scaling=scaling)))

    def rotate(q, positions, length):
        prepared = rope.prepare(positions, length)
        return transform_queries_keys(prepared, q, q, positions, positions.clone())

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(rotate, backend=counter, fullgraph=True)
    for length in (5, 9, 20, 33):
        q, positions = torch.randn(1, 2, length, 8), torch.arange(length)
        want = rope.prepare(positions, length).cos_sin(positions)
        for got in compiled(q, positions, length):  # prepared positions, and others
            torch.testing.assert_close(got, rotate_pairs(q, *want, interleaved=False))
    assert counter.frame_count <= 2


def test_longrope_with_equal_lists_is_cache_safe():
    factors = (1.0, 2.0, 3.0, 4.0)
    scaling = LongRoPE(4, 8, short_factor=factors, long_factor=factors)
    assert not scaling.depends_on_length
    assert RoPE(8, interleaved=False, scaling=scaling).claims.cache_safe


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Linear(0.5), "Linear: factor .* at least 1, got 0.5"),
        (lambda: NTK(math.nan), "NTK: factor .* got nan"),
        (lambda: DynamicNTK(2, 0), "original_max_positions .* got 0"),
        (lambda: NTKByParts(2, 64, 5, 4), "0 <= alpha <= beta, got 5 and 4"),
        (lambda: Llama3(8, 64, 4, 4), "below high_freq_factor, got 4 and 4"),
        (lambda: YaRN(8, 64, 1, 32), "beta_fast >= beta_slow > 0, got 1 and 32"),
        (lambda: YaRN(8, 64, attention_factor=1.0, mscale=2.0), "not both, got 1.0, 2.0"),
        (lambda: YaRN(8, 64, attention_factor=-1.0), "positive number or None, got -1.0"),
        (lambda: LongRoPE(8, 64, long_factor=(1.0, -2.0)), "positive numbers, got"),
        (lambda: YaRN("8", 64), "YaRN: factor must be a finite number, got '8'"),  # type: ignore
        (lambda: YaRN(8, 64, truncate="False"), "truncate must be True or False"),  # type: ignore
        (lambda: DynamicYaRN(True), "original_max_positions must be a finite number, got True"),
        (lambda: Proportional("half"), "p must be a finite number, got 'half'"),  # type: ignore
        (lambda: Proportional(1.5), "fraction of pairs to rotate, 0 to 1, got 1.5"),
        (
            lambda: rope_frequencies(8, 1e4, LongRoPE(8, 64, short_factor=(1.0,))),
            "short_factor must have one number per pair, 4, got 1",
        ),
        (
            lambda: RoPE(8, interleaved=False, scaling=LongRoPE(8, 64, long_factor=(1.0,))),
            "long_factor must have one number per pair, 4, got 1",
        ),
        (lambda: rope_frequencies(2, 1e4, NTK(2)), "rotary_dim must be at least 4.*got 2"),
        (lambda: rope_frequencies(8, 1e4, DynamicNTK(2, 64), 0), "length .* got 0"),
    ],
)
def test_wrong_parameters_are_refused(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


def test_scaled_frequencies_carry_forty_digits():
    found = rope_frequencies(64, 10000.0, YaRN(4, 2048)).inv_freq
    middle = found[20]
    assert isinstance(middle, Decimal)
    assert len(middle.as_tuple().digits) >= 40


def test_frequencies_need_no_torch():
    code = (
        "import sys, posenc\n"
        "from posenc.frequencies.scalings.lookup import SCALINGS\n"
        "from posenc.frequencies.scalings.scaling import rope_frequencies\n"
        "rope_frequencies(64, 1e4, posenc.YaRN(4, 2048))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_yarns_extrapolation_factor_is_how_much_of_fast_pairs_is_kept(share):
    """As in the authors' code, in floats and by hand."""
    shape = posenc.ModelShape(64, 1, train_length=4096)
    rope = posenc.create("yarn", shape, factor=40.0, extrapolation_factor=share)
    turning = [4096 / (2 * math.pi * turns) for turns in (32, 1)]
    ends = [64 * math.log(length) / (2 * math.log(10000)) for length in turning]
    low, high = math.floor(ends[0]), math.ceil(ends[1])
    for t, found in enumerate(rope.frequencies().inv_freq):
        plain = 10000 ** (-t / 32)
        kept = (1 - min(max((t - low) / (high - low), 0), 1)) * share
        assert float(found) == pytest.approx(plain / 40 * (1 - kept) + plain * kept, rel=1e-12)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_yarn_keeps_between_nothing_and_all(share):
    with pytest.raises(ValueError, match=r"extrapolation_factor must be (between|a finite)"):
        YaRN(40, 4096, extrapolation_factor=share)


@pytest.mark.reference("ntk_by_parts")
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("base", [100.0, 10000.0, 500000.0])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 32.0), (2.5, 4.0)])
def test_frequencies_are_the_papers(head_dim: int, base: float, alpha: float, beta: float):
    rope = RoPE(head_dim, base, interleaved=False, scaling=NTKByParts(8.0, 512, alpha, beta))
    found, factor = rope.frequencies()
    want = paper.frequencies(head_dim, base, 8.0, 512, alpha, beta)
    assert [float(f) for f in found] == pytest.approx(want, rel=1e-12)
    assert factor == 1
