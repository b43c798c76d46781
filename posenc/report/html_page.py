"""Build one self-contained HTML page: text, tables and figures, without scripts or network.

page = Page("Which encoding?", "six encodings, two seeds")
page.append_section("Loss", "Lower is better.", Plot(chart, "Loss by position.", "alibi is flat"))
page.write("report.html")
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata, resources
from itertools import count, groupby
from pathlib import Path
from typing import Any

from posenc.files.atomic import write_atomically
from posenc.report.chart import describe_curve_ends
from posenc.report.drawing import SVG_RULES, css_variables, to_svg
from posenc.report.escaping import escape_html
from posenc.report.report import (
    LONG_TEXT_LENGTH,
    Block,
    Caution,
    Cell,
    Code,
    Facts,
    Fold,
    Heading,
    Headline,
    Items,
    Labelled,
    Limits,
    Links,
    Plot,
    Report,
    Table,
    TextBlock,
    Value,
    cell_text,
    named_tables,
    numeric_columns,
)

MIN_LINKED_SECTIONS = 3
"""Sections with headings from which on a page begins with links to them: chosen."""
_HEADING = r"th scope=col[^>]*(?:>[^<]*<small)?"
_OPENING_TAG = rf"<(?:p|p class=caption|figcaption|{_HEADING})>"
"""Begins the elements in which words become links."""


def page_of(report: Report) -> "Page":
    """Return the report as a page: first its headline, limits and cautions under no heading, and
    then all sections, also those that the terminal leaves out as details. Its facts are not on the
    page."""
    page = Page(report.title, report.subtitle)
    headline_blocks = [Headline(report.headline)] if report.headline else []
    limits_blocks = [Limits(report.limits)] if report.limits else []
    page.append_section("", *headline_blocks, *limits_blocks, *map(Caution, report.cautions))
    for section in report.sections:
        page.append_section(section.heading, *section.blocks)
    return page


class Page:
    """Collect the sections of a page, and write it as one HTML file.

    Args:
        title: heading and title of the page.
        subtitle: one line under it.
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self._sections: list[tuple[str, tuple[Block, ...]]] = []

    def append_section(self, heading: str, *blocks: Block) -> None:
        """Append a section with these blocks; "" for one without a heading."""
        self._sections.append((heading, blocks))

    def plots(self) -> list[Plot]:
        """Return every figure, in order."""
        return [
            block for _, blocks in self._sections for block in blocks if isinstance(block, Plot)
        ]

    def tables(self) -> dict[str, Table]:
        """Return the tables that have a name, by name."""
        return named_tables(block for _, blocks in self._sections for block in blocks)

    def html(self) -> str:
        """Return the whole page as text: one HTML file without anything outside of it."""
        plot_numbers = count(1)
        sections_html = [
            _section_html(heading, blocks, plot_numbers) for heading, blocks in self._sections
        ]
        subtitle_html = (
            f"<p class=subtitle>{escape_html(self.subtitle)}</p>" if self.subtitle else ""
        )
        return _PAGE_TEMPLATE.format(
            title=escape_html(self.title),
            subtitle=subtitle_html,
            contents=self._contents(),
            body=_link_words("\n".join(sections_html)),
            style=_style_sheet(),
        )

    def _contents(self) -> str:
        """Return a line of links to the sections as HTML; "" for a page with fewer than
        MIN_LINKED_SECTIONS sections with headings."""
        headings = [heading for heading, _ in self._sections if heading]
        if len(headings) < MIN_LINKED_SECTIONS:
            return ""
        links = [
            f'<a href="#{_anchor_of_heading(heading)}">{escape_html(heading)}</a>'
            for heading in headings
        ]
        return f"<nav>{' · '.join(links)}</nav>"

    def write(self, path: str | Path) -> None:
        """Write the page atomically."""
        content = self.html()
        write_atomically(path, content)


def _style_sheet() -> str:
    """Return the page's CSS: colours for a light and a dark scheme, and the rules of page.css."""
    dark_rule = f"@media(prefers-color-scheme:dark){{:root{{{css_variables('dark')}}}}}"
    rules = resources.files("posenc.report").joinpath("page.css").read_text(encoding="utf-8")
    return f":root{{{css_variables('light')}{SVG_RULES}}}{dark_rule}\n{rules}"


def _section_html(heading: str, blocks: Sequence[Block], plot_numbers: Iterator[int]) -> str:
    """Return a section as HTML.

    plot_numbers: yields 1, 2, ... for the figures of the page, for the identifiers in their SVG.
    """
    parts = (
        [f'<h2 id="{_anchor_of_heading(heading)}">{escape_html(heading)}</h2>'] if heading else []
    )
    for is_plot, group in groupby(blocks, key=lambda b: isinstance(b, Plot)):
        html_of_group = [_block_html(block, plot_numbers) for block in group]
        parts += ["<div class=figures>", *html_of_group, "</div>"] if is_plot else html_of_group
    return "<section>" + "\n".join(parts) + "</section>"


