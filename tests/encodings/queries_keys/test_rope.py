"""RoPE in its layouts and partial forms, over one axis and several, against recorded values."""

import pytest
import torch

import posenc
from posenc.encodings.queries_keys.axial import AxialRoPE, MixedRoPE
from posenc.encodings.queries_keys.mrope import MRoPE
from posenc.encodings.queries_keys.rope import RoPE
from posenc.frequencies.scalings.registry import Proportional, YaRN
from posenc.positions.mrope import mrope_positions
from tests.golden_values import Case, cases


def assert_rotates(case: Case, rope, positions=None) -> None:
    positions = case.inputs["positions"] if positions is None else positions
    q, k = rope(case.inputs["q"], case.inputs["k"], positions)
    case.assert_close("q", q)
    case.assert_close("k", k)


def assert_tables(case: Case, rope, positions, twice: bool) -> None:
    for name, table in zip(("cos", "sin"), rope.cos_sin(positions), strict=True):
        case.assert_close(name, torch.cat([table, table], -1) if twice else table)


@pytest.mark.golden("rope")
@pytest.mark.parametrize("case", cases("rope_half_split"))
def test_half_split(case: Case):
    rope = RoPE(case.params["head_dim"], case.params["base"], interleaved=False)
    assert_rotates(case, rope)
    assert_tables(case, rope, case.inputs["positions"], twice=True)


@pytest.mark.golden("rope_interleaved")
@pytest.mark.parametrize("case", cases("rope_interleaved"))
def test_interleaved(case: Case):
    rope = RoPE(case.params["head_dim"], case.params["base"], interleaved=True)
    assert_rotates(case, rope)
    assert_tables(case, rope, case.inputs["positions"], twice=False)


@pytest.mark.parametrize("case", cases("rope_interleaved_su"))
def test_interleaved_in_float64(case: Case):
    rope = RoPE(case.params["head_dim"], case.params["base"], interleaved=True)
    assert case.inputs["q"].dtype == torch.float64
    assert_rotates(case, rope)


@pytest.mark.golden("partial_rope")
@pytest.mark.parametrize("case", cases("rope_partial"))
def test_partial(case: Case):
    head_dim = case.params["head_dim"]
    rotary_dim = int(head_dim * case.params["partial_rotary_factor"])
    rope = RoPE(head_dim, case.params["base"], interleaved=False, rotary_dim=rotary_dim)
    assert_rotates(case, rope)
    case.assert_close("inv_freq", torch.tensor([float(f) for f in rope.frequencies().inv_freq]))


@pytest.mark.parametrize("case", cases("rope_partial_interleaved"))
def test_partial_interleaved(case: Case):
    rotary_dim = case.params["rotary_dim"]
    head_dim, base = case.params["head_dim"], case.params["base"]
    assert_rotates(case, RoPE(head_dim, base, interleaved=True, rotary_dim=rotary_dim))


@pytest.mark.golden("p_rope")
@pytest.mark.parametrize("case", cases("rope_proportional"))
def test_proportional(case: Case):
    scaling = Proportional(case.params["p"], case.params["factor"])
    rope = RoPE(case.params["head_dim"], case.params["base"], interleaved=False, scaling=scaling)
    assert_rotates(case, rope)
    case.assert_close("inv_freq", torch.tensor([float(f) for f in rope.frequencies().inv_freq]))


@pytest.mark.parametrize("case", cases("rope_proportional_gemma"))
def test_proportional_of_gemma(case: Case):
    scaling = Proportional(case.params["p"], case.params["scale_factor"])
    rope = RoPE(case.params["head_dim"], case.params["base"], interleaved=False, scaling=scaling)
    x, _ = rope(case.inputs["x"], case.inputs["x"], case.inputs["positions"])
    case.assert_close("x", x)


@pytest.mark.golden("mrope", "mrope_interleaved")
@pytest.mark.parametrize("case", cases("mrope_qwen2vl") + cases("mrope_qwen3vl_interleaved"))
def test_mrope(case: Case):
    rope = MRoPE(
        case.params["head_dim"],
        case.params["base"],
        interleaved=False,
        sections=case.params["mrope_section"],
        alternating=case.method.endswith("interleaved"),
    )
    positions = case.inputs["positions"].T
    assert_rotates(case, rope, positions)
    assert_tables(case, rope, positions, twice=True)


