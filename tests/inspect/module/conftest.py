"""Modules are tried at their full length, however busy the machine is."""

import pytest

from posenc.inspect.module import subject


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(subject, "SLOW_SECONDS", 60.0)
