"""`posenc inspect`: its options; torch and matplotlib load when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULTS = (64, 8, 2048)
"""Head size, heads and training length."""


def inspect(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Encodings, see posenc list; package.module:Class; or the word claims.",
            metavar="NAME...",
        ),
    ],
    head_dim: Annotated[int, typer.Option(min=1, help="Size of one head.")] = DEFAULTS[0],
    num_heads: Annotated[int, typer.Option(min=1, help="Number of query heads.")] = DEFAULTS[1],
    train_length: Annotated[
        int, typer.Option(min=1, help="Longest sequence of the training, in tokens.")
    ] = DEFAULTS[2],
    compare: Annotated[
        bool, typer.Option("--compare", help="One table and shared figures, side by side.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: a list with one object per name."),
    ] = False,
    arguments: Annotated[
        list[str] | None,
        typer.Option("--arg", help="name=value for the class of package.module:Class; repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the page.", show_default="runs/inspect.html; with --json nowhere"
        ),
    ] = None,
) -> None:
    """Measure and draw what encodings do with position: nothing is read off their claims."""
    shape_given = (head_dim, num_heads, train_length) != DEFAULTS
    if any(":" in name for name in names):
        if len(names) > 1 or compare or out or shape_given:
            raise ValueError("posenc inspect package.module:Class takes --arg and --json alone.")
        from posenc.inspect import modules_command

        modules_command.run(names[0], arguments or [], as_json)
        return
    if arguments:
        raise ValueError("--arg is for package.module:Class.")
    if "claims" in names:
        if names != ["claims"] or compare or out or shape_given:
            raise ValueError("posenc inspect claims takes --json and nothing else.")
        from posenc.inspect import claims_command

        claims_command.run(as_json)
        return
    from posenc.inspect.sheets import Request, run

    run(Request(names, head_dim, num_heads, train_length, compare, as_json, out))
