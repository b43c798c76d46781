"""Write posenc/list.json, and the table of encodings into both READMEs; run by `make readme`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from posenc.list import STORED, encodings

START, END = "<!-- encodings: written by make readme -->\n", "<!-- end of encodings -->"


def with_table(readme: str, table: str) -> str:
    """The README with `table` between its two markers."""
    before, rest = readme.split(START)
    return f"{before}{START}{table.strip()}\n{END}{rest.split(END)[1]}"


def current_list() -> str:
    """What posenc/list.json must hold: the claims of posenc's own encodings."""
    rows = [row for row in encodings()[0] if not row["origin"]]
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


def current_table() -> str:
    """What `posenc list --markdown` prints."""
    command = [sys.executable, "-m", "posenc.cli", "list", "--markdown"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    STORED.write_text(current_list(), encoding="utf-8")
    root, table = Path(__file__).parents[1], current_table()
    for name in ("README.md", "README.zh-CN.md"):
        path = root / name
        text = path.read_text(encoding="utf-8")
        path.write_text(with_table(text, table), encoding="utf-8")
