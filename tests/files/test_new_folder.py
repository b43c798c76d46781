"""A new folder: whole, or not there; one writer at a time; leftovers of a kill go."""

import os
from pathlib import Path

import pytest

from posenc.files import folders as new_folder_module
from posenc.files.folders import new_folder


def test_it_appears_when_the_block_ends(tmp_path):
    out = tmp_path / "deep/out"
    with new_folder(out) as temporary:
        (temporary / "a").write_text("a")
        assert not out.exists()
    assert [p.name for p in out.iterdir()] == ["a"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_an_error_leaves_nothing_and_is_passed_on(tmp_path):
    with pytest.raises(OSError, match="full"), new_folder(tmp_path / "out") as temporary:
        (temporary / "a").write_text("a")
        raise OSError(28, "full")
    assert not list(tmp_path.iterdir())


def test_what_a_kill_left_is_cleared(tmp_path):
    left = tmp_path / ".out.0123456789abcdef.unproved"
    (left / "sub").mkdir(parents=True)
    (left / "old").write_text("old")
    with new_folder(tmp_path / "out") as temporary:
        assert not left.exists() and not list(temporary.iterdir())


def test_two_writers_and_an_existing_folder_are_refused(tmp_path):
    out = tmp_path / "out"
    with new_folder(out) as temporary:
        with pytest.raises(ValueError, match="Another posenc writes"):
            new_folder(out).__enter__()
        assert temporary.is_dir()
    with pytest.raises(ValueError, match="exists already"):
        new_folder(out).__enter__()


def test_a_place_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write there"):
        new_folder(tmp_path / "file/out").__enter__()


def test_an_error_in_it_names_the_folder_that_was_given(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError) as failed, new_folder(out) as temporary:
        (temporary / "missing" / "file").write_text("")
    assert failed.value.filename == str(out / "missing" / "file")


def test_on_windows_files_are_flushed_by_handles_that_may_write(tmp_path, monkeypatch):
    """Windows opens no folders, and refuses to flush a handle that only reads."""
    opened = {}

    def watch(path, flags, *others, **named):
        opened[Path(path).name] = flags
        return open_file(path, flags, *others, **named)

    open_file = os.open
    monkeypatch.setattr(new_folder_module, "ON_WINDOWS", True)
    with new_folder(tmp_path / "out") as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub/a").write_text("a")
        monkeypatch.setattr(os, "open", watch)
    monkeypatch.undo()
    assert opened["a"] & os.O_RDWR
    assert "sub" not in opened and temporary.name not in opened
