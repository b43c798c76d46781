"""--fix writes what the named runtimes read alike, proved by their emulators, or says why not."""

import json

import pytest

from posenc.doctor.command import Options
from posenc.runtimes.disagreement import disagreement, reasons_for_disagreement
from posenc.runtimes.files.source import load
from posenc.runtimes.known import RUNTIMES, emulate
from posenc.runtimes.meaning import meaning_of
from tests.doctor.judging import fix, judge, run
from tests.doctor.threads import BASE, EIGHT, ORIGINAL, SHORT
from tests.runtimes.golden_cases import FOLDER, config

ALL = tuple(RUNTIMES)
CASES = sorted(FOLDER.glob("[0-9]*.json"))
NO_STATIC_FORM = {"07", "27", "39", "56"}
"""Their frequencies change with the length."""
NO_FORM = {"62", "65"}
"""Lists of the wrong length; half a head rotated in a family that rotates whole heads."""
TWO_BASES = {"38"}
NO_TYPE = {"79"}
"""A factor, and not what it is for."""


@pytest.fixture
def written(tmp_path):
    def write(value, name="source.json"):
        path = tmp_path / name
        path.write_text(json.dumps(value))
        return load(path)

    return write


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_each_golden_case_is_fixed_or_the_reason_is_told(path, written, tmp_path):
    raw = json.loads(path.read_text())["config"]
    source, out = written(raw), tmp_path / "fixed"
    if path.name[:2] in NO_STATIC_FORM | NO_FORM | TWO_BASES | NO_TYPE:
        with pytest.raises(ValueError) as refused:
            fix(source, out, ALL)
        assert ("--length" in str(refused.value)) == (path.name[:2] in NO_STATIC_FORM)
        assert not out.exists()
        return
    meant = meaning_of(raw)
    text, code = fix(source, out, ALL)
    fixed = json.loads((out / "config.json").read_text())
    wrong = reasons_for_disagreement(fixed, meant.computed, ALL)
    assert (code == 1) == bool(wrong)
    for name in ALL:
        assert (f"not mended for {name}: " in text) == (name in wrong)
    right = [n for n in ALL if n not in wrong and emulate(fixed)[n].is_known]
    assert right
    for name in right:
        assert disagreement(emulate(fixed, None, [name])[name], meant.computed) == ""
    assert not [f for f in judge(fixed, tuple(right)) if f.severity == "E"]


@pytest.mark.parametrize("number", sorted(NO_STATIC_FORM))
def test_a_length_makes_it_static(number, written, tmp_path):
    raw, out = config(f"{number}_"), tmp_path / "fixed"
    named = ("transformers-4", "transformers-5", "vllm", "sglang")
    text, code = fix(written(raw), out, named, length=4096)
    assert code == 0, text
    fixed = json.loads((out / "config.json").read_text())
    assert reasons_for_disagreement(fixed, meaning_of(raw, 4096).computed, named) == {}
    for length in (64, 4096):
        got = emulate(fixed, length, named)
        assert len({c.rotations["all"].inv_freq for c in got.values()}) == 1


def test_most_golden_cases_are_fixed_for_four_runtimes_and_many_for_all():
    named = ("transformers-4", "transformers-5", "vllm", "sglang")
    counts = {"four": 0, "all": 0}
    from posenc.runtimes.writers.recipes import best_recipe

    for path in CASES:
        if path.name[:2] in NO_STATIC_FORM | NO_FORM:
            continue
        raw = json.loads(path.read_text())["config"]
        meant = meaning_of(raw)
        counts["four"] += not best_recipe(raw, meant, named).misreadings
        counts["all"] += not best_recipe(raw, meant, ALL).misreadings
    assert counts["four"] >= 45
    assert counts["all"] >= 28


