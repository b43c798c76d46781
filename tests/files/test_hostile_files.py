"""Locks, new folders and partial files follow no link and empty nothing that is not ours."""

import os

import pytest

from posenc.files.atomic import atomically, prepare_file, write_atomically
from posenc.files.folders import locked, locked_without_file, new_folder


@pytest.fixture
def victim(tmp_path):
    """A folder that was given to nobody; afterwards it is as it was."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("precious")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "precious"


@pytest.mark.parametrize("target", ["file", "missing"])
def test_a_lock_that_is_a_link_is_refused(tmp_path, victim, target):
    (tmp_path / ".lock").symlink_to(victim / target)
    with pytest.raises(ValueError, match="is a link, or not of the kind"):
        locked(tmp_path, "comparison").__enter__()


def test_a_lock_that_is_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ValueError, match="not of the kind that a lock needs; remove it"):
        locked(tmp_path, "comparison").__enter__()


def test_a_lock_that_may_not_be_opened_is_not_called_a_link(tmp_path, monkeypatch):
    (tmp_path / ".lock").write_text("")

    def refuse(path, flags, mode=0o777):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        locked(tmp_path, "comparison").__enter__()


def test_a_lock_with_content_keeps_it(tmp_path):
    (tmp_path / ".lock").write_text("a hard link, maybe")
    with locked(tmp_path, "comparison"):
        pass
    assert (tmp_path / ".lock").read_text() == "a hard link, maybe"


def test_a_folder_that_is_a_link_is_not_locked(tmp_path, victim):
    (tmp_path / "state").symlink_to(victim)
    with pytest.raises(ValueError, match="is a link"):
        locked_without_file(tmp_path / "state", "busy").__enter__()


@pytest.mark.parametrize("name", [".out.unproved", ".out.0123456789abcdef.unproved"])
def test_links_beside_a_new_folder_are_left_alone(tmp_path, victim, name):
    (tmp_path / name).symlink_to(victim)
    with new_folder(tmp_path / "out") as temporary:
        (temporary / "a").write_text("a")
    assert (tmp_path / name).is_symlink() and (tmp_path / "out/a").exists()


def test_a_link_to_nothing_is_not_replaced(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "later")
    with pytest.raises(ValueError, match="exists already"):
        new_folder(tmp_path / "out").__enter__()


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="another process"), new_folder(out):
        out.mkdir()
        (out / "file").write_text("theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "file").read_text() == "theirs"


def test_partial_files_cannot_be_predicted(tmp_path, victim):
    (tmp_path / f".a.{os.getpid()}.partial").symlink_to(victim / "file")
    write_atomically(tmp_path / "a", "new")
    prepare_file(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "new"


def test_a_file_is_replaced_and_what_it_linked_to_stays(tmp_path, victim):
    (tmp_path / "a").symlink_to(victim / "file")
    write_atomically(tmp_path / "a", "new")
    assert not (tmp_path / "a").is_symlink()


def test_a_planted_partial_file_is_not_opened(tmp_path, victim, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "00" * size)
    (tmp_path / f".a.{0:016x}.partial").symlink_to(victim / "file")
    with pytest.raises(FileExistsError), atomically(tmp_path / "a"):
        pytest.fail("the planted name was used")
