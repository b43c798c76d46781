"""Each rule fires on configs of reported failures, and is an error only if a named runtime is
affected."""

import json
import re
from pathlib import Path

import pytest

from posenc.doctor.misreadings import Case
from posenc.doctor.rules import CATCH_ALL_CODES, RULES, findings
from posenc.runtimes.files.json_object import in_json_words
from posenc.runtimes.files.source import Source
from tests.doctor.built import BUILT
from tests.doctor.judging import case, codes, judge
from tests.doctor.threads import BASE, EIGHT, ORIGINAL, SHORT, THREADS, full
from tests.runtimes.golden_cases import FOLDER, config


@pytest.mark.parametrize(
    "changes, code, severity",
    [t[1:] for t in (*THREADS, *BUILT)],
    ids=[t[0] for t in (*THREADS, *BUILT)],
)
def test_a_config_is_flagged_with_its_rule(changes, code, severity):
    found = {f.code: f for f in judge(full(changes))}
    assert code in found, sorted(found)
    assert found[code].severity == severity
    assert found[code].message and found[code].runtimes and found[code].cure


def test_thirty_threads_or_more():
    assert len({t[0] for t in THREADS}) >= 30
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", t[0]) for t in THREADS)
    assert len({t[2] for t in THREADS}) >= 20
    assert len({t[2] for t in (*THREADS, *BUILT)}) >= 29


def test_codes_run_without_a_gap():
    assert list(RULES) == [f"PD{i:03}" for i in range(1, len(RULES) + 1)]


def test_an_error_is_a_warning_where_no_named_runtime_is_concerned():
    v5_only = config("11_")
    assert codes(v5_only, severity="E") == {"PD001"}
    assert codes(v5_only, ("vllm", "sglang"), "E") == set()
    assert codes(v5_only, ("vllm", "sglang"), "W") == {"PD001"}


def test_no_error_where_the_lost_setting_is_the_default_anyway():
    plain = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert codes(plain, severity="E") == set()
    other = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    assert codes(other, severity="E") == {"PD001"}


def test_messages_carry_the_users_values():
    (laguna,) = [t[1] for t in THREADS if t[0] == "vllm-project/vllm#46280"]
    (found,) = [f for f in judge(full(laguna)) if f.code == "PD017"]
    assert "attention_factor 1" in found.message and "1.41589" in found.message
    assert found.runtimes == ("sglang", "mlx-lm", "llama.cpp")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[0-9]*.json")), ids=lambda p: p.stem)
def test_an_error_is_raised_exactly_where_a_runtime_computes_something_else(path):
    """For each runtime alone: it differs from the meaning, and only then an E names it; a refusal
    may be a warning, and contradictions and one-token bugs are errors without a difference."""
    raw = json.loads(path.read_text())["config"]
    whole = case(raw)
    for name, seen in whole.differences.items():
        found = findings(Case(whole.source, (name,)))
        errors = [f for f in found if f.severity == "E"]
        if seen & {"pairs", "frequencies", "multiplier", "scale", "layers"}:
            assert errors, f"{name} differs in {set(seen)}, and nothing says so"
        elif not seen:
            allowed = {"PD002", "PD003", "PD006", "PD014", "PD025", "PD037"}
            assert {f.code for f in errors} <= allowed, (name, errors)


SIMPLE = {**BASE, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024}


@pytest.mark.parametrize(
    "code, changes",
    [
        (
            "PD002",
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            },
        ),
        ("PD009", {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}),
        ("PD012", {ORIGINAL: 1024, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("PD014", {"max_position_embeddings": 16384, "rope_scaling": YARN}),
        (
            "PD023",
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": EIGHT,
                    "long_factor": EIGHT,
                    "factor": 1.0,
                    ORIGINAL: 4096,
                }
            },
        ),
        ("PD024", {"rope_scaling": {**YARN, "truncate": False}}),
        ("PD024", {"rope_scaling": {**YARN, "beta_fast": 64, "beta_slow": 4}}),
        (
            "PD029",
            {
                "model_type": "smollm3",
                "architectures": ["SmolLM3ForCausalLM"],
                "no_rope_layers": [1, 0, 1, 0, 1, 0],
            },
        ),
        ("PD033", {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}),
        (
            "PD037",
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": SHORT,
                    "long_factor": EIGHT,
                    "factor": 4.0,
                    ORIGINAL: 1024,
                }
            },
        ),
        ("PD040", {ORIGINAL: 1024, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("PD041", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    ],
)
def test_the_other_rules_fire(code, changes):
    assert code in codes({**SIMPLE, **changes})
    assert code not in codes(SIMPLE)


def test_what_no_rule_explains_is_told():
    glm = {
        **SIMPLE,
        "model_type": "glm",
        "architectures": ["GlmForCausalLM"],
        "partial_rotary_factor": 0.5,
    }
    assert codes(glm, severity="E") == {"PD038"}
    refused = {k: v for k, v in SIMPLE.items() if k != "attention_bias"}
    refused |= {"model_type": "glm4", "partial_rotary_factor": 0.5}
    refused["architectures"] = ["Glm4ForCausalLM"]
    (finding,) = judge(refused, ("mlx-lm",))
    assert finding.code == "PD039" and "__init__" not in finding.message
    assert finding.message == 'mlx-lm refuses the file, which does not state "attention_bias"'
    assert set(CATCH_ALL_CODES) == {"PD038", "PD039"}


def test_messages_write_null_and_true_as_json_does():
    def said(code, scaling):
        (finding,) = [f for f in judge({**SIMPLE, "rope_scaling": scaling}) if f.code == code]
        return finding.message

    assert said("PD008", {"rope_type": None}) == "rope_scaling has factor null and rope_type null"
    unread = {**YARN, "low_freq_factor": None, "scale": [True, None, "a", 1.5]}
    assert said("PD010", unread).endswith(
        "does not read: low_freq_factor null, scale [true, null, 'a', 1.5]"
    )
    assert in_json_words({"a": {"b": False}}) == "{'a': {'b': false}}"


def test_yarn_on_an_odd_number_of_channels_is_refused_in_words():
    odd = {**SIMPLE, "model_type": "stablelm", "architectures": ["StableLmForCausalLM"]}
    odd |= {"partial_rotary_factor": 0.5, "hidden_size": 1600, "num_attention_heads": 32}
    odd |= {"num_key_value_heads": 32, "rope_scaling": YARN}
    odd.pop("head_dim", None)
    found = {f.runtimes: f.message for f in judge(odd)}
    assert "25 channels rotate, an odd number" in found["transformers-4",]
    assert not any("zip" in message for message in found.values())


def test_low_precision_tables_are_found_in_the_headers(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    def judged(dtype):
        tensors = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, dtype)}
        save_file(tensors, tmp_path / "model.safetensors")
        path = tmp_path / "config.json"
        path.write_text(json.dumps(SIMPLE))
        return {f.code for f in findings(Case(Source(path, "transformers", SIMPLE, SIMPLE)))}

    assert judged(np.float16) == {"PD035"}
    assert judged(np.float32) == set()


def test_the_rules_need_no_files():
    assert not Path("no-such-folder").exists()
    assert codes(SIMPLE) == set()
