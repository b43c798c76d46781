"""Rotations over rows, columns and time, as image and video generators use them."""

import pytest
import torch

import posenc
from posenc import AxialRoPE
from posenc.positions import grid, normalized_grid
from posenc.testing import CHECKS
from tests.golden_values import Case, cases


def assert_rotates(case: Case, rope: AxialRoPE | posenc.MixedRoPE, positions: torch.Tensor) -> None:
    """The rotated vectors and the gradient are those of the authors' code."""
    x = case.inputs["x"].requires_grad_()
    out, _ = rope(x, x, positions)
    (gradient,) = torch.autograd.grad((out * case.inputs["cotangent"]).sum(), x)
    case.assert_close("out", out)
    case.assert_close("gradient", gradient)


@pytest.mark.golden("axial_rope")
@pytest.mark.parametrize("case", cases("axial_wan"))
def test_wan(case: Case):
    params = case.params
    rope = AxialRoPE(params["head_dim"], 10000.0, interleaved=True, axes=params["axes"])
    assert_rotates(case, rope, grid(*params["sizes"]))


@pytest.mark.parametrize("case", cases("axial_flux"))
def test_flux(case: Case):
    params = case.params
    rope = AxialRoPE(params["head_dim"], 10000.0, interleaved=True, axes=params["axes"])
    assert_rotates(case, rope, grid(1, *params["sizes"], class_tokens=params["text"]))


@pytest.mark.parametrize("case", cases("axial_qwen_image"))
def test_qwen_image(case: Case):
    params = case.params
    rope = AxialRoPE(params["head_dim"], 10000.0, interleaved=True, axes=params["axes"])
    positions = grid(*params["sizes"], centred=params["centred"], text_before=params["text"])
    assert_rotates(case, rope, positions)


@pytest.mark.parametrize("case", cases("axial_hunyuan_video"))
def test_hunyuan_video(case: Case):
    params = case.params
    rope = AxialRoPE(params["head_dim"], 256.0, interleaved=True, axes=params["axes"])
    assert_rotates(case, rope, grid(*params["sizes"]))


@pytest.mark.parametrize("case", cases("axial_ltx"))
def test_ltx(case: Case):
    rope = AxialRoPE.ltx(case.params["head_dim"])
    whole = torch.tensor([20, 2048, 2048])  # frames, rows and columns of pixels
    scale = torch.tensor(case.params["scale"], dtype=torch.float64)
    fractions = grid(*case.params["sizes"]) * scale / whole
    assert rope.claims.coordinates == "normalized"
    assert_rotates(case, rope, 2 * fractions - 1)


@pytest.mark.parametrize("case", cases("axial_dinov3"))
def test_dinov3(case: Case):
    rope = AxialRoPE.dinov3(case.params["head_dim"])
    cells = normalized_grid(*case.params["sizes"], class_tokens=case.params["prefix"])
    assert_rotates(case, rope, cells)


@pytest.mark.parametrize("case", cases("axial_pixtral"))
def test_pixtral(case: Case):
    assert_rotates(case, AxialRoPE.pixtral(case.params["head_dim"]), grid(*case.params["sizes"]))


@pytest.mark.parametrize("case", cases("axial_rope_vit"))
def test_rope_vit(case: Case):
    assert_rotates(case, AxialRoPE.rope_vit(case.params["head_dim"]), grid(*case.params["sizes"]))


@pytest.mark.golden("mixed_rope")
@pytest.mark.parametrize("case", cases("mixed_rope_vit"))
def test_rope_mixed(case: Case):
    heads = case.params["heads"]
    rope = posenc.MixedRoPE(case.params["head_dim"], heads)
    with torch.no_grad():
        rope.weight.copy_(case.inputs["freqs"].unflatten(1, (heads, -1)).flip(0))
    cells = grid(*case.params["sizes"])
    assert_rotates(case, rope, cells)
    out, _ = rope(case.inputs["x"], case.inputs["x"], cells)
    (gradient,) = torch.autograd.grad((out * case.inputs["cotangent"]).sum(), rope.weight)
    case.assert_close("gradient of freqs", gradient.flip(0).flatten(1))


