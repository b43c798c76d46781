"""Overrides of a model of several modalities count inside of its language model's config only."""

import json
from collections.abc import Mapping

import pytest

from posenc.runtimes import families
from posenc.runtimes.config_model import (
    language_model_key,
    language_model_key_after_loading,
    model_of,
)
from posenc.runtimes.families import all_families
from posenc.runtimes.known import RUNTIMES, emulate
from posenc.runtimes.meaning import UnknownFamilyError, meaning_of
from posenc.runtimes.writers.overrides import (
    check_override,
    config_after_override,
    override_options,
)
from tests.runtimes.golden_cases import FOLDER

RECORDED = json.loads((FOLDER / "_override_forms.json").read_text("utf-8"))
SIZES, ROWS = RECORDED["sizes"], RECORDED["rows"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
YARN |= {"rope_theta": 1e6}
STRETCH = {"rope_parameters": YARN, "max_position_embeddings": 32768}


def file_of(row):
    """The config.json on which a row was recorded."""
    text = {**SIZES, **row["rope"]}
    if "inner" not in row:
        return {"model_type": row["family"], **text}
    named = {"model_type": row["inner"]} if row["inner"] else {}
    return {"model_type": row["family"], "text_config": {**named, **text}}


def kinds_of(rope):
    """A rope dict by kind of layer, without the older name of the type and without nulls."""
    inner = {k: v for k, v in rope.items() if isinstance(v, Mapping)}
    return {
        kind: {
            k: v
            for k, v in p.items()
            if k != "type" and v is not None and (k, v) != ("partial_rotary_factor", 1.0)
        }
        for kind, p in (inner or {"all": rope}).items()
    }


def typed(rope):
    """SGLang reads `type` where there is no rope_type, layers/rotary_embedding/factory.py."""
    return {"rope_type": rope["type"], **rope} if "type" in rope else rope


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_overrides_are_set_as_the_server_s_own_code_sets_them(server):
    compared = 0
    for row in ROWS:
        if row["server"] != server:
            continue
        config = file_of(row)
        if "error" in row:  # two types that contradict each other, or no such config
            compared += 1
            if "Found conflicts" in row["error"]:
                served = config_after_override(config, row["given"], server)
                assert row["error"][:20] in str(RUNTIMES[server](served).error)
            else:
                with pytest.raises(ValueError, match="would stop there"):
                    check_override(config, row["given"], server)
            continue
        served = config_after_override(config, row["given"], server)
        place = served[language_model_key(served)] if language_model_key(served) else served
        assert place["max_position_embeddings"] == row["max_position_embeddings"], row
        theirs = row["rope_parameters"]
        ours = kinds_of(place["rope_parameters"])
        theirs = kinds_of(typed(theirs) if server == "sglang" else theirs)
        missing = ours.keys() - theirs.keys()
        if missing and "all" not in missing:  # a kind of layer is left without a dict
            assert RUNTIMES[server](served).error is not None, row
        else:
            assert ours == theirs, row
        compared += 1
    assert compared > 150


COMPOSITE = [name for name, facts in all_families().items() if "text" in facts]


def config_of(family):
    """A config of several modalities, plain, with sizes that every family takes."""
    facts = all_families()[family]
    text = {**SIZES, "rope_theta": 1e6}
    if facts.get("any"):
        text["model_type"] = facts["text"]
    return {"model_type": family, facts.get("inner", ["text_config"])[0]: text}


def known(family):
    try:
        meaning_of(config_of(family))
    except ValueError:
        return []
    answers = emulate(config_of(family), runtimes=("vllm", "sglang"))
    return [(family, server) for server, answer in answers.items() if answer.is_known]


KNOWN = [each for family in COMPOSITE for each in known(family)]


def test_the_families_of_several_modalities_that_servers_are_known_to_have_are_many():
    assert len({family for family, _ in KNOWN}) >= 25


def stretched(config, rope):
    key = language_model_key(config)
    return {**config, key: {**config[key], "rope_scaling": rope, "max_position_embeddings": 32768}}


@pytest.mark.parametrize("family, server", KNOWN)
def test_the_printed_line_is_one_that_the_server_reads(family, server, tmp_path, call):
    plain = config_of(family)
    if (
        language_model_key(plain)
        and all_families()[family]["text"] == "gemma3_text"
        and server == "sglang"
    ):
        pytest.skip("SGLang scales nothing in Gemma 3")
    rope = {k: v for k, v in YARN.items() if k != "rope_theta"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(stretched(plain, rope)))
    code, out, told = call("doctor", path, "--overrides", server)
    if code != 0:
        assert "sglang cannot" in told or "vllm cannot" in told
        return
    given = json.loads(out.split("'")[1])
    assert set(given) == {language_model_key_after_loading(plain)}
    given[language_model_key_after_loading(plain)]["max_position_embeddings"] = 32768
    path.write_text(json.dumps(plain))  # the same line for the file without a scaling
    arguments = ("doctor", path, "--for", server, "--length", 32768, "--with")
    code, out, told = call(*arguments, json.dumps(given))
    if (family, server) != ("gemma4", "sglang"):  # its full layers have another share without one
        assert code == 0 and "as meant" in out and " 32768" in out, out + told
    top = given[language_model_key_after_loading(plain)]
    code, out, told = call(*arguments, json.dumps(top))
    assert code == 1 and "PD032" in out and "as meant" not in out, out + told
    assert "stand at the top level, where no server looks for them" in " ".join(out.split())


def test_a_flat_file_has_the_language_model_s_config_after_loading():
    flat = {"model_type": "qwen2_vl", **SIZES, "rope_theta": 1e6}
    assert (language_model_key(flat), language_model_key_after_loading(flat)) == ("", "text_config")
    assert '{"text_config": {"rope_parameters"' in override_options(flat, meaning_of(flat), "vllm")
    unknown = {"model_type": "mllama", "text_config": {**SIZES, "rope_theta": 1e6}}
    with pytest.raises(UnknownFamilyError, match="vllm computes for mllama_text_model"):
        override_options(unknown, meaning_of(unknown), "vllm")
    top = config_after_override(flat, STRETCH, "vllm")
    assert top["rope_parameters"]["rope_type"] == "default"
    assert top["max_position_embeddings"] == 8192
    inside = config_after_override(flat, {"text_config": STRETCH}, "vllm")
    assert inside["rope_parameters"]["rope_type"] == "yarn"
    assert inside["max_position_embeddings"] == 32768


def test_another_name_of_the_inner_config_is_printed(monkeypatch):
    """A planted family whose language model is in language_config."""
    planted = {**all_families()["llava"], "inner": ["language_config"]}
    table = {**all_families(), "planted_vl": planted}
    monkeypatch.setattr(families, "all_families", lambda: table)
    config = {
        "model_type": "planted_vl",
        "language_config": {
            "model_type": "llama",
            **SIZES,
            "rope_theta": 1e6,
            "rope_scaling": YARN,
            "max_position_embeddings": 32768,
        },
    }
    for server in ("vllm", "sglang"):
        given = json.loads(override_options(config, meaning_of(config), server).split("'")[1])
        assert set(given) == {"language_config"}


def test_what_sglang_replaces_has_no_base_of_the_file(tmp_path, call):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("llava")))
    rope = {k: v for k, v in YARN.items() if k != "rope_theta"}
    given = json.dumps({"text_config": {"rope_parameters": rope}})
    code, out, _ = call("doctor", path, "--for", "sglang", "--with", given)
    assert code == 1 and "has no rope_theta, and sglang replaces the dict" in out
    code, out, _ = call("doctor", path, "--for", "vllm", "--with", given)
    assert code == 0 and "as meant" in out


