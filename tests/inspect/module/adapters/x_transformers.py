from x_transformers.x_transformers import RotaryEmbedding

rotary = RotaryEmbedding(64)


def cos_sin(x, positions):
    angles, _ = rotary(positions)
    return angles.cos(), angles.sin()
