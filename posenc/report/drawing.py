"""The style of all figures: one matplotlib style, one line style per encoding, and SVG that takes
its colours from the page."""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import east_asian_width
from xml.etree import ElementTree

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from posenc.files.atomic import write_atomically
from posenc.report.chart import HIGH, LOW, Data, axis_names, split_by_series
from posenc.report.escaping import show_hidden_characters

INK, GRID = "#1d2126", "#d9dce0"
_INK_DARK, _GRID_DARK = "#e4e6e8", "#3a3f46"

# Okabe and Ito's palette without yellow (too faint on white), with black as ink and adjusted
# lightness: under simulated protanopia and deuteranopia any two colours differ by at least 16
# CIELAB units, in the light and in the dark variant.
LIGHT_COLOURS = ("#0064A8", "#C24A00", "#009E73", "#B4629A", "#DD9700", "#56A8DD", INK)
NUM_RANKED_COLOURS = len(LIGHT_COLOURS) - 1  # all but ink, which the other encodings have, faintly
"""Colours of `ranked_styles`: all but ink, which the encodings after them have, faintly."""
DARK_COLOURS = ("#4197D6", "#E8703A", "#1DB489", "#D98BB8", "#E9AB2B", "#8CCBF0", _INK_DARK)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
_DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 2, 3, 2)))

LEGEND_ROW_INCHES = 0.19
"""Height of a row of a legend: a line of 8.5 points and the space below it, estimated."""
MAX_MARKERS = 12
"""Points of a curve up to which each of them has a marker."""
HOVER_PREFIX = "hover:"
"""Prefix of the gid of an artist; the rest of the gid is the name that a page shows under the
mouse."""

COLOUR_VARIABLES = {
    "light": {"ink": INK, "grid": GRID} | {f"c{i}": c for i, c in enumerate(LIGHT_COLOURS[:-1])},
    "dark": {"ink": _INK_DARK, "grid": _GRID_DARK}
    | {f"c{i}": c for i, c in enumerate(DARK_COLOURS[:-1])},
}
"""CSS variables that replace the figures' colours, by colour scheme."""

PAGE_FONTS = (
    'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", "PingFang SC", '
    '"Microsoft YaHei", "WenQuanYi Micro Hei", "DejaVu Sans", sans-serif'
)

FIGURE_FONT = "DejaVu Sans"
"""The font of all figures, which matplotlib includes."""
CHINESE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "PingFang SC",
    "Microsoft YaHei",
    "SimHei",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Noto Sans CJK JP",
)
"""Fonts with Chinese letters that match the Latin ones of a figure, best first."""
LAST_RESORT_FONT = "Last Resort High-Efficiency"
"""A font with a place for every letter, which matplotlib includes from release 3.11 on."""

_SVG = "http://www.w3.org/2000/svg"
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2.5,
    "image.cmap": "cividis",
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "posenc",
    # Names and tokens may contain a dollar sign.
    "text.parse_math": False,
    "axes.unicode_minus": True,
}


