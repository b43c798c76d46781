"""One report, four renderers: what a number is, it is everywhere."""

import csv
import io
import json
import math
import re
from dataclasses import dataclass

import pytest

from posenc.report.chart import Chart, describe_curve_ends, long_table
from posenc.report.html_page import page_of
from posenc.report.report import (
    Cell,
    Code,
    Facts,
    Fold,
    Heading,
    Items,
    Labelled,
    Number,
    Plot,
    Report,
    Section,
    Table,
    as_json,
    records_of,
    table_csv,
)
from posenc.report.terminal import LABELLED_WIDTH, Terminal, as_text, show

PLANTED = 2.345678901234567
LOSSES = Table(
    ["method", Heading("0–64", "tokens"), Heading("64–4,096", "tokens, beyond training"), "loads"],
    [
        ["none", Number(PLANTED, 2.1, 2.5, ".3f"), Cell("cannot", note="No rows there."), "yes"],
        ["yarn", Number(-0.125, format_spec="+.3f", unit=" %"), 12345, "no"],
        ["far", Cell(Number(7.25, format_spec=".2f"), second_line="worse", tone=2), math.nan, None],
    ],
    "Loss by position",
    name="losses",
)


@dataclass(frozen=True)
class Gap:
    mean: float
    half: float


def report(**changed) -> Report:
    given = {
        "title": "Which method?",
        "headline": "Use yarn.",
        "facts": {"chosen": "yarn", "gap": Gap(0.5, math.inf), "tried": ("none", "yarn")},
        "limits": "One text.",
        "cautions": ["Mind the text."],
        "sections": [
            Section("Losses", ["How to read it.", LOSSES, Items(["first item"])]),
            Section("Repeat it", [Code("posenc x"), Facts({"torch": "2.13"})], is_detail=True),
        ],
    }
    return Report(**given | changed)


def printed(made: Report, width: int = 100) -> str:
    out = io.StringIO()
    show(made, Terminal(width=width, file=out))
    return out.getvalue()


def test_a_number_is_equal_on_the_terminal_the_page_in_json_and_csv():
    terminal, page = printed(report()), page_of(report()).html()
    for shown in ("2.346 (2.100–2.500)", "-0.125 %", "12,345", "7.25"):
        assert shown in terminal and shown in page, shown
    rows = json.loads(as_json(report()))["tables"]["losses"]
    assert rows[0]["0–64"] == PLANTED
    assert (rows[0]["0–64, low"], rows[0]["0–64, high"]) == (2.1, 2.5)
    assert (rows[1]["0–64"], rows[1]["64–4,096"], rows[2]["0–64"]) == (-0.125, 12345, 7.25)
    assert rows[1]["0–64, low"] is None and rows[2]["64–4,096"] is None
    assert rows[0]["64–4,096"] == "cannot"
    table = list(csv.DictReader(io.StringIO(table_csv(LOSSES))))
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows] == table
    assert float(table[0]["0–64"]) == PLANTED


def test_a_number_written_otherwise_than_measured_is_seen():
    other = Table(LOSSES.header, [["none", Number(2.3, 2.1, 2.5, ".3f"), 1, ""]], name="losses")
    made = report(sections=[Section("", [other])])
    assert "2.346" not in printed(made) and "2.346" not in page_of(made).html()
    assert json.loads(as_json(made))["tables"]["losses"][0]["0–64"] != PLANTED


def test_the_answer_its_limits_and_cautions_are_on_the_terminal_and_the_page():
    terminal, page = printed(report()), page_of(report()).html()
    for said in ("Use yarn.", "One text.", "Mind the text.", "How to read it.", "first item"):
        assert said in terminal and said in page, said
    assert terminal.index("Use yarn.") < terminal.index("What this cannot say: One text.")
    assert page.index("Use yarn.") < page.index("<h2")
    assert "posenc x" in page and "posenc x" not in terminal  # a detail
    assert "[1] No rows there." in terminal and "cannot [1]" in terminal


