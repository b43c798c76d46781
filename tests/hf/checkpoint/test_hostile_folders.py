"""Folders from strangers: no code of theirs runs, no file outside of them is read or copied."""

import io
import json
import shutil
from pathlib import Path

import pytest

from posenc.hf.checkpoint.files import TOKENIZER_FILES
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.checkpoint.tokenization import make_text_encoder
from tests.hf_models import LENGTH, save, transformers

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Evil: pass\n"
TEXT = "the fox and the dog " * 200


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """A Llama whose tokenizer splits at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = save("llama", tmp_path_factory.mktemp("words") / "llama", vocab_size=300)
    vocabulary = {word: i for i, word in enumerate(["<unk>", *sorted(set(TEXT.split()))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", model_max_length=LENGTH
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(words, tmp_path) -> Path:
    return Path(shutil.copytree(words, tmp_path / "llama"))


def change(path: Path, **keys: object) -> None:
    config = json.loads(path.read_text(encoding="utf-8")) | keys
    path.write_text(json.dumps(config), encoding="utf-8")


def command(folder: Path, kind: str) -> list[str]:
    if kind == "inspect":
        return ["inspect", "model", str(folder), "--sentence", "the fox", "--json"]
    (folder.parent / "text.txt").write_text(TEXT)
    return [
        "extend",
        str(folder),
        "--to",
        str(2 * LENGTH),
        "--method",
        "ntk",
        "--windows",
        "1",
        "--text",
        str(folder.parent / "text.txt"),
        "--out",
        str(folder.parent / "out"),
    ]


def refused(answer) -> str:
    code, _, said = answer
    assert (code, said.count("\n")) == (2, 1), said
    return said


@pytest.mark.parametrize("kind", ["inspect", "extend"])
@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_code_beside_a_tokenizer_never_runs_whatever_stdin_says(
    where, kind, folder, call, monkeypatch
):
    planted = [None, "evil.Evil"]
    known = {"tokenizer_class": "Evil"} if where == "tokenizer_config.json" else {}
    change(folder / where, auto_map={"AutoTokenizer": planted, "AutoModel": "evil.Evil"}, **known)
    (folder / "evil.py").write_text(EVIL)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    said = refused(call(*command(folder, kind)))
    assert list(folder.glob("ran")) == []
    assert "auto_map asks for code from the folder" in said
    assert not (folder.parent / "out").exists()


def test_code_for_a_model_that_transformers_knows_is_left_alone(folder):
    change(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Evil"})
    (folder / "evil.py").write_text(EVIL)
    assert load_checkpoint(folder).trained_length == LENGTH
    assert list(folder.glob("ran")) == []


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_kernels_that_a_config_names_are_never_fetched(key, folder):
    change(folder / "config.json", text_config={key: "somebody/kernels"})
    with pytest.raises(ValueError, match="names the code 'somebody/kernels'"):
        load_checkpoint(folder)


def test_an_adapter_is_not_looked_for_elsewhere(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/model"}')
    with pytest.raises(ValueError, match="Merge the adapter"):
        load_checkpoint(folder)


class Pickled:
    """Touches a file when it is read as a pickle."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self):
        return Path.touch, (self.touched,)


def other_weights(folder: Path, kind: str) -> str:
    """Plant weights that no check has seen; return the name that config.json gives them."""
    import torch
    from safetensors import safe_open

    outside = folder.parent / "outside.safetensors"
    shutil.copy(folder / "model.safetensors", outside)
    if kind == "pickle":
        torch.save({"a": Pickled(folder / "ran")}, folder / "adapter_model.bin")
        return "adapter_model.bin"
    if kind == "link":
        (folder / "other.safetensors").symlink_to(outside)
        return "other.safetensors"
    with safe_open(outside, framework="pt") as opened:
        names = list(opened.keys())
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "other.safetensors.index.json").write_text(json.dumps(index))
    return "other.safetensors.index.json"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["pickle", "link", "index"])
