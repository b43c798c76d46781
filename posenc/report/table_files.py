"""Write the tables of a report as files for papers and notes: LaTeX and Markdown."""

from collections.abc import Mapping
from pathlib import Path

from posenc.files.atomic import mark_figures, write_atomically
from posenc.report.escaping import show_hidden_characters
from posenc.report.report import Cell, Heading, Table, Value, cell_text, numeric_columns

_LATEX_OF_CHARACTER = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "≈": r"$\approx$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "–": "--",
    "—": "---",
    "…": r"\dots{}",
    "\N{NO-BREAK SPACE}": "~",
}
"""What LaTeX writes for a character that it reads otherwise, or that pdfLaTeX lacks."""
_MARKDOWN_OF_CHARACTER = {letter: f"\\{letter}" for letter in "\\`*_{}[]<>#|~"} | {"\n": " "}


def write_tables(tables: Mapping[str, Table], bibliography: str, folder: Path) -> None:
    """Write each table as NAME.tex and NAME.md into a folder, and `bibliography` as references.bib.

    tables: by name. bibliography: entries of BibTeX; "" for none, which writes no file.
    """
    for name, table in tables.items():
        write_atomically(folder / f"{name}.tex", table_latex(name, table))
        write_atomically(folder / f"{name}.md", table_markdown(table))
    if bibliography:
        write_atomically(folder / "references.bib", bibliography)
    mark_figures(folder)


def table_latex(name: str, table: Table) -> str:
    r"""Return a table for LaTeX with the package booktabs: `\input` it, and refer to it as
    `tab:NAME`. Meanings of columns are a second line of the head, notes are below.

    >>> print(table_latex("loss", Table(["encoding", "bits"], [["rope_1", 2.5]], "In bits.")))
    \begin{table}
    \caption{In bits.}
    \label{tab:loss}
    \centering
    \begin{tabular}{lr}
    \toprule
    encoding & bits \\
    \midrule
    rope\_1 & 2.5 \\
    \bottomrule
    \end{tabular}
    \end{table}
    <BLANKLINE>
    """
    letters = "".join("r" if is_numeric else "l" for is_numeric in numeric_columns(table))
    notes: dict[str, int] = {}
    rows = [[_latex(_text_of(cell, notes)) for cell in row] for row in table.rows]
    headings = [_heading_of(heading) for heading in table.header]
    lines = [r"\begin{table}"]
    if table.caption:
        lines.append(rf"\caption{{{_latex(table.caption)}}}")
    lines += [rf"\label{{tab:{name}}}", r"\centering", rf"\begin{{tabular}}{{{letters}}}"]
    lines += [r"\toprule", _latex_row([_latex(heading.text) for heading in headings])]
    if any(heading.meaning for heading in headings):
        meanings = [_latex(heading.meaning) for heading in headings]
        lines.append(_latex_row([rf"\scriptsize {m}" if m else "" for m in meanings]))
    lines += [r"\midrule", *map(_latex_row, rows), r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\footnotesize [{number}] {_latex(note)}" for note, number in notes.items()]
    return "\n".join([*lines, r"\end{table}", ""])


def table_markdown(table: Table) -> str:
    """Return a table for Markdown, as GitHub reads it: its caption above, its notes below.

    >>> print(table_markdown(Table(["encoding", Heading("loss", "bits")], [["rope", 2.5]])))
    | encoding | loss (bits) |
    |---|--:|
    | rope | 2.5 |
    <BLANKLINE>
    """
    notes: dict[str, int] = {}
    rows = [[_markdown(_text_of(cell, notes)) for cell in row] for row in table.rows]
    headings = [
        _markdown(f"{heading.text} ({heading.meaning})" if heading.meaning else heading.text)
        for heading in map(_heading_of, table.header)
    ]
    rulers = ["--:" if is_numeric else "---" for is_numeric in numeric_columns(table)]
    lines = [_markdown(table.caption), ""] if table.caption else []
    lines += [_markdown_row(headings), f"|{'|'.join(rulers)}|", *map(_markdown_row, rows)]
    if notes:
        lines += ["", *(f"{number}. {_markdown(note)}" for note, number in notes.items())]
    return "\n".join([*lines, ""])


def _heading_of(heading: str | Heading) -> Heading:
    """Return the heading of a column with its meaning."""
    return heading if isinstance(heading, Heading) else Heading(heading)


def _text_of(cell: Value, notes: dict[str, int]) -> str:
    """Return the text of a cell with its second line in brackets and the number of its note. A new
    note is added to `notes`, the number of each by its text."""
    text = cell_text(cell)
    if isinstance(cell, Cell):
        if cell.second_line:
            text = f"{text} ({cell.second_line.strip('()')})"
        if cell.note:
            text = f"{text} [{notes.setdefault(cell.note, len(notes) + 1)}]"
    return text


def _latex(text: str) -> str:
    """Return a text as LaTeX that shows it."""
    return "".join(_LATEX_OF_CHARACTER.get(c, c) for c in show_hidden_characters(text))


def _latex_row(cells: list[str]) -> str:
    """Return a row of a tabular. A bracket at its beginning would be read as an argument of the row
    above."""
    row = " & ".join(cells)
    return ("{}" if row.startswith("[") else "") + row + r" \\"


def _markdown(text: str) -> str:
    """Return a text as Markdown that shows it."""
    return "".join(_MARKDOWN_OF_CHARACTER.get(c, c) for c in show_hidden_characters(text))


def _markdown_row(cells: list[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
