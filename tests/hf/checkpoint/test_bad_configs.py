"""Values of config.json that no model can have: one line that names the file and the key."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc.hf.checkpoint.loading import load_checkpoint
from tests.hf_models import LENGTH

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": LENGTH}
LLAMA3 = {**YARN, "rope_type": "llama3", "factor": 2.0}
BAD: list[tuple[str, object, str]] = [
    *(
        (key, value, f"{key} must be a whole number from 1")
        for key in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "head_dim",
            "max_position_embeddings",
        )
        for value in (0, -4, 1.5, "32", [32], True, 10**12, float("nan"), {})
    ),
    ("hidden_size", None, "hidden_size must be"),
    ("num_key_value_heads", 0, "num_key_value_heads must be"),
    ("num_attention_heads", 8, "is stored as (32, 32), and config.json needs"),
    ("num_hidden_layers", 10**6, "num_hidden_layers is 1000000, but there are only 21 tensors"),
    *(
        ("rope_theta", value, "rope_theta must be a positive number")
        for value in (0, -1e4, float("nan"), float("inf"), "10000", [1], True)
    ),
    ("rope_parameters", "yarn", "rope_parameters must be an object or null, got 'yarn'"),
    ("rope_scaling", [1], "rope_scaling must be an object or null"),
    ("rope_parameters", YARN, "yarn without factor"),
    ("rope_parameters", {**YARN, "factor": None}, "yarn without factor"),
    ("rope_parameters", {**YARN, "factor": "4"}, "factor must be a positive number, got '4'"),
    ("rope_parameters", {**YARN, "factor": -4.0}, "factor must be a positive number, got -4.0"),
    ("rope_parameters", {**YARN, "factor": float("nan")}, "factor must be a positive number"),
    ("rope_parameters", {**YARN, "factor": 2.0, "beta_fast": "a"}, "beta_fast must be"),
    (
        "rope_parameters",
        {**YARN, "factor": 2.0, "original_max_position_embeddings": "64"},
        "original_max_position_embeddings must be a whole number",
    ),
    ("rope_parameters", {**YARN, "rope_type": "spiral"}, "unknown rope_type 'spiral'"),
    ("rope_parameters", {**YARN, "rope_type": 3}, "unknown rope_type 3"),
    ("rope_parameters", LLAMA3, "llama3 without low_freq_factor"),
    (
        "rope_parameters",
        {**YARN, "rope_type": "longrope", "short_factor": [1.0]},
        "longrope without long_factor",
    ),
    (
        "rope_parameters",
        {**YARN, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, "2"]},
        "long_factor must be a list of positive",
    ),
    ("rope_parameters", {"rope_type": "default", "rope_theta": "1e4"}, "rope_theta must be"),
    ("model_type", None, "model_type must be a name, got None"),
    ("model_type", ["llama"], "model_type must be a name"),
    ("model_type", "nothing_known", "nothing_known"),
    ("hidden_act", "no_such", "no_such"),
    ("hidden_size", 33, "config.json"),
    ("architectures", 3, "architectures must be a list of names"),
    ("architectures", [3], "architectures must be a list of names"),
]


@pytest.fixture
def folder(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def complaint(answer) -> str:
    code, out, err = answer
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


@pytest.mark.parametrize(("key", "value", "message"), BAD, ids=lambda v: str(v)[:40])
def test_a_value_that_no_model_can_have(key, value, message, folder, call):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    said = complaint(call("inspect", "model", folder, "--json"))
    assert str(folder) in said
    assert message in said


CONTENTS = {
    "[]": "expected a JSON object, got a list",
    '"a"': "expected a JSON object, got a string",
    "null": "expected a JSON object, got null",
    "{": "not valid JSON",
    "": "not valid JSON",
    "[" * 100_000: "not valid JSON",
    '{"model_type": "\xff"}': "not UTF-8",
}


@pytest.mark.parametrize("content", CONTENTS, ids=lambda v: v[:20])
@pytest.mark.parametrize("command", ["inspect model", "extend"])
def test_a_config_that_is_no_object(content, command, folder, call):
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    more = ["--to", 128, "--out", folder.parent / "out"] if command == "extend" else []
    said = complaint(call(*command.split(), folder, *more))
    assert f"{folder / 'config.json'}: {CONTENTS[content]}" in said
    assert not (folder.parent / "out").exists()


def test_weights_that_are_left_unread_are_said(folder, caplog):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.more.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_checkpoint(folder)
    assert "1 weights are not used, such as model.layers.0.more.weight" in caplog.text


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(wrong, folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = wrong
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 of 32 elements of model\.norm\.weight are NaN or inf"):
        load_checkpoint(folder)


def test_losses_that_are_not_finite_end_the_run_at_once(folder, call, tmp_path):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], 3e38)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text = tmp_path / "text.txt"
    text.write_text("the fox and the dog " * 200)
    asked = ["--to", 192, "--text", text, "--windows", 1, "--out", tmp_path / "out"]
    said = complaint(call("extend", folder, *asked))
    assert "as it is, 191 of 191 losses are NaN or infinite" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["inspect model", "extend"])
def test_weights_that_are_whole_numbers_are_refused_and_buffers_are_not(folder, call, command):
    path, pt = folder / "model.safetensors", {"format": "pt"}
    weights, some = load_file(path), "model.layers.1.self_attn.q_proj.weight"
    counted = {"model.layers.1.mask": torch.ones(4, dtype=torch.int32)}
    save_file(weights | counted, path, metadata=pt)
    assert load_checkpoint(folder).stored_dtype == "float32"
    save_file(weights | {some: weights[some].to(torch.int32)}, path, metadata=pt)
    said = complaint(call(*command.split(), folder, *["--to", 192] * (command == "extend")))
    assert f"{some} is stored as I32: expected floating-point weights" in said


def test_a_model_that_overflows_on_a_sentence_is_refused(folder, call):
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], 3e38)
    save_file(weights, path, metadata={"format": "pt"})
    assert "states are NaN or infinite" in complaint(call("inspect", "model", folder, "--json"))
