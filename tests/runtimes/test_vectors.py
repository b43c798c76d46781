"""The conformance vectors are what transformers' modules compute, and what posenc says."""

import copy
import re
from pathlib import Path

import pytest

from posenc.runtimes import frequencies
from posenc.runtimes.conformance import vectors

ROOT = Path(__file__).parents[2]
VECTORS = {v["name"]: v for v in vectors()}
NAMES = list(VECTORS)


def test_sixty_configs_of_every_type_and_kind():
    configs = {name.partition(", ")[0] for name in NAMES}
    assert len(configs) >= 60
    kinds = {k["name"] for v in VECTORS.values() for k in v["expected"]["kinds"]}
    assert {"all", "full_attention", "sliding_attention", "main", "compress"} <= kinds
    dicts = [
        v["config"].get("rope_scaling") or v["config"].get("rope_parameters") or {}
        for v in VECTORS.values()
    ]
    types = {d.get("rope_type", d.get("type", "default")) for d in dicts}
    assert {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "mrope"} <= types


@pytest.mark.parametrize("name", NAMES)
def test_posenc_gives_a_vectors_numbers(name):
    vector = VECTORS[name]
    got, wanted = frequencies(vector["config"], vector["length"]), vector["expected"]
    assert [k["name"] for k in got["kinds"]] == [k["name"] for k in wanted["kinds"]]
    for ours, theirs in zip(got["kinds"], wanted["kinds"], strict=True):
        assert ours.pop("inv_freq") == pytest.approx(theirs["inv_freq"], rel=1e-12)
        assert ours == {k: v for k, v in theirs.items() if k != "inv_freq"}
    assert {k: got[k] for k in wanted if k != "kinds"} == {
        k: v for k, v in wanted.items() if k != "kinds"
    }


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "kimi_linear", "num_hidden_layers": 27},
        {"model_type": "glm5_next", "text_config": {"model_type": "glm5_next_text"}},
        {"model_type": "gpt2", "n_layer": 12},
    ],
)
def test_a_model_without_rotation_rotates_nothing(config):
    layers = list(range(config.get("num_hidden_layers", config.get("n_layer", 1))))
    assert frequencies(config) == {
        "kinds": [],
        "without_rotation": layers,
        "softmax_scale": None,
        "switch": "static",
    }
    with pytest.raises(ValueError, match="does not know"):
        frequencies({**config, "model_type": "kimi_linea", "text_config": {}})


def assert_real(vector):
    """A vector's numbers are those of transformers' modules for its config, at its length."""
    import torch
    import transformers

    from tests.doctor.oracles import real
    from tests.runtimes.known.test_vendors import turned

    config_class = real.class_of(vector["config"]["model_type"])
    config = config_class.from_dict(copy.deepcopy(vector["config"]))
    length = vector["length"] or vector["config"].get("max_position_embeddings")
    got = {}
    for rotary in real.rotary_modules(config):
        for kind, found in real.rebuilt(rotary, config).items():
            got[kind] = found
            if vector["expected"]["switch"] == "length":
                module = rotary[1](copy.deepcopy(config))
                angles, multipliers = turned(module, None, length)
                got[kind] = angles, multipliers[0]
    assert torch and transformers
    for kind in vector["expected"]["kinds"]:
        inv_freq, multiplier = got[kind["name"]]
        assert kind["inv_freq"] == pytest.approx(inv_freq, rel=2e-6, abs=1e-7)
        assert kind["multiplier"] == pytest.approx(multiplier, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_is_what_transformers_computes(name):
    pytest.importorskip("transformers", minversion="5.0")
    assert_real(VECTORS[name])


@pytest.mark.parametrize("what", ["inv_freq", "multiplier"])
def test_a_wrong_vector_is_seen(what):
    pytest.importorskip("transformers", minversion="5.0")
    vector = copy.deepcopy(VECTORS["deepseek-v4"])
    kind = vector["expected"]["kinds"][1]
    if what == "inv_freq":
        kind["inv_freq"][1] *= 1.00001
    else:
        kind["multiplier"] = float("nan")
    with pytest.raises(AssertionError):
        assert_real(vector)


def test_the_page_tests_a_runtime(monkeypatch):
    page = (ROOT / "docs/conformance.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(ROOT)
    exec(code, {})  # as a reader runs it
    with pytest.raises(AssertionError):
        exec(code.replace("-2 * i / dim", "-i / dim"), {})


LLAMA = {"model_type": "llama", "head_dim": 16, "rope_theta": 1e6, "num_hidden_layers": 2}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"rope_scaling": {**YARN, "factor": -4}}, "factor must be a positive number, got -4"),
        ({"rope_scaling": {**YARN, "factor": "-4"}}, "factor must be a positive number, got '-4'"),
        ({"rope_parameters": {**YARN, "rope_type": ["yarn"]}}, "rope_type must be a string"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"layer_types": 5}, "layer_types must be a list of strings"),
        ({"rope_theta": 0}, "rope_theta must be a positive number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_as_by_the_command(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        frequencies({**LLAMA, **given})


@pytest.mark.parametrize("length", [0, -4, "8", 1.5, True])
def test_a_length_that_is_none_is_refused(length):
    with pytest.raises(ValueError, match="length must be an integer of at least 1"):
        frequencies({**LLAMA, "rope_scaling": YARN}, length)
