"""Every public name teaches by an example, and the examples give what they show."""

import doctest
import sys
import types
from operator import attrgetter

import pytest
import torch

import posenc

PUBLIC = [*posenc.__all__, *posenc._MODULES]
RUNS = ("compare.run", "extend.run", "inspect.measure_encodings")
"""The commands as functions."""
ELSEWHERE = {"keras"}  # in tests/keras, in a process of its own


def run(documented: object, name: str) -> doctest.TestResults:
    """Run the examples in one docstring, with torch, posenc and the names of its module; not those
    of the package, whose module `list` would hide Python's."""
    home = sys.modules.get(getattr(documented, "__module__", ""))
    globs = {**(vars(home) if home else {}), "torch": torch, "posenc": posenc}
    text = getattr(documented, "__doc__", None) or ""
    test = doctest.DocTestParser().get_doctest(text, globs, name, None, 0)
    return doctest.DocTestRunner(verbose=False).run(test)


@pytest.mark.quick(1000)  # each takes milliseconds, and teaches
@pytest.mark.parametrize(
    "name",
    [
        *sorted({*PUBLIC} - ELSEWHERE),
        *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS),
    ],
)
def test_example(name: str):
    failed, tried = run(attrgetter(name)(posenc), name)
    assert tried > 0, f"posenc.{name} has no example"
    assert failed == 0


def test_a_module_that_was_imported_hides_no_name():
    import posenc.list  # noqa: F401

    def counted():
        """
        >>> list(range(2))
        [0, 1]
        """

    counted.__module__ = "posenc"
    assert run(counted, "counted").failed == 1  # what a module's own example must not see
    module = types.ModuleType("room", counted.__doc__)
    assert run(module, "room") == (0, 1)


def test_a_wrong_example_is_seen():
    def wrong():
        """
        >>> posenc.ALiBi(2).slopes
        (0.5, 0.25)
        """

    assert run(wrong, "wrong") == (1, 1)
    assert run(len, "len") == (0, 0)
