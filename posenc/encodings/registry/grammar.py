r"""Define the grammar in which every command reads the names of encodings, and parse it.

    spec    = [label "="] layer {"/" layer} ["every" number]
    layer   = part {"+" part}                                   several in one attention
    part    = (name | module ":" Class | path ".py:" Class) [":" option {"," option}]
    option  = key "=" value
    value   = number | true | false | none | word | "text" | [value, ...]

Text after a colon is an option if an equals sign follows its first word, otherwise a class. A path
ends with ".py". A path with a space, a quote or one of + = , : [ ] must be quoted, so "rope /
my.py:Mine" is two layers. `A/B every 4` uses B at each fourth layer; `A/B/C` repeats the three.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn

Value = int | float | bool | str | tuple["Value", ...] | None
"""Type of an option's value."""

_WORD_PATTERN = re.compile(r"[^\W\d][\w.-]*")
_WHOLE_WORD_NUMBER_PATTERN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
PATH_PATTERN = re.compile(r"(?:[A-Za-z]:[\\/])?[^\s+=,:\[\]'\"]+\.py(?![\w.])")
"""Regular expression of paths that need no quotes."""


class SpecError(ValueError):
    """Report a mistake in a text that names an encoding. The message names the column, counted from
    1."""

    def __init__(self, text: str, column: int, problem: str) -> None:
        column_words = "" if column <= 1 else f", column {column}"
        super().__init__(f"{text!r}{column_words}: {problem}")
        self.column = column


@dataclass(frozen=True)
class Option:
    """Hold an option key=value, with its column in the text."""

    key: str
    value: Value
    column: int = field(default=1, compare=False)

    def __str__(self) -> str:
        return f"{self.key}={format_value(self.value)}"


@dataclass(frozen=True)
class Part:
    """Hold one encoding named in a text.

    name_or_module: a registered name; if there is an `attribute`, a module or the path of a file.
    attribute: the class there; "" for a registered name.
    """

    name_or_module: str
    attribute: str = ""
    options: tuple[Option, ...] = ()
    column: int = field(default=1, compare=False)
    attribute_column: int = field(default=1, compare=False)

    @property
    def is_file(self) -> bool:
        """Return True if `name_or_module` is the path of a file."""
        return bool(self.attribute) and self.name_or_module.endswith(".py")

    @property
    def target(self) -> str:
        """Return the text of the part without its options: "rope", or "./my.py:Mine"."""
        path_or_name = self.name_or_module
        if self.is_file and not PATH_PATTERN.fullmatch(path_or_name):
            path_or_name = _in_double_quotes(path_or_name)
        return f"{path_or_name}:{self.attribute}" if self.attribute else path_or_name

    def __str__(self) -> str:
        options = ",".join(map(str, sorted(self.options, key=lambda o: o.key)))
        return f"{self.target}:{options}" if options else self.target


@dataclass(frozen=True)
class Spec:
    """Hold a parsed text; `str` returns its canonical form.

    layers: the encodings of successive layers, repeated; each is a tuple of parts to compose.
    every: None, or n of "every n": the second of two layers is used at each n-th layer.
    label: the name that the user gave it; "" means its canonical text.
    text: the text that was parsed, for error messages.
    """

    layers: tuple[tuple[Part, ...], ...]
    every: int | None = None
    label: str = field(default="", compare=False)
    text: str = field(default="", compare=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts of all layers, in the order of the text."""
        return tuple(part for layer in self.layers for part in layer)

    @property
    def pattern(self) -> tuple[tuple[Part, ...], ...]:
        """Return the layers of one period: for "A/B every 3" A, A and B."""
        if self.every is None:
            return self.layers
        usual_layer, nth_layer = self.layers
        return (*[usual_layer] * (self.every - 1), nth_layer)

    def error(self, column: int, problem: str) -> SpecError:
        """Return, without raising it, an error that reports `problem` at this column of the
        text."""
        return SpecError(self.text, column, problem)

    def __str__(self) -> str:
        text = ""
        for layer in self.layers:
            if text:  # spaces separate a path from the slash before it
                text += " / " if layer[0].is_file else "/"
            text += "+".join(map(str, layer))
        return text if self.every is None else f"{text} every {self.every}"


def format_value(value: Value) -> str:
    """Return an option's value as `parse` would read it; whole numbers have no decimal point."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # Below 2^53 every whole float is exact.
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, tuple):
        return f"[{','.join(map(format_value, value))}]"
    is_unquoted_word = _WORD_PATTERN.fullmatch(value) and value not in (
        "true",
        "false",
        "none",
        "null",
    )
    return value if is_unquoted_word else _in_double_quotes(value)


