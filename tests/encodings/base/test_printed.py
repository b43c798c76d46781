"""What print shows of an encoding, and the class tokens of those over rows and columns."""

import copy
import pickle

import pytest
import torch

import posenc
from posenc.encodings.queries_keys.axial import centred_grid
from posenc.encodings.queries_keys.rope_scaling.longrope import LongRoPE

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
    cells = torch.cat([torch.full((1, 2), -1), posenc.positions.grid(2, 3)])
    x = torch.randn(1, 4, 7, 16)
    for used in (rope, rope.prepare(cells)):
        q, k = used(x, x, cells)
        torch.testing.assert_close(q[:, :, 0], x[:, :, 0])
        assert not torch.allclose(k[:, :, 2:], x[:, :, 2:])
    one = torch.tensor([[-1, 5], [3, -2]])
    torch.testing.assert_close(rope(x[:, :, :2], x[:, :, :2], one)[0], x[:, :, :2])


def test_tokens_without_a_place_get_zeros_and_real_coordinates_may_be_negative():
    cells = torch.tensor([[-1, -1], [0, 1], [2, -1]])
    for encoding in (posenc.SinCos2D(16), posenc.Learned2D(3, 3, 16)):
        added = encoding(torch.zeros(1, 3, 16), cells)[0]
        assert not added[0].any() and not added[2].any() and added[1].any()
    centred = centred_grid(2, 2).float()
    assert posenc.SinCos2D(16)(torch.zeros(1, 4, 16), centred).any(-1).all()
    x = torch.randn(1, 1, 4, 16)
    dino = posenc.AxialRoPE.dinov3(16)
    assert not torch.isclose(dino(x, x, centred)[0], x).all(-1).any()
