import torch
from transformers import LlamaConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=1))


def rotate(q, k, positions):
    return apply_rotary_pos_emb(q, k, *rotary(q, positions[None]))


def bias(n, dtype):
    return build_alibi_tensor(torch.ones(1, n), 8, dtype)
