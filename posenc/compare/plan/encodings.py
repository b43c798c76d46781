"""Read and name the encodings of a comparison, and hash their code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posenc.compare.trial.effective_spec import code_of
from posenc.encodings.registry import SpecError, parse
from posenc.encodings.registry.known import entry, names, portable
from posenc.encodings.registry.spec import Option, Part, Spec


@dataclass(frozen=True)
class Compared:
    """One row of a comparison.

    text: argument for `posenc.create` in any process started in the same folder.
    label: name shown to the user.
    code: hash of files outside posenc; "" if there are none.
    """

    text: str
    label: str
    code: str


def read_encodings(texts: Sequence[str]) -> tuple[Compared, ...]:
    """Read each encoding once, in the order given. Files are imported; nothing is built.

    Raises: ValueError for a text that names no encoding, and for two equal ones.
    """
    found = tuple(dict.fromkeys(map(read_encoding, texts)))
    for i, one in enumerate(found):
        for other in found[:i]:
            if one.label == other.label:
                raise ValueError(
                    f"{one.label!r} names two encodings, {other.text} and {one.text}: give one of "
                    f"them another label, as in {one.label}-2={one.text}."
                )
            if one.text == other.text:
                raise ValueError(
                    f"{other.label!r} and {one.label!r} are the same encoding, {one.text}: leave "
                    "one out."
                )
    return found


def read_encoding(text: str) -> Compared:
    """Read one text."""
    spec = parse(text)
    code = code_of(text)
    here = replace(
        spec, layers=tuple(tuple(_anywhere(spec, part) for part in layer) for layer in spec.layers)
    )
    shown = str(replace(spec, layers=tuple(tuple(map(_tidy, layer)) for layer in spec.layers)))
    if spec.label in names() and spec.label != shown:
        raise ValueError(
            f"{spec.label!r} is the name of an encoding, and {shown} is another one: use another "
            f"label, as in my-{spec.label}={shown}."
        )
    return Compared(str(here), spec.label or shown, code)


def _anywhere(spec: Spec, part: Part) -> Part:
    """Return the part without names that only this process knows."""
    if part.attribute:
        return _tidy(part)
    try:
        place = portable(part.where)
    except ValueError as error:
        raise spec.error(part.column, str(error)) from error
    if place is None:
        return part
    own = {o.key for o in part.options}
    defaults = [
        Option(key, value) for key, value in entry(part.where).defaults.items() if key not in own
    ]
    for option in defaults:
        if not isinstance(option.value, int | float | bool | str | None):
            why = (
                f"{part.where} was registered with {option.key}={option.value!r}, which cannot be "
                "passed to another process; give numbers, words, true or false."
            )
            raise SpecError(spec.text, part.column, why)
    return _tidy(Part(*place, options=(*defaults, *part.options), column=part.column))


def _tidy(part: Part) -> Part:
    """Return the part with its file as a path from the current folder."""
    if not part.is_file:
        return part
    path = Path(part.where).expanduser()
    full, here = path.resolve(), Path.cwd().resolve()
    where = full.relative_to(here) if full.is_relative_to(here) else full
    return replace(part, where=where.as_posix())