def pages_by_word() -> dict[str, str]:
    """Return, for each word that the site explains, the page and section: {"tied": "compare#how-
    differences-are-judged"}."""
    return json.loads(resources.files("posenc.report").joinpath("glossary.json").read_bytes())


@cache
def repository_url() -> str:
    """Return the address of posenc's repository, which an installed release has; "" if unknown."""
    try:
        urls = metadata.metadata("posenc").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    return next((url[12:] for url in urls if url.startswith("Repository, ")), "")


def _link_words(body: str) -> str:
    """Return a page's body with a link on the first mention of each word of `pages_by_word` in an
    explanation or a column's heading: to the document that explains it, or, if the repository's
    address is unknown, only the document's name as a tooltip."""
    for word, target in pages_by_word().items():
        page_name, hash_sign, anchor = target.partition("#")
        file = f"docs/{page_name}.md"
        opening_tag = "<abbr"
        closing_tag = "</abbr>"
        if repository_url():
            opening_tag = f'<a href="{repository_url()}/blob/main/{file}{hash_sign}{anchor}"'
            closing_tag = "</a>"
        pattern = (
            rf"({_OPENING_TAG}[^<]*?(?<![A-Za-z-]))({re.escape(escape_html(word))})(?![A-Za-z-])"
        )
        link = rf'\1{opening_tag} title="{file}">\2{closing_tag}'
        body = re.sub(pattern, link, body, count=1, flags=re.IGNORECASE)
    return body


def _anchor_of_heading(heading: str) -> str:
    """Return the name by which a link finds a heading: "Near and far" -> "near-and-far"."""
    return re.sub(r"\W+", "-", heading.lower()).strip("-")


def _block_html(block: Block, plot_numbers: Iterator[int]) -> str:
    """Return a block as HTML; plot_numbers: as in `_section_html`."""
    match block:
        case str():
            return f"<p>{escape_html(block)}</p>"
        case TextBlock():
            return _text_block_html(block)
        case Links(items):
            return _links_html(items)
        case Fold():
            return _fold_html(block, plot_numbers)
        case Items(texts):
            return _list_html(texts)
        case Facts(items):
            return _definitions_html(items)
        case Labelled():
            return _labelled_html(block, plot_numbers)
        case Plot():
            return _plot_html(block, f"f{next(plot_numbers)}")
        case Table():
            return _table_html(block)


def _text_block_html(block: TextBlock) -> str:
    """Return a block that is one text as HTML, with the look of its class."""
    text = escape_html(block.text)
    match block:
        case Headline():
            return f"<p class=headline>{text}</p>"
        case Limits():
            return f"<p class=limits><strong>What this cannot say.</strong> {text}</p>"
        case Caution():
            return f"<p class=warning role=note>{text}</p>"
        case Code():
            return f"<pre tabindex=0><code>{text}</code></pre>"
    raise AssertionError(f"no HTML for a {type(block).__name__}")


def _links_html(addresses: Mapping[str, str]) -> str:
    """Return a line of links as HTML; addresses: by the text of each link."""
    links = (
        f'<a href="{escape_html(address)}">{escape_html(link_text)}</a>'
        for link_text, address in addresses.items()
    )
    return f"<p>{' · '.join(links)}</p>"


def _fold_html(fold: Fold, plot_numbers: Iterator[int]) -> str:
    """Return a fold as HTML: its summary, and blocks that a click on it shows."""
    inner_html = "".join(_block_html(block, plot_numbers) for block in fold.blocks)
    return f"<details><summary>{escape_html(fold.summary)}</summary>{inner_html}</details>"


def _labelled_html(block: Labelled, plot_numbers: Iterator[int]) -> str:
    """Return a label as HTML, with its sentences and commands beside it."""
    inner_html = "".join(_block_html(part, plot_numbers) for part in block.parts)
    return f"<dl><dt>{escape_html(block.label)}</dt><dd>{inner_html}</dd></dl>"


def _list_html(texts: Sequence[str]) -> str:
    """Return texts as a list with a bullet for each."""
    return "<ul>" + "".join(f"<li>{escape_html(text)}</li>" for text in texts) + "</ul>"


def _definitions_html(facts: Mapping[str, Any]) -> str:
    """Return a list of definitions as HTML: each name of `facts`, and its value."""
    pairs_html = (
        f"<dt>{escape_html(name)}</dt><dd>{escape_html(str(value))}</dd>"
        for name, value in facts.items()
    )
    return "<dl>" + "".join(pairs_html) + "</dl>"


def describe_plot(plot: Plot) -> str:
    """Return the text alternative of a figure: its own, or its caption and the ends of its
    curves."""
    return plot.description or f"{plot.caption} {describe_curve_ends(plot.chart.data)}".strip()


