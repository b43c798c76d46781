"""Versions of a runtime: facts that changed are those that the released versions computed."""

import json
from pathlib import Path

import pytest

from posenc.runtimes.config_model import model_of
from posenc.runtimes.families import RUNTIME_FILES, all_families
from posenc.runtimes.known import RELEASES, RUNTIMES, emulate
from posenc.runtimes.known.releases import facts_in_version, is_recorded, version_numbers

PRINTED = json.loads(Path(__file__).with_name("versions.json").read_text(encoding="utf-8"))
"""What each transformers' modules had, from `python -m tests.doctor.oracles.printed`."""


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: f"{row['family']} {row['version']}")
def test_a_version_computes_what_its_modules_did(row):
    config = {**row["config"], "model_type": row["family"]}
    got = emulate(config, None, ["transformers-5"], {"transformers-5": row["version"]})
    got = got["transformers-5"]
    if row["kinds"] is None:
        assert got.known == "yes" and got.error
        return
    assert got.error is None
    for kind, (pairs, first, multiplier) in row["kinds"].items():
        (layer,) = got.rotations_of_kind(kind)
        assert len(layer.inv_freq) == pairs
        assert layer.inv_freq[1:4] == pytest.approx(first, rel=2e-6)
        assert layer.multiplier == pytest.approx(multiplier, rel=2e-6)


def test_every_recorded_change_is_held_to_two_versions_that_differ():
    for name, facts in all_families().items():
        for change in (facts.get("transformers5") or {}).get("before", ()):
            if change.keys() - {"until", "unread"} and change.get("unread", True):
                until = version_numbers(change["until"])
                rows = [row for row in PRINTED if row["family"] == name]
                sides = {version_numbers(row["version"]) < until for row in rows}
                assert sides == {True, False}, name


def test_a_family_is_missing_before_its_first_version():
    facts = all_families()["gemma4_text"]["transformers5"]
    assert facts_in_version(facts, "5.4") is None and facts_in_version(facts, "5.5") is not None
    got = RUNTIMES["transformers-5"]({"model_type": "gemma4_text"}, None, "5.4.0")
    assert got.known == "no model"


@pytest.mark.parametrize("runtime", RELEASES)
def test_a_version_without_a_record_is_never_judged(runtime):
    first, last, read, _ = RELEASES[runtime]
    assert all(is_recorded(runtime, version) for version in (first, last, read))
    old, new = ("b1", "b99999") if first.startswith("b") else ("0.1", "99.0")
    for version in (old, new):
        got = RUNTIMES[runtime]({"model_type": "llama"}, None, version)
        assert got.known == "unknown" and version in str(got.error)


def test_what_a_version_was_not_read_with_is_unknown():
    facts = all_families()["gemma4_text"][RUNTIME_FILES["transformers-5"]]
    assert facts["before"][0]["unread"][0] == "yarn"
    old = {"transformers-5": "5.16"}
    plain = {"model_type": "gemma4_text"}
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    nested = {**plain, "rope_parameters": {"full_attention": yarn}}
    assert emulate(plain, None, old, old)["transformers-5"].known == "yes"
    assert emulate(nested, None, old, old)["transformers-5"].known == "unknown"
    assert emulate(nested, None, old)["transformers-5"].known == "yes"


def test_a_type_that_only_5_4_refuses_is_unknown_there():
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    for name in ("dinov3_vit", "wav2vec2-bert"):
        config = {"model_type": name, "position_embeddings_type": "rotary", **linear}
        for version, known in (("5.4", "unknown"), ("5.5", "yes")):
            assert RUNTIMES["transformers-5"](config, None, version).known == known