def parse_word(word: str) -> Value:
    """Convert an unquoted word to a value.

    >>> parse_word("1e3"), parse_word("true"), parse_word("none"), parse_word("half")
    (1000, True, None, 'half')
    """
    if word in ("true", "false"):
        return word == "true"
    if word in ("none", "null"):
        return None
    if not _WHOLE_WORD_NUMBER_PATTERN.fullmatch(word):
        return word
    try:
        return int(word)
    except ValueError:
        number = float(word)
        return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _in_double_quotes(text: str) -> str:
    """Return the text in double quotes, with quotes and backslashes in it escaped."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# What can stand at one place of the text, in the order of the grammar.
_LABEL_PATTERN = re.compile(r"\s*([^:+/=\[\]'\",$]*?)\s*=")
_DOTTED_NAME_PATTERN = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_KEY_PATTERN = re.compile(r"([^\W\d]\w*)\s*=")
_COLON_BEFORE_A_CLASS_PATTERN = re.compile(rf"\s*:(?!\s*{_KEY_PATTERN.pattern})\s*")
_NUMBER_THEN_END_PATTERN = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?=[\s,+/\]]|$)")
_UNQUOTED_PATTERN = re.compile(r"[^\s,+/:=\[\]'\"]+")
_QUOTED_TEXT_PATTERN = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_EVERY_PATTERN = re.compile(r"\s+every\b")
_COUNT_PATTERN = re.compile(r"\s*(\d{1,6})(?!\w)")
MAX_LIST_DEPTH = 8
"""Maximum depth of nested lists."""


@lru_cache(maxsize=256)
def parse(text: str) -> Spec:
    """Parse a text that names an encoding; nothing is looked up or imported.

    >>> spec = parse("rope:rope_theta=5e5+alibi")
    >>> str(spec), [part.name_or_module for part in spec.parts]
    ('rope:rope_theta=500000+alibi', ['rope', 'alibi'])
    >>> str(parse("mine = ./my.py:LogALiBi/nope every 4"))
    './my.py:LogALiBi/nope every 4'

    Raises: SpecError, a ValueError with the column of the mistake.
    """
    return _Reader(text).read_spec()


class _Reader:
    """Parse a text from left to right, with a method for each line of the grammar. `next_index` is
    the index of the next character to be read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.next_index = 0

    def read_spec(self) -> Spec:
        """Read the whole text, and return what it says."""
        label_match = self._match_and_advance(_LABEL_PATTERN)
        if label_match is not None and not label_match[1]:
            self._refuse("a label is missing before the equals sign", 0)
        if (
            label_match is not None and not label_match[1][0].isalnum()
        ):  # matplotlib hides labels with _
            self._refuse("a label begins with a letter or a digit", 0)
        layers = [self._read_layer()]
        while self._match_and_advance(re.compile(r"\s*/")):
            layers.append(self._read_layer())
        every = self._read_every(len(layers)) if self._match_and_advance(_EVERY_PATTERN) else None
        self._skip_white_space()
        if self.next_index < len(self.text):
            remaining_text = self.text[self.next_index :]
            self._refuse(f"expected '+', '/', ',' or the end, found {remaining_text[:20]!r}")
        return Spec(tuple(layers), every, label_match[1] if label_match else "", self.text)

    def _read_layer(self) -> tuple[Part, ...]:
        """Read the encodings of one layer, joined by plus signs, and return them."""
        parts = [self._read_part()]
        while self._match_and_advance(re.compile(r"\s*\+")):
            parts.append(self._read_part())
        return tuple(parts)

    def _read_part(self) -> Part:
        """Read one encoding: a name, a module and class, or a file and class; and its options.
        Return it."""
        self._skip_white_space()
        start_index = self.next_index
        path = self._read_path()
        name_or_path = self._read_name() if path is None else path
        is_file = path is not None
        attribute, attribute_column = self._read_attribute(name_or_path, is_file)
        if is_file and not attribute:
            self._refuse(f"name a class of the file, as in {name_or_path}:MyEncoding")
        if "." in name_or_path and not attribute:
            self._refuse(f"name a class of the module, as in {name_or_path}:MyEncoding")
        options = self._read_options() if self._match_and_advance(re.compile(r"\s*:")) else ()
        return Part(name_or_path, attribute, options, start_index + 1, attribute_column)

    def _read_path(self) -> str | None:
        """Read the path of a file, quoted or not, and return it; None if there is none here."""
        start_index = self.next_index
        if self._quote_begins():
            path = self._read_quoted()
            if not path.endswith(".py"):
                self._refuse(f"{path!r} in quotes must be the path of a .py file", start_index)
            return path
        match = self._match_and_advance(PATH_PATTERN)
        return None if match is None else match[0]

    def _read_name(self) -> str:
        """Read the name of an encoding or a module, and return it."""
        match = self._match_and_advance(_DOTTED_NAME_PATTERN)
        if match is None:
            remaining_text = self.text[self.next_index :]
            found_words = (
                f"found {remaining_text[:20]!r}" if remaining_text.strip() else "found nothing"
            )
            self._refuse(
                f"expected an encoding (a name, module:Class or file.py:Class), {found_words}"
            )
        return match[0]

    def _read_attribute(self, name_or_path: str, is_file: bool) -> tuple[str, int]:
        """Read a colon and the name of a class. Return the name and its column; ("", the next
        column) if no class follows, for example an option. name_or_path: what was read before the
        colon."""
        if self._match_and_advance(_COLON_BEFORE_A_CLASS_PATTERN) is None:
            return "", self.next_index + 1
        column = self.next_index + 1
        match = self._match_and_advance(_DOTTED_NAME_PATTERN)
        if match is None:
            wanted_words = "a class" if is_file or "." in name_or_path else "a class or key=value"
            self._refuse(f"expected {wanted_words} after the colon")
        return match[0], column

    def _read_options(self) -> tuple[Option, ...]:
        """Read options key=value, one or more, separated by commas, and return them."""
        options: list[Option] = []
        while True:
            self._skip_white_space()
            column = self.next_index + 1
            key_match = self._match_and_advance(_KEY_PATTERN)
            if key_match is None:
                self._refuse("expected an option as key=value")
            if any(option.key == key_match[1] for option in options):
                self._refuse(f"{key_match[1]} is given twice", column - 1)
            options.append(Option(key_match[1], self._read_value(), column))
            if not self._match_and_advance(re.compile(r"\s*,")):
                return tuple(options)

    def _read_value(self, depth: int = 0) -> Value:
        """Read a quoted text, a list, a number or a word, inside of `depth` lists, and return its
        value."""
        self._skip_white_space()
        if self._quote_begins():
            return self._read_quoted()
        if self._match_and_advance(re.compile(r"\[")):
            if depth == MAX_LIST_DEPTH:
                self._refuse("lists are nested too deeply", self.next_index - 1)
            return self._read_list(depth + 1)
        word_match = self._match_and_advance(_NUMBER_THEN_END_PATTERN) or self._match_and_advance(
            _UNQUOTED_PATTERN
        )
        if word_match is None:
            self._refuse("a value is missing after the equals sign or comma")
        return parse_word(word_match[0])

    def _read_list(self, depth: int) -> Value:
        """Read the values of a list up to its closing bracket, and return them. The opening bracket
        was read already."""
        start_index = self.next_index - 1
        values: list[Value] = []
        if self._match_and_advance(re.compile(r"\s*\]")):
            return ()
        while True:
            values.append(self._read_value(depth))
            if self._match_and_advance(re.compile(r"\s*\]")):
                return tuple(values)
            if not self._match_and_advance(re.compile(r"\s*,")):
                self._refuse("the list that begins here is not closed", start_index)

    def _quote_begins(self) -> bool:
        """Return True if the next character is a quote."""
        return self.text.startswith(("'", '"'), self.next_index)

    def _read_quoted(self) -> str:
        """Read a text in quotes, and return it without them and without escapes."""
        start_index = self.next_index
        match = self._match_and_advance(_QUOTED_TEXT_PATTERN)
        if match is None:
            self._refuse("the quote that begins here is not closed", start_index)
        in_single, in_double = match.groups()
        escaped = in_double if in_single is None else in_single
        return re.sub(r"\\(.)", r"\1", escaped)

    def _read_every(self, num_written_layers: int) -> int:
        """Read the number after the word `every` and return it. num_written_layers: how many
        layers the text has, which must be two."""
        start_index = self.next_index
        match = self._match_and_advance(_COUNT_PATTERN)
        if match is None or int(match[1]) < 2:
            self._refuse("`every` needs a whole number >= 2, as in rope/nope every 4", start_index)
        if num_written_layers != 2:
            self._refuse(
                f"`every` is for two layers, as in rope/nope every 4; got {num_written_layers}",
                start_index,
            )
        return int(match[1])

    def _match_and_advance(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match the pattern at the next character. Return the match and go on behind it; return
        None if the pattern does not match."""
        match = pattern.match(self.text, self.next_index)
        if match is not None:
            self.next_index = match.end()
        return match

    def _skip_white_space(self) -> None:
        """Go on behind white space, if there is any."""
        self._match_and_advance(re.compile(r"\s*"))

    def _refuse(self, problem: str, index: int | None = None) -> NoReturn:
        """Raise SpecError for a problem at `index` of the text, or for None at the next
        character."""
        error_index = self.next_index if index is None else index
        raise SpecError(self.text, error_index + 1, f"{problem}.")