@pytest.mark.parametrize("inner", [True, False])
def test_a_base_on_its_own_has_no_effect(inner, tmp_path, call):
    path = tmp_path / "config.json"
    config = config_of("llava") if inner else {"model_type": "llama", **SIZES, "rope_theta": 1e6}
    path.write_text(json.dumps(config))
    given = {"text_config": {"rope_theta": 5e6}} if inner else {"rope_theta": 5e6}
    for server in ("vllm", "sglang"):
        code, out, _ = call("doctor", path, "--for", server, "--with", json.dumps(given))
        assert code == 1 and "the override rope_theta 5000000.0 has no effect" in out
        assert "as meant" not in out


@pytest.mark.parametrize(
    "given, words",
    [
        ({"text_config": {"rope_theta": 1e6}}, "llama has no text_config: vllm would stop there"),
        ({"thinker_config": {}}, "llama has no thinker_config"),
        ({"text_config": 5}, "text_config must be an object, got 5"),
        ({"text_config": None}, "text_config must be an object, got None"),
    ],
)
def test_what_a_language_model_has_no_place_for_is_refused(given, words, tmp_path, call):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SIZES, "rope_theta": 1e6}))
    code, out, told = call("doctor", path, "--with", json.dumps(given))
    assert (code, out, told.count("\n")) == (2, "", 1) and words in told


def test_sections_are_part_of_every_line():
    """M-RoPE's sections go with SGLang's replaced dict, and with plain RoPE."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1]}
    rope |= {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
    text = {**SIZES, "head_dim": 16, "rope_parameters": rope}
    config = {"model_type": "qwen3_5", "text_config": text}
    yarn = {**rope, **YARN, "rope_theta": 1e7}
    long = {**text, "rope_parameters": yarn, "max_position_embeddings": 32768}
    for raw in (config, {**config, "text_config": long}):
        for server in ("vllm", "sglang"):
            given = json.loads(override_options(raw, meaning_of(raw), server).split("'")[1])
            got = given["text_config"]["rope_parameters"]
            assert got["mrope_section"] == [2, 1, 1] and got["mrope_interleaved"] is True
            assert got["partial_rotary_factor"] == 0.5
    assert model_of(config).model_type == "qwen3_5_text"
