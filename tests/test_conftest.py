"""Which cases `make test` leaves to `make test-all`, and what it does not search for garbage."""

import gc

import pytest

from posenc.bench import measure
from tests.conftest import QUICK_CASES, leave_most_cases_to_test_all

MANY = """
import pytest

@pytest.mark.parametrize("case", range(100))
def test_many(case): pass

@pytest.mark.quick(3)
@pytest.mark.parametrize("case", range(100))
def test_three(case): pass

@pytest.mark.parametrize("case", range(8))
def test_all(case): pass

@pytest.mark.parametrize("case", [pytest.param(n, marks=pytest.mark.slow) for n in range(100)])
def test_none(case): pass

def test_one(): pass
"""


@pytest.fixture
def chosen(tmp_path, request):
    """The cases of a file that are not slow, by the name of their function."""
    path = tmp_path / "test_many.py"
    path.write_text(MANY)
    module = pytest.Module.from_parent(request.session, path=path)
    items = [*module.collect()]
    leave_most_cases_to_test_all(items)
    found: dict[str, list[int]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            case = item.callspec.params["case"] if hasattr(item, "callspec") else 0
            found.setdefault(item.originalname, []).append(case)
    return found


def test_of_many_cases_a_few_are_quick_from_the_first_to_the_last(chosen):
    assert chosen == {
        "test_many": [0, 14, 28, 42, 57, 71, 85, 99],
        "test_three": [0, 50, 99],
        "test_all": [*range(8)],
        "test_one": [0],
    }
    assert len(chosen["test_many"]) == QUICK_CASES


def test_what_the_tests_began_with_is_searched_for_garbage_neither_now_nor_after_bench():
    before = gc.get_freeze_count()
    measure.time_interleaved_rounds({"a": int}, 1)
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before > 100_000
