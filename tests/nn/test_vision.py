"""timm's attention with posenc's inside: the same answers without an encoding, and a grid of
positions with one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import posenc
from posenc.nn import VisionAttention, attach_to_vit

PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Stock(nn.Module):
    """An attention with timm's parts."""

    def __init__(self, dim: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // num_heads), nn.LayerNorm(dim // num_heads)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attn_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, attn_mask=attn_mask, scale=self.scale
        )
        return self.proj(out.transpose(1, 2).flatten(2))


def test_the_same_parts_give_the_same_answers():
    stock = Stock()
    x, mask = torch.randn(2, 9, 32), torch.rand(9, 9) < 0.7
    mask[:, 0] = True
    mine = VisionAttention(stock)
    assert mine.state_dict().keys() == stock.state_dict().keys()
    torch.testing.assert_close(mine(x), stock(x), rtol=0, atol=1e-6)
    each = mask.expand(2, 1, 9, 9)
    torch.testing.assert_close(mine(x, mask), stock(x, mask), rtol=0, atol=1e-6)
    torch.testing.assert_close(mine(x, each), stock(x, each), rtol=0, atol=1e-6)
    stock.scale = mine.scale = 0.5
    torch.testing.assert_close(mine(x), stock(x), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="attn_mask must be bool"):
        mine(x, torch.zeros(9, 9))
    with pytest.raises(ValueError, match="made for 9 tokens, got 8"):
        VisionAttention(stock, posenc.ALiBi(4), torch.arange(9))(x[:, :8])


def test_other_attentions_are_refused():
    with pytest.raises(TypeError, match="got a MultiheadAttention without qkv"):
        VisionAttention(nn.MultiheadAttention(32, 4))
    strange = Stock()
    strange.relative_position = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="got a Stock with relative_position"):
        VisionAttention(strange)
    with pytest.raises(TypeError, match="has no blocks with an attn"):
        attach_to_vit(nn.Linear(2, 2), None)


@pytest.fixture
def vit():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm.models.VisionTransformer(**sizes, num_classes=5, reg_tokens=2).eval()


@torch.no_grad()
def test_timms_model_gives_its_own_answers(vit):
    stock, names = vit(PIXELS), list(vit.state_dict())
    attach_to_vit(vit, None)
    torch.testing.assert_close(vit(PIXELS), stock, rtol=0, atol=1e-5)
    assert list(vit.state_dict()) == names


@torch.no_grad()
@pytest.mark.parametrize("name", ["axial_rope", "rope", "alibi"])
def test_timms_model_feels_positions(name, vit):
    stock = vit(PIXELS)
    encoding = posenc.create(name, posenc.ModelShape(32, 4, causal=False))
    attach_to_vit(vit, encoding)
    assert (vit(PIXELS) - stock).abs().max() > 1e-4
    if name == "axial_rope":
        places = vit.blocks[0].attn.positions
        assert places[:3].isnan().all() and places.tolist()[3] == [0, 0]
        assert places.tolist()[-1] == [3, 3]


def test_timms_model_trains_an_encoding_of_each_layers_own(vit):
    fire = posenc.create("t5", posenc.ModelShape(32, 4, causal=False))
    each = posenc.PerLayer([fire, posenc.create("t5", posenc.ModelShape(32, 4, causal=False))])
    attach_to_vit(vit.train(), each)
    vit(PIXELS).square().sum().backward()
    tables = [p for n, p in vit.named_parameters() if "encoding" in n]
    assert len(tables) == 2
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in tables)
