"""GGUF files: what their keys mean, what is wrong with them, and an edited copy."""

import json

import numpy as np
import pytest

from posenc.doctor.command import Options
from posenc.doctor.misreadings import Case
from posenc.doctor.rules import findings
from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import ComputedPositions, LayerRotation
from posenc.runtimes.config_model import model_of
from posenc.runtimes.files.gguf_metadata import KEY_OF_FIELD, read_metadata
from posenc.runtimes.files.source import load
from posenc.runtimes.known.llama_cpp import compute_from_metadata
from posenc.runtimes.known.llama_cpp_converter import converted_metadata
from posenc.runtimes.writers import gguf_edit
from tests.doctor.judging import fix, run
from tests.doctor.threads import BASE, EIGHT
from tests.runtimes.golden_cases import config

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
ALL = ("llama.cpp",)


def write(path, architecture="llama", tensors=None, **keys):
    """A GGUF file without a vocabulary, with these rope keys."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_block_count(2)
    for key, value in keys.items():
        name = f"{architecture}.rope.{key.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    for name, values in {"token_embd.weight": np.ones((3, 64)), **(tensors or {})}.items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


YARN = {
    "freq_base": 10000.0,
    "scaling__type": "yarn",
    "scaling__factor": 4.0,
    "scaling__original_context_length": 1024,
}


def codes(path):
    return [f.message for f in findings(Case(load(path), ALL)) if f.code == "PD034"]


def test_the_keys_are_read(tmp_path):
    meta = read_metadata(write(tmp_path / "a.gguf", **YARN))
    assert (meta.architecture, meta.head_dim, meta.dimension_count) == ("llama", 16, 16)
    assert (meta.freq_base, meta.original_length, meta.context_length) == (10000, 1024, 4096)
    got = compute_from_metadata(meta, None).rotations["all"]
    assert got.inv_freq == pytest.approx(float64_formulas.yarn_frequencies(16, 10000.0, 4.0, 1024))
    assert got.multiplier == pytest.approx(1.1386294)


@pytest.mark.parametrize(
    "keys, words",
    [
        ({**YARN, "scaling__yarn_beta_fast": 64.0}, "yarn_beta_fast is 64"),
        ({**YARN, "scaling__yarn_attn_factor": 1.0}, "yarn_attn_factor is 1"),
        ({**YARN, "scaling__yarn_ext_factor": 4.0}, "yarn_ext_factor is 4"),
        ({**YARN, "scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"freq_base": 1e4, "scaling__type": "longrope"}, "no rope_factors_long.weight"),
    ],
)
def test_keys_that_libllama_does_not_read(tmp_path, keys, words):
    path = write(tmp_path / "a.gguf", **keys)
    assert any(words in message for message in codes(path))
    assert run(Options((path,)))[1] == 1
    assert run(Options((path,), for_="vllm"))[1] == 3  # it reads no such file


def test_a_sound_file_has_nothing_to_complain_about(tmp_path):
    assert codes(write(tmp_path / "a.gguf", **YARN)) == []
    freqs = {"rope_freqs.weight": np.array(EIGHT)}
    path = write(tmp_path / "b.gguf", freq_base=1e4, tensors=freqs)
    text, code = run(Options((path,), as_json=True))
    assert code == 0
    layer = json.loads(text)["runtimes"]["llama.cpp"]["layers"]["all"]
    assert layer["inv_freq"] == pytest.approx(
        [p / f for p, f in zip(float64_formulas.unscaled_frequencies(16, 1e4), EIGHT, strict=True)]
    )


def test_tensors_that_an_architecture_refuses(tmp_path):
    freqs = {"rope_freqs.weight": np.array(EIGHT)}
    path = write(tmp_path / "a.gguf", "qwen2", freq_base=1e6, tensors=freqs)
    assert any("loads no rope_freqs" in m for m in codes(path))
    found = [f for f in findings(Case(load(path), ALL)) if "loads no rope_freqs" in f.message]
    assert all("does not load the file" in f.cure and "{arch}" not in f.cure for f in found)
    path = write(tmp_path / "b.gguf", freq_base=1e6, dimension_count=8)
    assert any("invalid n_rot" in m for m in codes(path))


def test_ignored_keys_become_ones_that_are_read(tmp_path):
    keys = {
        **YARN,
        "scaling__yarn_beta_fast": 64.0,
        "scaling__yarn_beta_slow": 4.0,
        "scaling__yarn_attn_factor": 1.0,
    }
    path = write(tmp_path / "a.gguf", **keys)
    text, code = fix(load(path), tmp_path / "b.gguf", ALL)
    assert code == 0 and "rope_freqs.weight" in text and "- llama.rope.scaling.type" in text
    meta = read_metadata(tmp_path / "b.gguf")
    got = compute_from_metadata(meta, None).rotations["all"]
    assert got.inv_freq == pytest.approx(
        float64_formulas.yarn_frequencies(16, 1e4, 4.0, 1024, 64.0, 4.0), rel=1e-6
    )
    assert got.multiplier == pytest.approx(1.0, rel=1e-6)
    assert codes(tmp_path / "b.gguf") == []
    tensors = {t.name: t for t in gguf.GGUFReader(str(tmp_path / "b.gguf")).tensors}
    assert set(tensors) == {"rope_freqs.weight", "token_embd.weight"}
    np.testing.assert_array_equal(tensors["token_embd.weight"].data, np.ones((3, 64)))


def test_a_temperature_alone_keeps_yarn(tmp_path):
    path = write(tmp_path / "a.gguf", "qwen2", **{**YARN, "scaling__yarn_attn_factor": 1.0})
    fix(load(path), tmp_path / "b.gguf", ALL)
    meta = read_metadata(tmp_path / "b.gguf")
    assert meta.scaling_type == "yarn" and meta.rope_freqs is None
    assert meta.attn_factor == pytest.approx(1 / float64_formulas.yarn_attention_factor(4.0))
    assert compute_from_metadata(meta, None).rotations["all"].multiplier == pytest.approx(1.0)


@pytest.mark.parametrize("number", ["30", "31", "34", "74", "82", "12", "18", "68", "42"])
def test_a_file_gets_a_configs_positions(tmp_path, number):
    raw = config(f"{number}_")
    path = write(tmp_path / "a.gguf", freq_base=10000.0)
    like = tmp_path / "config.json"
    like.write_text(json.dumps(raw))
    text, code = run(Options((path,), fix=True, out=tmp_path / "b.gguf", like=like))
    assert code == 0, text
    text, code = run(Options((tmp_path / "b.gguf", like)))
    assert code == 0, text


def test_what_an_architecture_cannot_is_said(tmp_path):
    like = tmp_path / "config.json"
    like.write_text(json.dumps(config("30_")))
    path = write(tmp_path / "a.gguf", "qwen2", freq_base=10000.0)
    with pytest.raises(ValueError, match="loads no rope_freqs"):
        run(Options((path,), fix=True, out=tmp_path / "b.gguf", like=like))
    assert not (tmp_path / "b.gguf").exists()


def test_a_failed_proof_leaves_nothing(tmp_path):
    path = write(tmp_path / "a.gguf", freq_base=10000.0)
    wanted = ComputedPositions(
        None, {"all": LayerRotation(float64_formulas.unscaled_frequencies(16, 20000.0))}, 16**-0.5
    )
    edit = gguf_edit.Edit({"freq_base": 30000.0})
    with pytest.raises(ValueError, match="proof failed"):
        gguf_edit.write_edited_copy(path, tmp_path / "b.gguf", edit, wanted)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_damaged_files_are_refused(tmp_path):
    good = write(tmp_path / "a.gguf", **YARN).read_bytes()
    for name, data in {
        "cut": good[:90],
        "magic": b"GGUF" + b"\xff" * 60,
        "none": b"GGUF",
        "count": good[:8] + (2**40).to_bytes(8, "little") + good[16:],
    }.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"damaged|has no"):
            load(path)


def test_a_file_cut_anywhere_is_refused_in_one_sentence(tmp_path):
    good = write(tmp_path / "a.gguf", **YARN)
    data, path = good.read_bytes(), tmp_path / "cut.gguf"
    whole = 0
    for size in range(len(data)):
        path.write_bytes(data[:size])
        try:
            load(path)
        except ValueError as refused:
            assert "\n" not in str(refused), size
        else:
            whole += 1
    assert whole <= 64  # only the padding at the end may be missing


def test_the_converters_keys_are_the_recorded_ones():
    """metadata of the golden cases: what the real converter wrote."""
    from tests.runtimes.golden_cases import cells

    checked = 0
    for cell in cells():
        recorded = cell.recorded.get("metadata")
        if cell.runtime != "llama.cpp" or recorded is None:
            continue
        meta = converted_metadata(model_of(cell.config))
        assert meta.architecture == recorded["general.architecture"]
        ours = {
            f"{meta.architecture}.{KEY_OF_FIELD[name]}": getattr(meta, name)
            for name in meta.given_fields & KEY_OF_FIELD.keys()
        }
        for key, value in recorded.items():
            if key in ours and not isinstance(value, str):
                assert ours[key] == pytest.approx(value, rel=1e-6), (cell.case, key)
            elif ".rope.scaling." in key or ".freq_base" in key:
                assert ours.get(key) == value, (cell.case, key)
        assert not {k for k in ours if ".rope.scaling." in k} - set(recorded), cell.case
        checked += 1
    assert checked > 45


def test_quantised_tensors_are_copied_as_they_are(tmp_path):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_block_count(1)
    writer.add_rope_freq_base(10000.0)
    blocks = gguf.quants.quantize(
        np.linspace(-1, 1, 64 * 4, dtype=np.float32).reshape(4, 64), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    like = tmp_path / "config.json"
    like.write_text(json.dumps({**BASE, "rope_theta": 500000.0}))
    run(Options((path,), fix=True, out=tmp_path / "b.gguf", like=like))
    (tensor,) = gguf.GGUFReader(str(tmp_path / "b.gguf")).tensors
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0
    np.testing.assert_array_equal(tensor.data, blocks)


UNUSABLE = {
    "zeros": ({"freq_base": 10000.0, "tensors": {"rope_freqs.weight": [0.0] * 8}}, 2),
    "nan": ({"freq_base": 10000.0, "tensors": {"rope_freqs.weight": [float("nan")] * 8}}, 2),
    "six": ({"freq_base": 10000.0, "tensors": {"rope_freqs.weight": [1.0] * 6}}, 1),
    "base": ({**YARN, "freq_base": 1.0}, 1),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_file_that_cannot_be_computed_is_one_error_of_that_file(name, tmp_path, call):
    keys, expected = UNUSABLE[name]
    bad, good = write(tmp_path / "bad.gguf", **keys), write(tmp_path / "good.gguf", **YARN)
    code, out, told = call("doctor", bad, "--json")
    assert code == expected and (str(bad) in told or json.loads(out)["rules"][0]["code"] == "PD034")
    for line in ([bad, "--fix", "--out", tmp_path / "fixed.gguf"], [bad, good]):
        code, out, told = call("doctor", *line)
        assert (code, out) == (2, "") and f"posenc: {bad}: " in told and told.count("\n") == 1
    code, out, _ = call("doctor", "--each", bad, good)
    assert code == expected and "Nothing to complain about" in out


def test_an_unknown_scaling_is_refused_and_not_guessed(tmp_path, call):
    keys = {**YARN, "scaling__type": "yarnn"}
    path, out = write(tmp_path / "a.gguf", **keys), tmp_path / "b.gguf"
    (said,) = codes(path)
    assert "unknown rope.scaling.type 'yarnn'" in said
    assert call("doctor", path)[0] == 1
    code, _, told = call("doctor", path, "--fix", "--out", out)
    assert code == 2 and "yarnn" in told and not out.exists()
    like = tmp_path / "config.json"
    like.write_text(json.dumps({**BASE, "rope_theta": 10000.0}))
    assert call("doctor", path, "--like", like, "--fix", "--out", out)[0] == 0
    assert codes(out) == []


@pytest.mark.parametrize("kind", [None, "linear", "yarn"])
def test_the_old_key_of_the_factor_is_read_and_replaced(kind, tmp_path, call):
    keys = {"freq_base": 10000.0, "scaling__original_context_length": 1024}
    keys |= {} if kind is None else {"scaling__type": kind}
    old = write(tmp_path / "old.gguf", **keys, scale_linear=4.0)
    new = write(tmp_path / "new.gguf", **keys, scaling__factor=4.0)
    both = write(tmp_path / "both.gguf", **keys, scaling__factor=4.0, scale_linear=2.0)
    for path in (new, both):
        assert call("doctor", old, path)[0] == 0
    plain = compute_from_metadata(read_metadata(write(tmp_path / "a.gguf", **keys)), None)
    assert compute_from_metadata(read_metadata(old), None).rotations != plain.rotations
    for path in (old, both):
        out = tmp_path / f"fixed-{path.name}"
        assert call("doctor", path, "--fix", "--out", out)[0] == 0
        assert call("doctor", old, out)[0] == 0
    like, out = tmp_path / "config.json", tmp_path / "plain.gguf"
    like.write_text(json.dumps({**BASE, "rope_theta": 10000.0}))
    assert call("doctor", old, "--like", like, "--fix", "--out", out)[0] == 0
    assert compute_from_metadata(read_metadata(out), None).rotations == plain.rotations


LONGROPE = {
    "freq_base": 10000.0,
    "scaling__type": "longrope",
    "scaling__factor": 2.0,
    "scaling__original_context_length": 1024,
}
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
@pytest.mark.parametrize("kept", [(), (LONG,), (SHORT,)])
def test_longrope_that_lost_its_factors_is_not_mended_by_a_guess(
    kept, architecture, tmp_path, call
):
    tensors = dict.fromkeys(kept, EIGHT)
    path, out = (
        write(tmp_path / "a.gguf", architecture, tensors=tensors, **LONGROPE),
        tmp_path / "b.gguf",
    )
    code, _, told = call("doctor", path, "--fix", "--out", out)
    assert code == 2 and "has lost" in told and "--like CONFIG" in told and not out.exists()
    for tensor in {LONG, SHORT} - set(kept):
        assert tensor in told and any(tensor in message for message in codes(path))
    # What the model's own config says is written, and shown as what it replaces.
    like = tmp_path / "config.json"
    scaling = {"rope_type": "linear", "factor": 4.0}
    like.write_text(json.dumps({**BASE, "rope_theta": 10000.0, "rope_scaling": scaling}))
    if kept == ():
        code, said, _ = call("doctor", path, "--like", like, "--fix", "--out", out)
        assert code == 0 and f"  {architecture}.rope.scaling.type: longrope -> linear" in said
        assert f"  {architecture}.rope.scaling.factor: 2 -> 4" in said
        assert f"+ {architecture}.rope.scaling" not in said


def test_the_sentence_about_lost_factors_agrees_with_the_numbers(tmp_path):
    """The graph divides by the factor for every type but none."""
    keys = {name: value for name, value in LONGROPE.items() if name != "scaling__factor"}
    (plain,) = codes(write(tmp_path / "a.gguf", **keys))
    (halved,) = codes(write(tmp_path / "b.gguf", **LONGROPE))
    (beyond,) = codes(write(tmp_path / "c.gguf", **keys, tensors={SHORT: EIGHT}))
    assert "plain RoPE" in plain
    assert "divided by 2" in halved and "plain" not in halved
    assert "beyond 1024 tokens, plain RoPE" in beyond and LONG in beyond
    for name, factor in {"a": 1.0, "b": 2.0}.items():
        got = (
            compute_from_metadata(read_metadata(tmp_path / f"{name}.gguf"), None)
            .rotations["all"]
            .inv_freq
        )
        wanted = [10000.0 ** (-2 * i / 16) / factor for i in range(8)]
        assert got == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "minicpm"])
@pytest.mark.parametrize("long", [[2.0] * 8, EIGHT])
def test_a_sound_file_with_two_lists_keeps_both(long, architecture, tmp_path, call):
    keys = {name: value for name, value in LONGROPE.items() if name != "scaling__factor"}
    path = write(tmp_path / "a.gguf", architecture, **keys, tensors={LONG: long, SHORT: [1.0] * 8})
    out = tmp_path / "b.gguf"
    code, said, _ = call("doctor", path, "--fix", "--out", out)
    assert code == 0 and "nothing to change" in said
    for length in (512, 4096):
        before, after = (compute_from_metadata(read_metadata(p), length) for p in (path, out))
        assert before.rotations == after.rotations
    like = tmp_path / "config.json"
    like.write_text(json.dumps({**BASE, "rope_theta": 10000.0}))
    if architecture != "phi3":  # what a config means is not to change with the context
        assert call("doctor", path, "--like", like, "--fix", "--out", out.with_suffix(".2"))[0] == 0


MISSING = {
    "scaling__original_context_length": "original_context_length is missing: libllama takes "
    "context_length, 4096",
    "scaling__type": "type is missing: libllama takes linear",
    "scaling__factor": "factor is missing: libllama takes 1",
}


@pytest.mark.parametrize("key", MISSING)
def test_a_default_that_decides_the_rotation_is_said(key, tmp_path, call):
    path = write(tmp_path / "a.gguf", "qwen2", **{k: v for k, v in YARN.items() if k != key})
    words = f"assumed: qwen2.rope.scaling.{MISSING[key]}"
    assert words in call("doctor", path)[1].splitlines()
    code, said, err = call("doctor", path, "--fix", "--out", tmp_path / "b.gguf")
    if key == "scaling__type":
        assert code == 0 and words in said.splitlines()
    else:  # half of a scaling, whose other half only the model's config has
        assert code == 2 and "PD059" in err and "--like FOLDER" in err
    assert "assumed" not in call("doctor", write(tmp_path / "c.gguf", "qwen2", **YARN))[1]
    assert "assumed" not in call("doctor", write(tmp_path / "d.gguf", freq_base=1e4))[1]
