"""Tables as LaTeX and Markdown: every character shown, every number in its column."""

import re

import pytest

from posenc.report.report import Cell, Heading, Number, Table
from posenc.report.table_files import table_latex, table_markdown, write_tables

TABLE = Table(
    ["encoding", Heading("128 bytes", "bits per byte"), "note"],
    [
        ["rope:a_b=1 & 50 %", Number(1.8042, format_spec=".3f"), Cell("cannot", note="no # rows")],
        ["[x] 位置", Cell(Number(2.0, format_spec=".3f"), second_line="(+0.2 ± 0.1)"), None],
    ],
    "Best first; ~2 | $5.",
    name="text",
)


def test_latex_has_a_line_for_each_row_and_no_character_that_it_reads_otherwise():
    lines = table_latex("text", TABLE).splitlines()
    assert lines[:6] == [
        r"\begin{table}",
        r"\caption{Best first; \textasciitilde{}2 \textbar{} \$5.}",
        r"\label{tab:text}",
        r"\centering",
        r"\begin{tabular}{lrl}",
        r"\toprule",
    ]
    assert lines[6:8] == [
        r"encoding & 128 bytes & note \\",
        r" & \scriptsize bits per byte &  \\",
    ]
    assert lines[9:11] == [
        r"rope:a\_b=1 \& 50 \% & 1.804 & cannot [1] \\",
        r"{}[x] 位置 & 2.000 (+0.2 $\pm$ 0.1) & -- \\",
    ]
    assert lines[13] == r"\par\footnotesize [1] no \# rows"


def test_braces_close_in_the_order_that_they_open():
    nasty = Table(["a"], [['}{\\^~"<>|\n#']], "}")
    text = re.sub(r"\\[{}\\]", "", table_latex("n", nasty))
    depth = 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0


def test_markdown_has_as_many_columns_in_each_row():
    caption, _, *rows = table_markdown(TABLE).splitlines()
    assert caption == r"Best first; \~2 \| $5."
    assert rows[:2] == ["| encoding | 128 bytes (bits per byte) | note |", "|---|--:|---|"]
    assert rows[2] == r"| rope:a\_b=1 & 50 % | 1.804 | cannot \[1\] |"
    assert rows[3] == r"| \[x\] 位置 | 2.000 (+0.2 ± 0.1) | – |"
    assert rows[5] == r"1. no \# rows"
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows[:4]} == {4}


@pytest.mark.parametrize("bibliography", ["", "@misc{a,\n}\n"])
def test_files_are_written_by_the_names_of_tables(tmp_path, bibliography):
    (tmp_path / "t").mkdir()
    write_tables({"text": TABLE}, bibliography, tmp_path / "t")
    names = {path.name for path in (tmp_path / "t").iterdir()}
    assert names - {"posenc-figures.txt"} == {"text.tex", "text.md"} | (
        {"references.bib"} if bibliography else set()
    )