def test_a_fix_for_named_runtimes_may_be_complete_where_one_for_all_is_not(written, tmp_path):
    source = written(config("30_"))
    named = ("transformers-4", "transformers-5", "vllm", "sglang")
    assert fix(source, tmp_path / "a", named)[1] == 0
    text, code = fix(source, tmp_path / "b", ALL)
    assert code == 1 and "not mended for llama.cpp" in text and "not mended for mlx-lm" in text


def test_nothing_is_overwritten_and_nothing_is_left(written, tmp_path):
    source = written(config("11_"))
    (tmp_path / "fixed").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        fix(source, tmp_path / "fixed", ALL)
    assert not list((tmp_path / "fixed").iterdir())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".fixed")]


def test_a_folder_keeps_its_other_files(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("11_")))
    (folder / "tokenizer.json").write_text("{}")
    fix(load(folder), tmp_path / "out", ALL)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".out")]


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/x", "..", "gone"])
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("11_")))
    index = {"weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names"):
        fix(load(folder), tmp_path / "out", ALL)
    assert not (tmp_path / "out").exists()


def test_a_wrong_recipe_fails_its_proof():
    raw = {**BASE, "rope_theta": 500000.0}
    meant = meaning_of(raw).computed
    assert reasons_for_disagreement(raw, meant, ALL) == {}
    off = {**raw, "rope_theta": 500001.0}
    assert set(reasons_for_disagreement(off, meant, ALL)) == set(ALL)
    assert set(reasons_for_disagreement(raw, meant, ALL, folded_multiplier=1.00001)) == set(ALL)
    assert set(reasons_for_disagreement(raw, meant, ALL, folded_multiplier=float("nan"))) == set(
        ALL
    )


def test_a_link_out_of_the_folder_is_not_copied(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("11_")))
    (tmp_path / "secret").write_text("secret")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(
        ValueError, match=r"tokenizer\.json: a link to .*secret, outside of the folder"
    ):
        fix(load(folder), tmp_path / "out", ALL)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_an_index_larger_than_a_config_may_be_is_read(tmp_path):
    """DeepSeek-V3's index has 9 MB."""
    from posenc.runtimes.files.json_object import MOST_BYTES_OF_CONFIG, read_json
    from posenc.runtimes.writers.copies import check_index

    shards = {f"model.layers.{i}.{'x' * 200}": "a.safetensors" for i in range(40000)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "a.safetensors").write_bytes(b"")
    assert index.stat().st_size > MOST_BYTES_OF_CONFIG
    check_index(tmp_path)
    with pytest.raises(ValueError, match="expected at most"):
        read_json(index)


@pytest.mark.parametrize(
    "raw, keys",
    [
        (
            {"dim": 64, "n_layers": 2, "n_heads": 4, "rope_theta": 5e5, "use_scaled_rope": True},
            '"rope_type": "llama3"',
        ),
        (
            {
                "dim": 64,
                "n_layers": 2,
                "n_heads": 4,
                "head_dim": 16,
                "rope_theta": 1000000.0,
                "max_position_embeddings": 8192,
                "yarn": {
                    "factor": 4,
                    "beta": 32,
                    "alpha": 1,
                    "original_max_position_embeddings": 2048,
                },
            },
            '"original_max_position_embeddings": 2048',
        ),
    ],
)
def test_makers_own_files_are_to_be_converted_first(raw, keys, tmp_path):
    path = tmp_path / "params.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="Convert the folder first") as refused:
        fix(load(path), tmp_path / "out", ALL)
    assert keys in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_copy_inside_of_its_source_leaves_the_source_as_it_was(written, tmp_path):
    source = written(
        {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "config.json"
    )
    before = source.path.read_bytes()
    fix(source, tmp_path / "fixed", ALL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "fixed"]
    assert source.path.read_bytes() == before
    assert [p.name for p in (tmp_path / "fixed").iterdir()] == ["config.json"]


DBRX = {
    "model_type": "dbrx",
    "architectures": ["DbrxForCausalLM"],
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "max_seq_len": 32768,
    "vocab_size": 100352,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
}


def test_a_base_inside_of_attn_config_is_written_where_transformers_5_looks(tmp_path):
    path, out = tmp_path / "config.json", tmp_path / "new"
    path.write_text(json.dumps(DBRX))
    named = {"for_": "transformers-4,transformers-5"}
    said, code = run(Options((path,), **named))
    assert code == 1 and "E PD057  rope_theta 500000 stands in attn_config" in said
    assert "PD004" not in said
    said, code = run(Options((path,), fix=True, out=out, **named))
    assert code == 0 and "from config.json: transformers-4, transformers-5" in said
    assert json.loads((out / "config.json").read_text())["rope_theta"] == 500000.0
    other = {**DBRX, "attn_config": {"kv_n_heads": 8}, "ffn": {"rope_theta": 500000}}
    path.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="PD057: rope_theta 500000 stands in ffn"):
        run(Options((path,), fix=True, out=tmp_path / "other", **named))


