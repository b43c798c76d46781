"""What is wrong with a stranger's folder is said in one line of ours, by every command, at once."""

import json
import os
import struct

import pytest

from tests.hf_models import save, transformers

MIB = 1 << 20
CONFIGS = {
    "auto_map": (5, "auto_map must be an object, got 5"),
    "id2label": (5, "id2label must be an object, got 5"),
    "quantization_config": ("x", "quantization_config must be an object, got 'x'"),
    "dtype": ([1], "dtype must be a name, got [1]"),
    "torch_dtype": (3, "torch_dtype must be a name, got 3"),
    "hidden_act": ([], "hidden_act must be a name, got []"),
    "num_labels": ("x", "num_labels must be a whole number, got 'x'"),
    "rms_norm_eps": ("x", "rms_norm_eps must be a number, got 'x'"),
    "layer_types": ("x", "layer_types must be a list"),
    "architectures": ("x", "architectures must be a list of names, got 'x'"),
    "tie_word_embeddings": ("false", "tie_word_embeddings must be true or false, got 'false'"),
    "attention_bias": (1, "attention_bias must be true or false, got 1"),
}


def said(call, *line):
    """The one line with which a command ends."""
    code, out, err = call(*line)
    assert (code, out, err.count("\n")) == (2, "", 1), (out, err)
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("key", CONFIGS)
def test_an_odd_key_is_named(key, tmp_path, call):
    folder = save("llama", tmp_path / "model")
    path = folder / "config.json"
    value, words = CONFIGS[key]
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    line = said(call, "inspect", "model", folder)
    assert f"{path}: " in line and words in line


def test_a_size_that_only_transformers_refuses_is_one_line(tmp_path, call):
    folder = save("llama", tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": "x"}))
    line = said(call, "inspect", "model", folder)
    assert str(folder) in line and f"transformers {transformers.__version__} " in line


BYTES = {
    "mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "latin": (b'{"model_type": "ll\xe9"}', "not UTF-8"),
    "deep": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested"),  # by Python's reader or ours
    "twice": (b'{"a": 1, "a": 2}', "'a' is given twice, with two values"),
    "digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
    "beyond": (b'{"rope_theta": 1e999}', "expected a finite number"),
    "nothing": (b"", "not valid JSON"),
    "a list": (b"[]", "expected a JSON object, got a list"),
    "no keys": (b"{}", "model_type"),
}


@pytest.mark.parametrize("command", ["inspect model", "doctor"])
@pytest.mark.parametrize("name", BYTES)
def test_a_damaged_config_is_one_line_with_its_name(name, command, tmp_path, call):
    folder = save("llama", tmp_path / "model")
    path = folder / "config.json"
    content, words = BYTES[name]
    path.write_bytes(content)
    if (command, name) != ("doctor", "mark"):  # which has a rule of its own
        line = said(call, *command.split(), folder)
        assert f"{path}: " in line and words in line


def sparse(path):
    """A header of 90 MiB of zeros in a file of 5 GiB that takes no room."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 90 * MIB))
        file.truncate(5 << 30)


WEIGHTS = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"hello world, these are no weights"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "sparse": sparse,
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "zeros": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_unreadable_weights_are_one_line_with_their_name(name, tmp_path, call):
    folder = save("llama", tmp_path / "model")
    path = folder / "model.safetensors"
    WEIGHTS[name](path)
    words = {"pipe": "not an ordinary", "folder": "not an ordinary", "zeros": "is not followed"}
    for command in ("inspect model", "doctor"):
        line = said(call, *command.split(), folder)
        assert f"{path}: " in line and words.get(name, "damaged safetensors file") in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_weights_without_permission_are_named(tmp_path, call):
    folder = save("llama", tmp_path / "model")
    (folder / "model.safetensors").chmod(0)
    for command in ("inspect model", "doctor"):
        assert "Permission denied" in said(call, *command.split(), folder)


def test_an_impossible_size_names_its_file(tmp_path, call):
    folder = save("llama", tmp_path / "model")
    path = folder / "config.json"
    sound = json.loads(path.read_text())
    for key, value in (("num_hidden_layers", -1), ("head_dim", 0)):
        path.write_text(json.dumps({**sound, key: value}))
        line = said(call, "doctor", folder)
        assert str(folder) in line and f"{key} must be between 1 and" in line
        assert "config.json: config.json" not in line