@pytest.mark.parametrize("case", cases("mrope_time_last"))
def test_mrope_with_the_slowest_pairs_for_time(case: Case):
    dim, theta, sections, time = case.params.values()
    rope = MRoPE(dim, theta, interleaved=False, sections=sections, time=time)
    assert_rotates(case, rope, case.inputs["positions"].T)


def test_where_time_may_stand():
    for options in ({"time": "last"}, {"time": "still", "alternating": True}):
        with pytest.raises(ValueError, match="time must be first, slowest or still"):
            MRoPE(16, interleaved=False, **options)


def test_mrope_of_text_is_rope():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 9, 16)
    text = mrope_positions([9])
    for alternating in (False, True):
        got = MRoPE(16, interleaved=False, alternating=alternating)(q, k, text)
        want = RoPE(16, interleaved=False)(q, k, torch.arange(9))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_mrope_positions_continue_one_past_the_largest_component():
    positions = mrope_positions([2, (1, 2, 3), 2])
    assert positions.tolist() == [
        [0, 0, 0],
        [1, 1, 1],
        [2, 2, 2],
        [2, 2, 3],
        [2, 2, 4],
        [2, 3, 2],
        [2, 3, 3],
        [2, 3, 4],
        [5, 5, 5],
        [6, 6, 6],
    ]


def test_mrope_sections_of_the_released_models_are_the_defaults():
    assert MRoPE(128, interleaved=False).sections == (16, 24, 24)
    assert MRoPE(128, interleaved=False, alternating=True).sections == (24, 20, 20)


@pytest.mark.parametrize(
    "sections, alternating", [((1, 2, 3), False), ((2, 4, 2), True), ((8,), False)]
)
def test_mrope_refuses_sections_that_do_not_fit(sections, alternating):
    with pytest.raises(ValueError, match=r"sum to rotary_dim / 2 = 8.*got \("):
        MRoPE(16, interleaved=False, sections=sections, alternating=alternating)


@pytest.mark.golden("axial_rope")
@pytest.mark.parametrize("case", cases("rope2d_axial_ropevit"))
def test_axial_of_rope_vit(case: Case):
    rope = AxialRoPE.rope_vit(case.params["head_dim"], case.params["base"])
    assert_rotates(case, rope, torch.stack([case.inputs["y"], case.inputs["x"]], -1))


@pytest.mark.parametrize("case", cases("rope2d_dinov3"))
def test_axial_of_dinov3(case: Case):
    rope = AxialRoPE.dinov3(case.params["head_dim"], case.params["base"])
    sizes = case.params["height"], case.params["width"]
    prefixed = posenc.positions.normalized_grid(*sizes, class_tokens=case.params["n_prefix"])
    assert_rotates(case, rope, prefixed)
    assert_tables(case, rope, posenc.positions.normalized_grid(*sizes), twice=True)


@pytest.mark.parametrize("case", cases("rope2d_pixtral"))
def test_axial_of_pixtral(case: Case):
    rope = AxialRoPE.pixtral(case.params["head_dim"], case.params["base"])
    positions = case.inputs["positions"].T
    assert_rotates(case, rope, positions)
    assert_tables(case, rope, positions, twice=True)


