"""The mutations that prove the tests' power break today's code."""

import pytest

from tests.power import MUTATIONS, ROOT

pytestmark = pytest.mark.prose


def test_each_mutation_replaces_text_that_the_library_has():
    texts = {m.file: (ROOT / "posenc" / m.file).read_text(encoding="utf-8") for m in MUTATIONS}
    assert [m.right for m in MUTATIONS if m.right not in texts[m.file]] == []


def test_the_tests_of_each_mutation_exist():
    named = {name for mutation in MUTATIONS for name in mutation.tests.split()}
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []
