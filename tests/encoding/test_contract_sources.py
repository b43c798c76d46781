"""What a registry line says about its checking is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posenc import names, registry
from posenc.queries_keys.rope_scaling import SCALINGS


@pytest.mark.parametrize("name", names())
def test_checked_names_a_test_that_exists(name: str):
    """Some test file uses the class, and its scaling's, beside golden values or a reference."""
    entry = registry.entry(name)
    assert entry.checked in ("golden", "reference")
    source = "tests.golden_values" if entry.checked == "golden" else "tests.references"
    words = [entry.path.partition(":")[2]]
    if "scaling" in entry.defaults:
        words.append(SCALINGS[entry.defaults["scaling"]].__name__)
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        text = path.read_text()
        own = path.stem not in ("test_negative_controls", "test_masks", Path(__file__).stem)
        if own and source in text and all(re.search(rf"\b{word}\b", text) for word in words):
            return
    pytest.fail(f"no test file has {' and '.join(words)} beside {source}")
