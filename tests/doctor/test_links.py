"""Nothing in a stranger's folder makes posenc read a file outside of it, or wait."""

import json
import os
import struct

import pytest

from posenc.runtimes.files.model_folder import path_inside, paths_inside
from posenc.runtimes.files.source import load
from posenc.runtimes.writers import copies
from tests.doctor.test_gguf_hostile import SOUND, header
from tests.doctor.threads import BASE

SECRET = b"SECRETS" + bytes(range(65, 91)) * 4
PLAIN = {**BASE, "rope_theta": 1e4}


def weights(*names):
    """The bytes of a safetensors file with tensors of one float."""
    infos = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    text = json.dumps(infos).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4 * len(names))


FILES = {
    "config.json": json.dumps(PLAIN).encode(),
    "params.json": json.dumps({"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 9}).encode(),
    "m.gguf": header(SOUND),
    "model.safetensors": weights("a"),
    "model-2.safetensors": weights("b"),
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model.safetensors"}}).encode(),
    "tokenizer.json": b"{}",
}
"""Files that are read in a folder, sound ones."""
ALONE = ("params.json", "m.gguf")
"""Those that are read where there is no config.json."""


@pytest.fixture
def model(tmp_path):
    """model(name) -> a folder with all that is read beside a file of this name, and without it."""

    def make(name):
        folder = tmp_path / "model"
        folder.mkdir()
        for other, content in FILES.items():
            if other != name and (name not in ALONE and other not in ALONE):
                (folder / other).write_bytes(content)
        return folder

    return make


def lines(folder, name, out):
    """The calls that read a file of this name."""
    yield "doctor", folder, "--fix", "--out", out
    if name not in ("model.safetensors.index.json", "tokenizer.json"):
        yield "doctor", folder
    if name in ("config.json", "model.safetensors"):
        yield "inspect", "model", folder


@pytest.mark.parametrize("target", ["secret", "a model's", "pipe", "/dev/zero"])
@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_not_followed(name, target, model, tmp_path, call):
    folder = model(name)
    if target == "pipe":
        os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "a model's").write_bytes(FILES[name])  # sound, and somebody else's
    (folder / name).symlink_to(tmp_path / target)
    for line in lines(folder, name, tmp_path / "out"):
        code, out, err = call(*line)
        assert (code, out, err.count("\n")) == (2, "", 1), (line, out, err)
        assert "outside of the folder, is not followed" in err and name in err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_one_line_and_no_wait(name, kind, model, tmp_path, call):
    folder = model(name)
    (os.mkfifo if kind == "pipe" else os.mkdir)(folder / name)
    for line in lines(folder, name, tmp_path / "out"):
        code, out, err = call(*line)
        assert (code, out, err.count("\n")) == (2, "", 1), (line, out, err)
        assert "not an ordinary file" in err
        assert not (tmp_path / "out").exists()


def test_links_of_the_hub_s_cache_and_within_the_folder_are_followed(tmp_path, call):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1").write_bytes(FILES["config.json"])
    (blobs / "2").write_bytes(FILES["model.safetensors"])
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "model.safetensors").symlink_to("../../blobs/2")
    assert call("doctor", snapshot)[0] == 0
    assert call("doctor", snapshot, "--fix", "--out", tmp_path / "new")[0] in (0, 1)
    assert not (tmp_path / "new/model.safetensors").is_symlink()
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "own.json").write_bytes(FILES["config.json"])
    (plain / "config.json").symlink_to("own.json")
    assert call("doctor", plain)[0] == 0


@pytest.mark.parametrize("target", ["secret", "a model's", "pipe", "/dev/zero"])
def test_a_link_of_an_adapter_is_not_followed(target, model, tmp_path, call):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "a model's").write_text("{}")
    (adapter / "adapter_config.json").symlink_to(tmp_path / target)
    out = tmp_path / "out"
    code, said, err = call("doctor", adapter, "--like", model("none"), "--fix", "--out", out)
    assert (code, said, err.count("\n")) == (2, "", 1) and not out.exists()
    regular = target in ("secret", "a model's")  # anything else is no adapter
    assert ("is not followed" if regular else "found 0 .gguf files") in err


def test_a_link_that_comes_after_the_check_is_not_copied(tmp_path, monkeypatch):
    """Somebody puts a link in the place of a file when it has been checked."""
    source, target, secret = tmp_path / "model", tmp_path / "copy", tmp_path / "secret"
    source.mkdir()
    target.mkdir()
    secret.write_bytes(SECRET)
    path = source / "model.safetensors"
    path.write_bytes(FILES["model.safetensors"])
    copied = copies.copy_file

    def late(checked, *arguments, **options):
        path.unlink()
        path.symlink_to(secret)
        copied(checked, *arguments, **options)

    monkeypatch.setattr(copies, "copy_file", late)
    with pytest.raises(ValueError, match="not an ordinary file"):
        copies.copy_files(source, target)
    assert list(target.iterdir()) == []


def test_what_is_listed_is_inside(tmp_path):
    (tmp_path / "a.x").write_text("")
    (tmp_path / "b.x").symlink_to("a.x")
    assert [path.name for path in paths_inside(tmp_path, "*.x")] == ["a.x", "b.x"]
    (tmp_path / "c.x").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match=r"c\.x: a link to"):
        paths_inside(tmp_path, "*.x")
    with pytest.raises(ValueError, match="which is not there"):
        path_inside(tmp_path, "none", "its listing")
    (tmp_path / "config.json").symlink_to("gone")
    with pytest.raises(ValueError, match="which is not there"):
        load(tmp_path)
