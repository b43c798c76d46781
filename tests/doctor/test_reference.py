"""The page and the picture are current; every rule, runtime and recorded config is there."""

import re

import pytest

from posenc.doctor.rules import RULES
from posenc.runtimes.known import RUNTIMES
from tests.test_readme import ROOT, load_script

pytestmark = pytest.mark.prose
PAGE = ROOT / "docs/doctor.md"


def test_the_page_is_complete():
    text = load_script("update_doctor").reference()
    for code, rule in RULES.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| [{code}](")]
        assert f"| {rule.title} |" in row
        assert (PAGE.parent / row.partition("](")[2].partition(")")[0]).is_file()
    for name in RUNTIMES:
        assert f"| {name} |" in text


def test_the_page_is_current():
    page = PAGE.read_text("utf-8")
    assert page == load_script("update_doctor").with_generated(page), "run `make readme`"


def test_the_golden_table_has_every_config_and_no_difference():
    page = PAGE.read_text("utf-8")
    (right, all_, configs) = re.findall(r"^(\d+) of (\d+) recorded answers to (\d+) ", page, re.M)[
        0
    ]
    assert (right, configs) == (all_, "57")
    assert "**differs**" not in page
    for document in ("README.md", "README.zh-CN.md"):
        assert all_ in (ROOT / document).read_text("utf-8"), document


def test_the_golden_table_shows_a_wrong_emulator(monkeypatch):
    monkeypatch.setitem(RUNTIMES, "vllm", RUNTIMES["transformers-4"])
    table = load_script("update_doctor").golden_cases()
    assert "**differs**" in table
    assert not table.startswith("337 of 337")


def test_the_picture_is_what_the_command_prints():
    script = load_script("update_doctor")
    assert script.SCREEN.read_text("utf-8") == script.picture(), "run `make readme`"
    shown = script.screen().plain
    broken, mended = shown.split("$ posenc doctor mended\n")
    assert "other" in broken and "E PD001" in broken
    assert "other" not in mended and "Nothing to complain about" in mended
    assert "font-face" not in script.picture()


def test_the_picture_of_kinds_is_what_transformers_computes(tmp_path):
    script = load_script("update_doctor")
    script.write_kinds(tmp_path / "kinds.svg")
    drawn = (tmp_path / "kinds.svg").read_text("utf-8")
    assert script.KINDS.read_text("utf-8") == drawn, "run `make readme`"
    page = PAGE.read_text("utf-8")
    slowest = re.findall(r"up to ([\d,]+) tokens", drawn)
    assert len(slowest) == 3 and f"once in {slowest[0]} tokens" in page
    assert "figures/doctor-kinds.svg" in page


@pytest.mark.parametrize(
    "word",
    [
        "--length",
        "--for",
        "--json",
        "--ignore",
        "--overrides",
        "--with",
        "--fix",
        "--out",
        "--like",
        "--layout",
        "--text",
        "--explain",
        "--convert-layout",
    ],
)
def test_the_page_tells_of_every_option(word):
    assert word in PAGE.read_text("utf-8")