def test_two_equal_axes_are_the_default():
    q = torch.randn(1, 2, 6, 16)
    for options in ({}, {"column_first": True}, {"alternating": True}):
        default = AxialRoPE(16, interleaved=False, **options)
        explicit = AxialRoPE(16, interleaved=False, axes=(8, 8), **options)
        assert torch.equal(default(q, q, grid(2, 3))[0], explicit(q, q, grid(2, 3))[0])


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("ascending", [False, True])
def test_three_axes_hold_the_contract(check: str, ascending: bool):
    def build(shape):
        width = shape.head_dim // 6 * 2
        axes = (shape.head_dim - 2 * width, width, width)
        if ascending:
            axes = (width,) * 3
        return AxialRoPE.from_shape(shape, interleaved=True, axes=axes, ascending=ascending)

    CHECKS[check](build)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": (6, 6, 2)}, r"sum to head_dim=16, got \(6, 6, 2\), which sum to 14"),
        ({"axes": (16,)}, r"two or more even numbers.*got \(16,\)"),
        ({"axes": (7, 9)}, "two or more even numbers"),
        ({"axes": (16, 0)}, "a number of channels in axes must be at least 2, got 0"),
        ({"axes": (8, 4, 4), "column_first": True}, "for two equal axes, got axes=.8, 4, 4"),
        ({"axes": (4, 12), "alternating": True}, "for two equal axes"),
        ({"axes": (4, 4, 6), "ascending": True}, "ascending needs equal axes"),
        ({"axes": (6, 6, 6), "ascending": True}, "which sum to 18"),
        ({"ascending": True, "frequencies_in_turns": True}, "a unit of its own"),
    ],
)
def test_axes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AxialRoPE(16, interleaved=True, **options)


def test_axes_that_are_no_numbers_are_refused():
    for axes in (16, "88", (8.0, 8.0), (True, 15)):
        with pytest.raises(TypeError, match="axes must be a"):
            AxialRoPE(16, interleaved=True, axes=axes)  # pyright: ignore[reportArgumentType]


def test_a_grid_of_another_size_than_the_tokens_is_refused():
    rope, x = AxialRoPE(16, interleaved=True, axes=(8, 4, 4)), torch.randn(1, 2, 12, 16)
    for positions in (grid(2, 2, 2), grid(3, 4)):
        with pytest.raises(ValueError, match=r"must have shape \(12, 3\).*got"):
            rope(x, x, positions)


def split_by_a_class_token(cells: torch.Tensor, index: int) -> torch.Tensor:
    nowhere = torch.full((1, cells.shape[1]), torch.nan, dtype=torch.float64)
    return torch.cat([cells[:index], nowhere, cells[index:]])


@pytest.mark.parametrize("index", [1, 3, 5])
def test_a_class_token_in_the_middle_of_a_grid_is_refused(index):
    said = f"have a token without a place, of index {index}, in the middle of a grid. Put class"
    cells, x = split_by_a_class_token(grid(2, 3), index), torch.randn(1, 2, 7, 16)
    for rope in (AxialRoPE(16, interleaved=False), posenc.MixedRoPE(16, 2)):
        with pytest.raises(ValueError, match=f"{type(rope).__name__}: positions {said}"):
            rope(x, x, cells)
    bias = posenc.RelativeBias2D(2, 2, 3)
    with pytest.raises(ValueError, match=f"RelativeBias2D: q_positions {said}"):
        bias(cells, cells)
    for added in (posenc.Learned2D(2, 3, 16), posenc.SinCos2D(16)):
        with pytest.raises(ValueError, match=said):
            added(torch.zeros(1, 7, 16), cells)
    batch = torch.stack([split_by_a_class_token(grid(2, 3), 0), cells])
    with pytest.raises(ValueError, match=f"attention: q_positions {said}"):
        q = torch.randn(2, 2, 7, 16)
        posenc.attention(q, q, q, bias, q_positions=batch, kv_positions=batch)
    frames = split_by_a_class_token(grid(3, 2, 3), 6 + index)
    with pytest.raises(ValueError, match=f"of index {6 + index}, in the middle"):
        AxialRoPE(16, interleaved=True, axes=(8, 4, 4))(*torch.randn(2, 1, 2, 19, 16), frames)


@pytest.mark.parametrize("index, count", [(1, 1), (5, 2), (10, 1)])
def test_a_class_token_in_the_place_of_a_cell_is_refused(index, count):
    cells = grid(3, 4).double()
    cells[index : index + count] = torch.nan
    rope, x = AxialRoPE(16, interleaved=False), torch.randn(1, 2, 24, 16)
    with pytest.raises(ValueError, match=f"of index {index}, in the middle of a grid"):
        rope(x[:, :, :12], x[:, :, :12], cells)
    two_pictures = torch.cat([cells, grid(4, 3).double()])
    with pytest.raises(ValueError, match=f"of index {index}, in the middle of a grid"):
        rope(x, x, two_pictures)


def test_class_tokens_beside_cells_that_were_drawn_are_none_in_the_middle():
    nowhere = torch.full((1, 2), torch.nan)
    # Of two pictures: 4 and 6 are in a row, and 5 is the one after 4.
    for first, second in (([5, 2, 4], [6, 11, 0]), ([0, 2, 4], [5, 8, 11])):
        cells = torch.cat([nowhere, grid(3, 4)[first], nowhere, grid(3, 4)[second]])
        x = torch.randn(1, 2, len(cells), 16)
        assert AxialRoPE(16, interleaved=False)(x, x, cells)[0].isfinite().all()


