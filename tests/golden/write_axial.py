"""Write the golden values of rotations over several axes, by the code in diffusers and
transformers, and by RoPE-ViT's authors.

    PYTHONPATH=rope-vit/self-attn python tests/golden/write_axial.py

in an environment with diffusers, transformers and torch, with a clone of
github.com/naver-ai/rope-vit; neither posenc nor its tests import this file.
"""

import json
import types
from importlib.metadata import version
from unittest import mock

import rope_self_attn
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers import (
    transformer_flux,
    transformer_hunyuan_video,
    transformer_ltx,
    transformer_qwenimage,
    transformer_wan,
)
from recording import case, write
from transformers import DINOv3ViTConfig, PixtralVisionConfig
from transformers.models.dinov3_vit import modeling_dinov3_vit
from transformers.models.pixtral import modeling_pixtral

HEADS = 1
ROPE_VIT_COMMIT = "ce85c2e56c5ff3aadc10e1a849872081f7b86293"


def inner_function(outer, name):
    """The function called `name` that is defined inside of `outer`, a function of diffusers."""
    for constant in outer.__code__.co_consts:
        if isinstance(constant, types.CodeType) and constant.co_name == name:
            return types.FunctionType(constant, {"torch": torch})
    raise LookupError(name)


def rotation(params, length, width, rotate):
    """One recorded call: x (1, heads, length, width), rotated, and the gradient of its inner
    product with `cotangent` with respect to x."""
    torch.manual_seed(len(json.dumps(params)))
    x = torch.randn(1, HEADS, length, width, requires_grad=True)
    cotangent = torch.randn(1, HEADS, length, width)
    out = rotate(x)
    (gradient,) = torch.autograd.grad((out * cotangent).sum(), x)
    inputs = {"x": x.detach(), "cotangent": cotangent}
    return case(params, inputs, {"out": out.detach(), "gradient": gradient})


def wan(sizes, head_dim):
    rope = transformer_wan.WanRotaryPosEmbed(head_dim, (1, 1, 1), 1024)
    cos, sin = rope(torch.zeros(1, 1, *sizes))

    apply = inner_function(transformer_wan.WanAttnProcessor.__call__, "apply_rotary_emb")

    def rotate(x):
        return apply(x.transpose(1, 2), cos, sin).transpose(1, 2)

    params = {"sizes": sizes, "head_dim": head_dim, "axes": [rope.t_dim, rope.h_dim, rope.w_dim]}
    return rotation(params, sizes[0] * sizes[1] * sizes[2], head_dim, rotate)


def flux(sizes, axes, text):
    rope = transformer_flux.FluxPosEmbed(theta=10000, axes_dim=axes)
    ids = torch.zeros(*sizes, 3)
    ids[..., 1] += torch.arange(sizes[0])[:, None]
    ids[..., 2] += torch.arange(sizes[1])[None, :]
    ids = torch.cat([torch.zeros(text, 3), ids.reshape(-1, 3)])
    tables = rope(ids)
    params = {"sizes": sizes, "head_dim": sum(axes), "axes": axes, "text": text}
    return rotation(params, len(ids), sum(axes), lambda x: apply_rotary_emb(x, tables))


def qwen_image(sizes, axes, text, centred):
    rope = transformer_qwenimage.QwenEmbedRope(10000, axes, scale_rope=centred)
    image, words = rope(tuple(sizes), torch.device("cpu"), max_txt_seq_len=text)
    factors = torch.cat([words, image])  # in joint attention text comes first

    def rotate(x):
        x = x.transpose(1, 2)
        out = transformer_qwenimage.apply_rotary_emb_qwen(x, factors, use_real=False)
        return out.transpose(1, 2)

    params = {"sizes": sizes, "head_dim": sum(axes), "axes": axes, "text": text, "centred": centred}
    return rotation(params, len(factors), sum(axes), rotate)


