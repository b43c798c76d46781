"""Write the golden values of biases by rows and columns, by the code in transformers and timm.

    python tests/golden/write_cell_bias.py

in an environment with transformers, timm and torch; neither posenc nor its tests import this file.
"""

import functools
import sys
import types
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import torch
from recording import case, write
from torch import nn
from transformers import BeitConfig, SwinConfig, Swinv2Config
from transformers.models.beit.modeling_beit import BeitRelativePositionBias
from transformers.models.swin import modeling_swin
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention


def source_in_transformers(path, function):
    return {
        "repo": "huggingface/transformers",
        "path": f"src/transformers/models/{path}",
        "version": f"transformers {version('transformers')}, torch {version('torch')}",
        "function": function,
        "written by": "tests/golden/write_cell_bias.py",
    }


def with_gradient(result, weights):
    """What a golden case expects: the result, and the gradients of its inner product with
    `cotangent` with respect to each weight."""
    cotangent = torch.randn(result.shape)
    gradients = torch.autograd.grad((result * cotangent).sum(), list(weights.values()))
    expected = {"bias": result.detach()}
    for name, gradient in zip(weights, gradients, strict=True):
        expected[f"gradient of {name}"] = gradient
    inputs = {name: weight.detach() for name, weight in weights.items()}
    return {**inputs, "cotangent": cotangent}, expected


def swin(height, width, heads):
    torch.manual_seed(0)
    module = modeling_swin.SwinRelativePositionBias(heads, (height, width))
    nn.init.normal_(module.relative_position_bias_table)
    weights = {"table": module.relative_position_bias_table}
    params = {"height": height, "width": width, "heads": heads}
    return case(params, *with_gradient(module()[0], weights))


@functools.cache
def timm_resize():
    """timm's function from its file alone: importing all of timm would need torchvision."""
    folder = find_spec("timm").submodule_search_locations[0]
    for name, path in (("timm", folder), ("timm.layers", f"{folder}/layers")):
        package = types.ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package
    return import_module("timm.layers.pos_embed_rel").resize_rel_pos_bias_table_simple


def swin_resized(old, new, heads):
    torch.manual_seed(1)
    table = torch.randn((2 * old - 1) ** 2, heads)
    new_shape = ((2 * new - 1) ** 2, heads)
    resized = timm_resize()(table, (new, new), new_shape)
    return case({"old": old, "new": new, "heads": heads}, {"table": table}, {"resized": resized})


def beit(old, new, heads):
    torch.manual_seed(2)
    config = BeitConfig(
        image_size=old, patch_size=1, num_attention_heads=heads, hidden_size=8 * heads
    )
    module = BeitRelativePositionBias(config)
    nn.init.normal_(module.relative_position_bias_table)
    weights = {"table": module.relative_position_bias_table}
    params = {"old": old, "new": new, "heads": heads}
    return case(params, *with_gradient(module((new, new))[0], weights))


def swin_v2(height, width, trained, heads):
    """Attention weights of zero queries: the softmax of the bias alone."""
    torch.manual_seed(3)
    config = Swinv2Config(attention_probs_dropout_prob=0.0)
    module = Swinv2SelfAttention(config, 8 * heads, heads, (height, width), trained).eval()
    module.continuous_position_bias_mlp = nn.Sequential(  # with fewer hidden units
        nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, heads, bias=False)
    )
    nn.init.zeros_(module.query.weight)
    nn.init.zeros_(module.query.bias)
    hidden, _, out = module.continuous_position_bias_mlp
    nn.init.normal_(hidden.bias)
    weights = {"hidden.weight": hidden.weight, "hidden.bias": hidden.bias, "out.weight": out.weight}
    _, probabilities = module(torch.randn(1, height * width, 8 * heads), output_attentions=True)
    params = {"height": height, "width": width, "trained": trained, "heads": heads}
    return case(params, *with_gradient(probabilities[0], weights))


