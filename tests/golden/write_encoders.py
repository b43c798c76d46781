"""Write the golden values of positions in encoders of speech and text, by the code in transformers.

    python tests/golden/write_encoders.py

in an environment with transformers and torch; neither posenc nor its tests import this file.
"""

from importlib.metadata import version
from types import SimpleNamespace

import torch
from recording import case, write
from torch import nn
from transformers import FalconConfig, MPNetConfig, Wav2Vec2ConformerConfig
from transformers.models.falcon import modeling_falcon
from transformers.models.moonshine import MoonshineConfig, modeling_moonshine
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer
from transformers.models.whisper import modeling_whisper


def source(path, function):
    return {
        "repo": "huggingface/transformers",
        "path": f"src/transformers/models/{path}",
        "version": f"transformers {version('transformers')}, torch {version('torch')}",
        "function": function,
        "written by": "tests/golden/write_encoders.py",
    }


def conformer(length, heads, head_dim):
    """Self-attention of a Conformer with relative positions, and gradients of its three
    parameters of position."""
    torch.manual_seed(0)
    width = heads * head_dim
    config = Wav2Vec2ConformerConfig(
        hidden_size=width,
        num_attention_heads=heads,
        position_embeddings_type="relative",
        attn_implementation="eager",
        attention_dropout=0.0,
    )
    attend = modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention(config).eval()
    with torch.no_grad():
        for parameter in attend.parameters():
            parameter.normal_(std=0.4)
    x = torch.randn(1, length, width)
    relative = modeling_wav2vec2_conformer.Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    out, _ = attend(x, relative_position_embeddings=relative)
    cotangent = torch.randn(out.shape)
    positional = {
        "u": attend.pos_bias_u,
        "v": attend.pos_bias_v,
        "projection.weight": attend.linear_pos.weight,
    }
    gradients = torch.autograd.grad((out * cotangent).sum(), list(positional.values()))
    inputs = {"x": x, "cotangent": cotangent}
    inputs |= {name: parameter.detach() for name, parameter in attend.named_parameters()}
    expected = {"out": out.detach()}
    for name, gradient in zip(positional, gradients, strict=True):
        expected[f"gradient of {name}"] = gradient
    return case({"heads": heads, "head_dim": head_dim}, inputs, expected)


def w2v_bert(length, left, right, heads, head_dim):
    torch.manual_seed(1)
    module = SimpleNamespace(
        left_max_position_embeddings=left,
        right_max_position_embeddings=right,
        distance_embedding=nn.Embedding(left + right + 1, head_dim),
        scaling=head_dim**-0.5,
    )
    q = torch.randn(1, heads, length, head_dim)
    table = module.distance_embedding.weight
    _, bias = modeling_wav2vec2_bert._apply_relative_key_position_encoding(module, q, q)
    cotangent = torch.randn(bias.shape)
    (gradient,) = torch.autograd.grad((bias * cotangent).sum(), table)
    return case(
        {"left": left, "right": right, "head_dim": head_dim},
        {"q": q, "table": table.detach(), "cotangent": cotangent},
        {"bias": bias.detach(), "gradient": gradient},
    )


def whisper(length, channels):
    table = modeling_whisper.sinusoids(length, channels)
    return case({"length": length, "channels": channels}, {}, {"table": table})


def moonshine():
    torch.manual_seed(2)
    config = MoonshineConfig(hidden_size=64, encoder_num_attention_heads=2, num_attention_heads=2)
    rope = modeling_moonshine.MoonshineRotaryEmbedding(config)
    q, k = torch.randn(2, 1, 2, 5, 32).unbind(0)
    positions = torch.tensor([0, 1, 2, 7, 30])
    cotangent = torch.randn(q.shape)
    q.requires_grad_()
    turned = modeling_moonshine.apply_rotary_pos_emb(q, k, *rope(q, positions[None]))
    (gradient,) = torch.autograd.grad((turned[0] * cotangent).sum(), q)
    kept = ("model_type", "hidden_size", "num_attention_heads", "encoder_num_attention_heads")
    values = {name: getattr(config, name) for name in (*kept, "max_position_embeddings")}
    values["rope_parameters"] = config.rope_parameters
    inputs = {"q": q.detach(), "k": k, "positions": positions, "cotangent": cotangent}
    expected = {"q": turned[0].detach(), "k": turned[1], "gradient of q": gradient}
    return case({"config": values}, inputs, expected)


