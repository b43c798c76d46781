"""SERVE.md of an export: right lines for each runtime, and no complaint of the doctor about
them."""

import json
import re
from dataclasses import replace

import pytest
import torch

from posenc import extend as hf
from posenc.extend.export.folder import config_to_write
from posenc.extend.export.serve_commands import Export
from posenc.extend.export.serve_page import serving_page
from posenc.extend.frequency_search import Genome, apply_genome
from posenc.extend.methods import METHODS, stretch
from posenc.extend.options import Options
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.model_rotation import rotary_frequencies, settings_applied
from posenc.hf.tune_config import TuneConfig
from posenc.runtimes.known import RUNTIMES, emulate
from tests.doctor.judging import judge
from tests.hf_models import (
    LENGTH,
    ROPE,
    save,
    skip_if_yarn_is_for_all_layers,
    transformers,
)
from tests.hf_models import WORDS as DOCUMENTS

TARGET = 3 * LENGTH
QUICK = Options(windows=2, search_evaluations=0, task_trials=1)
ALL = tuple(RUNTIMES)
SEARCHED = Genome((1.0, 1.3, 2.9, 17.0), 1.07)


@pytest.fixture(scope="module", params=ROPE)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / request.param
    return load_checkpoint(save(request.param, folder))


def stretched(checkpoint, name):
    if name == "search":
        return apply_genome(checkpoint.rope_settings, SEARCHED, TARGET)
    return stretch(checkpoint.rope_settings, METHODS[name], TARGET)


def export_of(checkpoint, name):
    """What `posenc extend --method name --out` would describe."""
    if name == "yarn" and any(setting.layer_type for setting in checkpoint.rope_settings):
        skip_if_yarn_is_for_all_layers()
    keeps = name != "search" and METHODS[name].keeps_maximum
    with settings_applied(
        checkpoint.model, stretched(checkpoint, name), LENGTH if keeps else TARGET
    ):
        saved = json.loads(json.dumps(checkpoint.config.to_dict(), default=str))
    saved["architectures"] = [type(checkpoint.model).__name__]
    recipe, meaning = config_to_write(saved, TARGET)
    assert meaning is not None
    return Export(
        checkpoint.folder,
        "out",
        name,
        LENGTH,
        TARGET,
        recipe,
        meaning,
        saved,
        checkpoint.folder,
        checkpoint.raw_config,
    )


def correct_runtimes(export):
    """Return the names of the runtimes that know the model and compute the right rotation from the
    folder."""
    computed_by_name = emulate(export.recipe.config)
    names = []
    for name in RUNTIMES:
        if computed_by_name[name].is_known and name not in export.recipe.misreadings:
            names.append(name)
    return tuple(names)


def errors(config, named):
    return [f for f in judge(config, named) if f.severity == "E"] if named else []


@pytest.mark.parametrize("name", [*METHODS, "search"])
def test_the_doctor_raises_no_error_for_the_runtimes_that_are_named_right(checkpoint, name):
    kind = checkpoint.config.model_type
    if (kind, name) == ("phi3", "dynamic") or (name == "search" and kind in ("gpt_neox",)):
        pytest.skip("no config of this family can say so, or its head has other pairs")
    export = export_of(checkpoint, name)
    assert "transformers-5" in correct_runtimes(export)
    assert errors(export.recipe.config, correct_runtimes(export)) == []
    said = serving_page(export)
    for runtime in correct_runtimes(export):
        assert re.search(rf"^\| {re.escape(runtime)} \|.*\| as meant \|$", said, re.M)
    for runtime, why in export.recipe.misreadings.items():
        assert why.removeprefix("refuses: ") in said.partition("## ")[0], runtime


def test_what_only_transformers_5_reads_is_an_error(checkpoint):
    """The planted case: the same settings in the newer dialect alone."""
    export = export_of(checkpoint, "yarn")
    if "transformers-4" not in correct_runtimes(export):
        pytest.skip("it does not read this family's yarn in any spelling")
    newer = {k: v for k, v in export.recipe.config.items() if k not in ("rope_theta",)}
    newer.pop("rope_scaling", None)
    newer.pop("rotary_emb_base", None)
    assert errors(newer, ("transformers-4",))


@pytest.mark.parametrize("name", ["ntk", "by-parts", "yarn", "search"])
def test_most_methods_reach_every_runtime_of_a_llama_but_for_what_is_told(name, tmp_path):
    export = export_of(load_checkpoint(save("llama", tmp_path / "llama")), name)
    missing = {
        "ntk": set(),
        "yarn": set(),
        "by-parts": {"llama.cpp"},
        "search": {"llama.cpp", "mlx-lm"},
    }[name]
    assert set(ALL) - set(correct_runtimes(export)) == missing
    said = serving_page(export)
    if "mlx-lm" in missing:
        assert "--for mlx-lm --fix --out NEW` (longrope with short = long, the temperature" in said
    if "llama.cpp" in missing:
        assert "posenc doctor model.gguf --like out/config.json --fix --out fixed.gguf" in said
    else:
        assert "--fix" not in said