def shifted_windows(height, width, window, shift, heads=2, head_dim=4):
    """Attention over a grid, by Swin's own steps: roll, cut into windows, add bias and mask,
    attend, and put everything back."""
    torch.manual_seed(4)
    config = SwinConfig(window_size=window, embed_dim=heads * head_dim)
    layer = modeling_swin.SwinLayer(
        config, heads * head_dim, (height, width), heads, shift_size=shift
    )
    bias_module = modeling_swin.SwinRelativePositionBias(heads, (window, window))
    nn.init.normal_(bias_module.relative_position_bias_table)
    q, k, v = torch.randn(3, 1, height, width, heads * head_dim, requires_grad=True).unbind(0)

    def into_windows(cells):
        """(windows, heads, cells, head_dim)"""
        windows = modeling_swin.window_partition(layer.cyclic_shift(cells), window)
        return windows.view(-1, window * window, heads, head_dim).transpose(1, 2)

    mask = layer.get_attn_mask(height, width, dtype=torch.float32, device=q.device)
    bias = bias_module()
    if mask is not None:
        bias = bias + mask[:, None]
    out, _ = modeling_swin.eager_attention_forward(
        layer.eval(), into_windows(q), into_windows(k), into_windows(v), bias
    )
    out = out.reshape(-1, window, window, heads * head_dim)
    out = modeling_swin.window_reverse(out, window, height, width)
    out = layer.cyclic_shift(out, reverse=True)
    params = {"height": height, "width": width, "window": window, "shift": shift, "heads": heads}
    cotangent = torch.randn(out.shape)
    weights = {"q": q, "k": k, "v": v, "table": bias_module.relative_position_bias_table}
    gradients = torch.autograd.grad((out * cotangent).sum(), list(weights.values()))
    inputs = {name: weight.detach() for name, weight in weights.items()}
    expected = {"out": out.detach()}
    for name, gradient in zip(weights, gradients, strict=True):
        expected[f"gradient of {name}"] = gradient
    return case(params, inputs | {"cotangent": cotangent}, expected)


def main():
    write(
        "cell_bias_swin",
        source_in_transformers("swin/modeling_swin.py", "SwinRelativePositionBias"),
        "bias (heads, cells, cells) and its gradient.",
        [swin(2, 3, 2), swin(4, 4, 3)],
    )
    write(
        "cell_bias_swin_resized",
        {
            "repo": "huggingface/pytorch-image-models",
            "path": "timm/layers/pos_embed_rel.py",
            "version": f"timm {version('timm')}, torch {version('torch')}",
            "function": "resize_rel_pos_bias_table_simple, bicubic as in Swin's load_pretrained",
            "written by": "tests/golden/write_cell_bias.py",
        },
        "table ((2 old - 1)^2, heads), resized ((2 new - 1)^2, heads).",
        [swin_resized(3, 5, 2), swin_resized(4, 2, 2)],
    )
    write(
        "cell_bias_beit",
        source_in_transformers("beit/modeling_beit.py", "BeitRelativePositionBias"),
        "A class token, then cells: bias (heads, 1 + cells, 1 + cells), for another grid too.",
        [beit(3, 3, 2), beit(3, 4, 2), beit(4, 2, 2)],
    )
    write(
        "cell_bias_swin_v2",
        source_in_transformers("swinv2/modeling_swinv2.py", "Swinv2SelfAttention"),
        "bias: the softmax of the bias over keys, as attention weights of zero queries.",
        [swin_v2(3, 3, [0, 0], 2), swin_v2(2, 4, [0, 0], 2), swin_v2(4, 4, [2, 3], 2)],
    )
    write(
        "mask_swin_windows",
        source_in_transformers(
            "swin/modeling_swin.py",
            "SwinLayer.cyclic_shift and get_attn_mask, window_partition, eager_attention_forward",
        ),
        "q, k, v, out (1, height, width, heads * head_dim): attention in (shifted) windows.",
        [shifted_windows(4, 6, 2, 0), shifted_windows(4, 6, 2, 1), shifted_windows(6, 6, 3, 1)],
    )


if __name__ == "__main__":
    main()