@pytest.mark.golden("mixed_rope")
@pytest.mark.parametrize("case", cases("rope2d_mixed_ropevit"))
def test_mixed_of_rope_vit(case: Case):
    heads, head_dim = case.params["heads"], case.params["head_dim"]
    rope = MixedRoPE(head_dim, heads)
    x_first = case.inputs["freqs"].view(2, heads, head_dim // 2)
    with torch.no_grad():
        rope.weight.copy_(x_first.flip(0))
    assert_rotates(case, rope, torch.stack([case.inputs["y"], case.inputs["x"]], -1))


def test_mixed_starts_with_two_orthogonal_directions_per_head():
    rope = MixedRoPE(16, 3)
    row, column = rope.weight.detach()
    assert rope.num_parameters == 2 * 3 * 8
    magnitude = 10.0 ** (-torch.arange(4) / 4)
    torch.testing.assert_close(row.hypot(column), magnitude.repeat(2).expand(3, 8))
    dot = row[:, :4] * row[:, 4:] + column[:, :4] * column[:, 4:]
    torch.testing.assert_close(dot, torch.zeros(3, 4), atol=1e-6, rtol=0)
    assert len({round(float(x), 4) for x in row[:, 0]}) == 3


def test_mixed_shares_frequencies_within_a_group_of_query_heads():
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    positions = torch.randint(9, (2, 5, 2))
    rope = MixedRoPE(8, 2)
    got_q, got_k = rope(q, k, positions)
    for head in range(4):
        alone = MixedRoPE(8, 1)
        with torch.no_grad():
            alone.weight.copy_(rope.weight[:, head // 2 : head // 2 + 1])
        want_q, want_k = alone(q[:, head : head + 1], k[:, head // 2 : head // 2 + 1], positions)
        torch.testing.assert_close(got_q[:, head : head + 1], want_q)
        torch.testing.assert_close(got_k[:, head // 2 : head // 2 + 1], want_k)


def test_a_frequency_of_zero_is_no_rotation_and_p_of_one_is_rope():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 7, 16)
    positions = torch.arange(100, 107)
    still = RoPE(16, interleaved=False, scaling=Proportional(0.0))(q, k, positions)
    assert torch.equal(still[0], q) and torch.equal(still[1], k)
    full = RoPE(16, interleaved=False)(q, k, positions)
    for rope in (
        RoPE(16, interleaved=False, scaling=Proportional(1.0)),
        RoPE(16, interleaved=False, rotary_dim=16),
    ):
        assert torch.equal(rope(q, k, positions)[0], full[0])


def test_two_instances_with_other_parameters_do_not_share_tables():
    positions = torch.arange(5)
    first, second = (RoPE(8, theta, interleaved=False) for theta in (1e4, 5e5))
    assert not torch.equal(first.cos_sin(positions)[0], second.cos_sin(positions)[0])


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: RoPE(65, interleaved=False), "head_dim must be even, got 65.*rotary_dim=64"),
        (lambda: RoPE(8, interleaved=False, rotary_dim=10), "head_dim=8, got 10"),
        (lambda: RoPE(8, 0.0, interleaved=False), "rope_theta must be positive, got 0.0"),
        (lambda: AxialRoPE(6, interleaved=False), "multiple of 4, got 6"),
        (lambda: MixedRoPE(10, 2), "multiple of 4, got 10"),
    ],
)
def test_wrong_sizes_are_refused(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


def test_the_layout_has_no_default():
    with pytest.raises(TypeError, match="interleaved"):
        RoPE(8)  # pyright: ignore[reportCallIssue]


def test_a_head_of_another_size_is_refused():
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"head_dim=16, got q or k with shape \(1, 2, 3, 8\)"):
        RoPE(16, interleaved=False)(q, q, torch.arange(3))


def test_a_share_of_the_head_is_an_even_number_of_channels():
    assert RoPE(10, interleaved=False, partial_rotary_factor=0.5).rotary_dim == 4
    with pytest.raises(ValueError, match="not both"):
        RoPE(8, interleaved=False, rotary_dim=4, partial_rotary_factor=0.5)


@pytest.mark.parametrize("scaling", [None, YaRN(4, 64)])
@pytest.mark.parametrize(
    "kind", ["run", "run from 70", "documents", "one apart", "backwards", "real"]
)
def test_long_rows_have_the_angles_of_every_position_alone(kind, scaling):
    positions = torch.arange(600) + (70 if kind == "run from 70" else 0)
    if kind == "documents":
        positions = positions % 300
    elif kind == "one apart":
        positions[-1] += 1
    elif kind == "backwards":
        positions = positions.flip(0)
    elif kind == "real":
        positions = positions / 2
    rope = RoPE(32, interleaved=False, scaling=scaling)
    together = rope.cos_sin(positions)
    alone = [rope.cos_sin(positions[i : i + 1]) for i in range(600)]
    for got, want in zip(together, map(torch.cat, zip(*alone, strict=True)), strict=True):
        assert torch.equal(got, want)
