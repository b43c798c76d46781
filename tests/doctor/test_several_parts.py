"""A config of several parts is read where transformers reads its language model's keys."""

import json

import pytest

from posenc.doctor.command import Options
from posenc.runtimes.config_model import model_of
from posenc.runtimes.families import all_families
from posenc.runtimes.known import emulate
from posenc.runtimes.meaning import UnknownFamilyError, meaning_of
from tests.doctor.judging import run

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "intermediate_size": 64,
    "rope_theta": 1e6,
}
LLAMA = {"model_type": "llama", **SIZES}
YARN = {"rope_type": "yarn", "type": "yarn", "factor": 4.0}
YARN |= {"original_max_position_embeddings": 2048}


def doctor(folder, raw):
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return run(Options((path,)))


@pytest.mark.parametrize(
    "outer",
    ["foo_vl", "encoder-decoder", "paligemma", "gemma3", "qwen3_vl", "llama4", "qwen3_5"],
)
def test_a_llama_inside_of_another_family_is_not_judged(tmp_path, outer):
    said, code = doctor(tmp_path, {"model_type": outer, "text_config": LLAMA})
    assert code == 3 and "Nothing was judged" in said and "as meant" not in said
    computed = emulate({"model_type": outer, "text_config": LLAMA})
    known = {name: answer.known for name, answer in computed.items()}
    if outer == "qwen3_5":
        assert known.pop("transformers-4") == "no model"  # 4.57 has no such family
    assert set(known.values()) == {"unknown"}


def test_a_tower_without_rotation_has_none_whatever_is_inside(tmp_path):
    said, code = doctor(tmp_path, {"model_type": "bert", "text_config": LLAMA})
    assert code == 0 and "bert has no rotary positions" in said and "as meant" not in said


@pytest.mark.parametrize("key", ["llm_config", "language_config"])
def test_a_key_that_the_family_does_not_read_holds_no_language_model(tmp_path, key):
    said, code = doctor(tmp_path, {"model_type": "llava", key: LLAMA})
    assert code == 3 and "'llava' without a text_config" in said


def test_a_text_config_in_a_plain_family_is_not_read(tmp_path):
    raw = {"model_type": "llama", "text_config": {**SIZES, "rope_theta": 1e4}}
    assert len(meaning_of(raw).computed.rotations["all"].inv_freq) == 64  # the class's own sizes
    said, code = doctor(tmp_path, raw)
    assert code == 1 and "rope_theta 10000.0 stands in text_config, where it is not read" in said
    said, code = doctor(tmp_path, {**LLAMA, "text_config": {**SIZES, "rope_theta": 1e4}})
    assert code == 1 and "the top level has 1000000.0" in said
    assert "PD057" not in doctor(tmp_path, {**LLAMA, "text_config": SIZES})[0]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "glm4v"])
def test_an_empty_text_config_is_read_before_the_keys_next_to_it(tmp_path, family):
    raw = {**LLAMA, "model_type": family, "text_config": {}}
    assert len(model_of(raw).layer_types) > 2  # the class's own sizes
    said, code = doctor(tmp_path, raw)
    assert code == 1 and "hidden_size 64 stands at the top level, where it is not read" in said


def real_text(raw):
    transformers = pytest.importorskip("transformers")
    kind = transformers.CONFIG_MAPPING[raw["model_type"]]
    return kind.from_dict(raw).get_text_config()


PARTS = [name for name, facts in all_families().items() if facts.get("any")]


@pytest.mark.parametrize("outer", PARTS)
def test_a_family_that_takes_any_language_model_reads_it_as_transformers_does(outer):
    if outer not in pytest.importorskip("transformers").CONFIG_MAPPING:
        pytest.skip("the installed release has no such class")
    for inner in ("llama", "qwen2"):
        own = {**SIZES, "model_type": inner}
        raw = {"model_type": outer, "rope_theta": 5.0, "hidden_size": 128, "text_config": own}
        model, real = model_of(raw), real_text(raw)
        assert model.model_type == real.model_type == inner
        assert model.head_dim == real.hidden_size // real.num_attention_heads == 16
        layer = emulate(raw)["transformers-5"].rotations["all"]
        assert layer.inv_freq[1] == real.rope_parameters["rope_theta"] ** (-1 / 8)
    del own["model_type"]
    assert model_of(raw).model_type == real_text(raw).model_type == all_families()[outer]["text"]


def test_a_class_that_is_fixed_reads_its_config_whatever_name_is_inside():
    raw = {"model_type": "aria", "text_config": {**SIZES, "model_type": "aria_moe_lm"}}
    assert model_of(raw).model_type == "aria_text"
    assert type(real_text(raw)).__name__ == "AriaTextConfig"
    with pytest.raises(UnknownFamilyError, match="gemma3 with a text_config of llama"):
        meaning_of({"model_type": "gemma3", "text_config": LLAMA})
