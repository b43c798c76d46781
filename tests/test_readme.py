"""The READMEs' table of encodings is current, and links in documents lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from posenc import registry

ROOT = Path(__file__).parents[1]
READMES = ("README.md", "README.zh-CN.md")
DOCUMENTS = sorted(
    p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
)


def load_update_readme():
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "docs/update_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table() -> str:
    return load_update_readme().current_table()


@pytest.mark.parametrize("document", READMES)
def test_table_of_encodings_is_current(document, table):
    text = (ROOT / document).read_text(encoding="utf-8")
    current = load_update_readme().with_table(text, table)
    assert text == current, "run `make readme`"


def test_table_names_every_encoding(table):
    for name in registry.names():
        assert name in table


def test_a_scaling_is_credited_with_its_own_paper(table):
    (yarn,) = [line for line in table.splitlines() if line.startswith("| `yarn` |")]
    assert "2309.00071" in yarn


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (folder / target.partition("#")[0]).exists(), target