def blocks(said, title, language):
    """The code under a heading."""
    section = said.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)\n```", section, re.S)


@pytest.mark.parametrize("name", ["ntk", "by-parts", "yarn", "linear", "llama3"])
def test_the_lines_for_transformers_5_do_the_same_to_the_original_folder(checkpoint, name):
    said = serving_page(export_of(checkpoint, name))
    _, code = blocks(said, "transformers 5", "python")
    names: dict = {}
    transformers.utils.logging.set_verbosity_error()
    exec(code, names)
    with settings_applied(checkpoint.model, stretched(checkpoint, name), TARGET):
        wanted = {k: v[0].clone() for k, v in rotary_frequencies(checkpoint.model).items()}
    got = rotary_frequencies(names["model"])
    assert got.keys() == wanted.keys()
    for kind, inv_freq in wanted.items():
        torch.testing.assert_close(got[kind][0], inv_freq, rtol=1e-6, atol=0)


def test_the_lines_for_transformers_4_set_what_a_loaded_gpt_neox_reads(tmp_path):
    """Its class copies rotary_emb_base to rope_theta when it is built, and rotates by that."""
    said = serving_page(export_of(load_checkpoint(save("gpt_neox", tmp_path / "neox")), "ntk"))
    _, code = blocks(said, "transformers 4", "python")
    assert re.findall(r"config.(rope_theta|rotary_emb_base) = (\S+)", code) == [
        ("rotary_emb_base", "90000.0"),
        ("rope_theta", "90000.0"),
    ]


def test_llama_cpp_takes_what_its_command_line_knows(tmp_path):
    llama = load_checkpoint(save("llama", tmp_path / "llama"))
    said = {n: serving_page(export_of(llama, n)) for n in ("ntk", "linear", "yarn", "by-parts")}
    assert "--rope-freq-base 43267.4871" in said["ntk"]
    assert "--rope-scaling linear --rope-scale 3" in said["linear"]
    assert "--rope-scaling yarn --rope-scale 3 --yarn-orig-ctx 64" in said["yarn"]
    assert "not possible, its options cover only a base, linear and yarn" in said["by-parts"]


@pytest.mark.parametrize("tune", [None, TuneConfig(1, batch=1)])
def test_serve_md_stands_beside_the_export(tune, tmp_path):
    folder = save("llama", tmp_path / "llama")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": LENGTH}))
    options = replace(QUICK, tune=tune)
    hf.extend(
        folder,
        TARGET,
        DOCUMENTS,
        method="ntk",
        out=tmp_path / "out",
        options=options,
        as_bytes=True,
    )
    said = (tmp_path / "out/SERVE.md").read_text()
    assert said.startswith("# Serve out\n\nIt reads 192 tokens, 64 before it was stretched.")
    assert "vllm serve out --max-model-len 192" in said
    assert "PARAMETER num_ctx 192" in said
    assert ("without this copy" in said) is (tune is None)
    kept = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert kept["model_max_length"] == TARGET


def test_dual_chunk_attention_goes_to_the_key_that_vllm_reads(tmp_path):
    folder, out = save("qwen2", tmp_path / "qwen2"), tmp_path / "out"
    hf.extend(folder, TARGET, DOCUMENTS, method="dual-chunk", out=out, options=QUICK, as_bytes=True)
    config = json.loads((out / "config.json").read_text())
    assert config["dual_chunk_attention_config"] == {"chunk_size": 48, "local_size": 4}
    assert config["max_position_embeddings"] == TARGET
    said = (out / "SERVE.md").read_text()
    assert "VLLM_ATTENTION_BACKEND=DUAL_CHUNK_FLASH_ATTN vllm serve out" in said
    codes = {f.code: f.runtimes for f in judge(config)}
    assert codes["PD042"] == ALL


NO_DUAL_CHUNK = {
    "not for a llama model": ("llama", {}, None),
    "the plain rotation only": (
        "qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        None,
    ),
    "nothing to tune for": ("qwen2", {}, TuneConfig(1)),
}


@pytest.mark.parametrize("message", NO_DUAL_CHUNK)
def test_dual_chunk_is_refused_where_vllm_would_not_run_it(message, tmp_path):
    family, more, tune = NO_DUAL_CHUNK[message]
    folder = save(family, tmp_path / family, **more)
    with pytest.raises(ValueError, match=message):
        hf.extend(
            folder,
            TARGET,
            DOCUMENTS,
            method="dual-chunk",
            out=tmp_path / "out",
            options=replace(QUICK, tune=tune),
            as_bytes=True,
        )
    assert not (tmp_path / "out").exists()


def test_a_model_that_the_emulators_do_not_know_is_said_to_be_unknown(tmp_path):
    from tests.extend.test_extend import TABLES

    folder = save("gpt2", tmp_path / "gpt2", vocab_size=257, **TABLES["gpt2"])
    hf.extend(
        folder,
        TARGET,
        DOCUMENTS,
        method="tile",
        out=tmp_path / "out",
        options=QUICK,
        as_bytes=True,
    )
    said = (tmp_path / "out/SERVE.md").read_text()
    assert "posenc has not read" in said
    assert "vllm" not in said


@pytest.mark.parametrize(
    "family, keys",
    [
        ("granite", {"attention_multiplier": 0.0078125}),
        ("deepseek_v3", {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16}),
        ("gemma2", {"num_hidden_layers": 46, "query_pre_attn_scalar": 144, "hidden_size": 576}),
    ],
)
def test_a_scale_of_the_familys_own_needs_no_edit(family, keys):
    from posenc.runtimes.known.llama_cpp import compute_from_metadata
    from posenc.runtimes.known.llama_cpp_converter import converted_metadata
    from posenc.runtimes.meaning import meaning_of

    config = {
        "model_type": family,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 8,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        **keys,
    }
    meaning = meaning_of(config)
    got = compute_from_metadata(converted_metadata(meaning.model), None).softmax_scale
    assert got == pytest.approx(meaning.computed.softmax_scale)