@pytest.mark.parametrize("width", [60, 100, 140])
def test_sentences_beside_a_label_are_wrapped_and_commands_are_not(width):
    sentence = "a sentence of many words " * 12
    command = "posenc extend " + "--option value " * 12
    parts = [sentence, Code(command.strip()), "the end"]
    made = Report("x", "", {}, [Section("", ["before", Labelled("E X1", parts), "after"])])
    lines = as_text(made, width).splitlines()
    indent = " " * len("E X1  ")
    assert lines[:2] == ["before", ""] and lines[2].startswith("E X1  a sentence")
    assert lines[-3:] == [f"{indent}    {command.strip()}", f"{indent}the end", "after"]
    body = [lines[2].removeprefix("E X1  "), *(line.removeprefix(indent) for line in lines[3:-3])]
    assert " ".join(body) == sentence.strip()
    assert all(len(line) <= min(width, LABELLED_WIDTH) for line in lines[:-3])
    assert f"<dt>E X1</dt><dd><p>{sentence}</p><pre" in page_of(made).html()


def test_facts_are_plain_json_without_nan():
    found = json.loads(as_json(report()))
    assert found["gap"] == {"mean": 0.5, "half": None}
    assert found["chosen"] == "yarn" and found["tried"] == ["none", "yarn"]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_breaks_no_number_and_names_every_row(width):
    shown = printed(report(sections=[Section("", [LOSSES])]), width)
    for number in ("2.346 (2.100–2.500)", "12,345", "-0.125 %"):
        assert number in shown, (width, shown)
    tables = shown.count("┏")
    assert shown.count("none") == shown.count("yarn ") == tables
    assert tables > 1 if width == 40 else tables == 1
    assert "…" not in shown


def test_a_long_text_is_broken_between_words_and_stays_beside_its_name():
    said = "the sign of the distance is exchanged, and every earlier key is one too large"
    rows = [["keys before a query differ by distance, as they must", "no", said]]
    table = Table(["check", "holds", "measured"], rows)
    shown = printed(
        report(headline="", limits="", cautions=[], sections=[Section("", [table])]), 64
    )
    assert shown.startswith("┏") and shown.count("┏") == 1 and "…" not in shown
    assert all(word in shown for word in f"{rows[0][0]} {said}".split())
    assert max(map(len, shown.splitlines())) == 64


def test_foreign_text_moves_no_cursor_and_is_no_markup():
    hostile = "\x1b[31m[bold]x[/bold]<script>"
    made = report(
        headline=hostile,
        cautions=[hostile],
        sections=[Section(hostile, [Table([hostile], [[hostile]], hostile, name="t"), hostile])],
    )
    terminal, page = printed(made), page_of(made).html()
    assert "\x1b" not in terminal + page + as_json(made) + table_csv(made.tables()["t"])
    assert "<script>" not in page and "[bold]" in terminal


def test_tables_in_folds_are_data_too_and_those_without_a_name_are_not():
    unnamed = Table(["a"], [["b"]])
    made = report(sections=[Section("", [Fold("more", [LOSSES]), unnamed])])
    assert [*made.tables()] == ["losses"]


def test_a_figure_without_a_description_reads_the_ends_of_its_curves():
    data = long_table("length", "loss", {"rope": ([64, 128, 1024], [2.5, 2.25, 3.125])})

    def draw(given):
        from posenc.report.drawing import draw_curves_by_length, line_styles

        return draw_curves_by_length(given, line_styles(["rope"]), [64, 1024], 64)

    page = page_of(report(sections=[Section("", [Plot(Chart(data, draw), "Loss.")])])).html()
    assert re.search(r"<\w*:?title[^>]*>Loss\. rope: 2\.5 at 64, 3\.12 at 1,024\.<", page)


def test_a_figure_over_words_reads_its_ends():
    data = long_table("token", "change", {"with": (["Tom", "saw", "Lily"], [0.5, 0.0, 0.25])})
    assert describe_curve_ends(data) == "with: 0.5 at Tom, 0.25 at Lily."


def test_a_table_without_rows_is_written_empty():
    assert records_of(Table(["a", "b"], [])) == []
    assert table_csv(Table(["a", "b"], [])).strip() == ""
