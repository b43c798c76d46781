"""Exports are proved by the same script, but in this process, which has loaded transformers: only
the journeys of the command start a process for it."""

import contextlib
import io
import json

import pytest

from posenc.extend import extension
from posenc.extend.export import stock_reader as proof
from posenc.extend.export.prover import Prover


class ProverHere(Prover):
    """A prover that is its own process."""

    returncode = 0

    def start(self):
        return self

    def communicate(self, asked: str) -> tuple[str, str]:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            proof.main(*json.loads(asked))
        return said.getvalue(), ""


@pytest.fixture(autouse=True)
def proved_here(request, monkeypatch):
    if "fresh_process" not in request.fixturenames:
        monkeypatch.setattr(extension, "Prover", ProverHere)
