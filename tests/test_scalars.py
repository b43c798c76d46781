"""Numbers and switches that no public class or function may take, one argument at a time."""

import math
import re

import pytest
import torch

import posenc
from posenc import masks, positions

SHAPE = posenc.ModelShape(64, 4, train_length=32)
Q = torch.randn(1, 4, 3, 16)
TOKENS = torch.tensor([[1, 2, 3]])
SIZES = {"vocab_size": 16, "embed_dim": 16, "num_layers": 1, "num_heads": 2}
MODEL = posenc.Decoder(posenc.DecoderConfig(**SIZES), "rope").eval()
VALID = torch.tensor([[True, True, True]])
WHERE = {"q_positions": range(3), "kv_positions": range(3)}

NEVER = (math.nan, "x", 1j, [1], b"1")
"""What is neither a number nor a switch."""
ODD = (math.inf, -math.inf, -1, 0, 1.5, 10**30, -(10**30), None, True, 2.0)


def filled() -> posenc.KVCache:
    cache = posenc.KVCache()
    rope = posenc.RoPE(16, interleaved=False)
    posenc.attention(Q, Q, Q, rope, cache=cache, **WHERE)
    return cache


CALLS = {
    "ModelShape": (
        posenc.ModelShape,
        {
            "embed_dim": 64,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "train_length": 8,
            "causal": True,
        },
    ),
    "DecoderConfig": (
        posenc.DecoderConfig,
        {
            **SIZES,
            "num_kv_heads": 2,
            "head_dim": 8,
            "ffn_dim": 32,
            "final_norm": True,
            "norm_eps": 1e-6,
            "ffn_bias": False,
            "tie_embeddings": False,
            "attention_bias": False,
            "dropout": 0.0,
        },
    ),
    "Attention": (
        posenc.Attention,
        {
            "embed_dim": 16,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_dim": 8,
            "bias": False,
            "dropout": 0.0,
        },
    ),
    "attention": (
        lambda **scalars: posenc.attention(Q, Q, Q, **WHERE, **scalars),
        {"dropout_p": 0.0, "return_lse": False, "scale": 1.0},
    ),
    "generate": (
        lambda **scalars: posenc.generate(MODEL, TOKENS, **scalars),
        {
            "max_new_tokens": 1,
            "temperature": 1.0,
            "top_k": 2,
            "top_p": 0.5,
            "num_beams": 1,
            "length_penalty": 1.0,
            "stop_token": 3,
            "length": 8,
        },
    ),
    "mrope_positions": (
        lambda **scalars: posenc.mrope_positions([3, (1, 2, 2)], **scalars),
        {"start": 0},
    ),
    "mrope_positions, a text": (
        lambda segments: posenc.mrope_positions([segments]),
        {"segments": 3},
    ),
    "mrope_positions, a grid": (
        lambda segments: posenc.mrope_positions([(1, segments, 2)]),
        {"segments": 3},
    ),
    "sliding_window": (masks.sliding_window, {"window_size": 4}),
    "chunked": (masks.chunked, {"chunk_size": 4}),
    "prefix": (masks.prefix, {"length": 4}),
    "attention_sinks": (masks.attention_sinks, {"num_sinks": 1, "window_size": 4}),
    "grid": (
        lambda height, width, **others: positions.grid(height, width, **others),
        {"height": 2, "width": 3, "text_before": 1},
    ),
    "positions_from_mask": (
        lambda **scalars: positions.positions_from_mask(VALID, **scalars),
        {"start": 0},
    ),
    "KVCache.crop": (lambda **scalars: filled().crop(**scalars), {"length": 1}),
    "KVCache.drop": (lambda **scalars: filled().drop(**scalars), {"start": 0, "stop": 1}),
    "KVCache.shift": (lambda **scalars: filled().shift(**scalars), {"delta": 1, "start": 0}),
    "PerLayer": (
        lambda **scalars: posenc.PerLayer([posenc.ALiBi(4)], **scalars),
        {"repeat": False},
    ),
    "nn.MultiheadAttention": (
        lambda **scalars: posenc.nn.MultiheadAttention(encoding=posenc.ALiBi(2), **scalars),
        {"embed_dim": 16, "num_heads": 2, "dropout": 0.0},
    ),
    "linear": (posenc.Linear, {"factor": 2.0}),
    "ntk": (posenc.NTK, {"factor": 2.0}),
    "ntk_by_parts": (
        posenc.NTKByParts,
        {"factor": 2.0, "original_max_positions": 64, "alpha": 1.0, "beta": 32.0},
    ),
    "yarn": (
        posenc.YaRN,
        {
            "factor": 2.0,
            "original_max_positions": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "extrapolation_factor": 1.0,
        },
    ),
    "yarn, its temperature": (
        lambda **scalars: posenc.YaRN(2.0, 64, **scalars),
        {"attention_factor": 1.0},
    ),
    "llama3": (
        posenc.Llama3,
        {
            "factor": 2.0,
            "original_max_positions": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "longrope": (
        posenc.LongRoPE,
        {
            "factor": 2.0,
            "original_max_positions": 64,
            "attention_factor": 1.0,
            "exempt_tokens": 0,
        },
    ),
    "proportional": (posenc.Proportional, {"p": 0.5, "factor": 1.0}),
    "dynamic_ntk": (posenc.DynamicNTK, {"factor": 2.0, "original_max_positions": 64}),
    "dynamic_linear": (posenc.DynamicLinear, {"original_max_positions": 64}),
    "dynamic_yarn": (
        posenc.DynamicYaRN,
        {"original_max_positions": 64, "beta_fast": 32.0, "beta_slow": 1.0},
    ),
    "rope": (
        posenc.RoPE,
        {"head_dim": 16, "rope_theta": 1e4, "interleaved": False, "rotary_dim": 8},
    ),
    "partial": (
        lambda **scalars: posenc.RoPE(16, interleaved=False, **scalars),
        {"partial_rotary_factor": 0.5},
    ),
    "xpos": (
        posenc.XPos,
        {"head_dim": 16, "rope_theta": 1e4, "interleaved": False, "scale_base": 8.0, "origin": 0},
    ),
    "alibi": (posenc.ALiBi, {"num_heads": 4, "learned": False, "bias_max": 8.0}),
    "kerple": (posenc.Kerple, {"num_heads": 4}),
    "rnope": (
        posenc.RNoPE,
        {"head_dim": 16, "rope_theta": 1e4, "interleaved": False, "every": 4, "window_size": 4},
    ),
    "logn": (posenc.LogN, {"train_length": 8}),
    "rerope": (posenc.ReRoPE, {"head_dim": 16, "interleaved": False, "window": 4, "leak": 2.0}),
    "self_extend": (
        posenc.SelfExtend,
        {"head_dim": 16, "interleaved": False, "window": 4, "group_size": 2},
    ),
    "dual_chunk": (
        posenc.DualChunk,
        {"head_dim": 16, "interleaved": False, "chunk_size": 8, "local_window": 2},
    ),
    "llama4_temperature": (
        posenc.Llama4Temperature,
        {"floor_scale": 8, "attn_scale": 0.1, "offset": 1},
    ),
}
"""A call with good arguments. Each one is made wrong in turn."""

CASES = [(call, name) for call, (_, scalars) in CALLS.items() for name in scalars]


def answer(call: str, name: str, value: object) -> str | None:
    """The message of a refusal, None if the value is accepted."""
    function, scalars = CALLS[call]
    try:
        function(**{**scalars, name: value})
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("call", CALLS)
def test_the_good_call_is_accepted(call):
    function, scalars = CALLS[call]
    function(**scalars)


@pytest.mark.parametrize(("call", "name"), CASES)
def test_what_is_no_number_is_refused_by_name(call, name):
    good = CALLS[call][1][name]
    refused = [*NEVER, math.inf, -math.inf]
    refused += [1, 0] if isinstance(good, bool) else [True]  # a switch, a number
    if isinstance(good, int):
        refused.append(1.5)
    for value in refused:
        said = answer(call, name, value)
        assert said is not None, f"{name}={value!r} is accepted"
        assert re.search(rf"^[\w.]+: .*\b{name}\b", said), (value, said)


@pytest.mark.parametrize(("call", "name"), CASES)
def test_odd_numbers_are_accepted_or_refused_by_name(call, name):
    for value in ODD:
        said = answer(call, name, value)
        assert said is None or re.search(rf"^[\w.]+: .*\b{name}\b", said), (value, said)
