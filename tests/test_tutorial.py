"""An encoding added as CONTRIBUTING.md says passes the contract, and no test keeps a list of names
by hand. tests/test_docs.py runs all of `make test` after every tutorial, which takes longer."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.test_docs import LEFT_OUT, ROOT, follow

NEW = "square_root"
PARTS = ("tests/attend", "tests/encodings")
TAKES_LONG = "compiles or exports or traces or inductor or known or frozen or inference"
BY_HAND = """
from posenc.encodings.registry import names

def test_list_by_hand():
    assert set(names()) == {kept}
"""
RUN = f"""
import sys
import pytest

class OnlyTheNew:
    def pytest_collection_modifyitems(self, items):
        from posenc.encodings.registry import names
        others = {{*names()}} - {{{NEW!r}}}
        named = lambda item: getattr(item, "callspec", None) and any(
            isinstance(value, str) and value in others for value in item.callspec.params.values()
        )
        items[:] = [item for item in items if not named(item)]

sys.exit(pytest.main(sys.argv[1:], plugins=[OnlyTheNew()]))
"""


@pytest.mark.slow
def test_what_contributing_adds_passes_and_a_list_by_hand_is_seen(tmp_path):
    from posenc.encodings.registry import names

    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT, "docs", "results"))
    follow((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), copy)
    planted = copy / "tests" / "attend" / "test_by_hand.py"
    planted.write_text(BY_HAND.format(kept=set(names())), encoding="utf-8")
    files = [
        path
        for part in PARTS
        for path in sorted((copy / part).rglob("test_*.py"))
        if re.search(r"names\(\)|_ENTRIES", path.read_text(encoding="utf-8"))
    ]
    (marks,) = re.findall(
        r"^test: .*\n.* -m \"(.*)\"$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
    )
    options = ["-q", "-p", "no:cacheprovider", "-m", marks, "-k", f"not ({TAKES_LONG})"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *options, *files],
        cwd=copy,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(copy)},
    )
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.M)
    assert failed == ["tests/attend/test_by_hand.py::test_list_by_hand"], done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 100
