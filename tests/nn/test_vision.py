"""timm's attention with posenc's inside: the same answers without an encoding, and a grid of
positions with one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import posenc
from posenc.nn import VisionAttention, attach_to_vit
from tests.compilers import needs_whole_graphs
from tests.golden_values import Case, cases

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


class Vit(nn.Module):
    """Two blocks over a grid of patches, with the attributes of timm's VisionTransformer."""

    def __init__(self, attention=Stock, height=2, width=3, class_tokens=1, **patches) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(2))
        for block in self.blocks:
            block.attn = attention()
        self.patch_embed = nn.Identity()
        self.patch_embed.grid_size = (height, width)
        vars(self.patch_embed).update(patches)
        self.num_prefix_tokens = class_tokens
        self.patch_drop = nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = x + block.attn(x)
        return x


DINO = posenc.AxialRoPE.dinov3(8)


@pytest.mark.parametrize("case", cases("vit_attention_dinov3_timm"))
def test_dinov3s_rotation_is_timms(case: Case):
    """Normalized coordinates, and class and register tokens that are not rotated."""
    p, weights = case.params, dict(case.inputs)
    x = weights.pop("x")
    model = Vit(lambda: Stock(p["dim"], p["num_heads"]), p["height"], p["width"], p["n_prefix"])
    for block in model.blocks:
        if not p["qk_norm"]:
            block.attn.q_norm = block.attn.k_norm = nn.Identity()
        block.attn.load_state_dict(weights)
    rope = posenc.AxialRoPE.dinov3(p["dim"] // p["num_heads"], p["base"])
    attach_to_vit(model.eval(), rope)
    case.assert_close("out", model.blocks[1].attn(x))
    cells = posenc.positions.grid(p["height"], p["width"], class_tokens=p["n_prefix"])
    attach_to_vit(model, rope, cells)  # rows and columns would be another model
    with pytest.raises(ValueError, match=r"reads coordinates from -1 to 1 .*normalized_grid"):
        model.blocks[1].attn(x)


class Rotating(nn.Module):
    """An attention with the parts of timm's EvaAttention or AttentionRope, whatever a case has."""

    def __init__(self, params, weights) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = params["num_heads"], params["num_kv_heads"]
        self.scale = (params["dim"] // self.num_heads) ** -0.5
        for name, weight in weights.items():
            module, _, parameter = name.rpartition(".")
            if not module:
                setattr(self, parameter, nn.Parameter(weight))
            elif not hasattr(self, module):
                is_norm = weight.ndim == 1
                made = nn.LayerNorm(len(weight)) if is_norm else nn.Linear(*weight.shape[::-1])
                if f"{module}.bias" not in weights:
                    made.bias = None
                setattr(self, module, made)
        if not hasattr(self, "qkv"):
            self.qkv = None
        self.load_state_dict(weights)

    def forward(self, x, rope=None, attn_mask=None, is_causal=False):
        assert rope is None  # this stand-in does not rotate
        if self.qkv is None:
            parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        else:
            parts = list(self.qkv(x).chunk(3, -1))
            parts[0] = parts[0] + self.q_bias
            parts[2] = parts[2] + self.v_bias
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (
            part.unflatten(-1, (h, -1)).transpose(1, 2)
            for part, h in zip(parts, heads, strict=True)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.proj(self.norm(out) if hasattr(self, "norm") else out)


@pytest.mark.parametrize("case", cases("vit_attention_eva_timm"))
def test_a_rotation_of_the_model_gives_way_to_the_encoding(case: Case):
    """Eva's attention, with biases of its own or three layers, and one with fewer key heads."""
    p, weights = case.params, dict(case.inputs)
    x, cotangent = weights.pop("x").requires_grad_(), weights.pop("cotangent")
    model = Vit(lambda: Rotating(p, weights), p["height"], p["width"], p["n_prefix"]).eval()
    names = list(model.state_dict())
    attach_to_vit(model, posenc.AxialRoPE.dinov3(p["dim"] // p["num_heads"]))
    assert list(model.state_dict()) == names
    out = model.blocks[0].attn(x, rope=torch.zeros(6, 16))
    case.assert_close("out", out)
    case.assert_close("gradient", *torch.autograd.grad((out * cotangent).sum(), x))
    attach_to_vit(model, None)
    assert (model.blocks[0].attn(x) - case.expected["out"]).abs().max() > 0.01


def test_each_layer_gets_the_coordinates_that_its_encoding_declares():
    cells = posenc.AxialRoPE(8, interleaved=False)
    model = attach_to_vit(Vit(), posenc.PerLayer([DINO, cells]))
    first, second = (block.attn._grid.compute() for block in model.blocks)
    torch.testing.assert_close(
        first, posenc.positions.normalized_grid(2, 3, class_tokens=1), equal_nan=True
    )
    torch.testing.assert_close(second, posenc.positions.grid(2, 3, class_tokens=1), equal_nan=True)
    mixed = attach_to_vit(Vit(), posenc.PerLayer([cells, posenc.ALiBi(4)]))
    assert mixed(torch.randn(1, 7, 32)).isfinite().all()


@torch.no_grad()
def test_positions_follow_the_models_input_size_and_its_copies():
    model, x = attach_to_vit(Vit().eval(), DINO), torch.randn(1, 7, 32)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    assert twin.blocks[0].attn._grid.patch_embed is twin.patch_embed
    twin.patch_embed.grid_size = (3, 2)  # as set_input_size does; as many tokens, other places
    assert not torch.allclose(twin(x), model(x))
    other = Vit(height=3, width=2).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), attach_to_vit(other, DINO)(x))
    twin.patch_embed.grid_size = (3, 3)
    with pytest.raises(ValueError, match="made for 10 tokens, got 7"):
        twin(x)


def test_attaching_again_replaces_the_encoding_and_changes_nothing_else():
    stock = Vit().train()
    stock.blocks[0].attn.attn_drop.eval()
    x, names = torch.randn(1, 7, 32), list(stock.state_dict())
    plain = stock(x)
    attach_to_vit(stock, DINO)
    attach_to_vit(stock, None)
    torch.testing.assert_close(stock(x), plain, rtol=0, atol=1e-6)
    assert list(stock.state_dict()) == names
    assert stock.blocks[0].attn.training and not stock.blocks[0].attn.attn_drop.training


@pytest.mark.slow
@needs_whole_graphs
def test_a_compiled_model_has_the_same_places():
    model, x = attach_to_vit(Vit().eval(), DINO), torch.randn(1, 7, 32)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


class Strange(Stock):
    def forward(self, x, relative_bias=None, attn_mask=None):
        return super().forward(x, attn_mask)


class Separate(Stock):
    def __init__(self) -> None:
        super().__init__()
        self.q_bias = nn.Parameter(torch.zeros(32))


class OfChannels(Stock):
    """Attends from channel to channel, with the parts of an attention of tokens."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(v @ (q.mT @ k).softmax(-1))


class WithFreshLastLayer(OfChannels):
    """A last layer of zeros, as some initialisations have it, hides what came before."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class InWindows(Stock):
    def forward(self, x):
        return super().forward(x.unflatten(1, (-1, 4)).flatten(0, 1)).view_as(x)


class OfTwoKinds(Stock):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = None


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (Strange, "whose forward takes relative_bias"),
        (Separate, "parameters of its own, such as q_bias"),
        (OfChannels, "computes something else"),
        (WithFreshLastLayer, "computes something else"),
        (InWindows, "cannot be called with tokens"),
        (OfTwoKinds, "without qkv"),
    ],
)
@pytest.mark.parametrize("encoding", [None, DINO, posenc.ALiBi(4)], ids=["none", "dino", "alibi"])
def test_attention_of_another_kind_is_refused_before_anything_changes(attention, why, encoding):
    model = Vit(attention).train()
    before = [block.attn for block in model.blocks]
    with pytest.raises((TypeError, ValueError), match=why):
        attach_to_vit(model, encoding)
    assert [block.attn for block in model.blocks] == before
    if attention is WithFreshLastLayer:
        assert not before[0].proj.weight.any() and not before[0].proj.bias.any()
    assert all(module.training for module in model.modules())


def test_tokens_without_a_fixed_place_are_refused():
    unknown = Vit()
    del unknown.patch_embed
    with pytest.raises(TypeError, match="no patch_embed with a grid_size"):
        attach_to_vit(unknown, DINO)
    attach_to_vit(unknown, DINO, posenc.positions.normalized_grid(2, 3, class_tokens=1))
    dropping = Vit()
    dropping.patch_drop.prob = 0.5
    for encoding in (DINO, posenc.ALiBi(4)):
        with pytest.raises(ValueError, match="drops patches in training"):
            attach_to_vit(dropping, encoding)
    with pytest.raises(ValueError, match="takes pictures of any size"):
        attach_to_vit(Vit(strict_img_size=False), DINO)
    attach_to_vit(Vit(strict_img_size=False), posenc.ALiBi(4))
    with pytest.raises(ValueError, match="MRoPE takes 3 components"):
        attach_to_vit(Vit(), posenc.MRoPE(8, interleaved=False))
    with pytest.raises(ValueError, match=r"must have shape \(len, 2\), got \(7,\)"):
        attach_to_vit(Vit(), DINO, torch.arange(7))
    with pytest.raises(ValueError, match="has 7 tokens, 1 of them before the patches; got 6"):
        attach_to_vit(Vit(), DINO, posenc.positions.normalized_grid(2, 3))
    wrong_end = posenc.positions.normalized_grid(2, 3, class_tokens=1).roll(-1, 0)
    with pytest.raises(ValueError, match=r"last 6 tokens of Vit are patches.*class_tokens=1\)"):
        attach_to_vit(Vit(), DINO, wrong_end)
    with pytest.raises(ValueError, match="Learned2D acts at the embeddings"):
        attach_to_vit(Vit(), posenc.Learned2D(2, 3, 32))
    with pytest.raises(ValueError, match="RNoPE repeats after 4 layers, and the model has 2"):
        attach_to_vit(Vit(), posenc.RNoPE(8, interleaved=False))


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
        places = vit.blocks[0].attn._grid.compute()
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


@torch.no_grad()
def test_timms_dinov3_gives_its_own_answers_with_posencs_rotation():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    rotation = {"rope_type": "dinov3", "rope_rotate_half": True, "rope_temperature": 100.0}
    eva = timm.models.Eva(**sizes, num_classes=5, use_rot_pos_emb=True, **rotation).eval()
    for parameter in eva.parameters():  # as drawn, positions hardly move the logits
        parameter.normal_(std=0.3)
    stock = eva(PIXELS)
    attach_to_vit(eva, DINO)
    torch.testing.assert_close(eva(PIXELS), stock, rtol=0, atol=1e-5)
    attach_to_vit(eva, None)
    assert (eva(PIXELS) - stock).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["NaFlexVit", "SwinTransformer", "Beit"])
@pytest.mark.parametrize("encoding", [DINO, posenc.ALiBi(4)], ids=["dino", "alibi"])
def test_timms_other_models_are_refused_in_one_sentence(name, encoding):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    made = {
        "NaFlexVit": {"model_name": "naflexvit_base_patch16_gap"},
        "SwinTransformer": {"model_name": "swin_tiny_patch4_window7_224"},
        "Beit": {"model_name": "beit_base_patch16_224"},
    }
    model = timm.create_model(**made[name])
    with pytest.raises(TypeError, match=r"^(attach_to_vit|VisionAttention): "):
        attach_to_vit(model, encoding)


def test_dropout_of_another_kind_is_left_out_or_refused():
    stock = Stock()
    stock.attn_drop = nn.Identity()
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(VisionAttention(stock).train()(x), stock(x), rtol=0, atol=1e-6)
    stock.attn_drop = nn.AlphaDropout(0.1)
    with pytest.raises(TypeError, match="whose attn_drop is a AlphaDropout"):
        VisionAttention(stock)
