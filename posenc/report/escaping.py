"""Escape text of foreign files, so that it can neither move the cursor nor reorder a line."""

import html
import re

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)
_COMMAND = re.compile(r"^(\s*)::", re.MULTILINE)


def show_hidden_characters(text: str) -> str:
    """Return `text` with each hidden character as an escape such as \\u001b, which JSON reads back.

    Hidden are control characters (C0 except tab and newline, and C1), marks that change the
    direction of writing, the line and paragraph separators, and the byte order mark.

    >>> print(show_hidden_characters("a" + chr(27) + "[31m" + chr(0x202E) + "b"))
    a\\u001b[31m\\u202eb
    """
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def without_runner_commands(text: str) -> str:
    """Return `text` in which the runner of GitHub Actions finds no command: neither :: at the
    beginning of a line, spaces aside, nor ##[ anywhere.

    >>> print(without_runner_commands("::error::all is lost"))
    %3A%3Aerror::all is lost
    """
    return _COMMAND.sub(r"\1%3A%3A", text).replace("##[", "##%5B")


def escape_html(text: str) -> str:
    """Return `text` as the content of an HTML element or attribute: &, <, > and quotes as entities,
    hidden characters as escapes."""
    return html.escape(show_hidden_characters(text))
