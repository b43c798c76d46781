"""What a compiler traces once serves texts of several lengths."""

import keras
import numpy as np
import pytest

from posenc import keras as pk
from tests.keras_layers.common import BACKEND, answer, array, encodings, normal, some_tokens

LENGTHS = (9, 17, 30)
torch_only = pytest.mark.skipif(BACKEND != "torch", reason="says what torch does")
jax_only = pytest.mark.skipif(BACKEND != "jax", reason="says what jax does")


def small_model() -> keras.Model:
    """Words, and attention of three kinds, for texts of any length."""
    tokens = keras.Input((None,), dtype="int32")
    x = pk.BertEmbedding(50, 32, pk.SinusoidalPositionEncoding(), dropout=0.0)(tokens)
    for name in ("rotary", "t5", "shaw"):
        attended = pk.PositionAwareAttention(4, 2, encoding=encodings()[name]())(x)
        x = keras.layers.Add()([x, attended])  # which keeps the mask, as + does not
    return keras.Model(tokens, x)


class Counting:
    """A backend for torch.compile that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@torch_only
def test_torch_compiles_a_model_into_one_graph_for_all_lengths():
    import torch

    model, count = small_model(), Counting()
    with torch.no_grad():
        want = [answer(model, some_tokens(length)) for length in LENGTHS]
        compiled = torch.compile(model, backend=count, dynamic=True, fullgraph=True)
        for length, expected in zip(LENGTHS, want, strict=True):
            got = compiled(torch.from_numpy(some_tokens(length)))
            np.testing.assert_allclose(array(got), expected, atol=1e-6)
    assert count.graphs == 1


@torch_only
def test_keras_own_compilation_stops_after_the_second_length(monkeypatch):
    """Keras leaves torch to find out which sizes change."""
    import functools

    import torch

    count = Counting()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    x = keras.Input((None, 32))
    rotary = pk.RotaryEmbedding(interleaved=False)
    model = keras.Model(x, pk.PositionAwareAttention(4, encoding=rotary)(x))
    model.compile(jit_compile=True)
    graphs = []
    for length in (9, 17, 30, 41):
        inputs = normal(2, length, 32)
        got = model.predict(inputs, verbose=0)
        graphs.append(count.graphs)
        np.testing.assert_allclose(got, array(model(inputs)), atol=1e-6)
    assert graphs[0] > 0
    assert graphs[1] == graphs[2] == graphs[3]


@jax_only
def test_jax_traces_a_model_once_for_all_lengths_and_batches():
    """XLA compiles the one traced program for each length that it meets."""
    import jax
    from jax import export

    model = small_model()
    sizes = export.symbolic_shape("batch, length")
    program = export.export(jax.jit(lambda tokens: model(tokens)))(
        jax.ShapeDtypeStruct(sizes, "int32")
    )
    for tokens in (some_tokens(9), some_tokens(30)[:2]):
        got = array(program.call(tokens))
        np.testing.assert_allclose(got, answer(model, tokens), rtol=1e-5, atol=1e-5)


@jax_only
def test_jax_compiles_once_for_padded_texts_of_several_lengths():
    import jax

    model, traces = small_model(), []

    @jax.jit
    def run(tokens):
        traces.append(tokens.shape)
        return model(tokens)

    alone = some_tokens(12)[1:]
    for length in (7, 12):
        tokens = alone.copy()
        tokens[:, length:] = 0
        got = array(run(tokens))[:, :length]
        want = answer(model, alone[:, :length])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert len(traces) == 1


@jax_only
def test_jax_compiles_once_for_all_steps_of_decoding():
    import jax

    rotary, steps = pk.RotaryEmbedding(interleaved=False), []
    x = normal(1, 1, 8)
    rotary.build(x.shape)

    @jax.jit
    def step(x, start):
        steps.append(x.shape)
        return rotary(x, start_index=start)

    for start in (0, 5, 10**6):
        want = rotary(x, positions=np.array([start], "int32"))
        np.testing.assert_allclose(array(step(x, start)), array(want), atol=1e-6)
    assert len(steps) == 1
