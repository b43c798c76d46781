"""Options shared by several commands, and options made from the fields of a dataclass."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

PANELS = ("What", "Data", "Model", "Training", "Where", "Output")
"""Headings in the help, in this order, below which options are listed."""


def option(
    help: str, *names: str, shown: str | bool = True, panel: str = "What", **limits: Any
) -> Any:
    """Return typer's option with this help, for use inside Annotated: `Annotated[bool,
    option("Print JSON.", "--json")]`.

    names: spellings such as "--json"; without any, typer derives one from the name of the parameter
        or field.
    shown: what the help says of the default. panel: the heading of PANELS below which the option is
        listed.
    limits: further arguments of typer.Option, such as min and max.
    """
    return typer.Option(*names, help=help, show_default=shown, rich_help_panel=panel, **limits)


def require_choice(option: str, value: str, known: Iterable[str]) -> str:
    """Return `value` if it is one of `known`. Raises: ValueError with all of them, and the nearest.

    >>> require_choice("--device", "cupa", ("cpu", "cuda"))
    Traceback (most recent call last):
    ValueError: --device must be cpu or cuda, got 'cupa'. Did you mean 'cuda'?
    """
    *names, last = known = [*known]
    if value in known:
        return value
    close_choices = get_close_matches(value, known, n=1) or get_close_matches(
        value.lower(), known, n=1
    )
    hint = f" Did you mean {close_choices[0]!r}?" if close_choices else ""
    raise ValueError(
        f"{option} must be {', '.join(names)}{' or ' if names else ''}{last}, got {value!r}.{hint}"
    )


Figures = Annotated[
    Path | None,
    option(
        "New folder for every figure as SVG, PDF and PNG, with its data as CSV.",
        shown=False,
        panel="Output",
    ),
]
Tables = Annotated[
    Path | None,
    option(
        "New folder for every table as LaTeX and Markdown, and the papers of the encodings as "
        "BibTeX.",
        shown=False,
        panel="Output",
    ),
]
Json = Annotated[bool, option("Print JSON on stdout and nothing else.", "--json", panel="Output")]


def with_options_of(*record_types: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a typer command the annotated fields of dataclasses as options, which it receives as
    keywords. So each option is defined once, next to its value."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        """Replace **keywords in the signature of a command, which typer reads, by the options."""
        declared_parameters = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for p in declared_parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        for record_type in record_types:
            for name, annotation, default in _option_fields(record_type):
                parameters.append(
                    inspect.Parameter(
                        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                    )
                )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def record_of(record_type: type, keywords: dict[str, Any]) -> Any:
    """Return an instance of the dataclass `record`, its annotated fields taken from the keywords
    that a command decorated by `with_options_of` has received."""
    return record_type(**{name: keywords[name] for name, _, _ in _option_fields(record_type)})


def changed_options(record: Any) -> list[str]:
    """Return the options, as spelled on the command line, that differ from their defaults."""
    spellings = []
    for name, annotation, default in _option_fields(type(record)):
        if getattr(record, name) != default:
            (option_info,) = (m for m in annotation.__metadata__ if isinstance(m, OptionInfo))
            # In Annotated, typer stores the first option name in place of the default.
            spelling = option_info.default
            if not isinstance(spelling, str):
                spelling = "--" + name.replace("_", "-")
            # A switch that is on by default can only have been turned off.
            spellings.append(spelling.replace("--", "--no-") if default is True else spelling)
    return spellings


def _option_fields(record_type: type) -> list[tuple[str, Any, Any]]:
    """Return name, annotation and default of each field of a dataclass that is an option: one that
    is Annotated and has a default."""
    annotations = get_type_hints(record_type, include_extras=True)
    return [
        (field.name, annotations[field.name], field.default)
        for field in fields(record_type)
        if hasattr(annotations[field.name], "__metadata__") and field.default is not MISSING
    ]