def hunyuan_video(sizes, axes):
    rope = transformer_hunyuan_video.HunyuanVideoRotaryPosEmbed(1, 1, axes)
    tables = rope(torch.zeros(1, 1, *sizes))
    params = {"sizes": sizes, "head_dim": sum(axes), "axes": axes}
    return rotation(
        params,
        sizes[0] * sizes[1] * sizes[2],
        sum(axes),
        lambda x: apply_rotary_emb(x, tables),
    )


def ltx(sizes, width, scale):
    rope = transformer_ltx.LTXVideoRotaryPosEmbed(width)
    # Angles of up to 15,708 radians, which the code computes in float32, off by 1e-3: here its
    # names of float32 mean float64.
    with mock.patch.object(torch, "float32", torch.float64):
        tables = rope(torch.zeros(1, 1), *sizes, rope_interpolation_scale=scale)

    def rotate(x):
        heads = [transformer_ltx.apply_rotary_emb(x[:, h], tables) for h in range(HEADS)]
        return torch.stack(heads, 1)

    params = {"sizes": sizes, "head_dim": width, "scale": scale}
    return rotation(params, sizes[0] * sizes[1] * sizes[2], width, rotate)


def dinov3(sizes, head_dim, num_prefix):
    config = DINOv3ViTConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        image_size=sizes,
        patch_size=1,
        rope_theta=100.0,
    )
    rope = modeling_dinov3_vit.DINOv3ViTRopePositionEmbedding(config).eval()
    tables = rope(torch.zeros(1, 3, *sizes))
    params = {"sizes": sizes, "head_dim": head_dim, "prefix": num_prefix}
    return rotation(
        params,
        num_prefix + sizes[0] * sizes[1],
        head_dim,
        lambda x: modeling_dinov3_vit.apply_rotary_pos_emb(x, x, *tables)[0],
    )


def pixtral(sizes, head_dim):
    config = PixtralVisionConfig(
        hidden_size=head_dim, num_attention_heads=1, image_size=8, patch_size=1
    )
    rope = modeling_pixtral.PixtralVisionRotaryEmbedding(config)
    cells = torch.cartesian_prod(*map(torch.arange, sizes))
    tables = rope(torch.zeros(1), cells.T[None])
    return rotation(
        {"sizes": sizes, "head_dim": head_dim},
        len(cells),
        head_dim,
        lambda x: modeling_pixtral.apply_rotary_pos_emb(x, x, *tables)[0],
    )


def rope_vit(sizes, head_dim):
    factors = rope_self_attn.compute_axial_cis(head_dim, end_x=sizes[1], end_y=sizes[0])
    return rotation(
        {"sizes": sizes, "head_dim": head_dim},
        sizes[0] * sizes[1],
        head_dim,
        lambda x: rope_self_attn.apply_rotary_emb(x, x, factors)[0],
    )


def rope_mixed(sizes, head_dim, heads):
    """As `rotation`, with the gradient of the frequencies, whose x (column) comes first, too."""
    torch.manual_seed(0)
    length = sizes[0] * sizes[1]
    freqs = rope_self_attn.init_2d_freqs(head_dim, heads).flatten(1).requires_grad_()
    x = torch.randn(1, heads, length, head_dim, requires_grad=True)
    cotangent = torch.randn(x.shape)
    columns_and_rows = rope_self_attn.init_t_xy(sizes[1], sizes[0])
    factors = rope_self_attn.compute_mixed_cis(freqs, *columns_and_rows, heads)
    out, _ = rope_self_attn.apply_rotary_emb(x, x, factors)
    of_x, of_freqs = torch.autograd.grad((out * cotangent).sum(), (x, freqs))
    inputs = {"x": x.detach(), "freqs": freqs.detach(), "cotangent": cotangent}
    expected = {"out": out.detach(), "gradient": of_x, "gradient of freqs": of_freqs}
    return case({"sizes": sizes, "head_dim": head_dim, "heads": heads}, inputs, expected)