class LineStyle(NamedTuple):
    """Colour, marker and dashes of one encoding, the same throughout a page."""

    color: str
    marker: str
    linestyle: Any
    alpha: float | None = None

    def arguments_for_points(self) -> dict[str, Any]:
        """Return arguments of `plot` or `errorbar` for a line through a few measured points."""
        return self._asdict()

    def arguments_for_curve(self, num_points: int) -> dict[str, Any]:
        """Return arguments of `plot` for a curve of many points, about six of them with a
        marker."""
        return {**self.arguments_for_points(), "markevery": max(1, num_points // 6)}


def line_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """Return a style for each name, in the given order. Colours repeat after 7, markers after 11;
    the first 77 styles differ."""
    distinct_names = list(dict.fromkeys(names))
    return {
        name: LineStyle(
            LIGHT_COLOURS[i % len(LIGHT_COLOURS)],
            _MARKERS[i % len(_MARKERS)],
            _DASHES[i % len(_DASHES)],
        )
        for i, name in enumerate(distinct_names)
    }


def ranked_styles(best_first: Sequence[str]) -> dict[str, LineStyle]:
    """Return a style for each encoding, best first: the first six have the colours of the palette,
    in its order, and all others are grey."""
    styles = line_styles(best_first)
    return {
        name: style if rank < NUM_RANKED_COLOURS else style._replace(color=INK, alpha=0.4)
        for rank, (name, style) in enumerate(styles.items())
    }


def ordered_colours(count: int) -> list[str]:
    """Return colours for `count` ordered things, from blue to orange, readable on white and
    black."""
    ramp = LinearSegmentedColormap.from_list("posenc", ["#0a7fc2", "#b0609a", "#d98200"])
    return [to_hex(ramp(i / max(1, count - 1))) for i in range(count)]


def _fonts_of_other_letters() -> list[str]:
    """Return the names of fonts that give the widths of letters which FIGURE_FONT lacks; [] if
    matplotlib includes LAST_RESORT_FONT.

    matplotlib takes widths from its Last Resort font by itself (1.15 em for a Chinese letter, which
    has 1 em on the page), so figures have the same layout on every machine. A release without that
    font takes them from Chinese fonts of this machine; without any, such a letter counts as 0.6 em.
    """
    known_fonts = {*font_manager.get_font_names()}
    return (
        []
        if LAST_RESORT_FONT in known_fonts
        else [name for name in CHINESE_FONTS if name in known_fonts]
    )


@contextmanager
def figure_style() -> Iterator[None]:
    """Use posenc's matplotlib style inside the `with`. `figure` does so, too: call this for figures
    with more than one pair of axes."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The reader's browser has the glyphs; only their width matters here.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()  # ignore the user's settings
        matplotlib.rcParams.update(_STYLE)  # type: ignore[call-overload]
        # Only to measure text; the reader's browser draws it in PAGE_FONTS.
        matplotlib.rcParams["font.family"] = [FIGURE_FONT, *_fonts_of_other_letters()]
        yield


@contextmanager
def figure(
    x_label: str, y_label: str, *, width: float = 5.0, height: float = 3.3, grid: bool = True
) -> Iterator[tuple[Figure, Axes]]:
    """Make a figure with one pair of labelled axes in posenc's style; draw inside the `with`.

    Args:
        x_label, y_label: labels with units, such as "distance, tokens".
        width, height: in inches; five inches fill a phone at the natural size of letters.
        grid: draw grid lines behind the data; False for matrices, which they would cover.

    Yields: the figure and its axes.
    """
    with figure_style():
        fig = Figure(figsize=(width, height))
        axes = fig.add_subplot(xlabel=x_label, ylabel=y_label)
        axes.grid(grid)
        yield fig, axes


def draw_legend_above(fig: Figure) -> None:
    """Draw one legend above all axes, where it covers no data, in as many columns as fit; the
    figure grows by its height."""
    entries: dict[str, Any] = {}
    for axes in fig.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    room_in_points = 72 * fig.get_figwidth()  # in points; an inch has 72
    num_columns = next(
        (n for n in (4, 3, 2) if _legend_width(list(entries), n) <= room_in_points), 1
    )
    num_rows = -(-len(entries) // num_columns)
    fig.set_figheight(fig.get_figheight() + LEGEND_ROW_INCHES * num_rows)
    with figure_style():  # the `with` in which the axes were drawn may have ended
        fig.legend(
            list(entries.values()),
            list(entries),
            loc="outside upper left",
            ncols=num_columns,
            handlelength=3.2,
            columnspacing=1.2,
            borderaxespad=0.2,
        )


def _legend_width(labels: Sequence[str], num_columns: int) -> float:
    """Return the estimated width of a legend with this many columns, in points."""
    num_rows = -(-len(labels) // num_columns)
    # Of the longest label of each column, in units of the font size. A Chinese letter is 1 wide; a
    # Latin one is counted as 0.62: chosen.
    longest_widths = [
        max(sum(1.0 if east_asian_width(c) in "WF" else 0.62 for c in label) for label in column)
        for column in (labels[i : i + num_rows] for i in range(0, len(labels), num_rows))
    ]
    # Besides its labels a column has a line of 3.2, see draw_legend_above, a space of 0.8 after it,
    # which is matplotlib's default, and a space of 1.2 to the next column.
    return _STYLE["legend.fontsize"] * (sum(longest_widths) + 5.2 * len(longest_widths))


def set_length_axis(axes: Axes, lengths: Sequence[int], train_length: int | None = None) -> None:
    """Make a logarithmic axis with the given lengths marked, and a line at the training length."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    if train_length is not None:
        axes.axvline(train_length, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        text_style = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        at_top_of_line = {"xy": (train_length, 1), "xycoords": ("data", "axes fraction")}
        axes.annotate("training length", xytext=(0, 3), **at_top_of_line, **text_style)


def draw_curves_by_length(
    data: Data, styles: Mapping[str, LineStyle], ticks: Sequence[int], train_length: int
) -> Figure:
    """Draw each series of a table over a logarithmic axis of lengths, with bars from low to high
    where the table has them, and the training length as a line."""
    x_label, y_label = axis_names(data)
    with figure(x_label, y_label) as (fig, axes):
        for name, series_table in split_by_series(data).items():
            x = series_table[x_label]
            y = series_table[y_label]
            has_markers = len(x) <= MAX_MARKERS
            style_arguments = (
                styles[name].arguments_for_points()
                if has_markers
                else styles[name].arguments_for_curve(len(x))
            )
            label_and_gid = {"label": name, "gid": HOVER_PREFIX + name}
            if LOW in series_table:
                bars = axes.errorbar(
                    x, y, yerr=[y - series_table[LOW], series_table[HIGH] - y], **style_arguments
                )
                bars[0].set(**label_and_gid)  # the line, which shows its name under the mouse
                bars.set_label(name)  # line and bars together, which the legend shows
            else:
                axes.plot(x, y, **label_and_gid, **style_arguments)
        set_length_axis(axes, ticks, train_length)
        draw_legend_above(fig)
    return fig


def draw_level(axes: Axes, y: float, text: str) -> None:
    """Draw a dotted horizontal line at y, in the unit of the data, with a text below its right
    end."""
    axes.axhline(y, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    text_style = {"textcoords": "offset points", "ha": "right", "va": "top", "fontsize": 8}
    at_right_end = {"xy": (1, y), "xycoords": ("axes fraction", "data")}
    axes.annotate(text, xytext=(-3, -3), **at_right_end, **text_style)


def replace_invalid_xml_characters(text: str) -> str:
    """Return the text with hidden characters as escapes, and with U+FFFD in place of each further
    character that XML does not allow, such as a lone surrogate. Markup is not escaped."""
    return _NOT_XML.sub("\ufffd", show_hidden_characters(text))


def to_svg(fig: Figure, description: str, prefix: str = "f") -> str:
    """Return the figure as an <svg> element for a page that defines `css_variables` and --font.

    Equal figures give equal output. Letters stay text.

    Args:
        fig: the figure; colours of this module's palette become CSS variables.
        description: text alternative for readers who cannot see it.
        prefix: start of every identifier, so that several figures fit one page.

    Pass tick labels from users through `replace_invalid_xml_characters` first. All other text is
    converted here.
    """
    buffer = io.StringIO()
    for text in fig.findobj(Text):
        text.set_text(replace_invalid_xml_characters(text.get_text()))  # type: ignore[attr-defined]
    with figure_style():
        fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(replace_invalid_xml_characters(buffer.getvalue()))
    for tag in ("metadata", "defs"):  # the style sheet in defs would apply to the whole page
        if (element := root.find(f"{{{_SVG}}}{tag}")) is not None:
            root.remove(element)
    for element in root.iter():
        if element.get("id", "").startswith(HOVER_PREFIX):
            hover_title = ElementTree.Element(f"{{{_SVG}}}title")
            hover_title.text = replace_invalid_xml_characters(
                element.attrib.pop("id").removeprefix(HOVER_PREFIX)
            )
            element.insert(0, hover_title)
        _adopt_page_style_and_ids(element.attrib, prefix)
    # The page sets the size; the view box keeps the shape.
    del root.attrib["width"], root.attrib["height"]
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-title")
    title = ElementTree.Element(f"{{{_SVG}}}title", {"id": f"{prefix}-title"})
    title.text = replace_invalid_xml_characters(description)
    root.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def _adopt_page_style_and_ids(attributes: dict[str, str], prefix: str) -> None:
    """Adapt the attributes of an SVG element to a page, in place: begin identifiers and references
    to them with `prefix`, and replace colours and fonts by the page's CSS variables."""
    for key, value in attributes.items():
        if key == "id":
            value = f"{prefix}-{value}"
        elif key.endswith("href") and value.startswith("#"):
            value = f"#{prefix}-{value[1:]}"
        elif key in ("style", "clip-path"):
            value = value.replace("url(#", f"url(#{prefix}-")
            value = re.sub(r"font-family: [^;]*", "font-family: var(--font)", value)
            # Up to matplotlib 3.9 it follows the size: font: 8.5px 'DejaVu Sans'
            value = re.sub(r"(font: [^;']*)'[^;]*", r"\1var(--font)", value)
            for name, colour in COLOUR_VARIABLES["light"].items():
                value = value.replace(colour.lower(), f"var(--{name})")
        attributes[key] = value


SVG_RULES = f"--font:{PAGE_FONTS};stroke-linejoin:round;stroke-linecap:butt"


def css_variables(scheme: str) -> str:
    """Return the colours of the "light" or "dark" scheme as definitions of CSS variables:
    `--ink:#1d2126;--grid:...`."""
    return "".join(f"--{name}:{value};" for name, value in COLOUR_VARIABLES[scheme].items())


def write_svg(fig: Figure, path: str | Path, description: str) -> None:
    """Write the figure as an SVG file that follows the reader's light or dark scheme."""
    # At 122 pixels per inch, letters of 9.5 points are 16 pixels high.
    width, height = (round(122 * inches) for inches in fig.get_size_inches())
    svg = to_svg(fig, description)
    svg = svg.replace("<svg ", f'<svg width="{width}" height="{height}" ', 1)
    start = svg.index(">") + 1
    style_sheet = (
        f"svg{{{css_variables('light')}{SVG_RULES}}}"
        f"@media(prefers-color-scheme:dark){{svg{{{css_variables('dark')}}}}}"
    )
    write_atomically(Path(path), f"{svg[:start]}<style>{style_sheet}</style>{svg[start:]}\n")
