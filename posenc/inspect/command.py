"""Options of `posenc inspect`; torch and matplotlib load when it runs."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from posenc.list import complete
from posenc.report.machine.options import Figures, option
from posenc.report.page.failure import RunFailed

DEFAULTS = (64, 8, 2048)
"""Head size, heads and training length."""
_MOST = 8192
"""Heads, or channels of a head, of a model that fits this machine and is measured in minutes."""


@contextmanager
def _no_exit() -> Iterator[None]:
    """Report that code which is measured calls sys.exit, instead of ending as if all were well."""
    try:
        yield
    except SystemExit as error:
        from posenc.encodings import own_line

        where = own_line(error) or "a package"
        raise RunFailed(
            f"{where} raises SystemExit({error.code!r}) in what is measured."
        ) from error


@_no_exit()
def inspect(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Encodings, see posenc list and docs/grammar.md; file.py:Class or "
            "package.module:Class, an encoding or a foreign module; or a model's folder.",
            autocompletion=complete,
        ),
    ],
    head_dim: Annotated[int, option("Size of one head.", min=1, max=_MOST)] = DEFAULTS[0],
    heads: Annotated[int, option("Number of query heads.", min=1, max=_MOST)] = DEFAULTS[1],
    train_length: Annotated[
        int, option("Longest sequence of the training, in tokens.", min=1)
    ] = DEFAULTS[2],
    compare: Annotated[
        bool, option("One table and shared figures, side by side.", "--compare")
    ] = False,
    as_json: Annotated[
        bool, option("Print JSON: a list with one object per name.", "--json")
    ] = False,
    contract: Annotated[
        bool,
        option(
            "Run the checks that posenc's own encodings must pass, and print failures.",
            "--contract",
        ),
    ] = False,
    arguments: Annotated[
        list[str] | None,
        option(
            "name=value for the class of package.module:Class, as in --arg dim=64 or --arg "
            '\'config={"model_type": "llama"}\'; repeatable.',
            "--arg",
        ),
    ] = None,
    call: Annotated[
        str | None,
        option(
            "How to call package.module:Class where the names of its arguments do not say it, "
            'as in "module(x, position_ids=p[None])": see docs/inspect.md.',
            "--call",
            metavar="EXPRESSION",
        ),
    ] = None,
    sentence: Annotated[
        str | None,
        option(
            "Sentence that the model reads.",
            shown="a sentence whose words do not reveal its meaning",
        ),
    ] = None,
    swap: Annotated[
        tuple[str, str] | None,
        option(
            "Two words of the sentence to exchange, with positions and without.",
            shown="two of the default sentence",
        ),
    ] = None,
    layers: Annotated[
        list[int] | None, option("Layer of the model to draw; repeatable.", "--layer")
    ] = None,
    as_bytes: Annotated[bool, option("The model reads the sentence as bytes.", "--bytes")] = False,
    as_ids: Annotated[bool, option("The sentence is token ids between spaces.", "--ids")] = False,
    out: Annotated[
        Path | None,
        option("Where to write the page.", shown="runs/inspect.html; with --json nowhere"),
    ] = None,
    figures: Figures = None,
) -> None:
    """Measure and draw what encodings and models do with position; nothing is taken from their
    claims."""
    shape_given = (head_dim, heads, train_length) != DEFAULTS
    of_model = sentence is not None or swap or layers or as_bytes or as_ids
    kinds = {_kind(name, as_module=bool(arguments or call)) for name in names}
    if contract and (kinds != {"encoding"} or compare or out or figures or shape_given or of_model):
        raise ValueError("posenc inspect --contract takes encodings, and --json.")
    if contract:
        from posenc.inspect.contract import run as run_contract

        run_contract(names, as_json)
        return
    if "module" in kinds:
        if len(names) > 1 or compare or out or figures or shape_given or of_model:
            raise ValueError(
                "posenc inspect package.module:Class takes --arg, --call and --json only."
            )
        from posenc.inspect.module.sheet import run as check_module

        check_module(names[0], arguments or [], call, as_json)
        return
    if arguments or call:
        raise ValueError(
            "--arg and --call are for package.module:Class; an encoding has its options in its "
            "name, as in rope:rope_theta=500000."
        )
    if of_model or "folder" in kinds:
        if len(names) > 1 or compare or shape_given:
            raise ValueError(
                "posenc inspect FOLDER takes --sentence, --swap, --layer, --bytes, --ids, --json, "
                "--out and --figures, and one folder."
            )
        from posenc.inspect.checkpoint.command import inspect_checkpoint
        from posenc.inspect.checkpoint.sheet import Request as ModelRequest

        asked = ModelRequest(Path(names[0]), sentence, swap, layers or (), as_bytes, as_ids)
        inspect_checkpoint(asked, as_json, out, shlex.join(["posenc", *sys.argv[1:]]), figures)
        return
    from posenc.encodings import ModelShape
    from posenc.inspect.encoding.command import run

    shape = ModelShape(head_dim * heads, heads, head_dim=head_dim, train_length=train_length)
    run(names, shape, compare, as_json, out, figures)


def _kind(name: str, *, as_module: bool = False) -> str:
    """Return the kind of a name: "encoding", "module" (a foreign one) or "folder".
    as_module: a class is taken for a foreign one.

    Raises: ValueError for a class that cannot be imported, and an encoding without its quotes.
    """
    from posenc.encodings import is_encoding, names, parse
    from posenc.inspect.module.build import imported

    known = names()
    try:
        spec = parse(name)
    except ValueError:
        if name.partition(":")[0].strip() in known:  # the grammar says what is wrong
            return "encoding"
        if not _is_module(name):
            return "folder" if _is_path(name) else "encoding"
        if as_module or not is_encoding(imported(name)):
            return "module"
        where, _, attribute = name.rpartition(":")
        raise ValueError(f"{name}: quote the file, as in \"'{where}':{attribute}\".") from None
    part, *more = spec.parts
    if Path(name).exists() and name not in known:
        return "folder"
    if part.attribute and part.where not in known and not (more or part.options):
        return "encoding" if is_encoding(imported(name)) and not as_module else "module"
    if any(each.attribute or each.options or each.where in known for each in (part, *more)):
        return "encoding"
    return "folder" if _is_path(name) else "encoding"


def _is_module(name: str) -> bool:
    """Return True if the name has the form package.module:Class or file.py:Class."""
    before, colon, _ = name.rpartition(":")
    plain = before.replace(".", "").replace("_", "").isalnum()
    return bool(colon) and (before.endswith(".py") or plain) and not Path(name).exists()


def _is_path(name: str) -> bool:
    """Return True if a name that is no encoding's can only be a folder: it exists, or looks like a
    path."""
    return "/" in name or "\\" in name or name.startswith((".", "~")) or Path(name).exists()
