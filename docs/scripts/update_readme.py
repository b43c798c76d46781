"""Write posenc/list.json, the names of the encodings into both READMEs, their table into
docs/encodings.md, and what is public into docs/public.md: names, commands and their options; run by
`make readme`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import posenc
from posenc.command_line import main as command_line
from posenc.list import HEADINGS, STORED_ROWS_FILE, build_rows, table_cells

ENCODINGS = ("<!-- encodings: written by make readme -->\n", "<!-- end of encodings -->")
NAMES = ("<!-- names: written by make readme -->\n", "<!-- end of names -->")
COMMANDS = ("<!-- commands: written by make readme -->\n", "<!-- end of commands -->")
PAGE = "docs/encodings.md"
PLACES = {
    "README.md": ("the embeddings", "queries and keys", "the scores", "the values", "nothing"),
    "README.zh-CN.md": ("词嵌入", "查询和键", "注意力分数", "值", "什么也不改"),
}
"""What an encoding changes: places 1 to 4, and none."""
PUBLIC_PAGE = Path(__file__).parents[1] / "public.md"
WITHOUT_LIST = "keras"
"""A module whose names need a package that is often missing; its page lists them."""
COLON = {"README.md": ": ", "README.zh-CN.md": "："}


def between(text: str, markers: tuple[str, str], content: str) -> str:
    """Return the text with `content` between the two markers."""
    start, end = markers
    before, rest = text.split(start)
    return f"{before}{start}{content.strip()}\n{end}{rest.split(end)[1]}"


def current_rows() -> list[dict[str, Any]]:
    """Return the claims of posenc's own encodings."""
    return [row for row in build_rows()[0] if not row["origin"]]


def as_json(rows: list[dict[str, Any]]) -> str:
    """Return what posenc/list.json must be."""
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


def table_in_markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table that `posenc list` prints, in Markdown."""
    cells_of_rows = [
        HEADINGS,
        ["---"] * len(HEADINGS),
        *([f"`{cell[0]}`", *cell[1:]] for cell in map(table_cells, rows)),
    ]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        for cells in cells_of_rows
    )


def names_by_place(rows: list[dict[str, Any]], readme: str) -> str:
    """Return a list with the names of the encodings that act at each place."""
    *places, nothing = PLACES[readme]
    lines = []
    for place, what in (*enumerate(places, 1), (0, nothing)):
        names = [f"`{row['name']}`" for row in rows if place in (row["places"] or [0])]
        lines.append(f"- **{what}**{COLON[readme]}{' '.join(names)}")
    return "\n".join(lines)


def pages(root: Path) -> dict[Path, str]:
    """Return the documents with their current tables."""
    rows = current_rows()
    made = {name: names_by_place(rows, name) for name in PLACES} | {PAGE: table_in_markdown(rows)}
    paths = {root / name: table for name, table in made.items()}
    return {p: between(p.read_text(encoding="utf-8"), ENCODINGS, made) for p, made in paths.items()}


def quoted(names: list[str]) -> str:
    """Return the names in backticks, with blanks between."""
    return " ".join(f"`{name}`" for name in names)


def names_in_words() -> str:
    """Return a line for posenc and one for each of its public modules."""
    lines = [f"- **posenc**: {quoted(sorted(posenc.__all__))}"]
    for name, path in sorted(posenc._MODULES.items()):
        if name != WITHOUT_LIST:
            module = importlib.import_module(path)
            lines.append(f"- **posenc.{name}**: {quoted(sorted(module.__all__))}")
    return "\n".join(lines)


def commands_in_words() -> str:
    """Return a line for each command, with its options."""
    lines = []
    for name, command in commands(command_line.app(), "posenc"):
        options = set()
        for parameter in command.params:
            options |= {word for word in parameter.opts if word.startswith("--")}
        lines.append(f"- **{name}**: {quoted(sorted(options - {'--help'}))}")
    return "\n".join(lines)


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the full name of each command below a group, and the command."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def current_public_page() -> str:
    """Return what the page must be."""
    text = between(PUBLIC_PAGE.read_text(encoding="utf-8"), NAMES, names_in_words())
    return between(text, COMMANDS, commands_in_words())


if __name__ == "__main__":
    STORED_ROWS_FILE.write_text(as_json(current_rows()), encoding="utf-8")
    for path, text in pages(Path(__file__).parents[2]).items():
        path.write_text(text, encoding="utf-8")
    PUBLIC_PAGE.write_text(current_public_page(), encoding="utf-8")
