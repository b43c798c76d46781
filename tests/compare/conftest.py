"""The scripts of experiments/, called in the process, and a text for them."""

import sys
from pathlib import Path

import pytest

from tests.texts import prose


@pytest.fixture
def run(monkeypatch, capsys):
    """run(script, "--seeds", 1, ...) -> (exit code, stdout, stderr) of its main"""

    def called(script, *words):
        name = Path(script.__file__).name
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        code = 0
        try:
            script.main()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return called


@pytest.fixture
def text(tmp_path):
    """A file of 96,000 bytes."""
    path = tmp_path / "text.txt"
    path.write_bytes(prose(96_000))
    return path
