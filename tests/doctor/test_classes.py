"""Classes in architectures: of another network with the same model_type, and of no known one."""

import pytest

from posenc.runtimes.families import is_named_like
from posenc.runtimes.known import RUNTIMES, emulate
from tests.doctor.judging import case, judge
from tests.doctor.threads import BASE

LING26 = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": 128,
    "layer_group_size": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rope_theta": 6000000,
    "max_position_embeddings": 131072,
}
"""Ling 2.6: its linear layers rotate 64 of 128 channels, and the other layers another 64."""
VISION = {"model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"]}


def test_another_network_with_the_same_model_type_is_not_judged(tmp_path):
    from posenc.doctor.command import Options
    from posenc.files.sealed_json import strict_json
    from posenc.runtimes.files.json_object import read_json
    from tests.doctor.judging import run

    path = tmp_path / "config.json"
    path.write_text(strict_json(LING26))
    assert read_json(path) == LING26
    said, code = run(Options((path,), ask=["none"]))
    assert code == 3 and "as meant" not in said and "PD0" not in said
    assert "BailingMoeV2_5ForCausalLM (Ling 2.5 and 2.6" in said
    assert "BailingHybridForCausalLM, the one that posenc has read" in said
    known = {name: computed.known for name, computed in emulate(LING26).items()}
    assert known.pop("transformers-4") == "no model"  # 4.57 has no bailing_hybrid
    assert set(known.values()) == {"unknown"}
    assert case({**LING26, "architectures": ["BailingHybridForCausalLM"]}).judged_runtimes


@pytest.mark.parametrize("cls", ["", "L", "LForCausalLM", "LlamForCausalLM", "_"])
def test_the_beginning_of_a_familys_name_is_no_class_of_it(cls):
    plain = {**BASE, "rope_theta": 10000.0, "architectures": [cls]}
    assert emulate(plain, runtimes=["vllm"])["vllm"].known == "unknown"
    (hit,) = [f for f in judge(plain) if f.code == "PD048"]
    assert f"architectures is {cls or 'an empty name'}, which posenc does not know" in hit.message


def test_the_word_text_may_be_missing_in_a_class():
    assert is_named_like("AriaTextModel", "aria_text", exactly=False)
    assert not is_named_like("AriForCausalLM", "aria_text", exactly=False)


@pytest.mark.parametrize("name", RUNTIMES)
def test_what_is_chosen_by_a_class_of_unknown_code_is_not_judged(name):
    plain = {**BASE, "rope_theta": 10000.0}
    by_class = name in ("vllm", "sglang", "llama.cpp")
    known = emulate({**plain, "architectures": ["FooForCausalLM"]}, runtimes=[name])[name].known
    assert known == ("unknown" if by_class else "yes")
    for right in ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "LlamaForSequenceClassification"):
        assert emulate({**plain, "architectures": [right]}, runtimes=[name])[name].known == "yes"


def test_the_class_of_a_part_is_not_looked_at():
    inner = {**BASE, "rope_theta": 10000.0, "architectures": ["VLlama3ForCausalLM"]}
    assert "PD048" not in {f.code for f in judge({**VISION, "text_config": inner})}
    wrong = {**VISION, "architectures": ["FooForConditionalGeneration"], "text_config": inner}
    assert "PD048" in {f.code for f in judge(wrong)}
