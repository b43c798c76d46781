"""Write the golden values of rotations over several axes, by the code in diffusers.

    python tests/golden/write_axial.py

in an environment with diffusers and torch; neither posenc nor its tests import this file.
"""

import json
import types
from importlib.metadata import version
from unittest import mock

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

HEADS = 1


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


def main():
    for method, (file, function, make) in FILES.items():
        source = {
            "repo": "huggingface/diffusers",
            "path": f"src/diffusers/models/transformers/{file}",
            "version": f"diffusers {version('diffusers')}, torch {version('torch')}",
            "function": function,
            "written by": "tests/golden/write_axial.py",
        }
        notes = "x (1, heads, len, head_dim); gradient: of (out * cotangent).sum() by x."
        write(method, source, notes, make())


if __name__ == "__main__":
    main()