def test_class_tokens_beside_a_grid_are_none_in_the_middle():
    two_pictures = torch.cat([grid(2, 3, class_tokens=2), grid(3, 2, class_tokens=1)])
    one_cell = split_by_a_class_token(split_by_a_class_token(grid(1, 1, text_after=1), 1), 1)
    between_text = split_by_a_class_token(grid(3, 3, text_before=2, text_after=2), 2)
    for cells in (
        two_pictures,
        one_cell,
        between_text,
        split_by_a_class_token(grid(3, 3, text_after=2), 9),
        split_by_a_class_token(grid(2, 3, centred=True), 6),
        split_by_a_class_token(torch.cat([grid(1, 3), grid(1, 3)]), 3),
    ):
        x = torch.randn(1, 2, len(cells), 16)
        assert AxialRoPE(16, interleaved=False)(x, x, cells)[0].isfinite().all()
    frames = split_by_a_class_token(grid(2, 2, 3), 6)
    x = torch.randn(1, 2, 13, 16)
    assert AxialRoPE(16, interleaved=True, axes=(8, 4, 4))(x, x, frames)[0].isfinite().all()


def test_a_token_with_a_row_and_no_column_is_refused():
    cells, x = grid(2, 3).double(), torch.randn(1, 2, 6, 16)
    cells[:, 1] *= torch.nan  # as of 0 / 0, in coordinates of one column
    with pytest.raises(ValueError, match="NaN in some components of a token and not in all"):
        AxialRoPE(16, interleaved=False)(x, x, cells)


def test_grids_of_time_and_text():
    assert grid(2, 1, 2).tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    assert grid(3, 2, centred=True)[:, 0].unique().tolist() == [-2, -1, 0]
    assert grid(4, 1, 2, centred=True)[:, 0].unique().tolist() == [0, 1, 2, 3]
    both = grid(1, 2, 3, text_before=1, text_after=2)
    assert both[[0, -2, -1]].tolist() == [[3] * 3, [4] * 3, [5] * 3] and len(both) == 9
    centred = grid(1, 3, centred=True, text_after=1, class_tokens=1)
    assert centred[0].isnan().all() and centred[-1].tolist() == [1, 1]
    assert grid(1, 3, text_after=1).dtype == torch.int64
    for sizes in ((), (3,), (1, 2, 3, 4)):
        with pytest.raises(TypeError, match="give height and width, or time, height and width"):
            grid(*sizes)
    with pytest.raises(ValueError, match="time must be at least 1, got 0"):
        grid(0, 2, 3)
    with pytest.raises(ValueError, match="text_after must be at least 0, got -1"):
        grid(2, 3, text_after=-1)
    with pytest.raises(TypeError, match="normalized_grid: at most 2 arguments without a name"):
        posenc.positions.normalized_grid(1, 2, 3)  # pyright: ignore
    with pytest.raises(TypeError, match="centred must be True or False"):
        posenc.positions.grid(2, 3, centred=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rope", [AxialRoPE.dinov3(12), AxialRoPE.ltx(12)], ids=["dinov3", "ltx"])
@pytest.mark.parametrize("class_tokens", [0, 1])
def test_rows_and_columns_where_coordinates_are_meant_are_refused(rope, class_tokens):
    """They would be another model: DINOv3's code makes its coordinates itself, from -1 to 1."""
    num_axes = rope.claims.num_axes
    cells = grid(*(3,) * num_axes, class_tokens=class_tokens)
    q = torch.zeros(1, 1, len(cells), 12)
    with pytest.raises(
        ValueError, match=r"^AxialRoPE: this variant reads coordinates .*width\)\.$"
    ):
        rope(q, q, cells)
    one_cell = torch.full((1, num_axes), 0.0)  # the middle of the picture
    rope(q[:, :, :1], q[:, :, :1], one_cell)
    rescaled = (2 * cells.double() + 1) / 3 * 4 - 4  # DINOv3's training takes them beyond 1
    rope(q, q, rescaled)


@pytest.mark.parametrize("encoding", [posenc.Learned2D(3, 4, 8), posenc.RelativeBias2D(2, 3, 4)])
def test_a_table_of_another_grid_is_answered_by_the_way_to_resize_it(encoding):
    name = type(encoding).__name__
    state = torch.nn.ModuleList([encoding]).state_dict()
    other = {key: torch.zeros(15, value.shape[1]) for key, value in state.items()}
    rows = len(encoding.weight)
    said = rf"^{name}: this table has 15 rows, .* 3 x 4 cells has {rows}: .*\(3, 4\)\.$"
    with pytest.raises(ValueError, match=said):
        torch.nn.ModuleList([encoding]).load_state_dict(other)
    torch.nn.ModuleList([encoding]).load_state_dict(state)
