"""The probe says what llama.cpp's loader makes of GGUF files, which hold a whole model here."""

import json
from pathlib import Path

import numpy as np
import pytest

from posenc.runtimes.ask import RuntimeAnswer, as_loaded, ask
from posenc.runtimes.files.gguf_metadata import read_metadata
from posenc.runtimes.known.llama_cpp import compute_from_metadata
from tests.runtimes.ask.probes.other_runtimes import interpreter, plant

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
PYTHON = interpreter("llama")
WIDTH, LAYERS, HEADS, KV_HEADS, TOKENS = 64, 2, 4, 2, 3
OF_A_LAYER = {
    "attn_norm": (WIDTH,),
    "ffn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH // 2, WIDTH),
    "attn_v": (WIDTH // 2, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (WIDTH, WIDTH),
    "ffn_down": (WIDTH, WIDTH),
    "ffn_up": (WIDTH, WIDTH),
}
YARN = {
    "freq_base": 500000.0,
    "scaling.type": "yarn",
    "scaling.factor": 3.0,
    "scaling.original_context_length": 1024,
}
DIVISORS = {"rope_freqs.weight": np.arange(1.0, 9.0)}


def write(path: Path, architecture: str = "llama", tensors=None, **keys) -> Path:
    """A whole Llama of zeros, with these rope keys; its name may be another one."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(TOKENS)
    writer.add_tokenizer_model("no_vocab")
    for key, value in keys.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{architecture}.rope.{key}", value)
    shapes = {"token_embd": (TOKENS, WIDTH), "output_norm": (WIDTH,), "output": (TOKENS, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in OF_A_LAYER.items()}
    weights = {f"{name}.weight": np.zeros(shape) for name, shape in shapes.items()}
    for name, values in {**weights, **(tensors or {})}.items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def answer(path: Path) -> RuntimeAnswer:
    (said,) = ask([(path, [4096])], PYTHON, "llama.cpp")
    return said


@pytest.mark.parametrize(
    ("keys", "loaded"),
    [
        ({}, {"freq_base_train": 10000.0, "rope scaling": "linear", "n_rot": 16}),
        (YARN, {"freq_base_train": 500000.0, "rope scaling": "yarn", "n_ctx_orig_yarn": 1024}),
        ({"scale_linear": 4.0}, {"freq_scale_train": 0.25, "n_ctx_orig_yarn": 4096}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope scaling": "none"}),
        ({"tensors": DIVISORS}, {"freq_base_train": 10000.0}),
    ],
    ids=["no keys", "yarn", "the older key", "none", "divisors"],
)
def test_what_it_loads_is_what_posenc_reads(tmp_path, keys, loaded):
    path = write(tmp_path / "a.gguf", **keys)
    said = answer(path)
    assert said.version.startswith("b") and not said.refusal
    assert {name: said.loaded[name] for name in loaded} == loaded
    metadata = read_metadata(path)
    computed, known = as_loaded(said, metadata, 4096), compute_from_metadata(metadata, 4096)
    assert computed.asked and computed.rotations == known.rotations


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dimension_count": 32}, "invalid n_rot: 32, expected 16"),
        ({"tensors": {"rope_freqs.weight": np.ones(6)}}, "expected 8, got 6"),
        ({"scaling.type": "llama3"}, "GGML_ASSERT"),
        ({"tensors": {"rope_factors_long.weight": np.ones(8)}}, "wrong number of tensors"),
    ],
    ids=["too many channels", "too few divisors", "an unknown type", "a list that nobody loads"],
)
def test_what_it_refuses_is_said_in_its_own_words(tmp_path, keys, words):
    said = answer(write(tmp_path / "a.gguf", **keys))
    assert words in said.refusal and not said.no_model and not said.loaded


def test_an_architecture_that_it_has_not_is_told_from_a_refusal(tmp_path):
    said = answer(write(tmp_path / "a.gguf", architecture="nobody"))
    assert said.no_model and "unknown model architecture" in said.refusal


def test_what_is_no_gguf_file_is_refused(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    assert answer(path).refusal or answer(path).why_unmeasured


def test_the_doctor_says_which_part_was_asked(call, tmp_path):
    path = write(tmp_path / "a.gguf", **YARN)
    code, out, _ = call("doctor", path, "--ask", PYTHON)
    assert code == 0 and "asked, b" in out and "what it computes from them is known" in out
    _, out, _ = call("doctor", path, "--ask", PYTHON, "--json")
    assert json.loads(out)["runtimes"]["llama.cpp"]["asked"]


@pytest.mark.parametrize(
    "mistake",
    [
        ("print_info: (", "print_inf: ("),
        (
            "refusal_match = ERROR_PATTERN.search(text) if log_line",
            "refusal_match = None if log_line",
        ),
        ("loaded.setdefault(name, number_or_words(value))", "loaded.setdefault(name, 1.0)"),
    ],
    ids=["reads no setting", "sees no refusal", "takes 1 for every setting"],
)
def test_a_probe_with_a_mistake_is_found(monkeypatch, tmp_path, mistake):
    path = write(tmp_path / "a.gguf", **YARN)
    refused = write(tmp_path / "b.gguf", dimension_count=32)
    plant(monkeypatch, tmp_path, "llama_cpp_probe.py", mistake)
    metadata = read_metadata(path)
    known = compute_from_metadata(metadata, 4096).rotations
    wrong = as_loaded(answer(path), metadata, 4096).rotations != known
    assert wrong or "n_rot" not in answer(refused).refusal
