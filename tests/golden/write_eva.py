"""Write the golden values of two of timm's attentions with DINOv3's rotation.

    python tests/golden/write_eva.py

in an environment with timm, torchvision and torch; neither posenc nor its tests import this file.
"""

from importlib.metadata import version

import torch
from recording import case, write
from timm.layers import AttentionRope, RotaryEmbeddingDinoV3
from timm.models.eva import EvaAttention
from torch import nn

DIM, HEADS, HEIGHT, WIDTH, PREFIX = 16, 2, 2, 3, 2


def attention(cls, **options):
    torch.manual_seed(0)
    attend = cls(
        DIM, HEADS, num_prefix_tokens=PREFIX, rotate_half=True, norm_layer=nn.LayerNorm, **options
    ).eval()
    with torch.no_grad():
        for parameter in attend.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(1, PREFIX + HEIGHT * WIDTH, DIM, requires_grad=True)
    rope = RotaryEmbeddingDinoV3(DIM // HEADS, temperature=100.0, rotate_half=True)
    out = attend(x, rope=rope.eval().get_embed([HEIGHT, WIDTH]))
    params = {
        "dim": DIM,
        "num_heads": HEADS,
        "num_kv_heads": options.get("num_kv_heads", HEADS),
        "height": HEIGHT,
        "width": WIDTH,
        "n_prefix": PREFIX,
    }
    cotangent = torch.randn(out.shape)
    (gradient,) = torch.autograd.grad((out * cotangent).sum(), x)
    inputs = {"x": x.detach(), "cotangent": cotangent, **attend.state_dict()}
    return case(params, inputs, {"out": out.detach(), "gradient": gradient})


def main():
    source = {
        "repo": "huggingface/pytorch-image-models",
        "path": "timm/models/eva.py and timm/layers/attention.py",
        "version": f"timm {version('timm')}, torch {version('torch')}",
        "function": "EvaAttention and AttentionRope, with RotaryEmbeddingDinoV3(temperature=100)",
        "written by": "tests/golden/write_eva.py",
    }
    cases = [
        attention(EvaAttention),  # q_bias and v_bias, and a norm of the output
        attention(EvaAttention, qkv_fused=False, scale_norm=False),
        attention(AttentionRope, qkv_fused=False, num_kv_heads=1, qk_norm=True),
    ]
    notes = "x (1, prefix + cells, dim) and the state dict of the attention; out as x."
    write("vit_attention_eva_timm", source, notes, cases)


if __name__ == "__main__":
    main()
