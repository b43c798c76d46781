"""One line of posenc equals the code that is installed: Wan's, Qwen-Image's and DINOv3's rotation,
SwinV2's bias and SigLIP 2's table, with gradients. tests/golden has recorded values of the same."""

from unittest import mock

import pytest
import torch
from torch import nn

import posenc
from posenc.positions import grid, normalized_grid

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

EXACT = {"rtol": 1e-5, "atol": 1e-5}


def assert_same_with_gradient(ours, theirs, leaf) -> None:
    """The two results of one leaf are the same, and the gradients of a random product of them."""
    torch.testing.assert_close(ours, theirs, **EXACT)
    cotangent = torch.randn(ours.shape)
    (of_ours,) = torch.autograd.grad((ours * cotangent).sum(), leaf)
    (of_theirs,) = torch.autograd.grad((theirs * cotangent).sum(), leaf)
    torch.testing.assert_close(of_ours, of_theirs, **EXACT)


def test_wan():
    wan = pytest.importorskip("diffusers.models.transformers.transformer_wan")
    theirs = wan.WanRotaryPosEmbed(128, (1, 1, 1), 1024)
    cos, sin = theirs(torch.zeros(1, 1, 3, 4, 5))
    x = torch.randn(1, 2, 60, 128, requires_grad=True)
    ours, _ = posenc.AxialRoPE(128, 10000.0, interleaved=True, axes=(44, 42, 42))(
        x, x, grid(3, 4, 5)
    )
    # diffusers rotates inside of its attention: ask the processor for the rotated queries.
    attention = wan.WanAttention(256, 2, 128, processor=wan.WanAttnProcessor())
    for name in ("to_q", "to_k", "to_v", "norm_q", "norm_k"):
        setattr(attention, name, nn.Identity())
    seen = []

    def keep_queries(query, key, value, **options):
        seen.append(query)
        return value

    with mock.patch.object(wan, "dispatch_attention_fn", keep_queries):
        attention(x.transpose(1, 2).flatten(2), None, None, (cos, sin))
    assert_same_with_gradient(ours, seen[0].transpose(1, 2), x)


@pytest.mark.parametrize("words", [0, 5])
def test_qwen_image(words: int):
    qwen = pytest.importorskip("diffusers.models.transformers.transformer_qwenimage")
    theirs = qwen.QwenEmbedRope(10000, [16, 56, 56], scale_rope=True)
    picture, text = theirs((1, 6, 9), torch.device("cpu"), max_txt_seq_len=words)
    x = torch.randn(1, 2, words + 54, 128, requires_grad=True)
    ours, _ = posenc.AxialRoPE(128, 10000.0, interleaved=True, axes=(16, 56, 56))(
        x, x, grid(1, 6, 9, centred=True, text_before=words)
    )
    rotated = qwen.apply_rotary_emb_qwen(
        x.transpose(1, 2), torch.cat([text, picture]), use_real=False
    )
    assert_same_with_gradient(ours, rotated.transpose(1, 2), x)


@pytest.mark.parametrize("size", [(14, 14), (7, 20)])
def test_dinov3(size):
    dino = transformers.models.dinov3_vit.modeling_dinov3_vit
    config = transformers.DINOv3ViTConfig(hidden_size=128, num_attention_heads=2, patch_size=1)
    tables = dino.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, *size))
    x = torch.randn(1, 2, 5 + size[0] * size[1], 64, requires_grad=True)
    ours, _ = posenc.AxialRoPE.dinov3(64)(x, x, normalized_grid(*size, class_tokens=5))
    assert_same_with_gradient(ours, dino.apply_rotary_pos_emb(x, x, *tables)[0], x)


@pytest.mark.parametrize("trained", [8, 6])
def test_swin_v2s_bias(trained: int):
    swin = transformers.models.swinv2.modeling_swinv2
    config = transformers.Swinv2Config(attn_implementation="eager")
    attention = swin.Swinv2SelfAttention(config, 96, 4, (8, 8), [trained, trained]).eval()
    ours = posenc.SwinV2Bias(4, 8, 8, trained_height=trained, trained_width=trained)
    network = attention.continuous_position_bias_mlp
    ours.load_state_dict(
        {
            "hidden.weight": network[0].weight,
            "hidden.bias": network[0].bias,
            "out.weight": network[2].weight,
        }
    )
    for layer in (attention.query, attention.key):  # scores of 0: the weights are the bias's
        nn.init.zeros_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    _, weights = attention(torch.randn(1, 64, 96), output_attentions=True)
    mine = ours(grid(8, 8), grid(8, 8)).softmax(-1)
    torch.testing.assert_close(mine, weights[0], **EXACT)
    cotangent = torch.randn(mine.shape)
    (of_mine,) = torch.autograd.grad((mine * cotangent).sum(), ours.hidden.weight)
    (of_theirs,) = torch.autograd.grad((weights[0] * cotangent).sum(), network[0].weight)
    torch.testing.assert_close(of_mine, of_theirs, **EXACT)


@pytest.mark.parametrize("size", [(16, 16), (7, 20), (24, 9)])
def test_siglip_2s_table(size):
    config = transformers.Siglip2VisionConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=1, num_patches=256, patch_size=1
    )
    model = transformers.Siglip2VisionModel(config)
    embeddings = next(m for m in model.modules() if hasattr(m, "position_embedding"))
    ours = posenc.Learned2D(16, 16, 8)
    ours.load_state_dict(embeddings.position_embedding.state_dict())
    num_cells = size[0] * size[1]
    nothing = torch.zeros(1, num_cells, config.num_channels)
    theirs = embeddings(nothing, torch.tensor([size])) - embeddings.patch_embedding(nothing)
    resized = ours.resize(*size, mode="bilinear", antialias=True)
    torch.testing.assert_close(resized.weight, theirs[0], **EXACT)
