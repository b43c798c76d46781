"""Wrong input to the scripts of experiments/: one line, and posenc's exit codes."""

import argparse
import errno

import pytest

from posenc.command_line.errors import RunFailed, Stopped
from tests.experiment import experiment

refused = experiment("refused")


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (Stopped("it goes on from here"), 130, "s.py: stopped; it goes on from here."),
        (KeyboardInterrupt(), 130, "s.py: stopped."),
        (RunFailed("rope\nfailed"), 1, "s.py: rope failed"),
        (OSError(errno.ENOSPC, "No space left"), 1, "s.py: the disk is full: [Errno 28] No space"),
        (FileNotFoundError("no such file"), 2, "s.py: error: no such file"),
        (ValueError("wrong"), 2, "s.py: error: wrong"),
    ],
)
def test_each_way_to_fail_has_its_line_and_its_code(raised, code, words, capsys):
    with pytest.raises(SystemExit) as end, refused.refusing(argparse.ArgumentParser("s.py")):
        raise raised
    assert end.value.code == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(words)


def test_what_is_a_mistake_of_ours_keeps_its_traceback():
    with pytest.raises(AssertionError), refused.refusing(argparse.ArgumentParser("s.py")):
        raise AssertionError


def test_a_folder_is_no_file_to_write_a_table_into(tmp_path):
    with pytest.raises(ValueError, match=r"--table: .* is not a file"):
        refused.check_file("--table", tmp_path)
    refused.check_file("--table", tmp_path / "new/table.csv")
    assert not (tmp_path / "new").exists()
