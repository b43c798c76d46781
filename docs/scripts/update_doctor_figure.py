"""Write docs/figures/doctor.svg: what the command prints of a broken and of a mended config.

Run by `make readme`.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

FIGURE = Path(__file__).parents[1] / "figures/doctor.svg"
ROOT = Path(__file__).parents[2]
EXAMPLE = "docs/examples/yarn"
"""A Llama with YaRN, as transformers 5 saves it."""
COMMANDS = (EXAMPLE, f"{EXAMPLE} --fix --out mended", "mended")
WIDTH = 108
COLOURS = (
    (r"\bother\b|\(other\)|^E PD\d+|\d+ errors?\b", "bold red"),
    (r"as meant|Nothing to complain about|proved by their emulators", "bold green"),
)


def screen() -> Text:
    """The prompts with what the commands print, in colours."""
    shown = Text()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copytree(ROOT / EXAMPLE, folder / EXAMPLE)
        for arguments in COMMANDS:
            shown.append(f"$ posenc doctor {arguments}\n", "bold")
            shown.append(printed(arguments.split(), folder) + "\n")
    for pattern, style in COLOURS:
        shown.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    shown.rstrip()
    return shown


def printed(arguments: list[str], folder: Path) -> str:
    """What `posenc doctor` prints in a process of its own."""
    command = [sys.executable, "-m", "posenc", "doctor", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode > 1:
        raise SystemExit(done.stderr)
    return done.stdout


def picture() -> str:
    """The screen as SVG, in the reader's own fixed-width font."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(screen())
    svg = console.export_svg(title="posenc doctor", theme=MONOKAI, unique_id="doctor")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("<text ", '<text xml:space="preserve" ')


if __name__ == "__main__":
    FIGURE.write_text(picture(), encoding="utf-8")
