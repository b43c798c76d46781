r"""The grammar by which every command reads encodings.

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
from functools import lru_cache
from typing import NoReturn

from posenc.encodings.registry.spec import PATH, Option, Part, Spec, SpecError, Value, read

_LABEL = re.compile(r"\s*([^:+/=\[\]'\",$]*?)\s*=")
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_KEY = re.compile(r"([^\W\d]\w*)\s*=")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?=[\s,+/\]]|$)")
_BARE = re.compile(r"[^\s,+/:=\[\]'\"]+")
_TEXT = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_EVERY = re.compile(r"\s+every\b")
_COUNT = re.compile(r"\s*(\d{1,6})(?!\w)")
DEEPEST = 8
"""Maximum depth of nested lists."""


@lru_cache(maxsize=256)
def parse(text: str) -> Spec:
    """Parse a text that names an encoding; nothing is looked up or imported.

    >>> spec = parse("rope:rope_theta=5e5+alibi")
    >>> str(spec), [part.where for part in spec.parts]
    ('rope:rope_theta=500000+alibi', ['rope', 'alibi'])
    >>> str(parse("mine = ./my.py:LogALiBi/nope every 4"))
    './my.py:LogALiBi/nope every 4'

    Raises: SpecError, a ValueError with the column of the mistake.
    """
    return _Reader(text).spec()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def spec(self) -> Spec:
        label = self._take(_LABEL)
        if label is not None and not label[1]:
            self._refuse("a label is missing before the equals sign", 0)
        if label is not None and not label[1][0].isalnum():  # matplotlib hides labels with _
            self._refuse("a label begins with a letter or a digit", 0)
        layers = [self._layer()]
        while self._take(re.compile(r"\s*/")):
            layers.append(self._layer())
        every = self._every(len(layers)) if self._take(_EVERY) else None
        self._skip()
        if self.at < len(self.text):
            self._refuse(f"expected '+', '/', ',' or the end, found {self.text[self.at :][:20]!r}")
        return Spec(tuple(layers), every, label[1] if label else "", self.text)

    def _layer(self) -> tuple[Part, ...]:
        parts = [self._part()]
        while self._take(re.compile(r"\s*\+")):
            parts.append(self._part())
        return tuple(parts)

    def _part(self) -> Part:
        self._skip()
        start = self.at
        if self.text[start : start + 1] in ("'", '"'):
            where, file = self._quoted(), True
            if not where.endswith(".py"):
                self._refuse(f"{where!r} in quotes must be the path of a .py file", start)
        elif found := self._take(PATH):
            where, file = found[0], True
        else:
            where, file = self._name(), False
        attribute, at = self._attribute(where, file)
        if file and not attribute:
            self._refuse(f"name a class of the file, as in {where}:MyEncoding")
        if "." in where and not attribute:
            self._refuse(f"name a class of the module, as in {where}:MyEncoding")
        options = self._options() if self._take(re.compile(r"\s*:")) else ()
        return Part(where, attribute, options, start + 1, at)

    def _name(self) -> str:
        found = self._take(_DOTTED)
        if found is None:
            rest = self.text[self.at :]
            what = f"found {rest[:20]!r}" if rest.strip() else "found nothing"
            self._refuse(f"expected an encoding (a name, module:Class or file.py:Class), {what}")
        return found[0]

    def _attribute(self, where: str, file: bool) -> tuple[str, int]:
        """Read a colon and a class name, with its column; "" if an option follows the colon."""
        found = re.compile(rf"\s*:(?!\s*{_KEY.pattern})\s*").match(self.text, self.at)
        if found is None:
            return "", self.at + 1
        self.at = found.end()
        column = self.at + 1
        name = self._take(_DOTTED)
        if name is None:
            wanted = "a class" if file or "." in where else "a class or key=value"
            self._refuse(f"expected {wanted} after the colon")
        return name[0], column

    def _options(self) -> tuple[Option, ...]:
        options: list[Option] = []
        while True:
            self._skip()
            column = self.at + 1
            key = self._take(_KEY)
            if key is None:
                self._refuse("expected an option as key=value")
            if any(option.key == key[1] for option in options):
                self._refuse(f"{key[1]} is given twice", column - 1)
            options.append(Option(key[1], self._value(), column))
            if not self._take(re.compile(r"\s*,")):
                return tuple(options)

    def _value(self, depth: int = 0) -> Value:
        self._skip()
        if self.text[self.at : self.at + 1] in ("'", '"'):
            return self._quoted()
        if self._take(re.compile(r"\[")):
            if depth == DEEPEST:
                self._refuse("lists are nested too deeply", self.at - 1)
            return self._list(depth + 1)
        word = self._take(_NUMBER) or self._take(_BARE)
        if word is None:
            self._refuse("a value is missing after the equals sign or comma")
        return read(word[0])

    def _list(self, depth: int) -> Value:
        start, values = self.at - 1, []
        if self._take(re.compile(r"\s*\]")):
            return ()
        while True:
            values.append(self._value(depth))
            if self._take(re.compile(r"\s*\]")):
                return tuple(values)
            if not self._take(re.compile(r"\s*,")):
                self._refuse("the list that begins here is not closed", start)

    def _quoted(self) -> str:
        start, found = self.at, self._take(_TEXT)
        if found is None:
            self._refuse("the quote that begins here is not closed", start)
        return re.sub(r"\\(.)", r"\1", found[1] if found[1] is not None else found[2])

    def _every(self, layers: int) -> int:
        column = self.at
        count = self._take(_COUNT)
        if count is None or int(count[1]) < 2:
            self._refuse("`every` needs a whole number >= 2, as in rope/nope every 4", column)
        if layers != 2:
            self._refuse(
                f"`every` is for two layers, as in rope/nope every 4; got {layers}", column
            )
        return int(count[1])

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def _skip(self) -> None:
        self._take(re.compile(r"\s*"))

    def _refuse(self, problem: str, at: int | None = None) -> NoReturn:
        raise SpecError(self.text, (self.at if at is None else at) + 1, f"{problem}.")
