"""What libllama's graphs do beside the angles: layers that do not rotate, and the softmax scale."""

import json
import math

import numpy as np
import pytest

from posenc.doctor.command import Options
from posenc.runtimes.files.gguf_metadata import Metadata, read_metadata
from posenc.runtimes.files.source import load
from posenc.runtimes.known import RUNTIMES
from posenc.runtimes.known.llama_cpp import compute_from_metadata
from posenc.runtimes.position_record import record_of
from tests.doctor.judging import run

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")


def write(path, architecture, *, layers=8, heads=4, width=64, key_length=16, **keys):
    """A GGUF file without a vocabulary; keys: what follows the architecture's name, with __ for
    each dot."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_head_count(heads)
    writer.add_block_count(layers)
    writer.add_key_length(key_length)
    for key, value in {"rope__freq_base": 10000.0, **keys}.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    writer.add_tensor("token_embd.weight", np.ones((3, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def still(path):
    return compute_from_metadata(read_metadata(path), None).without_rotation


WINDOW = {"attention__sliding_window": 4096}
LISTED = [True, False, True, True, False, True, False, True]
STILL = [
    ("afmoe", {}, (3, 7)),
    ("afmoe", {"attention__sliding_window_pattern": LISTED, **WINDOW}, (3, 7)),
    ("cohere2", WINDOW, (3, 7)),
    ("cohere2", {"attention__sliding_window_pattern": 2, **WINDOW}, (1, 3, 5, 7)),
    ("cohere2", {"attention__sliding_window_pattern": LISTED, **WINDOW}, (1, 4, 6)),
    ("cohere2", {"attention__sliding_window_pattern": 0, **WINDOW}, ()),
    ("cohere2", {"attention__sliding_window_pattern": [True, False], **WINDOW}, (1, *range(2, 8))),
    ("cohere2moe", {"leading_dense_block_count": 1, **WINDOW}, (4,)),
    ("cohere2moe", {"leading_dense_block_count": 0, **WINDOW}, (0, 4)),
    ("exaone-moe", {"nextn_predict_layers": 1, **WINDOW}, (3,)),
    ("exaone4", WINDOW, ()),
    ("exaone4", {"layers": 64, **WINDOW}, tuple(range(3, 64, 4))),
    ("exaone4", {"layers": 64}, tuple(range(3, 64, 4))),
    ("llama4", {}, (3, 7)),
    ("llama4", {"attention__sliding_window": 8192}, (3, 7)),
    ("llama4", {"attention__sliding_window": 0}, (7,)),
    ("muse-glimmer", WINDOW, (3, 7)),
    ("smallthinker", WINDOW, (0, 4)),
    ("smallthinker", {}, ()),
    ("smollm3", {}, (3, 7)),
    ("granite", {"rope__scaling__finetuned": True}, ()),
    ("granite", {"rope__scaling__finetuned": False}, tuple(range(8))),
    ("granitehybrid", {"rope__scaling__finetuned": False}, tuple(range(8))),
    ("granitemoe", {"rope__scaling__finetuned": False}, ()),
    ("llama", {"rope__scaling__finetuned": False}, ()),
    ("granite_swa", {"attention__rope_pattern": LISTED}, (1, 4, 6)),
    ("refact", {}, tuple(range(8))),
    ("gemma2", WINDOW, ()),
]
"""Architecture, keys, and the layers that its graph in src/models does not rotate."""


@pytest.mark.parametrize("architecture, keys, expected", STILL)
def test_the_graph_says_which_layers_rotate(architecture, keys, expected, tmp_path):
    path = write(tmp_path / "a.gguf", architecture, **keys)
    assert still(path) == expected
    assert record_of(load(path)).without_rotation == expected


def test_layers_that_only_predict_further_tokens_are_not_counted(tmp_path):
    path = write(tmp_path / "a.gguf", "cohere2", layers=9, nextn_predict_layers=1, **WINDOW)
    assert still(path) == (3, 7)


def test_a_file_that_rotates_nothing_says_so(tmp_path):
    path = write(tmp_path / "a.gguf", "granite", rope__scaling__finetuned=False)
    assert compute_from_metadata(read_metadata(path), None).rotations == {}
    assert run(Options((path,)))[1] == 0
    with pytest.raises(ValueError, match="no layer that rotates"):
        run(Options((path,), fix=True, out=tmp_path / "b.gguf"))


SCALES = [
    ("llama", {"attention__scale": 0.5}, 16**-0.5),
    ("granite", {"attention__scale": 0.0078125}, 0.0078125),
    ("granitemoe", {"attention__scale": 0.0078125}, 0.0078125),
    ("granitehybrid", {"attention__scale": 0.0078125}, 0.0078125),
    ("granite_swa", {"attention__scale": 0.0078125}, 0.0078125),
    ("granite", {"attention__scale": 0.0}, 16**-0.5),
    ("granite", {}, 16**-0.5),
    ("minicpm", {"attention__scale": 0.5}, 16**-0.5),
    ("gemma2", {"layers": 46, "width": 96, **WINDOW}, (96 // 4) ** -0.5),
    ("gemma2", {"layers": 42, "width": 96, **WINDOW}, 16**-0.5),
    ("gemma3", {"layers": 62, "width": 96, **WINDOW}, (96 // 4) ** -0.5),
    ("gemma3", {"layers": 46, "width": 96, **WINDOW}, 16**-0.5),
    ("gemma3n", WINDOW, 1.0),
    ("gemma4", WINDOW, 1.0),
    ("grok", {}, 0.08838834764831845),
    ("grok", {"attention__output_scale": 0.25}, 0.25),
    ("gpt-oss", {"rope__dimension_count": 8, **WINDOW}, 8**-0.5),
]
"""Architecture, keys, and what its graph in src/models multiplies q.k by."""


@pytest.mark.parametrize("architecture, keys, expected", SCALES)
def test_the_graph_says_the_softmax_scale(architecture, keys, expected, tmp_path):
    path = write(tmp_path / "a.gguf", architecture, **keys)
    got = compute_from_metadata(read_metadata(path), None).softmax_scale
    assert got == pytest.approx(expected, rel=1e-6)


GRANITE = {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "attention_multiplier": 0.0078125,
}
COHERE2 = {
    **GRANITE,
    "model_type": "cohere2",
    "architectures": ["Cohere2ForCausalLM"],
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def like(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path / "config.json"


def test_a_right_conversion_means_the_same_positions(tmp_path):
    granite = write(tmp_path / "a.gguf", "granite", attention__scale=0.0078125)
    assert run(Options((like(tmp_path, GRANITE), granite)))[1] == 0
    cohere = write(tmp_path / "b.gguf", "cohere2", **WINDOW)
    assert run(Options((like(tmp_path, COHERE2), cohere)))[1] == 0


@pytest.mark.parametrize(
    "config, architecture, keys, words",
    [
        (GRANITE, "granite", {}, "softmax scale is 0.25"),
        (GRANITE, "granite", {"rope__scaling__finetuned": False}, "do not rotate"),
        (COHERE2, "cohere2", {"attention__sliding_window_pattern": 2, **WINDOW}, "do not rotate"),
    ],
)
def test_fix_proves_nothing_where_the_comparison_sees_a_difference(
    config, architecture, keys, words, tmp_path
):
    path, meant = write(tmp_path / "a.gguf", architecture, **keys), like(tmp_path, config)
    assert run(Options((path, meant)))[1] == 1
    with pytest.raises(ValueError, match=words):
        run(Options((path,), fix=True, out=tmp_path / "b.gguf", like=meant))
    assert not (tmp_path / "b.gguf").exists()


@pytest.mark.parametrize("architecture", ["olmo2", "mellum", "laguna"])
def test_windowed_layers_of_a_plain_kind_have_no_multiplier(architecture):
    """olmo2.cpp:117, mellum.cpp:122, laguna.cpp:186: freq_scale 1, attn_factor 1."""
    meta = Metadata(
        architecture,
        context_length=4096,
        dimension_count=16,
        head_dim=16,
        sliding_window=256,
        scaling_factor=8.0,
        attn_factor=1.2,
    )
    layer = compute_from_metadata(meta, None).rotations["sliding_attention"]
    assert layer.multiplier == 1.0
    assert layer.inv_freq == pytest.approx([10000.0 ** (-2 * i / 16) for i in range(8)])


@pytest.mark.parametrize(
    "architecture, base",
    [("olmo2", 1e6), ("mellum", 1e6), ("cohere2", 1e6), ("gpt-oss", 500.0), ("gemma3", 500.0)],
)
def test_some_graphs_give_windowed_layers_the_base_of_all(architecture, base):
    meta = Metadata(
        architecture,
        context_length=4096,
        dimension_count=16,
        head_dim=16,
        sliding_window=256,
        freq_base=1e6,
        freq_base_swa=500.0,
        scaling_factor=2.0,
    )
    layers = compute_from_metadata(meta, None).rotations
    pair = (layers.get("sliding_attention") or layers["all"]).inv_freq[1]
    assert min(abs(math.log(pair * f / base ** (-2 / 16))) for f in (1, 2)) < 1e-9


def test_a_missing_base_is_said_and_is_no_mistake(tmp_path):
    path = write(tmp_path / "a.gguf", "llama")
    meta = read_metadata(path)
    bare = gguf.GGUFWriter(str(tmp_path / "b.gguf"), "llama")
    bare.add_context_length(4096)
    bare.add_key_length(16)
    bare.add_tensor("token_embd.weight", np.ones((3, 64), np.float32))
    bare.write_header_to_file()
    bare.write_kv_data_to_file()
    bare.write_tensors_to_file()
    bare.close()
    without = read_metadata(tmp_path / "b.gguf")
    assert (
        compute_from_metadata(without, None).rotations
        == compute_from_metadata(meta, None).rotations
    )
    said, code = run(Options((tmp_path / "b.gguf",)))
    assert code == 0 and "llama.rope.freq_base is missing: libllama takes 10000" in said
    assert "freq_base is missing" not in run(Options((path,)))[0]


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"rope__scaling__finetuned": 1.0}, "finetuned must be true or false"),
        ({"context_length": 1.5}, "context_length must be a whole number, got 1.5"),
        ({"attention__scale": -1.0}, "attention.scale must be a number above 0"),
        ({"attention__scale": math.nan}, "attention.scale must be a number above 0"),
        ({"attention__sliding_window_pattern": 2.5}, "must be an integer, or a list of flags"),
        ({"attention__sliding_window_pattern": [0.5, float("nan")]}, "must be a list of flags"),
        ({"attention__sliding_window_pattern": [1, 2]}, "must be a list of flags"),
        ({"attention__rope_pattern": 1}, "must be a list of flags"),
        ({"nextn_predict_layers": 9}, "nextn_predict_layers must be between 0 and 8"),
    ],
)
def test_keys_of_the_attention_with_impossible_values_are_refused(keys, words, tmp_path):
    path = write(tmp_path / "a.gguf", "granite", **keys)
    with pytest.raises(ValueError, match=words):
        read_metadata(path)


FULL, SLIDING = "full_attention", "sliding_attention"
CONVERTED = [
    ("exaone4", {}, ()),  # without 64 layers none has a window
    ("exaone4", {"num_hidden_layers": 64}, tuple(range(3, 64, 4))),
    ("exaone_moe", {"layer_types": [SLIDING, FULL] * 4}, (1, 3, 5, 7)),
    ("afmoe", {"layer_types": [SLIDING, FULL] * 4}, (3, 7)),
    ("cohere2", {"layer_types": [SLIDING, FULL] * 4}, (3, 7)),
    ("cohere2_moe", {"layer_types": [FULL, SLIDING] * 4, "first_k_dense_replace": 1}, (2, 4, 6)),
    ("llama4_text", {"no_rope_layers": [1, 0] * 4}, (3, 7)),
    ("llama4_text", {"layer_types": [FULL] * 8}, (7,)),
    ("smollm3", {"no_rope_layers": [1, 0] * 4}, (3, 7)),
]
"""A config's family and keys, and the layers that do not rotate once it is converted."""


@pytest.mark.parametrize("family, keys, expected", CONVERTED)
def test_a_config_is_read_as_its_converted_file(family, keys, expected):
    config = {**COHERE2, "model_type": family, "head_dim": 16, **keys}
    del config["architectures"], config["attention_multiplier"]
    got = RUNTIMES["llama.cpp"](config, None)
    assert (got.error, got.without_rotation) == (None, expected)