def falcon(length, heads, head_dim):
    """Attention weights of Falcon with ALiBi, which it adds before the division."""
    torch.manual_seed(3)
    config = FalconConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        alibi=True,
        multi_query=False,
        new_decoder_architecture=False,
        attn_implementation="eager",
        attention_dropout=0.0,
    )
    attend = modeling_falcon.FalconAttention(config, layer_idx=0).eval()
    nn.init.normal_(attend.query_key_value.weight, std=0.5)
    x = torch.randn(1, length, heads * head_dim)
    alibi = modeling_falcon.build_alibi_tensor(
        torch.ones(1, length, dtype=torch.long), heads, torch.float32
    )
    hidden = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    split_of_attention = attend._split_heads
    vectors = []

    def split_and_keep(fused):
        vectors.extend(split_of_attention(fused))
        return vectors[:3]

    attend._split_heads = split_and_keep
    _, weights = attend(x, alibi, hidden, output_attentions=True)
    q, k, _ = vectors
    cotangent = torch.randn(weights.shape)
    of_q, of_k = torch.autograd.grad((weights * cotangent).sum(), (q, k))
    inputs = {"q": q.transpose(1, 2).detach(), "k": k.transpose(1, 2).detach()}
    expected = {"weights": weights.detach()}
    expected |= {"gradient of q": of_q.transpose(1, 2), "gradient of k": of_k.transpose(1, 2)}
    params = {"heads": heads, "head_dim": head_dim}
    return case(params, inputs | {"cotangent": cotangent}, expected)


def mpnet(length, heads):
    torch.manual_seed(4)
    config = MPNetConfig(hidden_size=8 * heads, num_attention_heads=heads, num_hidden_layers=1)
    encoder = MPNetEncoder(config)
    table = encoder.relative_attention_bias.weight
    nn.init.normal_(table)
    x = torch.zeros(1, length, 8 * heads)
    bias = encoder.compute_position_bias(x)[0, :, [0, length // 2, length - 1]]
    rows = torch.tensor([0, length // 2, length - 1])
    cotangent = torch.randn(bias.shape)
    (gradient,) = torch.autograd.grad((bias * cotangent).sum(), table)
    inputs = {"table": table.detach(), "query positions": rows, "cotangent": cotangent}
    expected = {"bias": bias.detach(), "gradient of table": gradient}
    return case({"length": length, "heads": heads}, inputs, expected)


def main():
    write(
        "transformer_xl_conformer",
        source(
            "wav2vec2_conformer/modeling_wav2vec2_conformer.py",
            "Wav2Vec2ConformerSelfAttention, Wav2Vec2ConformerRelPositionalEmbedding",
        ),
        "out: self-attention of x with all weights, both directions; gradients of (out * "
        "cotangent).sum().",
        [conformer(7, 2, 8), conformer(4, 3, 4)],
    )
    write(
        "shaw_w2v_bert",
        source("wav2vec2_bert/modeling_wav2vec2_bert.py", "_apply_relative_key_position_encoding"),
        "bias: added to the scaled scores; other limits before and after the query.",
        [w2v_bert(9, 4, 2, 2, 4), w2v_bert(3, 8, 1, 1, 4)],
    )
    write(
        "sinusoidal_whisper",
        source("whisper/modeling_whisper.py", "sinusoids"),
        "table (length, channels), angles in float32.",
        [whisper(24, 16)],
    )
    write(
        "rope_moonshine",
        source(
            "moonshine/modeling_moonshine.py", "MoonshineRotaryEmbedding + apply_rotary_pos_emb"
        ),
        "q, k (1, heads, len, head_dim), of which a part rotates.",
        [moonshine()],
    )
    write(
        "alibi_falcon",
        source("falcon/modeling_falcon.py", "FalconAttention + build_alibi_tensor"),
        "weights: causal attention weights of q and k (1, heads, len, head_dim).",
        [falcon(6, 4, 16)],
    )
    write(
        "t5_bias_mpnet",
        source("mpnet/modeling_mpnet.py", "MPNetEncoder.compute_position_bias"),
        "bias (heads, queries, length) of three queries.",
        [mpnet(150, 2)],
    )


if __name__ == "__main__":
    main()
