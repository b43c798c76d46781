"""Configure Sphinx for the pages that docs/build_site.py lays out."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from site_search import SPLIT_QUERY, terms_of

project = author = "posenc"
html_title = "posenc"
copyright = "the posenc authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
default_role = "literal"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # other libraries' names: their sites are not asked
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_use_type_comments = False
add_module_names = False
python_maximum_signature_line_length = 60
python_display_short_literal_types = True
suppress_warnings = ["misc.highlighting_failure"]  # blocks in languages of our own
html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
html_search_language = "en-zh"
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))

_LABEL = re.compile(r"([A-Z][a-z]+(?: [a-z]+)?): (\S.*)")
_ITEM = re.compile(r"([a-z_]+): (\S.*)")
_FORMULA = re.compile(r"[a-zA-Z][^.:]*? (\+=|-=|\*=|=) ")
_SPAN = re.compile(r"(`[^`]*`)")


def as_rst(lines: list[str]) -> list[str]:
    """Return a docstring as reStructuredText: formulas literal, labels bold, the rest escaped."""
    made: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        rows = [row for row in paragraph.split("\n") if row.strip()]
        if not rows:
            continue
        if rows[0].lstrip().startswith(">>>"):
            made += [*rows, ""]
        elif _FORMULA.match(rows[0]) and not _LABEL.match(rows[0]):
            made += ["::", "", *(f"    {row}" for row in rows), ""]
        elif rows[0].startswith("    ") and not (made and made[-2:-1] == ["Args:"]):
            made += ["::", "", *rows, ""]
        elif _ITEM.match(rows[0]):
            for row in rows:
                found = _ITEM.fullmatch(row)
                said = f"- ``{found[1]}``: {escaped(found[2])}" if found else escaped(row.strip())
                made.append(said if found else f"  {said}")
            made.append("")
        else:
            for row in rows:
                if found := _LABEL.fullmatch(row):
                    made += ["", f"**{found[1]}:** {escaped(found[2])}"]
                else:
                    made.append(escaped(row))
            made.append("")
    return made


def escaped(text: str) -> str:
    """Return text without the signs that reStructuredText reads; code spans stay code."""
    parts = _SPAN.split(text)
    for i, part in enumerate(parts):
        parts[i] = f"`{part}`" if i % 2 else re.sub(r"([\\*|`]|_(?!\w))", r"\\\1", part)
    return "".join(parts)


def search_language() -> type:
    """Return the class by which Sphinx indexes both languages: English by word stems, Chinese by
    pairs of characters. Sphinx is only imported here, because tests load this file without it."""
    from sphinx.search import SearchEnglish

    class SearchEnglishAndChinese(SearchEnglish):
        lang = "en-zh"
        language_name = "English"  # names the stemmer in JavaScript
        js_splitter_code = SPLIT_QUERY
        stopwords = SearchEnglish.stopwords - {"own"}  # "your own encoding"

        def split(self, input: str) -> list[str]:
            return terms_of(input)

    return SearchEnglishAndChinese


def show_tree_of_the_language(app, pagename, templatename, context, doctree) -> None:
    """Keep of the navigation what is in the page's language, below a link to the other one: the
    same page where it exists there, else the front page."""
    if "furo_navigation_tree" not in context:
        return
    is_chinese = pagename.endswith(".zh-CN")
    trees = re.split(r'(?=<p class="caption")', context["furo_navigation_tree"])
    kept = [tree for tree in trees if ("中文" in tree.partition("</p>")[0]) == is_chinese]
    other = pagename.removesuffix(".zh-CN") if is_chinese else f"{pagename}.zh-CN"
    exists = other in app.env.found_docs
    if not exists:
        other = "index" if is_chinese else "index.zh-CN"
    said = "English" if is_chinese else "中文" if exists else "中文（本页只有英文）"
    switch = f'<p class="caption"><a href="{context["pathto"](other)}">{said}</a></p>'
    context["furo_navigation_tree"] = switch + "".join(kept)


def setup(app) -> None:
    app.add_search_language(search_language())
    app.connect("html-page-context", show_tree_of_the_language, priority=900)  # after the theme

    def read(app, what, name, obj, options, lines: list[str]) -> None:
        lines[:] = as_rst(lines)

    app.connect("autodoc-process-docstring", read, priority=400)  # before napoleon
