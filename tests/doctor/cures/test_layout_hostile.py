"""--layout loads a model, and runs nothing that lies in its folder."""

import io
import json

import pytest

from tests.doctor.cures.test_fold import checkpoint


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_layout_runs_no_code_of_the_folder_even_if_told_to(where, tmp_path, call, monkeypatch):
    folder, witness = checkpoint(tmp_path / "model", "llama"), tmp_path / "it ran"
    path = folder / where
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    content["auto_map"] = {
        "AutoTokenizer": [None, "evil.Evil"],
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
    }
    if where == "config.json":
        content["model_type"] = "evil"
    path.write_text(json.dumps(content), encoding="utf-8")
    planted = f"from pathlib import Path\nPath({str(witness)!r}).touch()\n\n\nclass Evil: ...\n"
    (folder / "evil.py").write_text(planted, encoding="utf-8")
    (tmp_path / "text").write_text("once upon a time " * 50, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    code, out, said = call("doctor", folder, "--layout", "--text", tmp_path / "text")
    if where == "config.json":  # a family that posenc does not know
        assert (code, said) == (3, "") and "'evil'" in out
    else:
        assert code == 2 and said.count("\n") == 1, said
    assert not witness.exists()


def test_an_error_does_not_name_the_hidden_copy(tmp_path, call):
    folder = checkpoint(tmp_path / "model", "llama")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    given = ("doctor", folder, "--convert-layout", "interleaved", "--out", tmp_path / "new")
    assert call(*given) == (2, "", "posenc: the folder has no safetensors\n")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
