"""Write the figures of a page as files for papers: SVG, PDF, PNG, and their numbers as CSV."""

import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import matplotlib
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

from posenc.report.files.atomic import write_atomically
from posenc.report.page.drawing import readable, style
from posenc.report.page.figure_data import csv_text
from posenc.report.page.page import Page, Plot
from posenc.report.page.visible import visible

DOTS_PER_INCH = 300
PREFERRED = "NotoSansCJK SourceHanSans NotoSansSC PingFang msyh simhei wqy NotoSans".split()
"""Prefixes of font files that match the Latin letters of a figure, best first."""
_ODD = ("bold", "italic", "oblique", "light", "thin", "black", "mono", "serif", "condensed")
_WITHOUT_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}


def write_figures(plots: Sequence[Plot], folder: Path) -> list[str]:
    """Write NAME.svg, NAME.pdf, NAME.png and NAME.csv of each figure, on white.

    Letters stay text in SVG and PDF; those missing in the figures' font come from a font of this
    machine. Colours are those of the light page.

    Returns: notes for the reader, often none.
    """
    lacking: dict[str, None] = {}
    for plot in plots:
        if not plot.name:
            raise ValueError(f"The figure {plot.caption!r} has no name for its files.")
        with style(), _fonts_for(plot.figure) as missing:
            lacking |= dict.fromkeys(missing)
            for kind, metadata in _WITHOUT_DATE.items():
                written = io.BytesIO()
                plot.figure.savefig(
                    written, format=kind, dpi=DOTS_PER_INCH, facecolor="white", metadata=metadata
                )
                write_atomically(folder / f"{plot.name}.{kind}", written.getvalue())
        write_atomically(folder / f"{plot.name}.csv", csv_text(plot.figure))
    if not lacking:
        return []
    return [
        f"No font of this machine has the letters {' '.join(lacking)}: PDF and PNG show boxes; the "
        "SVG files show them wherever the reader has such a font."
    ]


def write_page(page: Page, out: str | Path | None, figures: str | Path | None) -> list[str]:
    """Write the page and its figures where requested; return notes for the reader."""
    if out is not None:
        page.write(out)
    return [] if figures is None else write_figures(page.plots(), Path(figures))


def write_and_say(page: Page, out: Path | None, figures: Path | None) -> None:
    """Write as `write_page`, and name on stderr what was written."""
    notes = write_page(page, out, figures)
    said = (out and f"Page: {out}", *notes, figures and f"Figures: {figures}")
    sys.stderr.writelines(f"{visible(line)}\n" for line in said if line)


@contextmanager
def _fonts_for(drawn: Figure) -> Iterator[list[str]]:
    """Give the figure fonts of this machine that have its letters, and restore it afterwards. Yield
    the letters that no font has."""
    texts = [t for t in drawn.findobj(Text) if isinstance(t, Text)]
    families = [text.get_fontfamily() for text in texts]
    wanted = {c for text in texts for c in readable(text.get_text()) if not c.isspace()}
    fonts, missing = _covering(wanted)
    found = [_family(path) for path in fonts]
    for text in texts:
        text.set_text(readable(text.get_text()))
        text.set_fontfamily(["DejaVu Sans", *found])
    # "truetype" keeps letters selectable, as journals require; most Chinese fonts do not fit it,
    # and their letters are then drawn one by one.
    with matplotlib.rc_context({"pdf.fonttype": 3 if found else 42}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        try:
            yield sorted(missing)
        finally:
            for text, family in zip(texts, families, strict=True):
                text.set_fontfamily(family)


def _covering(letters: set[str]) -> tuple[list[str], set[str]]:
    """Return fonts of this machine, besides the figures' own, that have the letters, and the
    letters that none has."""
    missing, fonts = _lacking(font_manager.findfont("DejaVu Sans"), letters), []
    for path in _machine_fonts() if missing else ():
        left = _lacking(path, missing)
        if len(left) < len(missing):
            missing = left
            fonts.append(path)
        if not missing:
            break
    return fonts, missing


def _lacking(path: str, letters: set[str]) -> set[str]:
    try:
        font = FT2Font(path)
    except (RuntimeError, OSError):  # a font of pictures, or a missing file
        return letters
    return {letter for letter in letters if not font.get_char_index(ord(letter))}


@cache
def _machine_fonts() -> tuple[str, ...]:
    """Return this machine's fonts, upright ones without serifs first. matplotlib's own list is
    outdated once fonts are added."""

    def rank(path: str) -> tuple[bool, int, str]:
        name = Path(path).stem
        places = [i for i, start in enumerate(PREFERRED) if name.startswith(start)]
        odd = any(word in name.lower() for word in _ODD)
        return odd, places[0] if places else len(PREFERRED), name

    return tuple(sorted(font_manager.findSystemFonts(), key=rank))


def _family(path: str) -> str:
    """Return the name by which matplotlib finds a font, the Chinese one of several."""
    font_manager.fontManager.addfont(path)
    names = [font.name for font in font_manager.fontManager.ttflist if font.fname == path]
    return next((name for name in names if name.endswith(" SC")), names[-1])
