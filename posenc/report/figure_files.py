"""Write the figures of a page as files for papers: SVG, PDF, PNG, and their numbers as CSV."""

import io
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

from posenc.files.atomic import mark_figures, write_atomically
from posenc.report.chart import csv_text
from posenc.report.drawing import (
    CHINESE_FONTS,
    FIGURE_FONT,
    figure_style,
    replace_invalid_xml_characters,
)
from posenc.report.escaping import show_hidden_characters
from posenc.report.html_page import Page, Plot
from posenc.report.report import table_csv

DOTS_PER_INCH = 300
_GLYPH = re.compile(r"Glyph (\d+) .*missing from")
"""Matches the beginning of matplotlib's warning about a letter that is in no font."""
_METADATA_WITHOUT_DATE = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
}
"""Metadata for each kind of file that leave out its date, so that equal figures give equal
files."""


def _figure_files(plots: Sequence[Plot]) -> tuple[dict[str, str | bytes], list[str]]:
    """Return the content of NAME.svg, NAME.pdf, NAME.png and NAME.csv of each figure, on white, by
    the name of the file; and notes on the files, such as on letters that no font has, often none.

    Letters stay text in SVG and PDF; those missing in the figures' font come from a font of this
    machine. Colours are those of the light page.
    """
    content_by_name: dict[str, str | bytes] = {}
    all_missing_letters: set[str] = set()
    for plot in plots:
        if not plot.name:
            raise ValueError(f"The figure {plot.caption!r} has no name for its files.")
        content_by_kind, missing_letters = _figure_bytes(plot.chart.figure)
        all_missing_letters |= missing_letters
        for kind, content in content_by_kind.items():
            content_by_name[f"{plot.name}.{kind}"] = content
        content_by_name[f"{plot.name}.csv"] = csv_text(plot.chart.data)
    notes = []
    if all_missing_letters:
        notes.append(
            f"No font of this machine has the letters {' '.join(sorted(all_missing_letters))}: PDF "
            "and PNG show boxes; the SVG files show them wherever the reader has such a font."
        )
    return content_by_name, notes


def _figure_bytes(figure: Figure) -> tuple[dict[str, bytes], set[str]]:
    """Return the content of the figure's files by their kind ("svg", "pdf", "png"), and the letters
    that no font of this machine has."""
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text)]
    for text in texts:
        text.set_text(replace_invalid_xml_characters(text.get_text()))
    missing_letters = _letters_without_glyph(
        {letter for text in texts for letter in text.get_text()}
    )
    # 42 ("truetype") keeps letters selectable, as journals require; most Chinese fonts do not fit
    # it, and their letters are then drawn one by one.
    font_settings: dict[Any, Any] = {"pdf.fonttype": 3 if missing_letters else 42}
    content_by_kind = {}
    with (
        _use_fonts_of_machine(texts if missing_letters else ()),
        figure_style(),
        matplotlib.rc_context(font_settings),
        warnings.catch_warnings(record=True) as caught_warnings,
    ):
        warnings.simplefilter("always")
        for kind, metadata in _METADATA_WITHOUT_DATE.items():
            buffer = io.BytesIO()
            figure.savefig(
                buffer, format=kind, dpi=DOTS_PER_INCH, facecolor="white", metadata=metadata
            )
            content_by_kind[kind] = buffer.getvalue()
    return content_by_kind, _letters_in_warnings(
        str(warning.message) for warning in caught_warnings
    )


@contextmanager
def _use_fonts_of_machine(texts: Sequence[Text]) -> Iterator[None]:
    """Inside the `with`, take letters of `texts` that the figures' own font lacks from Chinese
    fonts that this machine has. Afterwards the texts have their own fonts again."""
    if not texts:
        yield
        return
    families = [text.get_fontfamily() for text in texts]
    installed_fonts = {*font_manager.get_font_names()}
    for text in texts:
        text.set_fontfamily(
            [FIGURE_FONT, *(name for name in CHINESE_FONTS if name in installed_fonts)]
        )
    yield
    for text, family in zip(texts, families, strict=True):
        text.set_fontfamily(family)


def _letters_in_warnings(messages: Iterable[str]) -> set[str]:
    """Return the letters that no font has, as the messages of matplotlib's warnings say."""
    letters = set()
    for message in messages:
        if glyph_match := _GLYPH.match(message):
            letters.add(chr(int(glyph_match[1])))
    return letters


def _letters_without_glyph(letters: set[str]) -> set[str]:
    """Return the letters that the figures' own font lacks."""
    font = FT2Font(font_manager.findfont(FIGURE_FONT))
    visible_letters = {letter for letter in letters if not letter.isspace()}
    return {letter for letter in visible_letters if not font.get_char_index(ord(letter))}


def write_page(
    page: Page, page_file: str | Path | None, figures_folder: str | Path | None
) -> list[str]:
    """Write the page to `page_file`, and its figures and named tables to `figures_folder`, each
    unless it is None. Return notes on the figures, often none."""
    contents: dict[Path, str | bytes] = {}
    notes: list[str] = []
    if page_file is not None:
        contents[Path(page_file)] = page.html()
    if figures_folder is not None:
        folder = Path(figures_folder)
        figure_files, notes = _figure_files(page.plots())
        table_files = {f"{name}.csv": table_csv(table) for name, table in page.tables().items()}
        for name, content in (figure_files | table_files).items():
            contents[folder / name] = content
        mark_figures(folder)
    for path, content in contents.items():
        write_atomically(path, content)
    return notes


def write_and_announce(page: Page, page_file: Path | None, figures_folder: Path | None) -> None:
    """Do what `write_page` does, and print on stderr the paths of what was written, and the
    notes."""
    notes = write_page(page, page_file, figures_folder)
    lines = (
        page_file and f"Page: {page_file}",
        *notes,
        figures_folder and f"Figures: {figures_folder}",
    )
    sys.stderr.writelines(f"{show_hidden_characters(line)}\n" for line in lines if line)
