"""inspect.html in a browser, its answer first, and the files of its figures."""

import csv
import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest

from posenc import ModelShape, names
from posenc.files.atomic import FIGURES_MARKER
from posenc.inspect.encoding import measurements
from posenc.inspect.encoding.measurements import measure
from posenc.inspect.encoding.report import report_of
from posenc.inspect.encoding.sentences import judge
from posenc.report.html_page import Page, page_of
from posenc.report.report import as_json
from tests.browser import DESKTOP, PHONE, needs_chromium
from tests.charts import assert_drawn_from_its_table

SHAPE = ModelShape(embed_dim=64, num_heads=4, head_dim=16, train_length=128)
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def sheets():
    with pytest.MonkeyPatch.context() as patch:  # slow, and tested with the spec sheet
        for name in ("compile_outcome", "export_outcome"):
            patch.setattr(measurements, name, lambda encoding, shape: "yes")
        return {
            name: measure(name, SHAPE)
            for name in ("sinusoidal", "yarn", "alibi", "t5", "cope", "learned", "rope")
        }


def page_about(sheets, compare: bool = False) -> Page:
    judged = [judge(sheet) for sheet in sheets]
    return page_of(report_of(judged, "posenc inspect", compare=compare, has_figures=True))


@pytest.fixture(scope="module")
def shown_page(sheets, tmp_path_factory):
    """shown_page(kind) -> how many figures the page of an encoding, or of "all" side by side, has,
    and where it lies; it is drawn once."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def drawn(kind: str) -> tuple[int, Path]:
        group = [*sheets.values()] if kind == "all" else [sheets[kind]]
        page = page_about(group, len(group) > 1)
        page.write(folder / f"{kind}.html")
        return len(page.plots()), folder / f"{kind}.html"

    return drawn


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    "kind",
    [
        "yarn",
        "all",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("sinusoidal", "t5")),
    ],
)
def test_page_is_well_shown(browser, shown_page, width, dark, kind):
    num_figures, path = shown_page(kind)
    seen = browser.open(path, width, dark=dark)
    seen.assert_well_shown(num_figures)
    assert "mathdefault" not in seen.text
    for meaning in ("trainable parameters", "what it gives an unrelated key"):
        assert meaning in seen.text


def test_an_encoding_has_the_figures_of_its_places(sheets):
    found = {name: len(page_about([sheet]).plots()) for name, sheet in sheets.items()}
    assert (found["sinusoidal"], found["yarn"], found["t5"]) == (8, 6, 5)
    assert len(page_about([*sheets.values()], True).plots()) == 9


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_first_screen_is_the_answer(browser, sheets, shown_page, width):
    text = browser.open(shown_page("yarn")[1], width).text
    curves = text.index("\nCurves\n")  # the section, which the contents name before the answer
    first = text.index("yarn favours near tokens that match the query")
    assert first < text.index("Where it ends: from position 512 on") < curves
    text = browser.open(shown_page("all")[1], width).text
    for name in sheets:
        assert text.index(f"\n{name}\t") < text.index("\nCurves\n")


@pytest.mark.slow
def test_every_page_is_below_a_megabyte(sheets):
    default = ModelShape(512, 8, head_dim=64, train_length=2048)
    large = [
        dataclasses.replace(sheets["learned"], name=name, shape=default)
        for name in ("learned", "learned_2d", "sincos_2d")
    ]
    assert len(page_about(large).html().encode()) < MEGABYTE
    many = [dataclasses.replace(sheets["sinusoidal"], name=name) for name in names()]
    assert len(page_about(many).html().encode()) < MEGABYTE


def test_every_figure_says_what_it_shows_and_has_a_name(sheets):
    for sheet in sheets.values():
        plots = page_about([sheet]).plots()
        assert all(plot.caption.endswith(".") for plot in plots)
        assert len({plot.name for plot in plots}) == len(plots)
        for plot in plots:
            assert_drawn_from_its_table(plot.chart)


def test_without_figures_a_report_has_the_same_tables(sheets):
    judged = [judge(sheets["rope"]), judge(sheets["alibi"])]
    bare = report_of(judged, "", compare=True, has_figures=False)
    drawn = report_of(judged, "", compare=True, has_figures=True)
    assert bare.tables() == drawn.tables() and {*bare.tables()} > {"answers", "near-and-far"}
    assert not page_of(bare).plots() and len(page_of(drawn).plots()) == 9
    rows = json.loads(as_json(bare))["tables"]["angles"]
    assert [row["rope"] for row in rows][:2] == ["5 of 8: 3-7", "2,147,483,648"]


def test_figures_are_written_with_their_data(tmp_path, monkeypatch, sheets, call, undrawn):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posenc.inspect.api.measure_all", lambda *_: [sheets["alibi"]])
    assert call("inspect", "encoding", "alibi", "--figures", "fig", "--json")[0] == 0
    files = {path.name for path in (tmp_path / "fig").iterdir()} - {FIGURES_MARKER}
    stems = {name.removesuffix(".svg") for name in files if name.endswith(".svg")}
    tables = {"near-and-far.csv", "what-leaves-a-result-unchanged.csv", "angles.csv"}
    tables |= {"cost-and-limits.csv"}
    drawn = {f"{stem}.{kind}" for stem in stems for kind in ("svg", "pdf", "png", "csv")}
    assert files == drawn | tables
    assert {"score-of-equals", "alibi-slopes", "alibi-bias"} <= stems
    assert not (tmp_path / "runs").exists()
    rows = list(csv.DictReader((tmp_path / "fig/alibi-slopes.csv").read_text().splitlines()))
    assert [float(row["slope, logits per token"]) for row in rows] == [0.25, 0.0625, 2**-6, 2**-8]


def test_a_comparison_of_few_breaks_no_word_at_80_columns(monkeypatch, sheets, call):
    monkeypatch.setenv("COLUMNS", "80")
    few = [sheets["alibi"], sheets["yarn"]]
    monkeypatch.setattr("posenc.inspect.api.measure_all", lambda *_: few)
    monkeypatch.setattr("posenc.report.figure_files.write_and_announce", lambda *_: None)
    code, out, _ = call("inspect", "encoding", "alibi", "yarn", "--compare")
    assert code == 0 and out.count("│ alibi") == 2  # of the answers; below it has columns
    for words in ("rows independent", "cache consistent", "symmetric", "directed", "untouched"):
        assert words in out


@pytest.mark.parametrize("command", [["inspect", "encoding", "rope"], ["inspect", "model", "."]])
def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path, call, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr("posenc.inspect.api.measure_all", _never)
    monkeypatch.setattr("posenc.inspect.checkpoint.measurements.measure_checkpoint", _never)
    code, _, err = call(*command, "--figures", "taken")
    assert code == 2 and "--figures: taken is not a folder" in err


def _never(*_, **__):
    raise AssertionError("something was measured")
