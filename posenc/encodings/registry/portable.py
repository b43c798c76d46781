"""Rewrite a spec so that another process, started in the same folder, can build it."""

from dataclasses import replace
from pathlib import Path

from posenc.encodings.registry.known import entry, portable
from posenc.encodings.registry.spec import Option, Part, Spec, SpecError


def anywhere(spec: Spec) -> Spec:
    """Replace registered names by the file or module of their class. Raise SpecError if another
    process could not load it."""
    layers = tuple(tuple(_anywhere(spec, part) for part in layer) for layer in spec.layers)
    return replace(spec, layers=layers)


def tidy(spec: Spec) -> Spec:
    """Replace file names in the spec by paths relative to the current folder."""
    return replace(spec, layers=tuple(tuple(map(_tidy, layer)) for layer in spec.layers))


def _anywhere(spec: Spec, part: Part) -> Part:
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
    if not part.is_file:
        return part
    path = Path(part.where).expanduser()
    full, here = path.resolve(), Path.cwd().resolve()
    where = full.relative_to(here) if full.is_relative_to(here) else full
    return replace(part, where=where.as_posix())