def test_other_weights_that_a_config_names_are_never_read(kind, nested, folder, call):
    named = {"transformers_weights": other_weights(folder, kind)}
    change(folder / "config.json", **({"text_config": named} if nested else named))
    said = refused(call(*command(folder, "inspect")))
    assert "transformers_weights" in said and "Delete the key" in said
    assert not (folder / "ran").exists()


def test_another_config_that_a_config_names_is_never_read(folder, call):
    """transformers would take the other file, which no check has seen."""
    shutil.copy(folder / "config.json", folder / "config.4.0.0.json")
    change(folder / "config.4.0.0.json", transformers_weights=other_weights(folder, "index"))
    change(folder / "config.json", configuration_files=["config.4.0.0.json"])
    assert "configuration_files" in refused(call(*command(folder, "inspect")))


def test_shards_that_transformers_would_take_before_the_weights_are_refused(folder, call):
    shard = folder / "shard-00000-model-00001-of-00001.safetensors"
    shard.symlink_to(folder.parent / "outside.safetensors")
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    assert f"{shard.name} is a part of a distributed" in refused(call(*command(folder, "inspect")))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors"])
def test_an_index_that_leads_out_of_the_folder_is_refused(name, folder, call):
    weights = folder / "model.safetensors"
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as opened:
        names = list(opened.keys())
    (folder / "sub").mkdir()
    shutil.copy(weights, folder / "sub" / "a.safetensors")
    weights.rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "decoy.safetensors").write_bytes(b"")
    assert f"names {name!r}, which is not a file of" in refused(call(*command(folder, "inspect")))


def test_an_index_within_the_folder_is_read(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        names = list(opened.keys())
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_checkpoint(folder).trained_length == LENGTH


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": ["a"]}', "\xff"])
def test_a_broken_index_is_one_line(content, folder, call):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(content.encode("latin-1"))
    assert "model.safetensors.index.json" in refused(call(*command(folder, "inspect")))


@pytest.mark.parametrize("kind", ["inspect", "extend"])
def test_a_broken_tokenizer_is_one_line(kind, folder, call):
    (folder / "tokenizer.json").write_text('{"model": 1}')
    said = refused(call(*command(folder, kind)))
    assert f"{folder}: its tokenizer cannot be read" in said
    assert not (folder.parent / "out").exists()


@pytest.mark.slow
def test_only_known_data_files_go_with_an_export(folder, call):
    for name in ("tokenizer_evil.py", "tokenizer.sh", "vocab.pickle", "evil.model.py"):
        (folder / name).write_text(EVIL)
    (folder / "tokenizer_more").mkdir()
    assert call(*command(folder, "extend"))[0] == 0
    copied = {path.name for path in (folder.parent / "out").iterdir()}
    made = {"config.json", "model.safetensors", "extend.html", "extend.csv", "SERVE.md"}
    assert copied <= {*made, *TOKENIZER_FILES}
    assert {"tokenizer.json", "tokenizer_config.json"} <= copied
    kept = json.loads((folder.parent / "out" / "tokenizer_config.json").read_text())
    assert kept["model_max_length"] == 2 * LENGTH


def test_a_link_out_of_the_folder_is_not_copied(folder, call):
    (folder.parent / "secret").write_text("a key of mine")
    (folder / "vocab.txt").symlink_to(folder.parent / "secret")
    assert "outside of the folder, is not followed" in refused(call(*command(folder, "extend")))
    assert not (folder.parent / "out").exists()


def test_the_links_of_the_hubs_cache_are_followed(words, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(words.iterdir()):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    assert load_checkpoint(snapshot).trained_length == LENGTH


def test_reading_a_folder_opens_no_connection(folder, monkeypatch):
    import socket

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"asked for {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    change(folder / "config.json", _name_or_path="somebody/model")
    encode = make_text_encoder(folder, load_checkpoint(folder).config.vocab_size)
    assert encode("the fox")
