from rotary_embedding_torch import RotaryEmbedding

rotary = RotaryEmbedding(dim=64)


def rotate(x):
    return rotary.rotate_queries_or_keys(x)
