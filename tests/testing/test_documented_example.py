"""The encoding of one's own that docs/use.md shows passes the contract."""

import re
from pathlib import Path

import pytest
import torch

import posenc
from posenc.testing import CHECKS, maker, verdicts

PAGE = Path(__file__).parents[2] / "docs/use.md"


@pytest.mark.prose
def test_the_example_of_the_page_passes_the_contract():
    (source,) = re.findall(r"^class LogALiBi.*?(?=\n\n\n)", PAGE.read_text("utf-8"), re.M | re.S)
    scope = {"__name__": "mine", "posenc": posenc, "torch": torch}
    exec(source, scope)
    failed = {v.check: v.failure for v in verdicts(maker(scope["LogALiBi"]), CHECKS) if v.failure}
    assert failed == {}
