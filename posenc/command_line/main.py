"""Define the command line. Each command is a line in COMMANDS and a function with typer options.

Help and completion import the modules of all commands, so these import torch inside functions; a
command imports its own alone.
"""

import importlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast, get_args

import typer
from rich.markup import escape

from posenc import __version__
from posenc.command_line.errors import RunFailed, Stopped, describe_os_error, disk_is_full
from posenc.command_line.options import PANELS, option
from posenc.lazy import EXTRA_BY_PACKAGE, install_hint
from posenc.machine import fingerprint
from posenc.report.escaping import show_hidden_characters

COMMANDS = {
    "list": "posenc.list:list_encodings",
    "compare": "posenc.compare.command:compare",
    "report": "posenc.compare.command:report",
    "judge": "posenc.compare.command:judge",
    "leaderboard": "posenc.compare.command:leaderboard",
    "bench": "posenc.bench.command:bench",
    "inspect": "posenc.inspect.command:inspect",
    "extend": "posenc.extend.command:extend",
    "doctor": "posenc.doctor.command:doctor",
    "explore": "posenc.explore.command:explore",
}
"""The function of each command, as "module:function"."""
SUFFICIENT_EXTRAS = {"doctor": "doctor"}
SUFFICIENT_EXTRAS |= dict.fromkeys(("compare", "report", "judge", "inspect", "extend"), "hf")
"""The extra that is enough for a command; "torch" for others."""

METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: ""}
"""The word for an option's value in the help, by its type."""

CTRL_C_EXIT_CODE = 130
"""Exit code after Ctrl-C, the same as typer's."""
RESTART_HINT = "stopped; the same command starts from the beginning."
"""What to know after Ctrl-C, unless `Stopped` says more."""


class Job(NamedTuple):
    """Describe a job of a user.

    verb: one word. example: a command that does it. result: what the command gives, one sentence.
    """

    verb: str
    example: str
    result: str


JOBS = (
    Job(
        "choose",
        "posenc compare rope alibi t5 --text book.txt",
        "Train each encoding on short text, test it on long text, and name one to take.",
    ),
    Job(
        "extend",
        "posenc extend MODEL --to 8192 --out LONGER",
        "Give a RoPE checkpoint a longer context; measure each method first.",
    ),
    Job(
        "serve",
        "posenc doctor MODEL",
        "Say what six runtimes compute from a config or GGUF file, and where one misreads it.",
    ),
    Job(
        "check",
        "posenc inspect contract my_encoding.py:Mine",
        "Test an encoding of your own: decoding, packing, gradients, compilation.",
    ),
    Job(
        "learn",
        "posenc explore --out page.html",
        "Write a page with sliders that shows why RoPE breaks at length.",
    ),
)
"""What posenc is for, as `posenc` alone prints it."""


# typer may contain its own copy of click, so this class comes from typer.
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])
_Abort = cast(type[Exception], typer.Abort)


