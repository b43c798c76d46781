"""The commands of `posenc inspect`; torch and matplotlib load when one runs."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from posenc.command_line.errors import RunFailed
from posenc.command_line.options import Figures, option
from posenc.list import complete_name

_LARGEST_SIZE = 8192
"""Heads, or channels of a head, of a model that fits this machine and is measured in minutes."""
_HELP_FLAGS = ("--help", "-h")
_MODEL_OPTIONS = ("--sentence", "--swap", "--layer", "--bytes", "--ids")
_MODULE_OPTIONS = ("--arg", "--as", "--width")


class Subcommands(TyperGroup):
    """The subcommands of `posenc inspect`. A command line without one is refused with a message
    that gives the line that was probably meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments as typer does, and return those left over. Raises: typer's usage
        error if they do not begin with a subcommand."""
        if not ctx.resilient_parsing:  # which is the shell's completion
            if not args:
                known_commands = ", ".join(list(self.commands)[:-1])
                ctx.fail(f"posenc inspect takes {known_commands} or {list(self.commands)[-1]}")
            first = args[0]
            is_option = first.startswith("-")
            close_commands = not is_option and get_close_matches(first, self.commands, n=1)
            if first not in (*self.commands, *_HELP_FLAGS) and not close_commands:
                suggestions = ", or ".join(f"`{line}`" for line in _lines_with_subcommand(args))
                ctx.fail(f"posenc inspect takes the kind first: {suggestions}")
        return super().parse_args(ctx, args)


def _lines_with_subcommand(args: list[str]) -> list[str]:
    """Return the command lines that may be meant by arguments without a subcommand."""
    options = {arg.partition("=")[0] for arg in args}
    if "--contract" in args:
        subcommands = ["contract"]
        args = [arg for arg in args if arg != "--contract"]
    elif options.intersection(_MODEL_OPTIONS):
        subcommands = ["model"]
    elif options.intersection(_MODULE_OPTIONS):
        subcommands = ["module"]
    else:
        names = [arg for arg in args if not arg.startswith("-")]
        subcommands = _likely_subcommands(names[0] if names else "")
    return [shlex.join(["posenc", "inspect", subcommand, *args]) for subcommand in subcommands]


def _likely_subcommands(name: str) -> list[str]:
    """Return the subcommands that may be meant with the argument `name`: a file's class, a
    folder, or an encoding."""
    file, colon, _ = name.rpartition(":")
    if colon and (file.strip("'\"").endswith(".py") or "." in file):
        return ["encoding", "module"]
    is_folder = "/" in name or name.startswith((".", "~")) or Path(name).is_dir()
    return ["model"] if is_folder else ["encoding"]


@contextmanager
def _report_sys_exit() -> Iterator[None]:
    """Raise RunFailed if the code that is measured inside the `with` calls sys.exit, so that the
    command does not end as if it had succeeded."""
    try:
        yield
    except SystemExit as error:
        from posenc.encodings import line_in_user_code

        # rich ends the program where nobody reads its output any more, as in `| head -1`.
        if isinstance(error.__context__, BrokenPipeError):
            raise
        where = line_in_user_code(error) or "a package"
        raise RunFailed(
            f"{where} raises SystemExit({error.code!r}) in what is measured."
        ) from error


inspect = typer.Typer(
    cls=Subcommands,
    help="Measure and draw what encodings, models and modules do with position; nothing is taken "
    "from their claims.",
)

_Encodings = Annotated[
    list[str],
    typer.Argument(
        help="Encodings, see posenc list and docs/grammar.md; or file.py:Class of your own.",
        autocompletion=complete_name,
    ),
]
_Out = Annotated[
    Path | None,
    option(
        "Where to write the page.", shown="runs/inspect.html; with --json nowhere", panel="Output"
    ),
]


@inspect.command("encoding")
@_report_sys_exit()
def encoding(
    names: _Encodings,
    head_dim: Annotated[
        int, option("Size of one head.", min=1, max=_LARGEST_SIZE, panel="Model")
    ] = 64,
    heads: Annotated[
        int, option("Number of query heads.", min=1, max=_LARGEST_SIZE, panel="Model")
    ] = 8,
    train_length: Annotated[
        int, option("Longest sequence of the training, in tokens.", min=1, panel="Data")
    ] = 2048,
    compare: Annotated[
        bool, option("One table and shared figures, as for more than three.", "--compare")
    ] = False,
    as_json: Annotated[
        bool, option("Print JSON: an object per name, and the tables.", "--json", panel="Output")
    ] = False,
    out: _Out = None,
    figures: Figures = None,
) -> None:
    """Measure and draw what encodings do with position; nothing is taken from their claims."""
    from posenc.encodings import ModelShape
    from posenc.inspect.api import inspect_encodings

    for name in names:
        _refuse_what_is_no_encoding(name)
    shape = ModelShape(head_dim * heads, heads, head_dim=head_dim, train_length=train_length)
    inspect_encodings(names, shape, compare, as_json, out, figures)


def _refuse_what_is_no_encoding(name: str) -> None:
    """Raise ValueError, with the command to use instead, if `name` is a model's folder, or a class
    in a file that is no PositionEncoding."""
    from posenc.encodings import is_encoding_class, load_object, names

    if Path(name).is_dir() and name not in names():
        command_line = shlex.join(["posenc", "inspect", "model", name])
        raise ValueError(f"{name} is a folder, and no encoding. For a model: {command_line}")
    file, colon, attribute = name.rpartition(":")
    if not colon or not Path(file).is_file():
        return
    try:
        named_object = load_object(file, attribute)
    except (ValueError, AttributeError):
        return  # the grammar says what is wrong
    if not is_encoding_class(named_object):
        command_line = shlex.join(["posenc", "inspect", "module", name])
        raise ValueError(
            f"{name} is no posenc.PositionEncoding. For any other module: {command_line}"
        )


@inspect.command("model")
@_report_sys_exit()
def model(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face folder with safetensors.")],
    sentence: Annotated[
        str | None,
        option(
            "Sentence that the model reads.",
            shown="a sentence whose words do not reveal its meaning",
            panel="Data",
        ),
    ] = None,
    swap: Annotated[
        tuple[str, str] | None,
        option(
            "Two words of the sentence to exchange, with positions and without.",
            shown="two of the default sentence",
            panel="Data",
        ),
    ] = None,
    layers: Annotated[
        list[int] | None,
        option("Layer of the model to draw; repeatable.", "--layer", panel="Model"),
    ] = None,
    as_bytes: Annotated[
        bool, option("The model reads the sentence as bytes.", "--bytes", panel="Data")
    ] = False,
    as_ids: Annotated[
        bool, option("The sentence is token ids between spaces.", "--ids", panel="Data")
    ] = False,
    as_json: Annotated[bool, option("Print JSON.", "--json", panel="Output")] = False,
    out: _Out = None,
    figures: Figures = None,
) -> None:
    """Measure and draw where a checkpoint has its positions, what it attends to, and what
    exchanging two words changes."""
    from posenc.inspect.api import inspect_checkpoint
    from posenc.inspect.checkpoint.measurements import Request

    request = Request(folder, sentence, swap, layers or (), as_bytes, as_ids)
    inspect_checkpoint(request, as_json, out, shlex.join(["posenc", *sys.argv[1:]]), figures)


@inspect.command("module")
@_report_sys_exit()
def module(
    path: Annotated[
        str,
        typer.Argument(help="package.module:NAME or file.py:NAME of a module or a function."),
    ],
    arguments: Annotated[
        list[str] | None,
        option(
            "name=value for the constructor, as in --arg dim=64 or --arg "
            '\'config={"model_type": "llama"}\'; repeatable.',
            "--arg",
        ),
    ] = None,
    returns: Annotated[
        str | None,
        option(
            "What it returns: cos-sin, rotate, bias, scores or add. The function of an adapter may "
            "have such a name instead: see docs/inspect.md.",
            "--as",
        ),
    ] = None,
    width: Annotated[
        int, option("Channels of a token, or of a head.", min=2, max=_LARGEST_SIZE, panel="Model")
    ] = 64,
    heads: Annotated[
        int, option("Heads of queries, keys and scores.", min=1, max=_LARGEST_SIZE, panel="Model")
    ] = 8,
    as_json: Annotated[bool, option("Print JSON.", "--json", panel="Output")] = False,
) -> None:
    """Check a position module of another library, or one of your own, for known mistakes."""
    from posenc.command_line.progress import replace_status_line
    from posenc.inspect.module.load import parse_arguments
    from posenc.inspect.module.measurements import measure_module, report_of
    from posenc.report.terminal import print_report

    constructor_arguments = parse_arguments(arguments or [])
    replace_status_line(f"measuring {path}")
    sheet = measure_module(path, returns, arguments=constructor_arguments, width=width, heads=heads)
    replace_status_line("")
    print_report(report_of(sheet), as_json)


@inspect.command("contract")
@_report_sys_exit()
def contract(
    names: _Encodings,
    as_json: Annotated[bool, option("Print JSON.", "--json", panel="Output")] = False,
) -> None:
    """Run the checks that posenc's own encodings pass, and print which fail and why."""
    from posenc.command_line.progress import status_line_while_loading

    with status_line_while_loading(
        f"{', '.join(names)}: checks how attention behaves with it, half a minute an encoding"
    ):
        from posenc.inspect.contract import judge_contract, refuse_failures, report_of
    from posenc.report.terminal import print_report

    outcomes = judge_contract(names)
    print_report(report_of(outcomes), as_json)
    refuse_failures(outcomes)
