"""The page that every command writes: right in a browser, safe against any text."""

import re
from functools import cache
from html.parser import HTMLParser
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib import font_manager

from posenc.report.chart import Chart
from posenc.report.drawing import (
    DARK_COLOURS,
    LAST_RESORT_FONT,
    LIGHT_COLOURS,
    draw_legend_above,
    figure,
    figure_style,
    line_styles,
    ordered_colours,
    set_length_axis,
    to_svg,
    write_svg,
)
from posenc.report.html_page import Caution, Code, Facts, Headline, Items, Page, Plot
from posenc.report.report import Cell, Table
from tests.browser import DESKTOP, PHONE, needs_chromium

NASTY = '<script>alert(1)</script> & "x" --> </svg> $a_b$ 公司收购了竞争对手 \x07\udc80'


def curves(names=("rope", "alibi", "t5", "learned", "nope", "sinusoidal")):
    styles = line_styles(names)
    with figure("test length, bytes", "bits per byte") as (drawn, axes):
        for i, name in enumerate(names):
            axes.errorbar(
                [128, 256, 512, 1024],
                2.2 + 0.1 * i * np.arange(4),
                yerr=0.05,
                label=name,
                **styles[name].arguments_for_points(),
            )
        set_length_axis(axes, [128, 256, 512, 1024], 128)
        draw_legend_above(drawn)
    return drawn


def heat_map():
    with figure("key 公司", "query $x$", grid=False) as (drawn, axes):
        axes.imshow(np.arange(16.0).reshape(4, 4))
        axes.set_xticks(range(4), list("公司收购"))
    return drawn


@cache
def sample_html() -> str:
    return sample().html()


def sample() -> Page:
    page = Page(f"Title {NASTY}", f"Subtitle {NASTY}")
    page.append_section("", Headline("alibi reads farthest."), Caution(NASTY))
    page.append_section(
        NASTY,
        "A paragraph.",
        Table(
            ["encoding", *(f"{n:,} bytes" for n in (128, 256, 512, 1024, 2048, 4096))],
            [
                ["rope", *(Cell(f"{v:.3f} ± 0.001") for v in np.linspace(2, 4, 6))],
                ["learned", "2.100", *[Cell("cannot", note=NASTY)] * 5],
            ],
            "Bits per byte.",
        ),
        Plot(Chart({}, lambda _: curves()), "Loss by length.", f"alibi stays flat {NASTY}"),
        Plot(Chart({}, lambda _: heat_map()), NASTY, "Attention"),
        Plot(Chart({}, lambda _: curves((NASTY[:30], NASTY[-14:]))), "A wide one.", "w", wide=True),
        Code(f"posenc compare rope alibi --out runs/{'long' * 60} {NASTY}"),
        Facts({"torch": "2.13.0", "processor": "x" * 300, NASTY: NASTY}),
        Items(["one", NASTY]),
    )
    return page


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_is_well_shown(browser, tmp_path, width, dark):
    (tmp_path / "report.html").write_text(sample_html(), errors="replace")
    seen = browser.open(tmp_path / "report.html", width, dark=dark)
    seen.assert_well_shown(num_figures=3)
    assert seen.scripts == 0
    assert "公司收购了竞争对手" in seen.text
    light, other = ("255, 255, 255", "21, 24, 28")
    assert (other if dark else light) in seen.paper


@needs_chromium
def test_browser_check_sees_defects(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        "<div style='width:2000px'>wide</div><figure><svg viewBox='0 0 9 9'></svg></figure>"
        "<script>console.error('no')</script><img src='missing.png'>"
    )
    seen = browser.open(page, PHONE)
    assert seen.overflow > 0
    assert seen.scripts == 1
    assert any("no" in complaint for complaint in seen.complaints)
    assert any("missing.png" in complaint for complaint in seen.complaints)
    assert seen.figures[0]["marks"] == 0


_FIGURE = "<figure><svg viewBox='0 0 300 200' style='width:300px'>{}</svg></figure>"
_WIDE = "".join(f"<td style='white-space:nowrap'>a column {i}</td>" for i in range(30))


