"""Write the table of encodings into both READMEs and posenc/list.json; run by `make readme`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

START, END = "<!-- encodings: written by make readme -->\n", "<!-- end of encodings -->"


def with_table(readme: str, table: str) -> str:
    """The README with `table` between its two markers."""
    before, rest = readme.split(START)
    return f"{before}{START}{table.strip()}\n{END}{rest.split(END)[1]}"


def current_table(form: str = "--markdown") -> str:
    """What `posenc list --markdown` prints."""
    command = [sys.executable, "-m", "posenc.cli", "list", form]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    root, table = Path(__file__).parents[1], current_table()
    for name in ("README.md", "README.zh-CN.md"):
        path = root / name
        text = path.read_text(encoding="utf-8")
        path.write_text(with_table(text, table), encoding="utf-8")
    (root / "posenc/list.json").write_text(current_table("--json"), encoding="utf-8")
