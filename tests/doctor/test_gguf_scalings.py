"""GGUF files with half of a scaling, or without the tensor that their family needs."""

import itertools
import json

import numpy as np
import pytest

from posenc.doctor.command import Options
from posenc.doctor.misreadings import Case
from posenc.doctor.rules import findings
from posenc.runtimes.files.gguf_metadata import Metadata
from posenc.runtimes.files.source import NoRotationError, load
from tests.doctor.judging import row_of, run
from tests.doctor.test_gguf import YARN, gguf, write
from tests.doctor.threads import BASE, EIGHT

LISTS = {"rope_factors_long.weight": np.array(EIGHT), "rope_factors_short.weight": np.ones(8)}
LLAMA31 = {"freq_base": 500000.0}


def found(path, code):
    return [f for f in findings(Case(load(path), ("llama.cpp",))) if f.code == code]


def without(*names):
    return {key: value for key, value in YARN.items() if key not in names}


@pytest.mark.parametrize(
    ("keys", "message", "cure"),
    [
        (without("scaling__factor"), "factor is missing", "Write llama.rope.scaling.factor"),
        (
            without("scaling__original_context_length"),
            "original_context_length is missing",
            "Write llama.rope.scaling.original_context_length",
        ),
        ({"scaling__type": "linear"}, "factor is missing", "Write llama.rope.scaling.factor"),
        ({**YARN, "scaling__type": "none"}, "factor is 4", "llama.rope.scaling.type"),
        ({**YARN, "scaling__factor": 0.25}, "factor is 0.25", "factor 4"),
        (
            {**YARN, "scaling__original_context_length": 9000},
            "above llama.context_length 4096",
            "llama.rope.scaling.original_context_length",
        ),
        (
            {"scaling__original_context_length": 1024},
            "nothing in the file stretches",
            "Write llama.rope.scaling.type and llama.rope.scaling.factor",
        ),
        (
            {**YARN, "scaling__factor": 1.0},
            "nothing in the file stretches",
            "Write llama.rope.scaling.factor.",
        ),
    ],
)
def test_half_of_a_scaling_is_an_error_whose_cure_names_the_key(tmp_path, keys, message, cure):
    path = write(tmp_path / "a.gguf", **keys)
    (hit,) = found(path, "PD059")
    assert hit.severity == "E" and message in hit.message and cure in hit.cure
    assert run(Options((path,), ask=["none"]))[1] == 1


def test_a_fix_does_not_guess_the_missing_half(tmp_path):
    path = write(tmp_path / "a.gguf", **without("scaling__factor"))
    with pytest.raises(ValueError, match=r"PD059.*Write llama.rope.scaling.factor"):
        run(Options((path,), fix=True, out=tmp_path / "b.gguf"))
    config = tmp_path / "config.json"
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config.write_text(json.dumps({**BASE, "rope_theta": 10000.0, "rope_scaling": scaling}))
    said, code = run(Options((path,), fix=True, out=tmp_path / "c.gguf", like=config))
    assert code == 0 and "proved by the emulator" in said


PARTS = {
    "scaling__type": (None, "none", "linear", "yarn"),
    "scaling__factor": (None, 1.0, 4.0),
    "scaling__original_context_length": (None, 1024, 4096),
}


@pytest.mark.parametrize("values", [*itertools.product(*PARTS.values())], ids=str)
def test_every_scaling_of_three_keys_is_whole_or_reported(tmp_path, values):
    """Whole are: no scaling at all, linear with a factor, and yarn with a factor and a length. A
    factor of 1 stretches nothing, so that an original length below the context contradicts it."""
    kind, factor, original = values
    keys = {name: value for name, value in zip(PARTS, values, strict=True) if value is not None}
    path = write(tmp_path / "a.gguf", **keys)
    stretches = factor == 4.0
    typed_as_stretching = kind in ("linear", "yarn")
    is_whole = (
        (not typed_as_stretching or factor is not None)
        and not (kind == "none" and stretches)
        and not (kind == "yarn" and stretches and original is None)
        and (original != 1024 or stretches)
    )
    assert bool(found(path, "PD059")) is not is_whole


def test_two_lists_without_the_length_at_which_they_change(tmp_path):
    keys = {"freq_base": 1e4, "scaling__type": "longrope"}
    path = write(tmp_path / "a.gguf", "phi3", tensors=LISTS, **keys)
    (hit,) = found(path, "PD059")
    assert "original_context_length is missing" in hit.message
    untyped = write(tmp_path / "untyped.gguf", "phi3", tensors=LISTS, freq_base=1e4)
    (hit,) = found(untyped, "PD059")
    assert "original_context_length is missing" in hit.message and "type is" not in hit.message
    whole = {**keys, "scaling__original_context_length": 1024}
    assert not found(write(tmp_path / "b.gguf", "phi3", tensors=LISTS, **whole), "PD059")