@needs_chromium
@pytest.mark.parametrize(
    ("planted", "defect"),
    [
        (f"<table><tr>{_WIDE}</tr></table>", "stands outside the page"),
        (
            f"<div style='overflow:hidden'><table><tr>{_WIDE}</tr></table></div>",
            "is cut off at the side",
        ),
        ("<p style='height:9px;overflow:hidden'>Two<br>lines</p>", "is cut off below"),
        ("<p style='color:#bbb'>Grey</p>", '"Grey" is faint'),
        (
            "<div style='overflow:auto'><table><tbody><tr><th style='min-width:300px'>x</th>"
            f"{_WIDE}</tr></tbody></table></div>",
            "hides over half",
        ),
        (_FIGURE.format("<text x='290' y='90'>axis label</text>"), "is cut off by its figure"),
        (_FIGURE.format("<text x='9' y='90' style='fill:#eee'>tick</text>"), '"tick" is faint'),
        (
            _FIGURE.format(
                "<path d='M0 60h200v60H0z' style='fill:#ddd'/><text x='9' y='90'>a</text>"
            ),
            "stands on a filled shape",
        ),
        (
            _FIGURE.format("<text x='9' y='90'>one label</text><text x='19' y='92'>other</text>"),
            '"other" is printed over "one label"',
        ),
    ],
)
def test_browser_check_sees_what_cannot_be_read(browser, tmp_path, planted, defect):
    page = tmp_path / "bad.html"
    head = "<meta name=viewport content='width=device-width'><style>body{overflow-x:hidden}</style>"
    page.write_text(f"<!doctype html>{head}<p>fine</p>{planted}")
    seen = browser.open(page, PHONE)
    assert any(defect in found for found in seen.defects), seen.defects
    assert not any("fine" in found for found in seen.defects)


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.ids, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href")]


def parsed(html: str) -> _Tags:
    tags = _Tags()
    tags.feed(html)
    return tags


def test_text_is_never_markup():
    tags = parsed(sample_html())
    assert "script" not in tags.tags
    assert tags.tags.count("svg") == 3


def test_page_asks_for_nothing():
    tags = parsed(sample_html())
    assert tags.links and all(link.startswith(("#", "data:")) for link in tags.links)
    assert "url(http" not in sample_html()


def test_identifiers_are_unique():
    ids = parsed(sample_html()).ids
    assert len(ids) == len(set(ids))


def test_references_inside_figures_resolve():
    html = sample_html()
    ids = set(parsed(html).ids)
    used = set(re.findall(r"url\(#([^)]+)\)", html)) | set(re.findall(r'href="#([^"]+)"', html))
    assert used and used <= ids


def test_page_is_reproducible():
    assert sample().html() == sample_html()


def test_figures_take_their_colours_from_the_page():
    svg = to_svg(curves(), "d")
    assert not re.findall("|".join(c.lower() for c in LIGHT_COLOURS), svg)
    assert "#ffffff" not in svg
    assert set(re.findall(r"var\(--(\w+)\)", svg)) == {
        "font",
        "ink",
        "grid",
        *"c0 c1 c2 c3 c4 c5".split(),
    }


@pytest.mark.parametrize("names", [["rope", "t5"], ["a_long_name_of_an_encoding"] * 9, ["公" * 30]])
@pytest.mark.filterwarnings("ignore:Glyph .* missing from")  # no Chinese font here
def test_legend_fits_the_figure(names):
    names = [f"{name}{i}" for i, name in enumerate(names)]
    drawn = curves(names)
    to_svg(drawn, "d")
    (legend,) = drawn.legends
    with figure_style():
        box = legend.get_window_extent()
    assert box.x1 <= drawn.bbox.x1 + 1
    top = drawn.axes[0].get_window_extent().y1
    assert box.y0 >= top - 1


needs_every_letter = pytest.mark.skipif(
    LAST_RESORT_FONT not in font_manager.get_font_names(),
    reason="this matplotlib has no Last Resort font: docs/start/install.md",
)


@needs_every_letter
@pytest.mark.parametrize("letter", "公あア한，ａ😀")
def test_wide_letters_have_room_without_their_font(letter):
    with figure("x", "y") as (drawn, axes):
        text = axes.text(0, 0, letter * 20, fontsize=10)
    to_svg(drawn, "d")
    with figure_style():
        width = text.get_window_extent(dpi=72).width
    assert 1.0 <= width / (20 * 10) <= 1.2  # of the font's size; the page takes 1


