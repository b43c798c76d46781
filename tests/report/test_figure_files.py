"""Figures as files: the numbers are those that are drawn, and letters of any script are right where
the machine has a font, and told where it has none."""

import csv
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from posenc.report.files.atomic import check_outputs
from posenc.report.page import figure_files
from posenc.report.page.drawing import DECORATION, figure, to_svg
from posenc.report.page.figure_data import csv_text
from posenc.report.page.figure_files import write_figures
from posenc.report.page.page import Plot


def rows(drawn) -> list[dict[str, str]]:
    return list(csv.DictReader(csv_text(drawn).splitlines()))


def test_lines_bands_and_intervals_are_read_back():
    x, y = [1.0, 2.0, 4.0], [0.5, float("nan"), 1 / 3]
    with figure("distance, tokens", "score, logits") as (drawn, axes):
        axes.plot(x, y, label="a")
        axes.fill_between(x, [0, 0, 0], [1, 1, 2], label="_a")
        axes.errorbar(x, [3, 4, 5], yerr=[0.5, 0, 1], label="b")
        axes.plot([0, 9], [0, 9], label="_hidden in the legend")
        axes.axvline(2)
        axes.plot([0], [0], label=DECORATION)
    found = rows(drawn)
    assert [r["series"] for r in found] == ["b"] * 3 + ["a"] * 3 + ["hidden in the legend"] * 2
    a = [r for r in found if r["series"] == "a"]
    assert [r["score, logits"] for r in a] == ["0.5", "", "0.333333333"]
    assert [(r["low"], r["high"]) for r in a] == [("0", "1"), ("0", "1"), ("0", "2")]
    assert [(r["low"], r["high"]) for r in found[:3]] == [("2.5", "3.5"), ("4", "4"), ("4", "6")]


def test_matrices_and_bars_are_read_back_with_their_words():
    with figure("key", "query", grid=False) as (drawn, axes):
        image = axes.imshow([[0.25, 0.75], [1, 0]])
        axes.set_xticks([0, 1], ["公司", "收购"])
        drawn.colorbar(image, ax=axes, label="weight")
    assert rows(drawn) == [
        {"key": "公司", "query": "0", "weight": "0.25"},
        {"key": "收购", "query": "0", "weight": "0.75"},
        {"key": "公司", "query": "1", "weight": "1"},
        {"key": "收购", "query": "1", "weight": "0"},
    ]
    with figure("token", "change") as (drawn, axes):
        axes.bar([-0.2, 0.8], [1, 2], 0.4, label="with")
        axes.set_xticks([0, 1], ["a", "b"])
    assert rows(drawn) == [
        {"series": "with", "token": "a", "change": "1"},
        {"series": "with", "token": "b", "change": "2"},
    ]
    with figure("position", "", grid=False) as (drawn, axes):
        axes.pcolormesh([1, 2, 4], [-0.5, 0.5], [[0.5, 1]])
    assert [(r["position"], r["value"]) for r in rows(drawn)] == [("1", "0.5"), ("2", "1")]


def test_a_line_without_a_name_is_refused():
    with figure("x", "y") as (drawn, axes):
        axes.plot([1, 2], [3, 4])
    with pytest.raises(ValueError, match="has no name"):
        csv_text(drawn)
    with pytest.raises(ValueError, match="no name for its files"):
        write_figures([Plot(drawn, "caption", "description")], figure_files.Path())


def plot(letters: str) -> Plot:
    with figure("x", letters) as (drawn, axes):
        axes.plot([1, 2], [3, 4], label="a")
    return Plot(drawn, "", "", name="figure")


def test_files_are_the_same_each_time_and_leave_the_figure_alone(tmp_path):
    drawn = plot("plain")
    before = to_svg(drawn.figure, "d")
    first = {p.name: p.read_bytes() for p in written(drawn, tmp_path / "a").iterdir()}
    second = {p.name: p.read_bytes() for p in written(drawn, tmp_path / "b").iterdir()}
    assert first == second and set(first) == {f"figure.{k}" for k in ("svg", "pdf", "png", "csv")}
    assert to_svg(drawn.figure, "d") == before
    assert first["figure.pdf"].startswith(b"%PDF") and first["figure.png"].startswith(b"\x89PNG")
    svg = first["figure.svg"].decode()
    assert ElementTree.fromstring(svg) is not None and "var(--" not in svg  # any program reads it


def written(drawn: Plot, folder):
    check_outputs(folder)
    assert write_figures([drawn], folder) == []
    return folder


def test_chinese_letters_are_drawn_where_there_is_a_font(tmp_path):
    if figure_files._covering({*"公司"})[1]:
        pytest.skip("no font of this machine has Chinese letters")
    folder = written(plot("公司"), tmp_path)
    assert ">公司<" in (folder / "figure.svg").read_text(encoding="utf-8")
    assert re.search(rb"/FontName /\w+\+(?!DejaVu)", (folder / "figure.pdf").read_bytes())


def test_letters_without_a_font_are_told_and_stay_text_in_svg(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_files, "_machine_fonts", tuple)
    check_outputs(tmp_path)
    (line,) = write_figures([plot("公司")], tmp_path)
    assert "letters 公 司" in line and "boxes" in line
    assert ">公司<" in (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert write_figures([plot("Latin, −1 and αβ")], tmp_path) == []


def test_numbers_survive_a_spreadsheet():
    values = np.random.default_rng(0).normal(size=50)
    with figure("x", "y") as (drawn, axes):
        axes.plot(values, label="_only")
    np.testing.assert_allclose([float(r["y"]) for r in rows(drawn)], values, rtol=1e-8)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is not a folder"):
        check_outputs(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot write into"):
        check_outputs(tmp_path / "file" / "below")
    check_outputs(tmp_path / "new" / "deep")
    assert list((tmp_path / "new/deep").iterdir()) == []