@pytest.mark.parametrize(
    ("architecture", "keys", "loads"),
    [
        ("llama", {}, False),
        ("llama", {"scaling__type": "longrope"}, True),
        ("phi3", {}, True),
        ("qwen2", {"scaling__type": "longrope"}, False),
    ],
)
def test_factor_lists_that_the_architecture_does_not_load(tmp_path, architecture, keys, loads):
    """libllama of b11549 says "wrong number of tensors; expected 14, got 12" for the first one."""
    keys = {"scaling__original_context_length": 1024, **keys}
    path = write(tmp_path / "a.gguf", architecture, tensors=LISTS, **keys)
    messages = [f.message for f in found(path, "PD034")]
    assert any("wrong number of tensors" in m for m in messages) is not loads


@pytest.mark.parametrize("architecture", ["llama", "deci", "apertus", "exaone", "exaone4"])
def test_a_family_that_needs_rope_freqs_is_suspected(architecture):
    bases = {"apertus": 12e6, "exaone": 1e6, "exaone4": 1e6}
    meta = Metadata(architecture, 65536, 128, 128, freq_base=bases.get(architecture, 500000.0))
    assert suspected(meta)
    ones = (1.0,) * 64
    for change in ({"rope_freqs": ones}, {"scaling_factor": 4.0}, {"freq_base": 1e4}):
        assert not suspected(Metadata(architecture, 65536, 128, 128, **{**bare(meta), **change}))
    assert not suspected(Metadata(architecture, 8192, 128, 128, **bare(meta)))


def bare(meta):
    return {"freq_base": meta.freq_base}


def suspected(meta):
    from pathlib import Path

    from posenc.runtimes.files.source import Source

    source = Source(Path("none.gguf"), "gguf", metadata=meta)
    return [f for f in findings(Case(source, ("llama.cpp",))) if f.code == "PD060"]


def test_the_suspicion_offers_the_folder(tmp_path):
    path = tmp_path / "of a model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(131072)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_rope_freq_base(500000.0)
    writer.add_tensor("token_embd.weight", np.ones((3, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said, code = run(Options((path,), ask=["none"]))
    assert code == 0 and "W PD060" in said and "Llama 3.1, 3.2 and 3.3" in said
    assert f"    posenc doctor '{path}' FOLDER" in said.splitlines()[-1]
    assert f"    posenc doctor '{path}' --like FOLDER --fix --out new.gguf\n" in said
    assert "Opens no GGUF file: mlx-lm." in said and "│ mlx-lm" not in said
    assert row_of("llama.cpp", said)[1].startswith("known, b")
    said, code = run(Options((path,), for_="vllm"))
    assert code == 3 and "llama: vllm: not known to posenc" in said


def test_a_file_without_weights_is_not_judged(tmp_path):
    def vocabulary(name, architecture="llama", **more):
        writer = gguf.GGUFWriter(str(tmp_path / name), architecture)
        writer.add_context_length(4096)
        writer.add_embedding_length(64)
        writer.add_head_count(4)
        for key, value in more.items():
            writer.add_uint16(key.replace("__", "."), value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tmp_path / name

    path = vocabulary("vocab.gguf")
    with pytest.raises(NoRotationError, match="no tensors"):
        load(path)
    said, code = run(Options((path,), ask=["none"]))
    assert code == 0 and "no tensors" in said and "Nothing to complain about" not in said
    assert load(vocabulary("first.gguf", split__no=0)).metadata is not None
    with pytest.raises(ValueError, match="part 2 of a split GGUF file"):
        load(vocabulary("second.gguf", split__no=1))
    with pytest.raises(ValueError, match="encoder"):
        load(vocabulary("mmproj.gguf", "clip"))


def test_each_unread_key_has_a_cure_of_its_own(tmp_path):
    keys = {**YARN, "scaling__yarn_attn_factor": 1.0, "scaling__yarn_beta_fast": 64.0}
    hits = found(write(tmp_path / "a.gguf", **keys), "PD034")
    cures = {hit.message.split(" is ")[0]: hit.cure for hit in hits}
    assert "attn_factor 0.878249" in cures["llama.rope.scaling.yarn_attn_factor"]
    assert "rope_freqs.weight" in cures["llama.rope.scaling.yarn_beta_fast"]


def test_runtimes_that_open_gguf_files_are_not_said_to_have_no_such_model(tmp_path):
    case = Case(load(write(tmp_path / "a.gguf", **YARN)))
    status = {name: computed.status_in_words for name, computed in case.computed.items()}
    assert status == {
        "transformers-4": "not known to posenc",
        "transformers-5": "not known to posenc",
        "vllm": "not known to posenc",
        "sglang": "not known to posenc",
        "mlx-lm": "opens no such file",
        "llama.cpp": "computes",
    }