def app(arguments: Sequence[str] = ()) -> Any:
    """Return the click group with the one command that the arguments begin with, or with all of
    COMMANDS if they begin with none, as to print help."""
    command_names = arguments[:1] if arguments and arguments[0] in COMMANDS else list(COMMANDS)
    application = typer.Typer(
        name="posenc",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    application.callback(invoke_without_command=True)(_print_version_or_jobs)
    for name in command_names:
        module_name, _, attribute_name = COMMANDS[name].partition(":")
        function_or_group = getattr(importlib.import_module(module_name), attribute_name)
        if isinstance(function_or_group, typer.Typer):
            application.add_typer(function_or_group, name=name)
        else:
            application.command(name)(function_or_group)
    group: Any = typer.main.get_command(application)
    group.commands = {name: group.commands[name] for name in command_names}  # groups would be last
    _arrange_help(group, application)
    return group


def _arrange_help(group: Any, application: typer.Typer) -> None:
    """Join the lines of each paragraph in the help of each command, and arrange its options by
    `_sort_options`."""
    for info in application.registered_commands:
        command = group.commands[info.name]
        paragraphs = inspect.cleandoc(command.help or "").split("\n\n")  # none under -OO
        command.help = "\n\n".join(" ".join(text.split()) for text in paragraphs)
        assert info.callback is not None
        _sort_options(command.params, info.callback)
    for info in application.registered_groups:
        assert info.typer_instance is not None
        _arrange_help(group.commands[info.name], info.typer_instance)


def _sort_options(params: list[Any], function: Callable[..., Any]) -> None:
    """Sort a command's options by their panels, and name the type of each by a short word of
    METAVARS. function: the command, with typer's annotations."""
    parameters = inspect.signature(function, eval_str=True).parameters
    for param in params:
        if param.param_type_name != "option":
            param.display_type_rich = lambda ctx: None  # "<list[str]>" helps nobody
            param.metavar = param.name.removesuffix("s").upper()
            _, argument = get_args(parameters[param.name].annotation)
            param.help = argument.help  # typer before 0.26 loses it with click 8.5
            continue
        param.help = escape(param.help)  # rich takes [hf] for a style
        if param.metavar is None:
            value_type = parameters[param.name].annotation
            while inner_types := get_args(value_type):  # Annotated, None or a list of it
                value_type = inner_types[0]
            param.metavar = METAVARS[value_type]
    options = [parameter for parameter in params if parameter.param_type_name == "option"]
    arguments = [parameter for parameter in params if parameter.param_type_name != "option"]
    options.sort(key=lambda parameter: PANELS.index(parameter.rich_help_panel))
    params[:] = arguments + options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Errors are one line on stderr; exit code 2 for wrong input, 1 if the run failed, 130 after
    Ctrl-C. POSENC_TRACEBACK=1 also prints the traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    _prepare_streams()
    ctrl_c = _InterruptWatcher()
    try:
        _refuse_empty(arguments)
        exit_code = app(arguments)(args=list(arguments), standalone_mode=False, prog_name="posenc")
        sys.stdout.flush()
        if exit_code == CTRL_C_EXIT_CODE:  # typer caught the interrupt
            _write_error(RESTART_HINT, CTRL_C_EXIT_CODE)
    except (Exception, KeyboardInterrupt, _Abort) as error:
        exit_code = _report_error(error, arguments)
    finally:
        ctrl_c.forget()
    sys.exit(exit_code if isinstance(exit_code, int) else 0)


def _prepare_streams() -> None:
    """Let standard output and error print any character. Exit with 2 if either is closed."""
    if sys.stdout is None or sys.stderr is None:
        # Closed by the shell: the next file that is opened would get what is printed.
        if sys.stderr is not None:
            _write_error("standard output is closed; write >/dev/null to print nothing.", 2)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # for "±" in an ASCII locale, and names not in UTF-8
            cast(Any, stream).reconfigure(errors="backslashreplace")
    terminal_width = os.environ.get("COLUMNS", "")
    if not (terminal_width.isdecimal() and int(terminal_width)):  # rich would print nothing
        os.environ.pop("COLUMNS", None)


def _report_error(error: BaseException, arguments: Sequence[str]) -> int:
    """Print on stderr in one line why a command ended, and return its exit code."""
    match error:
        case Stopped():
            return _write_error(f"stopped; {error}.", CTRL_C_EXIT_CODE)
        case KeyboardInterrupt() | _Abort():
            return _write_error(RESTART_HINT, CTRL_C_EXIT_CODE)
        case _UsageError():
            usage_error: Any = error
            command_path = (
                usage_error.ctx.command_path if usage_error.ctx else _command_path(arguments)
            )
            return _write_error(
                f"{usage_error.format_message().rstrip('.')}; see {command_path} --help.", 2
            )
        case RunFailed():
            return _write_error(str(error), 1)
        case BrokenPipeError():  # `posenc list | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        case OSError() if disk_is_full(error):
            return _write_error(f"the disk is full: {describe_os_error(error)}", 1, error)
        case OSError():
            return _write_error(describe_os_error(error), 2, error)
        case ModuleNotFoundError():
            return _report_missing_package(error, arguments)
        case ValueError() | TypeError() | ImportError():
            return _write_error(str(error), 2, error)
        case _:
            return _write_error(f"{type(error).__name__}: {error}", 1, error)


def _report_missing_package(error: ModuleNotFoundError, arguments: Sequence[str]) -> int:
    """Print on stderr the extra to install if the missing package belongs to one, else the error;
    return the exit code."""
    command_name = arguments[0] if arguments else ""
    default_extra = SUFFICIENT_EXTRAS.get(command_name, "torch")
    hint_to_install = install_hint(error, default_extra)
    return _write_error(hint_to_install or f"{error}", 2 if hint_to_install else 1, error)


def _print_version_or_jobs(
    context: typer.Context,
    version: Annotated[
        bool, option("Print the version and exit.", "--version", is_eager=True, metavar="")
    ] = False,
    versions: Annotated[
        bool, option("Print the versions to report, and exit.", "--versions", metavar="")
    ] = False,
) -> None:
    """Position encodings for Transformers: use, compare, extend, inspect."""
    if version:
        print(f"posenc {__version__}")
        raise typer.Exit
    if versions:
        print(
            "\n".join(
                f"{name} {package_version}"
                for name, package_version in fingerprint.versions(*EXTRA_BY_PACKAGE).items()
            )
        )
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(_jobs_in_words())


def _jobs_in_words() -> str:
    """Return the lines that `posenc` alone prints."""
    lines = ["posenc: position encodings for Transformers. Five jobs, with an example each:", ""]
    for job in JOBS:
        lines.append(f"  {job.verb:<8}{job.example}")
        lines.append(f"  {'':<8}{job.result}")
    lines.append("")
    lines.append("In Python: import posenc; posenc.RoPE, posenc.attention, posenc.hf.attach, ...")
    lines.append("`posenc list` names the encodings, `posenc --help` all commands.")
    return "\n".join(lines)


def _command_path(arguments: Sequence[str]) -> str:
    """Return the name of the command that the arguments call, such as "posenc inspect model"."""
    command_or_group = app(arguments)
    words = ["posenc"]
    for word in arguments:
        command_or_group = getattr(command_or_group, "commands", {}).get(word)
        if command_or_group is None:
            break
        words.append(word)
    return " ".join(words)


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Raise ValueError for an empty argument, which as a folder would mean the current one."""
    option = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not argument or (name.startswith("--") and equals and not value):
            raise ValueError(f"{name or option or 'an argument'} is empty; it must name something.")
        option = argument if argument.startswith("-") else ""


class _InterruptWatcher:
    """Notes that Ctrl-C was pressed. A library that is being imported may turn the interrupt into
    an error of its own, which would blame the file that was read at that moment."""

    pressed = False

    def __init__(self) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        has_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._changed = in_main_thread and has_default_handler
        if self._changed:
            signal.signal(signal.SIGINT, self._press)

    def _press(self, signal_number: int, frame: Any) -> None:
        """Note the interrupt, and raise KeyboardInterrupt, as Python's own handler does."""
        _InterruptWatcher.pressed = True
        signal.default_int_handler(signal_number, frame)

    def forget(self) -> None:
        """Forget that Ctrl-C was pressed, and restore Python's own handler."""
        _InterruptWatcher.pressed = False
        if self._changed and signal.getsignal(signal.SIGINT) == self._press:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _write_error(text: str, code: int, error: BaseException | None = None) -> int:
    """Write one line on stderr, and return the exit code. After Ctrl-C write RESTART_HINT and
    return CTRL_C_EXIT_CODE instead.

    error: its traceback is printed if POSENC_TRACEBACK is set.
    """
    if _InterruptWatcher.pressed and code != CTRL_C_EXIT_CODE:
        text = RESTART_HINT
        code = CTRL_C_EXIT_CODE
    if error is not None and os.environ.get("POSENC_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    sys.stderr.write(f"posenc: {show_hidden_characters(' '.join(text.split()))}\n")
    return code
