"""Write posenc/list.json, the names of the encodings into both READMEs, and their table into
docs/encodings.md; run by `make readme`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from posenc.list import STORED_ROWS_FILE, build_rows

START, END = "<!-- encodings: written by make readme -->\n", "<!-- end of encodings -->"


PAGE = "docs/encodings.md"
PLACES = {
    "README.md": ("the embeddings", "queries and keys", "the scores", "the values", "nothing"),
    "README.zh-CN.md": ("词嵌入", "查询和键", "注意力分数", "值", "什么也不改"),
}
"""What an encoding changes: places 1 to 4, and none."""
COLON = {"README.md": ": ", "README.zh-CN.md": "："}


def with_table(page: str, table: str) -> str:
    """Return the page with `table` between its two markers."""
    before, rest = page.split(START)
    return f"{before}{START}{table.strip()}\n{END}{rest.split(END)[1]}"


def current_rows() -> list[dict[str, Any]]:
    """Return the claims of posenc's own encodings."""
    return [row for row in build_rows()[0] if not row["origin"]]


def as_json(rows: list[dict[str, Any]]) -> str:
    """Return what posenc/list.json must be."""
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


def current_table() -> str:
    """Return what `posenc list --markdown` prints."""
    command = [sys.executable, "-m", "posenc", "list", "--markdown"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


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
    made = {name: names_by_place(rows, name) for name in PLACES} | {PAGE: current_table()}
    paths = {root / name: table for name, table in made.items()}
    return {p: with_table(p.read_text(encoding="utf-8"), made) for p, made in paths.items()}


if __name__ == "__main__":
    STORED_ROWS_FILE.write_text(as_json(current_rows()), encoding="utf-8")
    for path, text in pages(Path(__file__).parents[2]).items():
        path.write_text(text, encoding="utf-8")
