"""A few random attentions in every run of the tests; python -m tests.fuzz.attention takes more."""

import pytest

from posenc.attend.ways import blocks, reference
from tests.fuzz import attention


@pytest.mark.parametrize("seed", [0, 10_000])
def test_random_attentions_equal_the_reference(seed, capsys):
    assert attention.main(100, seed) == []
    counts = capsys.readouterr().out
    assert "'agree': " in counts and "'wrong'" not in counts


def test_a_kernel_that_is_slightly_off_is_found(monkeypatch):
    def off(problem):
        out, lse = reference.run(problem)
        return out * 1.01, lse

    monkeypatch.setattr(blocks, "run", off)
    found = attention.main(60, 0)
    assert found and all(case.impl in ("blocks", "auto") for case, _ in found)


def test_a_nan_is_found(monkeypatch):
    def nothing(problem):
        out, lse = reference.run(problem)
        return out * float("nan"), lse

    monkeypatch.setattr(blocks, "run", nothing)
    assert attention.main(60, 0)
