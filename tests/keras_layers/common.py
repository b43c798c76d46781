"""What the checks share: arrays, weights copied from PyTorch modules, a model of every layer."""

import keras
import numpy as np
import torch
from keras import ops

from posenc.keras import (
    ALiBi,
    BertEmbedding,
    KerpleBias,
    LearnedPositionEmbedding,
    PositionAwareAttention,
    RotaryEmbedding,
    ShawAttention,
    SinusoidalPositionEncoding,
    T5RelativeBias,
)

BACKEND = keras.backend.backend()
keras.utils.set_random_seed(0)  # every process draws the same numbers


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def array(x) -> np.ndarray:
    return ops.convert_to_numpy(x)


def tensor(x) -> torch.Tensor:
    return torch.from_numpy(np.array(x))


def run(layer, *x, length=None, use_causal_mask=None, start_index=0, **arrays):
    """The layer's answer; compiled where the backend always compiles, which is faster than op by
    op."""
    static = {"length": length, "use_causal_mask": use_causal_mask}
    static = {name: value for name, value in static.items() if value is not None}
    if not layer.built:
        layer.build(x[0].shape)
    if BACKEND != "jax":
        return layer(*x, start_index=start_index, **arrays, **static)
    import jax

    def call(x, arrays):
        return layer(*x, start_index=start_index, **arrays, **static)

    return jax.jit(call)(x, arrays)


def answer(model, x) -> np.ndarray:
    """The model's answer; compiled under jax, which op by op compiles each of them."""
    if BACKEND != "jax":
        return array(model(x))
    import jax

    return array(jax.jit(lambda x: model(x))(x))


def assert_equal_to_torch(got, want: torch.Tensor, atol: float = 1e-6) -> None:
    """To 1e-6: a few roundings of float32 at numbers around 1."""
    np.testing.assert_allclose(array(got), want.detach().numpy(), rtol=1e-6, atol=atol)


def copy_weights(layer, module: torch.nn.Module) -> None:
    """Every weight of the layer from the module's parameter of the same name; a kernel is a
    transposed weight."""
    parameters = dict(module.named_parameters())
    assert len(layer.weights) == len(parameters)
    for weight in layer.weights:
        *owner, name = weight.path.split("/")[1:]
        name = {"kernel": "weight", "gamma": "weight", "beta": "bias"}.get(name, name)
        if owner and owner[0].endswith("_proj"):
            name = f"{owner[0]}.{name}"
        elif owner:
            name = f"encoding.{name}"
        value = parameters[name].detach().numpy()
        weight.assign(value.T if weight.path.endswith("kernel") else value)


def encodings() -> dict:
    """One of every encoding that attention takes."""
    yarn = {"name": "yarn", "factor": 4.0, "original_max_positions": 32}
    return {
        "none": lambda: None,
        "rotary": lambda: RotaryEmbedding(interleaved=True, rotary_dim=4, scaling=yarn),
        "alibi": lambda: ALiBi(4, form="left_right", learned=True),
        "t5": lambda: T5RelativeBias(4, bidirectional=True, num_buckets=8, max_distance=20),
        "t5_unscaled": lambda: T5RelativeBias(4, unscaled=True),
        "kerple": lambda: KerpleBias(4, form="power"),
        "shaw": lambda: ShawAttention(max_distance=3),
    }


def model_of_everything() -> keras.Model:
    """A classifier with every layer of the package, for texts of any length."""
    tokens = keras.Input((None,), dtype="int32")
    table = LearnedPositionEmbedding(8, growth="interpolate", num_positions=64, align_corners=True)
    x = BertEmbedding(50, 32, table, dropout=0.0)(tokens)
    x = SinusoidalPositionEncoding(order="concatenated")(x)
    for make in encodings().values():
        x = x + PositionAwareAttention(4, 2, encoding=make())(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, keras.layers.Dense(3)(x))


def model_of_shared(name: str) -> keras.Model:
    """Two attention layers with one encoding object between them, ready to train."""
    encoding = encodings()[name]()
    x = y = keras.Input((None, 32))
    for _ in range(2):
        y = y + PositionAwareAttention(4, encoding=encoding)(y)
    model = keras.Model(x, y)
    model.compile("adam", "mse")
    return model


def some_tokens(length: int = 12) -> np.ndarray:
    tokens = np.random.default_rng(length).integers(1, 50, (3, length)).astype("int32")
    tokens[0, -4:] = 0
    return tokens
