from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

attention = T5Attention(T5Config(), has_relative_attention_bias=True)


def bias(n):
    return attention.compute_bias(n, n)
