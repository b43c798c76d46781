"""Every multimodal family: a server's options carry what its file means, and a scaling beside the
language model's config is moved into it."""

import json
import shlex

import pytest

from posenc.doctor.cures.preferred import with_preferred
from posenc.runtimes.disagreement import disagreement
from posenc.runtimes.families import all_families
from posenc.runtimes.known import emulate
from posenc.runtimes.meaning import UnknownFamilyError, meaning_of
from posenc.runtimes.writers.overrides import config_after_override, override_options

WHOLES = sorted(name for name, facts in all_families().items() if "text" in facts)
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 6,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SECTIONS = [16, 24, 24]
WITHOUT_OPTIONS = {("gemma3", "sglang")}
"""SGLang never applies a scaling of Gemma 3's full layers."""


def whole(name):
    facts = all_families()[name]
    inner = (facts.get("inner") or ["text_config"])[0]
    rope = dict(YARN)
    if all_families().get(facts["text"], {}).get("transformers5", {}).get("sections"):
        rope["mrope_section"] = SECTIONS
    return inner, {
        "model_type": name,
        inner: {"model_type": facts["text"], **SIZES, "rope_scaling": rope},
    }


def meant(config):
    try:
        return meaning_of(config)
    except (UnknownFamilyError, ValueError):
        return None


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_options_carry_the_meaning_of_every_whole_that_the_server_is_known_for(server):
    carried = []
    for name in WHOLES:
        _, config = whole(name)
        meaning = meant(config)
        if meaning is None or not emulate(config, runtimes=[server])[server].is_known:
            continue
        try:
            options = override_options(config, meaning, server)
        except ValueError as error:
            refused = (name, server) in WITHOUT_OPTIONS or "refuses the file" in str(error)
            assert refused, (name, error)
            continue
        given = json.loads(shlex.split(options)[1])
        served = emulate(config_after_override(config, given, server), runtimes=[server])[server]
        assert not disagreement(served, meaning.computed), name
        carried.append(name)
    assert len(carried) >= 30 and {"qwen2_5_vl", "qwen3_vl", "llava", "internvl"} <= {*carried}


def test_a_scaling_at_the_wrong_level_of_every_whole_is_moved():
    for name in WHOLES:
        inner, config = whole(name)
        rope = config[inner].pop("rope_scaling")
        settled = with_preferred({**config, "rope_scaling": rope}, "rope_scaling")
        assert settled == {**config, inner: {**config[inner], "rope_scaling": rope}}, name