TRANSFORMERS = {
    "axial_dinov3": (
        "dinov3_vit/modeling_dinov3_vit.py",
        "DINOv3ViTRopePositionEmbedding (eval) + apply_rotary_pos_emb",
        lambda: [dinov3([2, 3], 8, 1), dinov3([3, 2], 64, 5)],
    ),
    "axial_pixtral": (
        "pixtral/modeling_pixtral.py",
        "PixtralVisionRotaryEmbedding + apply_rotary_pos_emb",
        lambda: [pixtral([2, 3], 8), pixtral([3, 2], 64)],
    ),
}
ROPE_VIT = {
    "axial_rope_vit": (
        "compute_axial_cis + apply_rotary_emb",
        lambda: [rope_vit([2, 3], 8), rope_vit([3, 1], 64)],
    ),
    "mixed_rope_vit": (
        "init_2d_freqs + compute_mixed_cis + apply_rotary_emb",
        lambda: [rope_mixed([2, 3], 8, 2), rope_mixed([3, 1], 16, 3)],
    ),
}
FILES = {
    "axial_wan": (
        "transformer_wan.py",
        "WanRotaryPosEmbed, and apply_rotary_emb inside of WanAttnProcessor",
        lambda: [wan([2, 2, 3], 16), wan([2, 1, 2], 128)],
    ),
    "axial_flux": (
        "transformer_flux.py",
        "FluxPosEmbed + apply_rotary_emb; text tokens first, with ids of zero",
        lambda: [flux([2, 3], [4, 6, 6], 2), flux([1, 3], [16, 56, 56], 1)],
    ),
    "axial_qwen_image": (
        "transformer_qwenimage.py",
        "QwenEmbedRope + apply_rotary_emb_qwen; text tokens first",
        lambda: [
            qwen_image([1, 3, 4], [4, 6, 6], 3, True),
            qwen_image([2, 2, 3], [4, 6, 6], 2, False),
            qwen_image([1, 3, 1], [16, 56, 56], 1, True),
        ],
    ),
    "axial_hunyuan_video": (
        "transformer_hunyuan_video.py",
        "HunyuanVideoRotaryPosEmbed (theta 256) + apply_rotary_emb",
        lambda: [hunyuan_video([2, 2, 3], [4, 6, 6]), hunyuan_video([2, 1, 2], [16, 56, 56])],
    ),
    "axial_ltx": (
        "transformer_ltx.py",
        "LTXVideoRotaryPosEmbed, in float64, + apply_rotary_emb, on vectors of all heads together",
        lambda: [ltx([2, 2, 2], 16, [0.32, 32, 32]), ltx([2, 2, 3], 24, [0.32, 32, 32])],
    ),
}


NOTES = "x (1, heads, len, head_dim); gradient: of (out * cotangent).sum() by x."


def main():
    for method, (file, function, make) in FILES.items():
        source = {
            "repo": "huggingface/diffusers",
            "path": f"src/diffusers/models/transformers/{file}",
            "version": f"diffusers {version('diffusers')}, torch {version('torch')}",
            "function": function,
            "written by": "tests/golden/write_axial.py",
        }
        write(method, source, NOTES, make())
    for method, (file, function, make) in TRANSFORMERS.items():
        source = {
            "repo": "huggingface/transformers",
            "path": f"src/transformers/models/{file}",
            "version": f"transformers {version('transformers')}, torch {version('torch')}",
            "function": function,
            "written by": "tests/golden/write_axial.py",
        }
        write(method, source, NOTES, make())
    for method, (function, make) in ROPE_VIT.items():
        source = {
            "repo": "naver-ai/rope-vit",
            "path": "self-attn/rope_self_attn.py",
            "commit": ROPE_VIT_COMMIT,
            "function": function,
            "written by": "tests/golden/write_axial.py",
        }
        write(method, source, NOTES, make())


if __name__ == "__main__":
    main()
