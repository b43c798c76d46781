"""Decoupled rotary embeddings: DeepSeek's equations, and transformers' latent attention."""

import numpy as np
import pytest
import torch

from posenc.encodings.queries_keys.decoupled import DecoupledRoPE, join
from posenc.frequencies.scalings.registry import YaRN
from posenc.testing.harness import transform_queries_keys
from tests.attending import attend
from tests.references import decoupled_rope as paper


@pytest.mark.reference("decoupled_rope")
def test_decoupled_rope_matches_the_paper():
    torch.manual_seed(0)
    encoding = DecoupledRoPE(14, interleaved=True, rotary_dim=6)
    q_positions, kv_positions = torch.tensor([3, 8, 100]), torch.arange(5)
    q_content, q_rotary = torch.randn(1, 2, 3, 8).double(), torch.randn(1, 2, 3, 6).double()
    k_content, k_rotary = torch.randn(1, 2, 5, 8).double(), torch.randn(1, 1, 5, 6).double()
    q, k = transform_queries_keys(
        encoding, join(q_content, q_rotary), join(k_content, k_rotary), q_positions, kv_positions
    )
    want = paper.scores(
        q_content[0].numpy(),
        q_rotary[0].numpy(),
        k_content[0].numpy(),
        k_rotary[0, 0].numpy(),
        q_positions.numpy(),
        kv_positions.numpy(),
    )
    np.testing.assert_allclose((q @ k.mT * encoding.scale(14))[0], want, rtol=1e-12, atol=1e-12)
    assert torch.equal(q[..., :8], q_content)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
def test_decoupled_rope_matches_transformers_latent_attention(scaled: bool, interleaved: bool):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    yarn = None
    if scaled:
        yarn = YaRN(8.0, 64, mscale=0.7, mscale_all_dim=1.0)
        rope = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        }
    config = transformers.DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        max_position_embeddings=512,
        rope_parameters=rope,
        rope_interleave=interleaved,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    layer = theirs.DeepseekV3Attention(config, 0).double()
    positions, x = torch.arange(40, 49), torch.randn(1, 9, 32).double()
    table = theirs.DeepseekV3RotaryEmbedding(config)(x, positions[None])
    bias = torch.full((9, 9), -torch.inf).triu(1)[None, None].double()
    want, _ = layer(x, table, bias)

    encoding = DecoupledRoPE(12, interleaved=interleaved, rotary_dim=4, scaling=yarn)
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).unflatten(-1, (2, 12))
    latent, rotary = layer.kv_a_proj_with_mqa(x).split([10, 4], dim=-1)
    content = layer.kv_b_proj(layer.kv_a_layernorm(latent)).unflatten(-1, (2, 14)).transpose(1, 2)
    k = join(content[..., :8], rotary[:, None])
    out = attend(q.transpose(1, 2), k, content[..., 8:], encoding, positions)
    got = layer.o_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, want, rtol=0, atol=3e-6)  # their cos and sin are float32


def test_decoupled_rope_takes_a_third_of_the_head_by_default():
    assert DecoupledRoPE(192, interleaved=True).rotary_dim == 64
    assert DecoupledRoPE(16, interleaved=True).rotary_dim == 4


def test_decoupled_rope_refuses_what_it_cannot_serve():
    with pytest.raises(ValueError, match="rotary_dim=8 leaves no content channel of head_dim=8"):
        DecoupledRoPE(8, interleaved=True, rotary_dim=8)
    with pytest.raises(ValueError, match="rotary_dim must be even, got 3"):
        DecoupledRoPE(8, interleaved=True, rotary_dim=3)
    with pytest.raises(ValueError, match="1 head or content's 4, got 2"):
        join(torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 4))
