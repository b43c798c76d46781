"""DeepSeek-V4's sliding attention: rotated values, one tensor for keys and values, sinks."""

from typing import Any

import pytest
import torch
from torch import Tensor

import posenc
from posenc import masks
from posenc.hf import attach, detach
from posenc.hf.transformers_compat import arguments_for_next_step, cache_argument_name, is_cache
from tests.hf.attachment.models import TOKENS
from tests.hf_models import COMMON, transformers

WINDOW, HEAD_DIM, ROTARY = 6, 16, 8


@pytest.fixture
def model() -> Any:
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this transformers has no DeepSeek-V4")
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        **COMMON
        | {
            "num_key_value_heads": 1,
            "head_dim": HEAD_DIM,
            "partial_rotary_factor": ROTARY / HEAD_DIM,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "hc_mult": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 2,
            "mlp_layer_types": ["moe"] * 2,
            "moe_intermediate_size": 32,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
        }
    )
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    return model


def encoding() -> posenc.RoVE:
    return posenc.RoVE(posenc.DecoupledRoPE(HEAD_DIM, interleaved=True, rotary_dim=ROTARY))


def rebuilt(layer: Any, x: Tensor, positions: Tensor, cache: posenc.KVCache | None = None):
    """The layer's projections around posenc's attention."""
    q = layer.q_b_proj(layer.q_a_norm(layer.q_a_proj(x))).unflatten(-1, (-1, HEAD_DIM))
    q = layer.q_b_norm(q).transpose(1, 2)
    kv = layer.kv_norm(layer.kv_proj(x))[:, None]
    out = posenc.attention(
        q,
        kv,
        kv,
        encoding(),
        q_positions=positions,
        kv_positions=positions,
        cache=cache,
        mask=masks.causal & masks.sliding_window(WINDOW),
        sinks=layer.sinks,
    )
    grouped = out.transpose(1, 2).flatten(2).unflatten(-1, (2, -1))
    return layer.o_b_proj(layer.o_a_proj(grouped).flatten(2))


def test_a_sliding_layer_built_from_posenc_is_theirs(model):
    layer, seen = model.model.layers[0].self_attn, {}
    layer.register_forward_hook(
        lambda module, args, kwargs, out: seen.update(kwargs, x=args[0], out=out[0]),
        with_kwargs=True,
    )
    model(TOKENS, use_cache=False)
    x, theirs = (seen.pop(name).detach() for name in ("x", "out"))
    # In early releases the model makes itself a cache, asked for or not; it is full by now.
    seen = {name: value for name, value in seen.items() if not is_cache(value)}
    want = layer(x.requires_grad_(), **seen)[0]
    torch.testing.assert_close(want, theirs)
    positions, cache = torch.arange(x.shape[1]), posenc.KVCache()
    got = rebuilt(layer, x, positions)
    assert want.abs().max() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    weight, leaves = torch.randn_like(want), (x, layer.sinks, layer.kv_proj.weight)
    for mine, theirs in zip(
        *(torch.autograd.grad((t * weight).sum(), leaves) for t in (got, want)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    with torch.no_grad():
        steps = [rebuilt(layer, x[:, i], positions[i], cache) for i in positions.split(3)]
    torch.testing.assert_close(torch.cat(steps, 1), want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_an_attached_rove_gives_the_stock_answers_and_another_does_not(model):
    stock = model(TOKENS).logits
    attach(model, encoding())
    torch.testing.assert_close(model(TOKENS).logits, stock, rtol=1e-4, atol=1e-4)
    empty = {cache_argument_name(model): transformers.DynamicCache(config=model.config)}
    first = model(TOKENS[:, :9], use_cache=True, **empty)  # some releases return only a given one
    rest = model(TOKENS[:, 9:], **arguments_for_next_step(model, first)).logits
    torch.testing.assert_close(rest, stock[:, 9:], rtol=1e-4, atol=1e-4)
    detach(model)
    attach(model, encoding().rotation)  # values that are not rotated
    assert (model(TOKENS).logits - stock).abs().max() > 1e-2
    detach(model)
    with pytest.raises(ValueError, match="the rotation's head_dim=8"):
        attach(model, posenc.RoVE(posenc.RoPE(8, interleaved=True), rotate_queries_keys=False))
    assert torch.equal(model(TOKENS).logits, stock)
