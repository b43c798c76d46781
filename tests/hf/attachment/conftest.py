"""What tests of attached models share."""

import pytest


@pytest.fixture
def without_proof(monkeypatch):
    """Let attach() leave out the dozen forwards by which it proves that a model counts its tokens:
    test_proof.py tests them, and test_families.py makes them for every family."""
    monkeypatch.setattr("posenc.hf.attachment.attach.prove", lambda model, example: None)
