"""What print shows of an encoding, and the class tokens of those over rows and columns."""

import copy
import math
import pickle

import pytest
import torch

import posenc
from posenc.frequencies.scalings.registry import LongRoPE
from posenc.positions.tokens import are_known_equal

SHAPE = posenc.ModelShape(embed_dim=64, num_heads=4, train_length=128)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("rope", "rope_theta=10000.0, interleaved=False"),
        ("rope", "scaling=None"),
        ("yarn", "scaling=YaRN(factor=4.0, original_max_positions=128"),
        ("alibi", "ALiBi(num_heads=4)"),
        ("axial_rope", "rope_theta=100.0"),
        ("sinusoidal", "base=10000.0"),
    ],
)
def test_print_shows_base_layout_and_scaling(name, shown):
    encoding = posenc.create(name, SHAPE)
    for each in (encoding, copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
        assert shown in str(each)
    if 1 not in encoding.claims.places:
        assert shown in str(posenc.Attention(64, 4, encoding=encoding))


def test_print_shows_what_was_given_unlike_its_default():
    assert "rotary_dim=8" in str(posenc.RoPE(16, 500.0, interleaved=True, rotary_dim=8))
    assert "rope_theta=500.0, interleaved=True" in str(posenc.RoPE(16, 500.0, interleaved=True))
    assert str(posenc.ALiBi(4, bias_max=4.0)) == "ALiBi(num_heads=4, bias_max=4.0)"


@pytest.mark.parametrize("name", posenc.names())
def test_print_is_short_and_names_no_address(name):
    text = str(posenc.create(name, SHAPE))
    assert " at 0x" not in text and all(len(line) < 500 for line in text.splitlines())
    factors = tuple(1.0 + i for i in range(32))
    long = posenc.RoPE(64, interleaved=False, scaling=LongRoPE(4.0, 128, factors, factors))
    assert "…" in str(long) and len(str(long)) < 500


@pytest.mark.parametrize("kind", ["axial", "mixed"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_token_without_a_place_is_not_rotated(kind, interleaved):
    rope = (
        posenc.AxialRoPE(16, interleaved=interleaved)
        if kind == "axial"
        else posenc.MixedRoPE(16, 4, interleaved=interleaved)
    )
    cells = posenc.positions.grid(2, 3, class_tokens=1)
    x = torch.randn(1, 4, 7, 16)
    for used in (rope, rope.prepare(cells)):
        q, k = used(x, x, cells)
        torch.testing.assert_close(q[:, :, 0], x[:, :, 0])
        assert not torch.allclose(k[:, :, 2:], x[:, :, 2:])
    assert torch.equal(rope(x, x, cells)[0], rope(x, x, cells.float())[0])


@pytest.mark.parametrize(
    "rope",
    [posenc.AxialRoPE(16, interleaved=False), posenc.MixedRoPE(16, 4)],
    ids=["axial", "mixed"],
)
def test_negative_rows_and_columns_are_places(rope):
    """A grid centred on 0, as in image generation: the same scores as one counted from 0."""
    x = torch.randn(1, 4, 16, 16)
    cells = posenc.positions.grid(4, 4)
    for centred in (cells - 2, (cells - 2).double(), (cells - 2).int()):
        q, k = rope(x, x, centred)
        assert not torch.isclose(q, x).all(-1).any(1)[0, torch.arange(16) != 10].any()
        assert torch.equal(q[:, :, 10], x[:, :, 10])  # row 0, column 0
        want_q, want_k = rope(x, x, cells)
        torch.testing.assert_close(q @ k.mT, want_q @ want_k.mT, rtol=1e-6, atol=1e-5)


def test_a_place_that_is_missing_is_seen_by_prepared_tables():
    rope, x = posenc.AxialRoPE(16, interleaved=False), torch.randn(1, 4, 7, 16)
    cells = posenc.positions.grid(2, 3, class_tokens=1)
    assert are_known_equal(cells, cells.clone())
    assert rope.prepare(cells)._remembered_cos_sin[0][0].fits(cells.clone())
    others = posenc.positions.grid(2, 3, class_tokens=1)
    others[0] = 5.0
    for used in (rope, rope.prepare(cells)):
        assert torch.equal(used(x, x, others)[0], rope(x, x, others)[0])


@pytest.mark.parametrize("name", ["alibi", "rope", "t5"])
def test_a_missing_place_is_refused_on_a_line(name):
    q, p = torch.randn(1, 4, 3, 16), torch.tensor([math.nan, 0, 1])
    encoding = posenc.create(name, posenc.ModelShape(64, 4))
    with pytest.raises((ValueError, TypeError), match=r"finite|whole|integers"):
        posenc.attention(q, q, q, encoding, q_positions=p, kv_positions=p)


def test_grids_by_hand():
    grid, normalized = posenc.positions.grid, posenc.positions.normalized_grid
    assert grid(2, 1).tolist() == [[0, 0], [1, 0]] and grid(2, 1).dtype == torch.int64
    assert normalized(1, 4).tolist() == [[0, -0.75], [0, -0.25], [0, 0.25], [0, 0.75]]
    for made in (grid(2, 3, class_tokens=2), normalized(2, 3, class_tokens=2)):
        assert made.shape == (8, 2) and made[:2].isnan().all() and made[2:].isfinite().all()
    for wrong in ((0, 3), (3, -1)):
        with pytest.raises(ValueError, match="must be at least 1"):
            grid(*wrong)
    with pytest.raises(ValueError, match="class_tokens must be at least 0, got -1"):
        normalized(1, 1, class_tokens=-1)
    for wrong in (2.0, True, "2"):
        with pytest.raises(TypeError, match="height must be a whole number"):
            grid(wrong, 2)


def test_a_learned_grid_has_whole_cells_only():
    learned, x = posenc.Learned2D(3, 3, 16), torch.zeros(1, 2, 16)
    whole = learned(x, torch.tensor([[0, 1], [2, 2]]))
    assert torch.equal(whole, learned(x, torch.tensor([[0.0, 1.0], [2.0, 2.0]])))
    with pytest.raises(ValueError, match="one between two cells"):
        learned(x, torch.tensor([[0.0, 0.5], [2.0, 2.0]]))
    for outside in (torch.tensor([[0, -1], [0, 0]]), torch.tensor([[0.0, -1.0], [0.0, 0.0]])):
        with pytest.raises(ValueError, match="column -1 is outside"):
            learned(x, outside)


def test_coordinates_of_two_kinds_are_not_composed():
    with pytest.raises(ValueError, match="rows and columns and another coordinates from -1 to 1"):
        posenc.Compose(posenc.SinCos2D(16), posenc.AxialRoPE.dinov3(16))
    assert posenc.AxialRoPE.dinov3(16).claims.coordinates == "normalized"


def test_tokens_without_a_place_get_zeros_and_real_coordinates_may_be_negative():
    cells = torch.tensor([[math.nan, math.nan], [0, 1], [math.nan, math.nan]])
    for encoding in (posenc.SinCos2D(16), posenc.Learned2D(3, 3, 16)):
        added = encoding(torch.zeros(1, 3, 16), cells)[0]
        assert not added[0].any() and not added[2].any() and added[1].any()
    assert posenc.SinCos2D(16)(torch.zeros(1, 1, 16), torch.tensor([[-1, -2]])).any()
    centred = posenc.positions.normalized_grid(2, 2).float()
    assert posenc.SinCos2D(16)(torch.zeros(1, 4, 16), centred).any(-1).all()
    x = torch.randn(1, 1, 4, 16)
    dino = posenc.AxialRoPE.dinov3(16)
    assert not torch.isclose(dino(x, x, centred)[0], x).all(-1).any()