@pytest.mark.parametrize(
    ("config", "pairs", "second"),
    [
        ({"model_type": "bamba"}, 32, 0.7498942),
        ({"model_type": "bamba", "partial_rotary_factor": 1.0}, 64, 0.8659643),
        ({"model_type": "dbrx", "attn_config": {"rope_theta": 500000.0}}, 64, 0.8146172),
        ({"model_type": "dbrx", "rope_theta": 300000.0}, 64, 0.8659643),
        ({"model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8}, 128, 0.9305720),
    ],
)
def test_transformers_4_computes_what_its_modules_did(config, pairs, second):
    """Printed by the modules of transformers 4.57.3."""
    got = RUNTIMES["transformers-4"](config)
    assert len(got.rotations["all"].inv_freq) == pairs
    assert got.rotations["all"].inv_freq[1] == pytest.approx(second, rel=2e-6)


@pytest.mark.parametrize("name", ["glm4_moe_lite", "qwen3", "deepseek_v3"])
def test_a_null_head_dim_beside_a_number_of_the_class_is_unknown(name):
    """transformers 5.4 on refuses it in most families; the versions before took other widths."""
    for config in ({"model_type": name, "head_dim": None}, {"model_type": name}):
        known = {got.known for got in emulate(config).values()} - {"no model"}
        assert ("unknown" in known and "yes" not in known) is ("head_dim" in config)


def test_zamba_2_stretches_its_base_for_long_contexts_in_transformers_4_only():
    """The numbers are those of Zamba2RotaryEmbedding in 4.57.3."""
    config = {
        "model_type": "zamba2",
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "hybrid"],
        "use_mem_rope": True,
        "use_long_context": True,
        "rope_theta": 10000,
    }
    known = emulate(config)
    stretched = known["transformers-4"].rotations["all"].inv_freq
    assert stretched[:3] == pytest.approx([1.0, 0.701242208480835, 0.4917406737804413], rel=1e-6)
    assert stretched[-1] == pytest.approx(1.666901880525984e-05, rel=1e-6)
    assert known["transformers-5"].rotations["all"].inv_freq[1] == pytest.approx(10000 ** (-2 / 64))


MSCALES = {"type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("deepseek_v2", MSCALES),
        ("minicpm3", MSCALES),
        ("mistral4", MSCALES),
        ("phimoe", {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.2}),
    ],
)
def test_what_5_15_changed_is_not_said_of_releases_before(family, scaling):
    """Until then, asked 5.12.1 says, MLA's softmax had no temperature in three families, and
    Phi-3.5-MoE took its long list beyond the original length."""
    scaling = {**scaling, "original_max_position_embeddings": 4096}
    config = {"model_type": family, "rope_theta": 10000.0, "rope_scaling": scaling}
    runtime = RUNTIMES["transformers-5"]
    assert runtime(config, None, "5.14").known == "unknown"
    assert runtime(config, None, "5.15").known == "yes"


@pytest.mark.parametrize("family", ["cohere2", "exaone4", "gemma3_text"])
@pytest.mark.parametrize(
    ("period", "error"),
    [
        ("LLLG", "TypeError"),
        (None, "TypeError"),
        (0, "ZeroDivisionError"),
        (3, None),
        (-3, None),
        (True, None),
    ],
)
def test_transformers_4_counts_kinds_of_layers_by_a_period(family, period, error):
    """As building the models of transformers 4.57.3 did, which has no layer_types to read here."""
    config = {
        "model_type": family,
        "num_hidden_layers": 7,
        "sliding_window": 16,
        "sliding_window_pattern": period,
    }
    got = RUNTIMES["transformers-4"](config, None)
    if error:
        assert error in got.error
    else:
        assert got.error is None
        full = [i for i in range(7) if (i + 1) % period == 0]
        kinds = model_of(config).layer_types
        assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == full
    listed = {**config, "layer_types": ["full_attention"] * 7}
    assert RUNTIMES["transformers-4"](listed, None).error is None


def test_exaone_4_without_a_window_needs_its_kinds_in_transformers_4():
    """Its class counts by 0 then: ZeroDivisionError in 4.57.3, whatever the period is."""
    config = {"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": None}
    for period in (3, "LLLG"):
        got = RUNTIMES["transformers-4"]({**config, "sliding_window_pattern": period}, None)
        assert "ZeroDivisionError" in got.error
    with_kinds = {**config, "layer_types": ["full_attention"] * 4}
    assert RUNTIMES["transformers-4"](with_kinds, None).error is None
