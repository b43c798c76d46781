"""Every public name teaches by an example, and the examples give what they show."""

from __future__ import annotations

import doctest
import sys

import pytest
import torch

import posenc

PUBLIC = [*posenc.__all__, *posenc._MODULES]
ELSEWHERE = {"keras"}  # in tests/keras, in a process of its own


def run(documented: object, name: str) -> doctest.TestResults:
    """Run the examples in one docstring, with torch, posenc and the names of its module."""
    home = sys.modules[getattr(documented, "__module__", "posenc")]
    globs = {**vars(home), "torch": torch, "posenc": posenc}
    text = getattr(documented, "__doc__", None) or ""
    test = doctest.DocTestParser().get_doctest(text, globs, name, None, 0)
    return doctest.DocTestRunner(verbose=False).run(test)


@pytest.mark.parametrize("name", sorted({*PUBLIC} - ELSEWHERE))
def test_example(name: str):
    failed, tried = run(getattr(posenc, name), name)
    assert tried > 0, f"posenc.{name} has no example"
    assert failed == 0


def test_a_wrong_example_is_seen():
    def wrong():
        """
        >>> posenc.ALiBi(2).slopes
        (0.5, 0.25)
        """

    assert run(wrong, "wrong") == (1, 1)
    assert run(len, "len") == (0, 0)
