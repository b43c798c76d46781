"""The package's face: its names, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import posenc

OPTIONAL = ("transformers", "keras", "jax", "ray", "peft", "tensorflow")
TOOL = ("matplotlib", "typer", "rich")


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `statement`."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_is_light():
    assert not loaded_after("import posenc") & {"torch", "numpy", *TOOL, *OPTIONAL}


def test_library_needs_neither_tool_nor_extras():
    statement = "import posenc; [getattr(posenc, name) for name in posenc.__all__]"
    assert not loaded_after(statement) & {*TOOL, *OPTIONAL}


def test_every_encoding_loads_without_extras():
    statement = (
        "from posenc import registry; [registry.encoding_class(n) for n in registry.names()]"
    )
    assert not loaded_after(statement) & {*TOOL, *OPTIONAL}


def test_study_needs_no_extras():
    assert not loaded_after("import posenc.compare.page, posenc.compare.results") & {*OPTIONAL}


@pytest.mark.parametrize("name", posenc.__all__)
def test_public_name_exists(name):
    assert getattr(posenc, name).__name__ == name
    assert name in dir(posenc)


def test_all_is_what_a_star_import_brings():
    scope: dict = {}
    exec("from posenc import *", scope)
    assert set(scope) - {"__builtins__"} == set(posenc.__all__)


def test_public_names_are_documented():
    for name in posenc.__all__:
        assert getattr(posenc, name).__doc__, name


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'posenc' has no attribute 'RoPe'"):
        posenc.RoPe  # noqa: B018


def test_submodules_that_documents_use():
    assert posenc.masks.causal.causal
    assert "rope" in posenc.registry.names()


def test_package_is_typed():
    assert (Path(posenc.__file__).parent / "py.typed").exists()
