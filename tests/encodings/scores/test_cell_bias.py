"""Biases by rows and columns, and Swin's windows, against recorded values."""

import pytest
import torch

import posenc
from posenc import RelativeBias2D, SwinV2Bias
from posenc.positions import grid
from tests.golden_values import Case, cases


def assert_bias_and_gradients(case: Case, bias: torch.Tensor, weights: dict) -> None:
    """The bias, and the gradients of its inner product with the case's cotangent, are recorded."""
    case.assert_close("bias", bias)
    product = (bias * case.inputs["cotangent"]).sum()
    gradients = torch.autograd.grad(product, list(weights.values()))
    for name, gradient in zip(weights, gradients, strict=True):
        case.assert_close(f"gradient of {name}", gradient)


def with_table(encoding: RelativeBias2D, table: torch.Tensor) -> RelativeBias2D:
    with torch.no_grad():
        encoding.weight.copy_(table)
    return encoding


@pytest.mark.golden("relative_bias_2d")
@pytest.mark.parametrize("case", cases("cell_bias_swin"))
def test_swin(case: Case):
    height, width, heads = case.params.values()
    swin = with_table(RelativeBias2D(heads, height, width), case.inputs["table"])
    cells = grid(height, width)
    assert_bias_and_gradients(case, swin(cells, cells), {"table": swin.weight})
    batched = swin(cells.expand(3, -1, -1), cells.flip(0)[None])
    assert batched.shape == (3, heads, len(cells), len(cells))
    assert torch.equal(batched[2].flip(-1), swin(cells, cells))


@pytest.mark.parametrize("case", cases("cell_bias_swin_resized"))
def test_swins_table_for_a_larger_window(case: Case):
    old, new, heads = case.params.values()
    swin = with_table(RelativeBias2D(heads, old, old), case.inputs["table"])
    case.assert_close("resized", swin.resize(new, new).weight)


@pytest.mark.parametrize("case", cases("cell_bias_beit"))
def test_beit(case: Case):
    old, new, heads = case.params.values()
    beit = with_table(RelativeBias2D(heads, old, old, class_token=True), case.inputs["table"])
    resized = beit.resize(new, new, mode="bilinear")
    cells = grid(new, new, class_tokens=1)
    case.assert_close("bias", resized(cells, cells))
    if old == new:
        assert_bias_and_gradients(case, beit(cells, cells), {"table": beit.weight})


@pytest.mark.golden("swin_v2")
@pytest.mark.parametrize("case", cases("cell_bias_swin_v2"))
def test_swin_v2(case: Case):
    params = case.params
    trained_height, trained_width = (size or None for size in params["trained"])
    swin = SwinV2Bias(
        params["heads"],
        params["height"],
        params["width"],
        trained_height=trained_height,
        trained_width=trained_width,
        mlp_width=8,
    )
    weights = dict(swin.named_parameters())
    swin.load_state_dict({name: case.inputs[name] for name in weights})
    cells = grid(params["height"], params["width"])
    attention_weights = swin(cells, cells).softmax(-1)
    assert_bias_and_gradients(case, attention_weights, weights)


@pytest.mark.golden("relative_bias_2d")
@pytest.mark.parametrize("case", cases("mask_swin_windows"))
def test_attention_in_shifted_windows(case: Case):
    height, width, window, shift, heads = case.params.values()
    swin = with_table(RelativeBias2D(heads, window, window), case.inputs["table"])
    positions = (grid(height, width) - shift) % window
    leaves = {name: case.inputs[name].requires_grad_() for name in ("q", "k", "v")}
    q, k, v = (
        leaf.flatten(1, 2).unflatten(-1, (heads, -1)).transpose(1, 2) for leaf in leaves.values()
    )
    out = posenc.attention(
        q,
        k,
        v,
        swin,
        q_positions=positions,
        kv_positions=positions,
        mask=posenc.masks.windows(height, width, window, shift=shift),
    )
    out = out.transpose(1, 2).flatten(2).unflatten(1, (height, width))
    case.assert_close("out", out)
    leaves["table"] = swin.weight
    product = (out * case.inputs["cotangent"]).sum()
    gradients = torch.autograd.grad(product, list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        case.assert_close(f"gradient of {name}", gradient)


def test_a_pair_with_a_class_token_has_no_bias_without_rows_for_it():
    cells = grid(2, 2, class_tokens=1)
    for encoding in (RelativeBias2D(3, 2, 2), SwinV2Bias(3, 2, 2)):
        bias = encoding(cells, cells)
        assert (bias[:, 0] == 0).all() and (bias[:, :, 0] == 0).all()
        assert torch.equal(bias[:, 1:, 1:], encoding(grid(2, 2), grid(2, 2)))


def test_a_window_of_one_cell_has_one_offset():
    for encoding in (RelativeBias2D(3, 1, 1), SwinV2Bias(3, 1, 1)):
        assert encoding(grid(1, 1), grid(1, 1)).isfinite().all()
        assert encoding.num_offsets == 1


@pytest.mark.parametrize("cls", [RelativeBias2D, SwinV2Bias])
def test_cells_that_do_not_fit_are_refused(cls):
    name = cls.__name__
    encoding = cls(2, 3, 4)
    with pytest.raises(ValueError, match=rf"{name}: two tokens are 3 rows apart, and a grid of 3"):
        encoding(grid(4, 4), grid(4, 4))
    with pytest.raises(ValueError, match="two tokens are 4 columns apart"):
        encoding(grid(1, 2) - torch.tensor([0, 3]), grid(1, 2))
    with pytest.raises(ValueError, match=r"must have shape \(len, 2\).*got \(3,\)"):
        encoding(torch.arange(3), torch.arange(3))
    with pytest.raises(ValueError, match="whole rows and columns"):
        encoding(grid(2, 2) + 0.5, grid(2, 2))
    with pytest.raises(ValueError, match="height must be at least 1, got 0"):
        cls(2, 0, 4)
    with pytest.raises(ValueError, match="built for 2 heads, got 4"):
        q, cells = torch.randn(1, 4, 4, 8), grid(2, 2)
        posenc.attention(q, q, q, encoding, q_positions=cells, kv_positions=cells)


@pytest.mark.parametrize(
    ("sizes", "shift", "message"),
    [
        ((4, 6, 4), 0, "multiples of window_size, and shift below it, got 4 x 6, window_size=4"),
        ((4, 4, 2), 2, "shift=2"),
        ((4, 0, 2), 0, "width must be at least 1, got 0"),
        ((4, 4, 2), -1, "shift must be at least 0, got -1"),
    ],
)
def test_windows_that_do_not_fit_are_refused(sizes, shift, message):
    with pytest.raises(ValueError, match=message):
        posenc.masks.windows(*sizes, shift=shift)


def test_a_mask_of_another_grid_is_refused():
    q, cells = torch.randn(1, 2, 6, 8), grid(2, 3)
    with pytest.raises(ValueError, match="documents"):
        posenc.attention(
            q,
            q,
            q,
            RelativeBias2D(2, 2, 3),
            q_positions=cells,
            kv_positions=cells,
            mask=posenc.masks.windows(2, 4, 2),
        )
