"""Figures as files: drawn from the table that their CSV has, with letters of any script where the
machine has a font, and a note where it has none."""

import csv
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from posenc.files.atomic import FIGURES_MARKER, prepare_page_and_figures
from posenc.report import figure_files
from posenc.report.chart import (
    HIGH,
    LOW,
    Chart,
    csv_text,
    long_table,
    matrix_table,
    split_by_series,
)
from posenc.report.drawing import draw_curves_by_length, figure, line_styles, to_svg
from posenc.report.figure_files import write_page
from posenc.report.html_page import Page, Plot
from tests.charts import assert_drawn_from_its_table


def rows(data) -> list[dict[str, str]]:
    return list(csv.DictReader(csv_text(data).splitlines()))


def test_curves_and_intervals_are_rows_with_gaps():
    curves = {"a": ([1, 2, 4], [0.5, float("nan"), 1 / 3], [0, 0, 0], [1, None, 2]), "b": [[]] * 4}
    data = long_table("distance, tokens", "score, logits", curves, LOW, HIGH)
    found = rows(data)
    assert [*found[0]] == ["series", "distance, tokens", "score, logits", "low", "high"]
    assert [r["series"] for r in found] == ["a"] * 3
    assert [r["score, logits"] for r in found] == ["0.5", "", "0.333333333"]
    assert [(r["low"], r["high"]) for r in found] == [("0", "1"), ("0", ""), ("0", "2")]


def test_a_matrix_has_a_row_for_each_cell():
    data = matrix_table(
        "key", "query", "weight", ["公司", "收购"], [0, 1], np.array([[0.25, 0.75], [1, 0]])
    )
    assert rows(data) == [
        {"key": "公司", "query": "0", "weight": "0.25"},
        {"key": "收购", "query": "0", "weight": "0.75"},
        {"key": "公司", "query": "1", "weight": "1"},
        {"key": "收购", "query": "1", "weight": "0"},
    ]
    same = matrix_table("position", "position", "cosine", [0, 4], [8], np.array([[0.1, 0.2]]))
    assert rows(same)[1] == {"position (column)": "4", "position (row)": "8", "cosine": "0.2"}


def test_parts_are_the_curves_in_their_order():
    data = long_table("x", "y", {"second": ([1, 2], [3, 4]), "first": ([5], [6])})
    found = split_by_series(data)
    assert [*found] == ["second", "first"]
    assert found["second"]["y"].tolist() == [3, 4] and found["first"]["x"].tolist() == [5]


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match=r"one length are needed, got \{'x': 2, 'y': 1\}"):
        Chart({"x": [1, 2], "y": [3]}, lambda data: None)  # type: ignore[arg-type]


def test_a_figure_without_a_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no name for its files"):
        write_figures([plot("y", name="")], tmp_path)


def test_a_drawing_that_does_not_follow_its_table_is_seen():
    data = long_table("test length", "loss", {"a": ([64, 128], [1.0, 2.0])})
    styles = line_styles(["a"])
    honest = Chart(data, lambda d: draw_curves_by_length(d, styles, [64, 128], 64))
    assert_drawn_from_its_table(honest)
    other = long_table("test length", "loss", {"a": ([64, 128], [1.0, 2.5])})
    with pytest.raises(AssertionError, match=r"not in the table: \[2\.5\]"):
        assert_drawn_from_its_table(Chart(data, lambda _: honest.draw(other)))


def plot(letters: str, name: str = "figure") -> Plot:
    def draw(data):
        with figure("x", letters) as (drawn, axes):
            axes.plot(data["x"], data["y"], label="a")
        return drawn

    return Plot(Chart({"x": [1, 2], "y": [3, 4]}, draw), "", "", name=name)


def without_names(svg: str) -> str:
    """Leave out the names of clips: hashes of rectangles, in which a second drawing with matplotlib
    3.8 differs by rounding."""
    return re.sub(r"\bf-p[0-9a-f]{10}\b", "clip", svg)


def test_files_are_the_same_each_time_and_leave_the_figure_alone(tmp_path):
    drawn = plot("plain")
    before = without_names(to_svg(drawn.chart.figure, "d"))
    first = {p.name: p.read_bytes() for p in written(drawn, tmp_path / "a").iterdir()}
    second = {p.name: p.read_bytes() for p in written(drawn, tmp_path / "b").iterdir()}
    files = {f"figure.{kind}" for kind in ("svg", "pdf", "png", "csv")}
    assert first == second and set(first) == {*files, FIGURES_MARKER}
    assert without_names(to_svg(drawn.chart.figure, "d")) == before
    assert first["figure.csv"] == b"x,y\n1,3\n2,4\n"
    assert first["figure.pdf"].startswith(b"%PDF") and first["figure.png"].startswith(b"\x89PNG")
    svg = first["figure.svg"].decode()
    assert ElementTree.fromstring(svg) is not None and "var(--" not in svg  # any program reads it


def write_figures(plots, folder):
    """Write the figures of a page with these plots; return the notes."""
    page = Page("figures")
    page.append_section("", *plots)
    return write_page(page, None, folder)


def written(drawn: Plot, folder):
    prepare_page_and_figures(folder)
    assert write_figures([drawn], folder) == []
    return folder


def test_chinese_letters_are_drawn_where_there_is_a_font(tmp_path):
    if not {*figure_files.CHINESE_FONTS} & {*figure_files.font_manager.get_font_names()}:
        pytest.skip("no font of this machine has Chinese letters")
    folder = written(plot("公司"), tmp_path)
    assert ">公司<" in (folder / "figure.svg").read_text(encoding="utf-8")
    assert re.search(rb"/FontName /\w+\+(?!DejaVu)", (folder / "figure.pdf").read_bytes())


def test_letters_without_a_font_are_told_and_stay_text_in_svg(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_files, "CHINESE_FONTS", ())
    prepare_page_and_figures(tmp_path)
    (line,) = write_figures([plot("公司")], tmp_path)
    assert "letters 公 司" in line and "boxes" in line
    assert ">公司<" in (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert write_figures([plot("Latin, −1 and αβ")], tmp_path) == []


def test_numbers_survive_a_spreadsheet():
    values = np.random.default_rng(0).normal(size=50)
    found = rows({"x": range(50), "y": values})
    np.testing.assert_allclose([float(r["y"]) for r in found], values, rtol=1e-8)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is not a folder"):
        prepare_page_and_figures(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot write into"):
        prepare_page_and_figures(tmp_path / "file" / "below")
    prepare_page_and_figures(tmp_path / "new" / "deep")
    assert list((tmp_path / "new/deep").iterdir()) == []


def test_a_file_of_somebody_else_is_never_replaced(tmp_path):
    """A user's thesis has a figure.svg too."""
    theirs = tmp_path / "thesis" / "figure.svg"
    theirs.parent.mkdir()
    theirs.write_text("a week of work")
    with pytest.raises(ValueError, match=r"holds other files \(figure.svg\).*Name a new folder"):
        prepare_page_and_figures(tmp_path / "thesis")
    assert theirs.read_text() == "a week of work" and len([*theirs.parent.iterdir()]) == 1
    ours = written(plot("first"), tmp_path / "ours")
    before = (ours / "figure.svg").read_bytes()
    written(plot("second"), ours)
    assert (ours / "figure.svg").read_bytes() != before
