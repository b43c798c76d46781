"""Write what is public into docs/public.md: names, commands and their options; run by
`make readme`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import posenc
from posenc.command_line import main as command_line

PAGE = Path(__file__).parents[1] / "public.md"
NAMES = ("<!-- names: written by make readme -->\n", "<!-- end of names -->")
COMMANDS = ("<!-- commands: written by make readme -->\n", "<!-- end of commands -->")
WITHOUT_LIST = "keras"
"""A module whose names need a package that is often missing; its page lists them."""


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


def between(text: str, markers: tuple[str, str], content: str) -> str:
    """Return the text with `content` between the two markers."""
    start, end = markers
    before, rest = text.split(start)
    return f"{before}{start}{content}\n{end}{rest.split(end)[1]}"


def current_page() -> str:
    """Return what the page must be."""
    text = between(PAGE.read_text(encoding="utf-8"), NAMES, names_in_words())
    return between(text, COMMANDS, commands_in_words())


if __name__ == "__main__":
    PAGE.write_text(current_page(), encoding="utf-8")
