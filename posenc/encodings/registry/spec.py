"""Parsed form of a text that names an encoding: options, parts and layers."""

import re
from dataclasses import dataclass, field

Value = int | float | bool | str | tuple["Value", ...] | None
"""Type of an option's value."""

_WORD = re.compile(r"[^\W\d][\w.-]*")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
PATH = re.compile(r"(?:[A-Za-z]:[\\/])?[^\s+=,:\[\]'\"]+\.py(?![\w.])")
"""Regular expression of paths that need no quotes."""


class SpecError(ValueError):
    """Report a mistake in a text that names an encoding. The message has the column, from 1."""

    def __init__(self, text: str, column: int, problem: str) -> None:
        where = "" if column <= 1 else f", column {column}"
        super().__init__(f"{text!r}{where}: {problem}")
        self.column = column


@dataclass(frozen=True)
class Option:
    """Hold an option key=value, with its column in the text."""

    key: str
    value: Value
    column: int = field(default=1, compare=False)

    def __str__(self) -> str:
        return f"{self.key}={written(self.value)}"


@dataclass(frozen=True)
class Part:
    """Hold one encoding named in a text.

    where: a registered name; if there is an `attribute`, a module or the path of a file.
    attribute: the class there; "" for a registered name.
    """

    where: str
    attribute: str = ""
    options: tuple[Option, ...] = ()
    column: int = field(default=1, compare=False)
    attribute_column: int = field(default=1, compare=False)

    @property
    def is_file(self) -> bool:
        return bool(self.attribute) and self.where.endswith(".py")

    @property
    def target(self) -> str:
        """Return the text of the part without its options."""
        where = self.where
        if self.is_file and not PATH.fullmatch(where):
            where = _quoted(where)
        return f"{where}:{self.attribute}" if self.attribute else where

    def __str__(self) -> str:
        options = ",".join(map(str, sorted(self.options, key=lambda o: o.key)))
        return f"{self.target}:{options}" if options else self.target


@dataclass(frozen=True)
class Spec:
    """Hold a parsed text; `str` returns its canonical form.

    layers: the encodings of successive layers, repeated; each is a tuple of parts to compose.
    every: None, or n of "every n": the second of two layers is used at each n-th layer.
    label: the name that the user gave it; "" means its canonical text.
    """

    layers: tuple[tuple[Part, ...], ...]
    every: int | None = None
    label: str = field(default="", compare=False)
    text: str = field(default="", compare=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for layer in self.layers for part in layer)

    @property
    def pattern(self) -> tuple[tuple[Part, ...], ...]:
        """Return the layers of one period: for "A/B every 3" A, A and B."""
        if self.every is None:
            return self.layers
        most, last = self.layers
        return (*[most] * (self.every - 1), last)

    def error(self, column: int, problem: str) -> SpecError:
        return SpecError(self.text, column, problem)

    def __str__(self) -> str:
        text = ""
        for layer in self.layers:
            if text:  # spaces separate a path from the slash before it
                text += " / " if layer[0].is_file else "/"
            text += "+".join(map(str, layer))
        return text if self.every is None else f"{text} every {self.every}"


def written(value: Value) -> str:
    """Return a value as text of the grammar, whole numbers without a decimal point."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, tuple):
        return f"[{','.join(map(written, value))}]"
    plain = _WORD.fullmatch(value) and value not in ("true", "false", "none", "null")
    return value if plain else _quoted(value)


def read(word: str) -> Value:
    """Convert an unquoted word to a value.

    >>> read("1e3"), read("true"), read("none"), read("half")
    (1000, True, None, 'half')
    """
    if word in ("true", "false"):
        return word == "true"
    if word in ("none", "null"):
        return None
    if not _NUMBER.fullmatch(word):
        return word
    try:
        return int(word)
    except ValueError:
        number = float(word)
        return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
