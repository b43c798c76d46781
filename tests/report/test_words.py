"""Words of a page lead to the section of the site that explains them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from posenc.report import html_page
from posenc.report.chart import Chart
from posenc.report.drawing import figure
from posenc.report.html_page import Caution, Code, Headline, Page, Plot, pages_by_word
from posenc.report.report import Cell, Heading, Table
from posenc.tasks.registry import TASKS

DOCS = Path(__file__).parents[2] / "docs"
ADDRESS = "https://example.org/me/posenc"
IN_DOCS = f"{ADDRESS}/blob/main/docs/"
LINK = re.compile(r'<a href="([^"]*)" title="([^"]*)">([^<]*)</a>')


@pytest.fixture(autouse=True)
def _installed_release(monkeypatch):
    """A release knows the address of its repository; a clone does not."""
    monkeypatch.setattr(html_page, "repository_url", lambda: ADDRESS)


def test_without_an_address_a_word_names_the_file_and_leads_nowhere(monkeypatch):
    monkeypatch.setattr(html_page, "repository_url", lambda: "")
    page = html("Tied: no encoding is better.")
    assert '<abbr title="docs/compare.md">Tied</abbr>' in page and 'href="http' not in page


@pytest.mark.parametrize("urls", [None, [], ["Issues, x"], [f"Repository, {ADDRESS}"]])
def test_address_is_that_of_the_installed_release(urls, monkeypatch):
    monkeypatch.undo()

    class Installed:
        def get_all(self, name):
            assert name == "Project-URL"
            return urls

    def installed(name):
        if urls is None:
            raise html_page.metadata.PackageNotFoundError(name)
        return Installed()

    monkeypatch.setattr(html_page.metadata, "metadata", installed)
    assert html_page.repository_url.__wrapped__() == (
        ADDRESS if urls and ADDRESS in urls[-1] else ""
    )


def dead(targets: Iterator[str]) -> list[str]:
    """Targets without a page in docs/, or without its section."""
    found = []
    for target in targets:
        name, _, section = target.partition("#")
        page = DOCS / f"{name}.md"
        lines = page.read_text(encoding="utf-8").splitlines() if page.is_file() else []
        titles = [line.lstrip("#") for line in lines if line.startswith("#")]
        anchors = [re.sub(r"[^\w -]", "", t.strip()).lower().replace(" ", "-") for t in titles]
        if not lines or (section and section not in anchors):
            found.append(target)
    return found


def test_every_word_leads_to_a_section_that_exists():
    assert dead(set(pages_by_word().values())) == []


@pytest.mark.parametrize("target", ["none", "none#tasks", "compare#no-such-section", "learn"])
def test_a_dead_target_is_seen(target):
    assert dead([target, "compare#tasks"]) == [target]


def test_every_word_is_on_a_page():
    rooms = [
        Path(__file__).parents[2] / "posenc" / room for room in ("compare", "extend", "inspect")
    ]
    text = " ".join(p.read_text(encoding="utf-8") for room in rooms for p in room.rglob("*.py"))
    text = re.sub(r'"\s*f?"', "", text).lower()
    text += "".join(task.metric for task in TASKS.values()).lower()
    assert [word for word in pages_by_word() if word.lower() not in text] == []


def html(*blocks) -> str:
    page = Page("Bits per byte", "tied")
    page.append_section("Tied", *blocks)
    return page.html()


def test_a_word_is_a_link_where_an_explanation_first_has_it():
    cell = Cell("1", second_line="tied")
    table = Table([Heading("loss", "bits per byte"), "tied"], [[cell, "more context"]])
    found = LINK.findall(html(table, "Tied: bits per byte, untied, tied-up.", "More context <b>."))
    compare = f"{IN_DOCS}compare.md"
    assert sorted(found) == sorted(
        [
            (f"{compare}#how-to-read-it", "docs/compare.md", "bits per byte"),
            (f"{compare}#how-differences-are-judged", "docs/compare.md", "tied"),
            (f"{compare}#how-to-read-it", "docs/compare.md", "More context"),
        ]
    )


def test_a_caption_has_links_too():
    with figure("x", "y") as (drawn, axes):
        axes.plot([0, 1], [0, 1], label="tied")
    chart = Chart({"x": [0, 1], "y": [0, 1]}, lambda _: drawn)
    page = html(Plot(chart, "Bits per byte by length.", "tied", "Nothing is tied."))
    assert [said for *_, said in LINK.findall(page)] == ["Bits per byte"]


def test_answers_commands_and_foreign_markup_stay():
    page = html(Headline("tied"), Caution("tied"), Code("tied"), "untied <i>tied</i> unTied")
    assert len(LINK.findall(page)) == 1 and "&lt;i&gt;<a " in page
    assert LINK.findall(html("untied, tied-up, Tiedown")) == []
