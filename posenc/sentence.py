"""Join names and clauses into sentences, in the reader's language."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

LANGUAGES = ("en", "zh")
_language: ContextVar[str] = ContextVar("language", default="en")


def language_of_environment() -> str:
    """Return the language that the environment asks for, found as gettext finds it."""
    names = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
    locale = next(filter(None, map(os.environ.get, names)), "")
    return "zh" if locale.startswith("zh") else "en"


@contextmanager
def use_language(language: str) -> Iterator[None]:
    """Make `phrase` speak one of LANGUAGES inside the `with`."""
    token = _language.set(language)
    try:
        yield
    finally:
        _language.reset(token)


def is_english() -> bool:
    """Return True unless another language is spoken."""
    return _language.get() == "en"


@cache
def catalogue(language: str) -> dict[str, str]:
    """Return templates by their name, which for short English ones is the template itself."""
    return json.loads(Path(__file__).with_name(f"{language}.json").read_text(encoding="utf-8"))


def phrase(template: str, **values: object) -> str:
    """Fill a template, or that of a name in en.json, with values, in the reader's language.

    A bar separates the forms for one and for other numbers, which the value `number` decides.

    >>> phrase("{number} trial failed|{number} trials failed", number=2)
    '2 trials failed'
    """
    form = catalogue(_language.get()).get(template, template)
    if not values:  # perhaps the word of a foreign file
        return form
    one, _, several = form.partition("|")
    form = several if several and values["number"] != 1 else one
    return form.format(**values)


def translate_stored_text(text: str, templates: Sequence[str]) -> str:
    """Say in the reader's language what is stored in English: one of the templates, filled. Any
    other text is returned as it is."""
    for template in templates:
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(template))
        if match := re.fullmatch(pattern, text):
            return phrase(template, **match.groupdict())
    return text


def join_names(names: Sequence[str]) -> str:
    """Join names by commas, the last by "and".

    >>> join_names(["rope", "alibi", "t5"])
    'rope, alibi and t5'
    """
    if len(names) == 1:
        return names[0]
    return phrase("{names} and {last}", names=phrase(", ").join(names[:-1]), last=names[-1])


def join_clauses(parts: Sequence[str]) -> str:
    """Join clauses into one sentence.

    >>> join_clauses(["nothing moves", "all hold"])
    'Nothing moves; all hold.'
    """
    text = phrase("; ").join(parts)
    return phrase("{sentence}.", sentence=f"{text[:1].upper()}{text[1:]}")
