"""Ask the built site the questions of docs/search.toml in Chromium, and list those whose page is
not among the first three results: check_search.py [SITE]"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from tests.browser import Browser

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "docs/search.toml"
SITE = ROOT / "build/docs"
FIRST = 3
"""How many results a visitor looks at; chosen."""

RESULTS = f"""new Promise(resolve => {{
    const links = () => [...document.querySelectorAll('#search-results .search li > a')];
    let rounds = 0, before = -1;
    const look = () => {{
        const found = links();
        const status = document.querySelector('#search-results .search-summary');
        const settled = found.length === before && (found.length || rounds > 40);
        before = found.length;
        rounds += 1;
        if (settled || rounds > 100) resolve(found.slice(0, {FIRST}).map(a => a.pathname));
        else setTimeout(look, 100);
    }};
    look();
}})"""


def questions() -> list[tuple[str, list[str]]]:
    """Return each question with the pages that answer it."""
    groups = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))
    return [pair for group in groups.values() for pair in group.items()]


def first_results(browser: Browser, site: Path, question: str) -> list[str]:
    """Return the first pages that the site's search shows for a question, without .html."""
    browser.load(site / "search.html", fragment=f"?q={quote(question)}")
    prefix = f"{site.resolve().as_posix()}/"
    shown = browser.evaluate(RESULTS)
    return [path.removeprefix(prefix).removesuffix(".html") for path in shown]


def missed(site: Path = SITE) -> list[str] | None:
    """Return a line for each question whose page is not among the first results; None without
    Chromium."""
    sys.path.insert(0, str(ROOT))
    try:
        from tests.browser import CHROMIUM, Browser
    finally:
        sys.path.remove(str(ROOT))
    if CHROMIUM is None:
        return None
    lines = []
    with TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        for question, pages in questions():
            shown = first_results(browser, site, question)
            if not {*shown} & {*pages}:
                lines.append(f"{question}: {', '.join(shown)} instead of {' or '.join(pages)}")
    return lines


if __name__ == "__main__":
    found = missed(Path(sys.argv[1]) if len(sys.argv) > 1 else SITE)
    if found is None:
        print("Chromium is not installed: nothing was asked.")
    else:
        print("\n".join(found) or f"{len(questions())} questions, each answered.")
    sys.exit(bool(found))
