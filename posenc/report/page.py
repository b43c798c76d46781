"""One self-contained HTML page: text, tables and figures, without scripts and without a network.

page = Page("Which encoding?", "six encodings, two seeds")
page.section("Loss", "Lower is better.", Plot(figure, "Loss by position.", "alibi stays flat"))
page.write("report.html")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import count, groupby
from pathlib import Path

from matplotlib.figure import Figure

from posenc.report.atomic import write_atomically
from posenc.report.drawing import SVG_RULES, css_variables, to_svg


@dataclass(frozen=True)
class Cell:
    """A table cell with more than its text: a note shown below the table, or emphasis."""

    text: str
    note: str = ""
    strong: bool = False


Value = str | int | float | Cell | None


@dataclass(frozen=True)
class Table:
    """Rows under a header; columns of numbers align right, the first column names the row.

    On a narrow screen the table scrolls sideways and the first column stays.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Value]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"Table: every row needs {len(self.header)} cells as the header has, "
                    f"got {len(row)} in {list(row)!r}."
                )


@dataclass(frozen=True)
class Plot:
    """A figure, the sentence under it, and a description for readers who cannot see it."""

    figure: Figure
    caption: str
    description: str
    wide: bool = False
    """Takes the whole width, and scrolls sideways on a narrow screen instead of shrinking."""


@dataclass(frozen=True)
class Code:
    """Commands or code; one click selects all of it."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Names and their values."""

    items: Mapping[str, object]


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Headline:
    """The answer, in large letters."""

    text: str


@dataclass(frozen=True)
class Caution:
    """A warning that the reader must see before trusting the rest."""

    text: str


Block = str | Table | Plot | Code | Facts | Items | Headline | Caution
"""A plain string is a paragraph."""


class Page:
    """A page under construction.

    Args:
        title: heading and title of the page.
        subtitle: one line under it.
        lang: the language of the text, for hyphenation and for reading aloud.
    """

    def __init__(self, title: str, subtitle: str = "", *, lang: str = "en") -> None:
        self.title, self.subtitle, self.lang = title, subtitle, lang
        self._sections: list[tuple[str, tuple[Block, ...]]] = []

    def section(self, heading: str, *blocks: Block) -> None:
        """Append a section; an empty heading gives none."""
        self._sections.append((heading, blocks))

    def html(self) -> str:
        """The whole page."""
        plots = count(1)
        body = "\n".join(_section(heading, blocks, plots) for heading, blocks in self._sections)
        subtitle = f"<p class=subtitle>{escape(self.subtitle)}</p>" if self.subtitle else ""
        return _PAGE.format(
            lang=escape(self.lang),
            title=escape(self.title),
            subtitle=subtitle,
            body=body,
            style=_style_sheet(),
        )

    def write(self, path: str | Path) -> None:
        """Write the page; a reader of `path` sees the old page or the new one, never half."""
        write_atomically(path, self.html())


def _style_sheet() -> str:
    dark = f"@media(prefers-color-scheme:dark){{:root{{{css_variables('dark')}}}}}"
    rules = resources.files("posenc.report").joinpath("page.css").read_text(encoding="utf-8")
    return f":root{{{css_variables('light')}{SVG_RULES}}}{dark}\n{rules}"


def _section(heading: str, blocks: Sequence[Block], plots: Iterator[int]) -> str:
    """`plots` counts the figures of a page, so that their identifiers differ."""
    parts = [f"<h2>{escape(heading)}</h2>"] if heading else []
    for is_plot, group in groupby(blocks, key=lambda b: isinstance(b, Plot)):
        shown = [_block(block, plots) for block in group]
        parts += ["<div class=figures>", *shown, "</div>"] if is_plot else shown
    return "<section>" + "\n".join(parts) + "</section>"


def _block(block: Block, plots: Iterator[int]) -> str:
    match block:
        case str():
            return f"<p>{escape(block)}</p>"
        case Headline(text):
            return f"<p class=headline>{escape(text)}</p>"
        case Caution(text):
            return f"<p class=warning role=note>{escape(text)}</p>"
        case Code(text):
            return f"<pre tabindex=0><code>{escape(text)}</code></pre>"
        case Items(texts):
            return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"
        case Facts(items):
            pairs = (f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in items.items())
            return "<dl>" + "".join(pairs) + "</dl>"
        case Plot(drawn, caption, description, wide):
            size = " class=wide" if wide else ""
            scroll = f' role=region tabindex=0 aria-label="{escape(caption)}"' if wide else ""
            svg = to_svg(drawn, description, f"f{next(plots)}")
            width = 72 * drawn.get_figwidth()  # its letters are then as large as the page's
            return (
                f'<figure{size}><div class=drawing{scroll} style="--natural:{width:g}px">'
                f"{svg}</div>"
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.header)
    numeric = [any(map(_is_number, c)) and all(map(_is_number_or_gap, c)) for c in columns]
    notes: dict[str, int] = {}
    head = "".join(
        f"<th scope=col{_class(number)}>{escape(name)}</th>"
        for name, number in zip(table.header, numeric, strict=True)
    )
    rows = []
    for row in table.rows:
        cells = [f"<th scope=row>{_cell(row[0], notes)}</th>"]
        cells += [
            f"<td{_class(number)}>{_cell(value, notes)}</td>"
            for value, number in zip(row[1:], numeric[1:], strict=True)
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    caption = f"<p class=caption>{escape(table.caption)}</p>" if table.caption else ""
    name = table.caption or ", ".join(table.header)
    below = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'{caption}<div class=table role=region tabindex=0 aria-label="{escape(name)}">'
        f"<table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        + (f"<ol class=notes>{below}</ol>" if below else "")
    )


def _cell(value: Value, notes: dict[str, int]) -> str:
    if not isinstance(value, Cell):
        return "–" if value is None else escape(_text(value))
    shown = escape(value.text)
    if value.strong:
        shown = f"<strong>{shown}</strong>"
    if value.note:
        number = notes.setdefault(value.note, len(notes) + 1)
        shown += f"<sup>{number}</sup>"
    return shown


def _text(value: str | int | float) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _class(number: bool) -> str:
    return " class=number" if number else ""


def _is_number(value: Value) -> bool:
    if isinstance(value, Cell):
        value = value.text
    if isinstance(value, str):
        value = value.strip().lstrip("+-−<>≈≥≤")
        return value[:1].isdigit()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number_or_gap(value: Value) -> bool:
    """A number, nothing, or a word with the reason for having no number."""
    noted = isinstance(value, Cell) and bool(value.note)
    return value is None or value == "" or _is_number(value) or noted


_PAGE = """<!doctype html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>{title}</h1>{subtitle}</header>
{body}
</main>
</body>
</html>
"""
