"""A text to train on."""

from __future__ import annotations

import pytest

from tests.texts import prose

TEXT = prose(9000)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_bytes(TEXT)
    return tmp_path


@pytest.fixture
def study(tmp_path):
    """A study's folder with the text in it."""
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "text.txt").write_bytes(TEXT)
    return tmp_path / "study"