def test_chinese_fonts_measure_where_matplotlib_has_no_font_for_every_letter(monkeypatch):
    for known, expected in (
        (["SimHei", "DejaVu Sans"], ["DejaVu Sans", "SimHei"]),
        (["DejaVu Sans"], ["DejaVu Sans"]),
        (["SimHei", "DejaVu Sans", LAST_RESORT_FONT], ["DejaVu Sans"]),
    ):
        monkeypatch.setattr(font_manager, "get_font_names", lambda known=known: known)
        with figure_style():
            assert matplotlib.rcParams["font.family"] == expected


@needs_every_letter
def test_chinese_tick_labels_do_not_reach_the_axis_label():
    with figure("x", "y", grid=False) as (drawn, axes):
        axes.imshow(np.arange(16.0).reshape(4, 4))
        axes.set_yticks(range(4), ["公司收购了竞争对手"] * 4)
    svg = ElementTree.fromstring(to_svg(drawn, "d"))
    texts = list(svg.iter("{http://www.w3.org/2000/svg}text"))
    words = [text for text in texts if text.text == "公司收购了竞争对手"]
    (label,) = (text for text in texts if text.text == "y")
    assert len(words) == 4 and float(label.get("x", "nan")) > 9.5 / 2
    for word in words:
        assert "8.5px" in word.get("style", "") and "text-anchor: end" in word.get("style", "")
        begins = float(word.get("x", "nan")) - 9 * 8.5  # a letter is as wide as the font is large
        assert begins > float(label.get("x", "nan")) + 9.5 / 2


def test_letters_stay_text():
    assert "公司" in to_svg(heat_map(), "d")
    assert "query $x$" in to_svg(heat_map(), "d")


def test_figure_file_is_xml_with_both_schemes(tmp_path):
    write_svg(curves(), tmp_path / "figure.svg", NASTY)
    text = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).get("width") == "610"
    assert "prefers-color-scheme:dark" in text and DARK_COLOURS[0] in text


def test_user_settings_do_not_reach_the_figures():

    plain = to_svg(curves(), "d")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert to_svg(curves(), "d") == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_style_leaves_no_trace():

    before = dict(matplotlib.rcParams)
    with figure_style():
        pass
    assert dict(matplotlib.rcParams) == before


def test_77_line_styles_differ():
    styles = line_styles([f"e{i}" for i in range(77)])
    assert len({(s.color, s.marker) for s in styles.values()}) == 77


def test_line_style_stays_with_its_name():
    assert line_styles(["a", "b", "a"])["b"] == line_styles(["a", "b", "c"])["b"]


def test_ordered_colours():
    assert len(set(ordered_colours(8))) == 8
    assert len(ordered_colours(1)) == 1


# Machado et al. 2009, severity 1, in linear RGB.
PROTANOPIA = [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
]
DEUTERANOPIA = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.01182, 0.04294, 0.968881],
]


def lab(hexadecimal: str, sight) -> np.ndarray:
    rgb = np.array([int(hexadecimal[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(sight) @ linear, 0, 1)
    xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]] @ seen
    t = xyz / [0.9505, 1, 1.089]
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("palette", [LIGHT_COLOURS, DARK_COLOURS], ids=["light", "dark"])
@pytest.mark.parametrize("sight", [np.eye(3), PROTANOPIA, DEUTERANOPIA])
def test_colours_differ_for_the_colour_blind(palette, sight):
    seen = [lab(colour, sight) for colour in palette]
    nearest = min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i])
    assert nearest > 16


def test_numbers_align_right_and_words_left():
    html = Page("t")
    html.append_section("s", Table(["a", "b", "c"], [["x", 1234567, "word"], ["y", None, "other"]]))
    assert "<td class=number>1,234,567</td><td>word</td>" in html.html()


def test_same_note_is_written_once():
    page = Page("t")
    page.append_section("s", Table(["a", "b", "c"], [["x", Cell("n", "why"), Cell("n", "why")]]))
    assert page.html().count("<li>why</li>") == 1
    assert page.html().count("<sup>1</sup>") == 2


def test_uneven_table_is_refused():
    for row in (["x", 1, 2], ["x"]):
        with pytest.raises(ValueError, match=rf"needs 2 cells .* got {len(row)}"):
            Table(["a", "b"], [["x", 1], row])


def test_writing_leaves_no_other_file(tmp_path):
    page = Page(NASTY)
    page.write(tmp_path / "a.html")
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_failed_write_keeps_the_old_page(tmp_path, monkeypatch):
    target = tmp_path / "a.html"
    target.write_text("old")

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        Page("new").write(target)
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]
    assert target.read_text() == "old"
