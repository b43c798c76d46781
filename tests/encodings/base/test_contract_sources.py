"""The registry's `checked` column is true: a test with the mark `golden` or `reference` names the
encoding, and fails if the encoding is wrong."""

import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from torch import Tensor

from posenc import PositionEncoding, names
from posenc.encodings import registry
from posenc.encodings.base.term import Term
from posenc.encodings.scores.alibi import ALiBi
from posenc.frequencies.scalings.lookup import SCALINGS
from tests.golden_values import Case, cases

TESTS = Path(__file__).parents[2]
Test = Callable[..., None]


@functools.cache
def marked() -> dict[tuple[str, str], list[Test]]:
    """Return the tests with the mark `golden` or `reference`, by (mark, encoding)."""
    found: dict[tuple[str, str], list[Test]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if not re.search(r"^@pytest\.mark\.(golden|reference)\(", path.read_text(), re.MULTILINE):
            continue
        module = importlib.import_module(".".join(path.relative_to(TESTS.parent).parts)[:-3])
        for test in vars(module).values():
            for mark in getattr(test, "pytestmark", []):
                if mark.name in ("golden", "reference"):
                    for name in mark.args:
                        found.setdefault((mark.name, name), []).append(test)
    return found


def calls(test: Test) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each parametrized run of a test that has no fixtures."""
    axes = []
    for mark in test.pytestmark:  # type: ignore[attr-defined]
        if mark.name == "parametrize":
            given = mark.args[0]
            keys = [k.strip() for k in given.split(",")] if isinstance(given, str) else list(given)
            values = [getattr(v, "values", (v,) if len(keys) == 1 else v) for v in mark.args[1]]
            axes.append([dict(zip(keys, v, strict=True)) for v in values if v != (None,)])
    for parts in itertools.product(*axes):
        yield {key: value for part in parts for key, value in part.items()}


def off(value: Any) -> Any:
    """Return what a method returned, with its numbers changed by five percent."""
    if isinstance(value, Tensor):
        return value * 1.05 if value.is_floating_point() else value
    if isinstance(value, float | Decimal):
        return value * type(value)("1.05")
    if isinstance(value, tuple | list):
        made = map(off, value)
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, FunctionType):
        return lambda *args: off(value(*args))
    if type(value) is PositionEncoding:  # NoPE: it does nothing that could be off
        return value
    if isinstance(value, PositionEncoding | Term):  # of a layer, or of one attention
        value.__class__ = type(type(value).__name__, (type(value),), methods_off(type(value)))
    return value


def methods_off(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class of posenc, by name, changed to return numbers that are
    five percent off."""
    found = {name: inspect.getattr_static(cls, name) for name in dir(cls) if name[0] != "_"}
    return {
        name: _planted(method)
        for name, method in found.items()
        if isinstance(method, FunctionType)
        and method.__module__.startswith("posenc.")
        and (cls is PositionEncoding or method is not vars(PositionEncoding).get(name))
    }


def plant(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, method in methods_off(cls).items():
        monkeypatch.setattr(cls, name, method)


def _planted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        return result if result is self else off(result)

    return wrong


def sees(test: Test) -> bool:
    """Return True if some run of the test fails by an assertion."""
    for arguments in calls(test):
        try:
            test(**arguments)
        except AssertionError:
            return True
    return False


def subject(name: str) -> type:
    """Return the class that the tests of an entry must check: its scaling if it has one, because
    RoPE itself is another entry."""
    entry = registry.entry(name)
    scaling = entry.defaults.get("scaling")
    return SCALINGS[scaling] if scaling else registry.encoding_class(name)


@pytest.mark.parametrize("name", names())
def test_the_registry_names_a_check_that_sees(name: str, monkeypatch: pytest.MonkeyPatch):
    checked = registry.entry(name).evidence
    tests = marked().get((checked, name), [])
    assert tests, f"no test is marked @pytest.mark.{checked}({name!r}), as the registry says"
    for test in tests:
        arguments = next(calls(test), None)
        if checked == "golden":
            assert arguments is None or any(isinstance(a, Case) for a in arguments.values()), test
    if all(next(calls(test), None) is None for test in tests):
        pytest.skip(f"no golden values of {name}")
    plant(subject(name), monkeypatch)
    assert any(map(sees, tests)), f"{name} may be five percent off: {tests} do not see it"


def test_marks_name_encodings_that_exist():
    assert {name for _, name in marked()} <= set(names())


# Checks that do not check, and must be found out.
@pytest.mark.parametrize("num_heads", [4, 8])
def compares_with_itself(num_heads: int):
    assert ALiBi(num_heads).slopes == ALiBi(num_heads).slopes


@pytest.mark.parametrize("case", cases("alibi"))
def compares_nothing(case: Case):
    ALiBi(4)


@pytest.mark.parametrize("test", [compares_with_itself, compares_nothing])
def test_a_blind_check_is_found_out(test: Test, monkeypatch: pytest.MonkeyPatch):
    plant(ALiBi, monkeypatch)
    assert not sees(test)


def test_a_planted_fault_ends_with_its_test():
    with pytest.MonkeyPatch.context() as patch:
        before = dict(vars(ALiBi))
        plant(ALiBi, patch)
        assert dict(vars(ALiBi)) != before
    assert dict(vars(ALiBi)) == before
    assert ALiBi.transform is PositionEncoding.transform