def _plot_html(plot: Plot, prefix: str) -> str:
    """Return a figure with its caption as HTML. prefix: begins the identifiers in its SVG."""
    class_attribute = " class=wide" if plot.wide else ""
    scroll_attributes = (
        f' role=region tabindex=0 aria-label="{escape_html(plot.caption)}"' if plot.wide else ""
    )
    svg = to_svg(plot.chart.figure, describe_plot(plot), prefix)
    # This width makes its letters as large as the page's.
    width_in_points = 72 * plot.chart.figure.get_figwidth()
    return (
        f"<figure{class_attribute}><div class=drawing{scroll_attributes} "
        f'style="--natural:{width_in_points:g}px">'
        f"{svg}</div>"
        f"<figcaption>{escape_html(plot.caption)}</figcaption></figure>"
    )


def _table_html(table: Table) -> str:
    """Return the table as HTML, its caption above it and its notes below."""
    headings = [
        heading if isinstance(heading, Heading) else Heading(heading) for heading in table.header
    ]
    are_numeric = numeric_columns(table)
    note_numbers: dict[str, int] = {}
    head_html = "".join(map(_heading_html, headings, are_numeric))
    label_attributes = [""] * len(headings)
    if table.as_cards:
        label_attributes = [f' data-label="{escape_html(heading.text)}"' for heading in headings]
    rows_html = [_row_html(row, are_numeric, label_attributes, note_numbers) for row in table.rows]
    caption_html = f"<p class=caption>{escape_html(table.caption)}</p>" if table.caption else ""
    label = table.caption or ", ".join(heading.text for heading in headings)
    table_class = '"table cards"' if table.as_cards else "table"
    notes_html = "".join(f"<li>{escape_html(note)}</li>" for note in note_numbers)
    notes_html = f"<ol class=notes>{notes_html}</ol>" if notes_html else ""
    return (
        f"{caption_html}<div class={table_class} role=region tabindex=0 "
        f'aria-label="{escape_html(label)}">'
        f"<table><thead><tr>{head_html}</tr></thead>"
        f"<tbody>{''.join(rows_html)}</tbody></table></div>{notes_html}"
    )


def _row_html(
    row: Sequence[Value],
    are_numeric: Sequence[bool],
    label_attributes: Sequence[str],
    note_numbers: dict[str, int],
) -> str:
    """Return a row of a table as HTML.

    are_numeric: for each column True if it has numbers. label_attributes: for each column an HTML
    attribute with its heading, or "". note_numbers: the number of each note, to which those of this
    row are added.
    """
    cells_html = [
        f"<th scope=row{_class_attribute(False, row[0])}>{_cell_html(row[0], note_numbers)}</th>"
    ]
    for value, is_numeric, label_attribute in zip(
        row[1:], are_numeric[1:], label_attributes[1:], strict=True
    ):
        cell_html = _cell_html(value, note_numbers)
        cells_html.append(
            f"<td{_class_attribute(is_numeric, value)}{label_attribute}>{cell_html}</td>"
        )
    return f"<tr>{''.join(cells_html)}</tr>"


def _cell_html(value: Value, note_numbers: dict[str, int]) -> str:
    """Return a cell's content as HTML, with the number of its note. note_numbers: the number of
    each note, to which a new note is added."""
    if not isinstance(value, Cell):
        return escape_html(cell_text(value))
    content_html = escape_html(str(value.text))
    if value.strong:
        content_html = f"<strong>{content_html}</strong>"
    if value.second_line:
        content_html = f"<span>{content_html}<small>{escape_html(value.second_line)}</small></span>"
    if value.note:
        note_number = note_numbers.setdefault(value.note, len(note_numbers) + 1)
        content_html = f"<span>{content_html}<sup>{note_number}</sup></span>"
    return content_html


def _heading_html(heading: Heading, is_numeric: bool) -> str:
    """Return the heading of a column as HTML; is_numeric: True for a column of numbers."""
    meaning_html = f"<small>{escape_html(heading.meaning)}</small>" if heading.meaning else ""
    class_attribute = _class_attribute(is_numeric)
    return f"<th scope=col{class_attribute}>{escape_html(heading.text)}{meaning_html}</th>"


def _class_attribute(is_numeric: bool, value: Value = None) -> str:
    """Return the attribute `class` of a cell, after a space, or "": "number" in a column of
    numbers, "long" for a long text, "tone1" to "tone4" for a cell with a background.

    _class_attribute(True) -> " class=number"
    """
    classes = []
    if is_numeric:
        classes.append("number")
    elif isinstance(value, str) and len(value) > LONG_TEXT_LENGTH:
        classes.append("long")
    if isinstance(value, Cell) and value.tone:
        classes.append(f"tone{value.tone}")
    quote = '"' if len(classes) > 1 else ""
    return f" class={quote}{' '.join(classes)}{quote}" if classes else ""


_PAGE_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="posenc">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>{title}</h1>{subtitle}{contents}</header>
{body}
</main>
</body>
</html>
"""
