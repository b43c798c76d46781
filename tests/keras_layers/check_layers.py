"""Keras' conventions: configs, saving, masks, policies, traced lengths; and that layers learn."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

from posenc import keras as pk
from posenc.list import KERAS_LAYERS
from tests.keras_layers.common import (
    BACKEND,
    answer,
    array,
    encodings,
    model_of_everything,
    model_of_shared,
    normal,
    run,
    some_tokens,
)

PAGE = Path(__file__).parents[2] / "docs/keras.md"

LAYERS = {
    "sinusoidal": lambda: pk.SinusoidalPositionEncoding(base=50.0, order="fairseq", padding_idx=1),
    "learned": lambda: pk.LearnedPositionEmbedding(
        8, growth="hierarchical", num_positions=20, alpha=0.3
    ),
    "bert": lambda: pk.BertEmbedding(
        9, 8, pk.SinusoidalPositionEncoding(), num_segments=3, dropout=0.2, padding_idx=None
    ),
    "attention": lambda: pk.PositionAwareAttention(4, 1, pk.ALiBi(4), head_dim=6, use_bias=True),
    **{name: make for name, make in encodings().items() if name != "none"},
}


def without_marks(config: dict) -> dict:
    """The config without the mark of one object, which every object has its own of."""
    return {
        key: without_marks(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "shared_object_id"
    }


@pytest.mark.parametrize("name", LAYERS)
def test_config_round_trip(name):
    layer = LAYERS[name]()
    config = layer.get_config()
    again = type(layer).from_config(config)
    assert without_marks(again.get_config()) == without_marks(config)
    registered = keras.saving.serialize_keras_object(layer)
    assert registered["registered_name"] == f"posenc>{type(layer).__name__}"
    assert type(keras.saving.deserialize_keras_object(registered)) is type(layer)


def test_a_subclass_with_a_constructor_of_its_own_keeps_every_argument():
    class Steep(pk.ALiBi):
        def __init__(self, *args, steepness, **kwargs):
            super().__init__(*args, **kwargs)
            self.steepness = steepness

    config = Steep(4, form="left_right", steepness=2.0).get_config()
    own = {name: config[name] for name in ("num_heads", "form", "learned", "steepness")}
    assert own == {"num_heads": 4, "form": "left_right", "learned": False, "steepness": 2.0}
    assert "args" not in config and "kwargs" not in config


def test_every_layer_has_a_config_test_and_the_table_names_them():
    assert {type(make()).__name__ for make in LAYERS.values()} == set(pk.__all__)
    hosts = {"BertEmbedding", "PositionAwareAttention"}
    assert set(KERAS_LAYERS.values()) == set(pk.__all__) - hosts


def test_saved_model_is_the_same(tmp_path):
    model = model_of_everything()
    assert model.output_shape == (None, 3)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    tokens = some_tokens(5)
    np.testing.assert_array_equal(answer(loaded, tokens), answer(model, tokens))
    assert len(loaded.weights) == len(model.weights)


@pytest.mark.parametrize("name", ["t5", "shaw"])
def test_one_object_in_several_layers_is_one_again_after_loading(name, tmp_path):
    model = model_of_shared(name)
    x = normal(2, 5, 32)
    model.fit(x, x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    first, second = (layer for layer in loaded.layers if hasattr(layer, "encoding"))
    assert first.encoding is second.encoding
    assert len(loaded.weights) == len(model.weights)
    np.testing.assert_array_equal(answer(loaded, x), answer(model, x))
    for trained in (model, loaded):
        trained.fit(x, x, shuffle=False, verbose=0)
    # The optimizer's state too: a fresh one would end at least 6e-3 away.
    np.testing.assert_allclose(answer(loaded, x), answer(model, x), atol=1e-4)


def test_masks_go_through():
    embed = pk.BertEmbedding(9, 8)
    tokens = np.array([[1, 2, 0], [3, 0, 0]], "int32")
    x = embed(tokens)
    for layer in (
        pk.SinusoidalPositionEncoding(),
        pk.RotaryEmbedding(interleaved=False),
        pk.PositionAwareAttention(2),
    ):
        y = layer(x)
        np.testing.assert_array_equal(array(keras.src.backend.get_keras_mask(y)), tokens != 0)


@pytest.mark.parametrize("name", ["none", "rotary", "t5", "shaw"])
def test_padding_changes_nothing(name):
    tokens = np.array([[4, 7, 2, 0, 0]], "int32")
    embed = pk.BertEmbedding(9, 32)
    attend = pk.PositionAwareAttention(4, encoding=encodings()[name]())
    padded = array(attend(embed(tokens)))[:, :3]
    np.testing.assert_allclose(array(attend(embed(tokens[:, :3]))), padded, atol=1e-5)
    positions = np.arange(5, dtype="int32")
    given = array(attend(embed(tokens), positions=positions))[:, :3]
    np.testing.assert_allclose(given, padded, atol=1e-5)


def test_a_row_that_sees_nothing_gives_zeros():
    x = normal(2, 4, 32)
    mask = np.ones((2, 4, 4), bool)
    mask[0, 2] = False
    for name, make in encodings().items():
        out = array(run(pk.PositionAwareAttention(4, encoding=make()), x, attention_mask=mask))
        assert not out[0, 2].any() and out[1, 2].any(), name


def inputs_of(name: str) -> list[np.ndarray]:
    """What the layer is called with, in numbers that bfloat16 holds."""
    if name == "bert":
        return [np.array([[3, 1, 0, 2, 5, 5]], "int32")]
    scores, heads = (1, 4, 6, 6), (1, 6, 4, 8)
    shapes = {name: [scores] for name in ("alibi", "t5", "t5_unscaled", "kerple")}
    shapes["shaw"] = [heads] * 3
    numbers = [normal(*shape) for shape in shapes.get(name, [(1, 6, 32)])]
    return [array(ops.cast(ops.cast(x, "bfloat16"), "float32")) for x in numbers]


@pytest.mark.parametrize("name", LAYERS)
def test_mixed_bfloat16_computes_in_float32(name):
    config = LAYERS[name]().get_config()
    config.pop("dropout", None)
    kind = type(LAYERS[name]())
    exact = kind.from_config(config)
    mixed = kind.from_config({**config, "dtype": "mixed_bfloat16"})
    inputs, positions = inputs_of(name), {}
    if name in ("sinusoidal", "rotary", "attention"):  # bfloat16 would round the first
        positions = {"positions": np.array([70000.5, 1, 2, 3, 4, 5], "float32")}
    want = array(run(exact, *inputs, **positions))
    mixed.build(inputs[0].shape)
    mixed.set_weights(exact.get_weights())
    rounded = [x if x.dtype == "int32" else ops.cast(x, "bfloat16") for x in inputs]
    got = run(mixed, *rounded, **positions)
    assert keras.backend.standardize_dtype(got.dtype) == "bfloat16"
    assert all(w.dtype == "float32" for w in mixed.weights)
    # rounded once, to 8 bits; the projections of attention are bfloat16 by the policy
    bound = 2e-2 if name == "attention" else 2**-8
    got = array(ops.cast(got, "float32"))
    np.testing.assert_allclose(got, want, rtol=bound, atol=bound if name == "attention" else 0)


@pytest.mark.parametrize("name", LAYERS)
def test_shapes_are_known_for_any_length(name):
    layer, inputs = LAYERS[name](), inputs_of(name)
    out = run(layer, *inputs)
    assert layer.supports_masking
    assert layer.compute_output_shape(inputs[0].shape) == tuple(out.shape)
    lengths = (2, 3) if inputs[0].shape[1:3] == (4, 6) else (1,)  # of scores, of tokens
    symbols = [
        keras.Input([None if i in lengths else n for i, n in enumerate(x.shape)][1:], dtype=x.dtype)
        for x in inputs
    ]
    want = tuple(None if i in (0, *lengths) else n for i, n in enumerate(out.shape))
    assert layer(*symbols).shape == want


ERRORS = {
    "interleaved": (lambda: pk.RotaryEmbedding(), TypeError, "interleaved"),
    "odd": (
        lambda: pk.RotaryEmbedding(interleaved=True)(normal(1, 2, 7)),
        ValueError,
        "rotary_dim must be even",
    ),
    "scaling": (
        lambda: pk.RotaryEmbedding(interleaved=True, scaling={"name": "yarnn"}),
        ValueError,
        "unknown scaling 'yarnn'",
    ),
    "length": (
        lambda: pk.RotaryEmbedding(interleaved=True)(normal(1, 2, 8), length=9),
        ValueError,
        "do not depend on it",
    ),
    "long": (
        lambda: pk.LearnedPositionEmbedding(3)(normal(1, 2, 8), start_index=2),
        ValueError,
        "must be 0 to 2, got 2 to 3",
    ),
    "growth": (
        lambda: pk.LearnedPositionEmbedding(3, num_positions=6),
        ValueError,
        "growth and num_positions go together",
    ),
    "align": (
        lambda: pk.LearnedPositionEmbedding(3, growth="interpolate", num_positions=6),
        ValueError,
        "needs align_corners",
    ),
    "both": (
        lambda: pk.SinusoidalPositionEncoding()(
            normal(1, 2, 8), positions=np.arange(2), start_index=1
        ),
        ValueError,
        "not both",
    ),
    "place": (
        lambda: pk.PositionAwareAttention(2, encoding=pk.SinusoidalPositionEncoding()),
        TypeError,
        "come before attention",
    ),
    "heads": (
        lambda: pk.PositionAwareAttention(4, encoding=pk.ALiBi(2)),
        ValueError,
        "for 2 heads, num_heads is 4",
    ),
    "groups": (lambda: pk.PositionAwareAttention(4, 3), ValueError, "must divide"),
    "one for all": (
        lambda: pk.RotaryEmbedding(interleaved=True)(normal(1, 9, 8), positions=np.array([5])),
        ValueError,
        r"with len 9, got shape \(1,\)",
    ),
    "mask": (
        lambda: pk.PositionAwareAttention(2)(normal(1, 2, 8), attention_mask=np.ones(2)),
        ValueError,
        r"got shape \(2,\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_input_is_named(name):
    make, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize("growth", ["none", "hierarchical"])
@pytest.mark.parametrize("host", ["learned", "bert"])
def test_positions_outside_of_a_table_are_named_and_compiled_give_nan(host, growth):
    options = {} if growth == "none" else {"growth": growth, "num_positions": 20}
    learned = pk.LearnedPositionEmbedding(8, **options)
    x, layer = normal(1, 3, 4), learned
    if host == "bert":
        x = np.array([[1, 2, 3]], "int32")
        layer = pk.BertEmbedding(9, 4, learned)
    layer(x, positions=np.arange(learned.num_usable_positions - 3, learned.num_usable_positions))
    number = ops.convert_to_tensor
    for wrong in (
        {"start_index": learned.num_usable_positions - 2},
        {"start_index": -1},
        {"start_index": number(learned.num_usable_positions - 2)},
        {"positions": np.array([-1, 0, 1])},
        {"positions": number(np.array([[0, learned.num_usable_positions, 1]], "int32"))},
    ):
        with pytest.raises(
            ValueError, match=rf"must be 0 to {learned.num_usable_positions - 1}, got"
        ):
            layer(x, **wrong)
    positions = np.array([-1, 0, learned.num_usable_positions], "int32")
    if BACKEND == "jax":
        import jax

        out = jax.jit(lambda x, positions: layer(x, positions=positions))(x, positions)
    elif BACKEND == "tensorflow":
        import tensorflow

        @tensorflow.function
        def looked_up(x, positions):
            return layer(x, positions=positions)

        out = looked_up(tensorflow.constant(x), tensorflow.constant(positions))
    else:
        import torch

        def rows(x, positions):
            return learned.embed(x, positions, 0)

        x = torch.from_numpy(normal(1, 3, 4))
        compiled = torch.compile(rows, backend="eager", fullgraph=True)
        out = compiled(x, torch.from_numpy(positions))
    bad = np.isnan(array(out)).all(axis=(0, 2))
    np.testing.assert_array_equal(bad, [True, False, True])


def test_shapes_of_a_short_table_in_a_layer_of_the_users():
    """Keras asks such a layer for its shape with lengths of its own choice, such as 83."""

    class Embed(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.embed = pk.BertEmbedding(9, 4, pk.LearnedPositionEmbedding(8))

        def build(self, shape):
            self.embed.build(shape)

        def call(self, tokens):
            return self.embed(tokens) * 2.0

    tokens = keras.Input((None,), dtype="int32")
    assert Embed()(tokens).shape == (None, None, 4)


def test_gradients_reach_every_weight_and_are_finite():
    model = model_of_everything()
    before = [array(w).copy() for w in model.trainable_weights]
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(some_tokens(), np.array([0, 1, 2]), epochs=1, verbose=0)
    for weight, old in zip(model.trainable_weights, before, strict=True):
        new = array(weight)
        assert np.isfinite(new).all(), weight.path
        assert (new != old).any(), weight.path


def test_the_page_runs_and_its_classifier_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict = {}
    exec(compile(code, str(PAGE), "exec"), scope)
    assert scope["accuracy"] > 0.95
    loaded = keras.models.load_model("classifier.keras")
    some = scope["x"][:4]
    np.testing.assert_array_equal(
        loaded.predict(some, verbose=0), scope["model"].predict(some, verbose=0)
    )


def test_equal_to_keras_hub():
    """Its layers where they are right: not its dynamic scaling, nor older versions' YaRN."""
    hub = pytest.importorskip("keras_hub", "0.32", reason="keras-hub is not installed")
    x = normal(2, 6, 8)
    sines = hub.layers.SinePositionEncoding()(x)
    ours = array(pk.SinusoidalPositionEncoding()(x)) - x
    np.testing.assert_allclose(ours, array(sines), atol=1e-5)
    learned, theirs = pk.LearnedPositionEmbedding(9), hub.layers.PositionEmbedding(9)
    learned.build(x.shape), theirs.build(x.shape)
    theirs.set_weights(learned.get_weights())
    ours = array(learned(x, start_index=2)) - x
    np.testing.assert_allclose(ours, array(theirs(x, start_index=2)), atol=1e-6)
    heads = normal(2, 6, 3, 8)
    yarn = {"rope_type": "yarn", "scaling_factor": 4.0, "original_max_position_embeddings": 32}
    for ours, theirs in (
        (None, {}),
        ({"name": "linear", "factor": 4.0}, {"scaling_factor": 4.0}),
        ({"name": "yarn", "factor": 4.0, "original_max_positions": 32}, yarn),
    ):
        got = pk.RotaryEmbedding(interleaved=False, scaling=ours)(heads)
        want = hub.layers.RotaryEmbedding(**theirs)(heads)
        np.testing.assert_allclose(array(got), array(want), atol=1e-5)
    scores = normal(1, 4, 5, 5)
    rows = array(hub.layers.AlibiBias()(scores) - pk.ALiBi(4)(scores))
    causal = np.where(np.tri(5), rows, rows[..., :1])  # theirs is shifted by a number per row
    np.testing.assert_allclose(causal, np.broadcast_to(rows[..., :1], rows.shape), atol=1e-5)