LISTS = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": EIGHT,
    "factor": 8.0,
    ORIGINAL: 512,
}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
SWITCHING = {
    "modernbert": {
        "architectures": ["ModernBertForMaskedLM"],
        "rope_parameters": {
            "full_attention": {**LISTS, "rope_theta": 160000.0},
            "sliding_attention": LOCAL,
        },
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {**LISTS, "rope_theta": 1e6},
            "sliding_attention": LOCAL,
        },
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "rope_theta": 1e6,
        "rope_scaling": LISTS,
    },
}


@pytest.mark.parametrize("length", [256, 4096])
@pytest.mark.parametrize("family", SWITCHING)
def test_a_length_makes_every_kind_of_layer_static(family, length, written, tmp_path):
    raw = {**BASE, "model_type": family, **SWITCHING[family]}
    text, code = fix(written(raw), tmp_path / "out", ("transformers-5",), length)
    assert code == 0 and "from config.json: transformers-5" in text
    fixed = json.loads((tmp_path / "out/config.json").read_text())
    meant = meaning_of(raw, length).computed
    for at in (1, 500, 513, 4096):
        assert reasons_for_disagreement(fixed, meant, ("transformers-5",), at) == {}


def test_a_copy_that_no_runtime_reads_right_is_not_written(written, tmp_path):
    raw = {
        **BASE,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": 16,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "dynamic", "factor": 8.0},
    }
    with pytest.raises(ValueError, match="no recipe is better than the file as it is"):
        fix(written(raw), tmp_path / "out", ALL, 16384)
    assert not (tmp_path / "out").exists()


NEW_ONLY = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


def test_text_and_numbers_of_other_keys_are_kept_exactly(tmp_path):
    kept = {
        "_name": "a\ud800b \udfff",
        "\udc80": 1,
        "pair": "\U0001f600",
        "digits": 10**200,
        "small": 5e-324,
        "limit": [0.0, 1e308],
        "escaped": "\\ud800",
    }
    path, out = tmp_path / "config.json", tmp_path / "out/config.json"
    path.write_text(json.dumps({**NEW_ONLY, **kept}))
    fix(load(path), out.parent, ALL)
    written = json.loads(out.read_text("utf-8"))
    assert {key: written[key] for key in kept} == kept


def test_a_number_that_no_float_holds_is_refused(tmp_path, call):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**NEW_ONLY, "other": 0}).replace('"other": 0', '"other": -1e400'))
    code, _, told = call("doctor", path, "--fix", "--out", tmp_path / "out")
    assert code == 2 and f"{path}: not valid JSON (expected a finite number, got -1e400)" in told
    assert not (tmp_path / "out").exists()


def test_a_copy_inside_of_its_source_is_not_left_behind(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NEW_ONLY))
    (tmp_path / "code.py").touch()
    said, _ = fix(load(tmp_path), tmp_path / "sub", ALL)
    assert said.endswith("\nleft behind: code.py")
