"""Pipes and devices are refused before they are read: one would wait, the other has no end."""

import os

import pytest

from posenc.doctor.cures import measure_layout
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.files.source import load


@pytest.fixture(params=["pipe", "/dev/zero", "/dev/full"])
def special(request, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / request.param  # an absolute name stays as it is


@pytest.mark.parametrize("read", [load, read_json])
def test_no_config_is_read_from_them(read, special):
    with pytest.raises(ValueError, match="not an ordinary file"):
        read(special)


def test_no_text_is_read_from_them(special, tmp_path):
    with pytest.raises(ValueError, match="not an ordinary file"):
        measure_layout._first_tokens(tmp_path, special)


@pytest.mark.parametrize("more", [[], ["--each"]])
def test_the_command_says_so_in_one_line(more, special, call):
    code, out, err = call("doctor", special, *more)
    assert (code, err.count("\n")) == (2, 1)
    assert "not an ordinary file" in out + err
