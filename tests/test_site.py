"""The site: its links are mended, dead ones are found, docstrings become valid markup."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import posenc
from tests.browser import needs_chromium
from tests.explore.test_page import PANELS
from tests.test_readme import ROOT, load_script

pytestmark = pytest.mark.prose
LEARN = sorted((ROOT / "docs/learn").glob("*.md"))


@pytest.fixture(scope="module")
def site():
    return load_script("build_site", "docs")


def test_every_page_is_in_the_index(site):
    fronts = {name: index(name) for name in ("README.md", "README.zh-CN.md")}
    by_front = {
        name: {page for links in site.sections(text).values() for _, page, _ in links}
        for name, text in fronts.items()
    }
    chinese = by_front["README.zh-CN.md"]
    assert all(page.endswith(".zh-CN") for page in chinese)
    assert not any(page.endswith(".zh-CN") for page in by_front["README.md"])
    listed = chinese | by_front["README.md"] | {"index.zh-CN"}
    pages = {name.removesuffix(".md") for name in site.where().values()}
    elsewhere = {name.removesuffix(".md") for name in site.ELSEWHERE.values()}
    assert {page for page in pages - {"index"} if not page.startswith("rules/")} == listed
    assert elsewhere <= listed


def index(name: str = "README.md") -> str:
    site = load_script("build_site", "docs")
    page = ROOT / "docs" / name
    return site.linked(page.read_text(encoding="utf-8"), page, site.where())


def test_a_link_out_of_the_site_becomes_a_name(site):
    page = ROOT / "docs/findings.md"
    said = "[rates.csv](../results/x/rates.csv) [the rule](../posenc/doctor/pages/PD011.md#why)"
    text = site.linked(f"{said} [out](https://x.org) [code](../posenc/list.py)", page, site.where())
    assert text == (
        "`results/x/rates.csv` [the rule](rules/PD011.md#why) [out](https://x.org) "
        "code (`posenc/list.py`)"
    )


def test_lines_of_chinese_are_joined_and_nothing_else(site):
    assert (
        site.joined("第一行，\n第二行\n  第三行。\n\n- 一\n- 二")
        == "第一行，第二行第三行。\n\n- 一\n- 二"
    )
    assert site.joined("用 YaRN\n或 NTK\none\ntwo") == "用 YaRN\n或 NTK\none\ntwo"


def test_the_site_has_the_explorer_at_its_root(site):
    page = ROOT / "docs/learn/rope.zh-CN.md"
    shown = site.linked("[it](../../posenc/explore/explore.html#lang=zh)", page, site.where())
    assert shown == '<a href="../explorer.html#lang=zh">it</a>'


@pytest.mark.parametrize("page", LEARN, ids=lambda page: page.name)
def test_a_page_of_learning_names_what_the_explorer_shows(page):
    chinese = "zh-CN" in page.name
    language, name, panel = (
        ("zh", r"“(.+?)”", r"第 (\d) 个面板“(.+?)”")
        if chinese
        else ("en", r"\*(\w[^*]*)\*", r"panel (\d),\s\*(.+?)\*")
    )
    strings = json.loads((ROOT / "explorer/src/strings.json").read_text(encoding="utf-8"))
    shown = [text[language].strip("▶ ") for text in strings.values()]
    for said in page.read_text(encoding="utf-8").split("\n\n"):
        if "explore.html" in said:
            panels = re.findall(panel, said)
            assert panels, said
            for number, title in panels:
                assert strings[f"{PANELS[int(number) - 1]}.short"][language] == title
            for word in re.findall(name, re.sub(r"\*\*.*?\*\*", "", said)):
                assert any(text.startswith(word) for text in shown), word


@pytest.mark.parametrize(
    "bad",
    [
        '<a href="none.html">',
        '<a href="b.html#none">',
        '<a href="#none">',
        '<img src="none.png">',
        '<script src="https://x.org/y.js">',
        '<link href="//x.org/y.css">',
    ],
)
def test_a_dead_link_is_found(site, tmp_path, bad):
    good = '<a href="b.html#here"><a href="https://x.org"><a href="#me" id="me"><a href="b.html">'
    (tmp_path / "a.html").write_text(good, encoding="utf-8")
    (tmp_path / "b.html").write_text('<p id="here">', encoding="utf-8")
    assert site.dead(tmp_path) == []
    (tmp_path / "a.html").write_text(good + bad, encoding="utf-8")
    (found,) = site.dead(tmp_path)
    assert re.findall(r'"(.*)"', bad)[0] in found


def test_every_public_name_has_a_place(site):
    pages = site.api()
    for name in posenc.__all__:
        assert sum(f":: posenc.{name}\n" in text for text in pages.values()) == 1, name


def test_a_card_says_what_the_registry_says(site):
    (row,) = [row for row in site.build_rows()[0] if row["name"] == "alibi"]
    card = site.card(row)
    assert "| acts on | scores |" in card and row["source"] in card and "BLOOM, MPT" in card
    assert re.search(r"\| attention takes \| 1\.\d\d \(", card)


def test_a_card_has_no_row_for_what_is_not_known(site):
    cards = {row["name"]: site.card(row) for row in site.build_rows()[0]}
    assert all("not recorded" not in card and "| None |" not in card for card in cards.values())
    assert {name for name, card in cards.items() if "| used by |" in card} == set(site.USED)
    assert {name for name in cards if "| attention takes |" not in cards[name]} == {
        name for name in cards if site.cost(name) is None
    }


def test_formulas_are_literal_and_signs_escaped():
    rst = load_script("conf", "docs").as_rst(
        ["Do it.", "", "score[h] += |a - b|", "", "Shapes: *where -> `x_`", "Units: q_ per |i|."]
    )
    assert rst == [
        "Do it.",
        "",
        "::",
        "",
        "    score[h] += |a - b|",
        "",
        "",
        r"**Shapes:** \*where -> ``x_``",
        "",
        r"**Units:** q\_ per \|i\|.",
        "",
    ]


@pytest.mark.parametrize("page", LEARN, ids=lambda page: page.name)
def test_a_page_of_learning_runs_and_shows_a_picture(page):
    text = page.read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert re.search(r"!\[.+\]\(\.\./figures/[\w-]+\.svg\)", text)
    exec(compile(code, str(page), "exec"), {})


@pytest.mark.parametrize("page", [p for p in LEARN if "zh-CN" not in p.name], ids=lambda p: p.name)
def test_a_page_of_learning_has_the_same_code_in_chinese(page):
    def code(path: Path) -> list[str]:
        blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S)
        return [re.sub(r"\s*#.*|\"\"\".*\"\"\"", "", block) for block in blocks]

    chinese = page.with_suffix(".zh-CN.md")
    assert code(page) and code(page) == code(chinese)
    numbers = [re.findall(r"\d+\.\d+", p.read_text(encoding="utf-8")) for p in (page, chinese)]
    assert sorted(numbers[0]) == sorted(numbers[1])


def printed(config: dict, folder: Path) -> list[str]:
    """What the doctor prints of a config, in the columns of docs/yarn.md."""
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    said = subprocess.run(
        [sys.executable, "-m", "posenc", "doctor", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "150"},
    ).stdout
    rows = [[cell.strip() for cell in row.strip("│").split("│")] for row in said.splitlines()]
    computing = [row for row in rows if "0.125" in row]
    return [f"| {row[0]} | {row[2]} | {row[3]} | {row[-1]} |" for row in computing]


def test_the_page_on_yarn_shows_what_the_doctor_prints(tmp_path):
    text = (ROOT / "docs/yarn.md").read_text(encoding="utf-8")
    both = json.loads(re.findall(r"^```json\n(.*?)^```$", text, re.M | re.S)[0])
    new = {k: v for k, v in both.items() if k not in ("rope_scaling", "rope_theta")}
    shown = re.findall(r"^\| runtime .*\n.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    for config, table in zip(
        (both, new, both | {"max_position_embeddings": 32768}), shown, strict=True
    ):
        assert printed(config, tmp_path) == table.splitlines()


SAID = "RoPE 的长度外推 rope_theta=10000，键。"


def test_chinese_is_searched_by_pairs_of_characters():
    terms = load_script("site_search", "docs").terms_of(SAID)
    assert {"RoPE", "rope_theta", "10000", "外推", "长度", "键"} <= set(terms)
    assert "键。" not in terms and "RoPE 的" not in terms


@needs_chromium
@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ("外推", ["外推"]),
        ("长度外推", ["长度", "外推"]),
        ("扩展上下文", ["扩展", "上下", "下文"]),
        ("RoPE为什么", ["RoPE", "为什", "什么"]),
        ("键", ["键"]),
        ("rope_theta=10000", ["rope_theta", "10000"]),
        ("...", []),
    ],
)
def test_a_query_is_split_into_terms_of_the_index(browser, query, terms):
    script = load_script("site_search", "docs")
    split = browser.evaluate(f"{script.SPLIT_QUERY}; splitQuery({json.dumps(query)})")
    assert split == terms
    assert set(split) <= set(script.terms_of(query))
    assert not set("&<>'\"") & set(script.SPLIT_QUERY)


def test_the_explorer_has_a_way_back_and_a_name_of_its_own(site):
    page = site.explorer_with_way_back()
    assert site.WAY_BACK in page and site.EXPLORER_NAME not in site.where().values()
    assert "explore.html" in {name.replace(".md", ".html") for name in site.where().values()}


def test_the_index_of_the_api_has_a_sentence_for_each_class_and_function(site):
    lines = [line for line in site.api()["index"].splitlines() if line.startswith("- `")]
    assert len(lines) > 80
    without = {re.findall(r"`(.+?)`", line)[0] for line in lines if "`:" not in line}
    assert all(name.startswith("masks.") for name in without), without
