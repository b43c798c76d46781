"""The command line: each command is one line here, and a function with typer options elsewhere.

A command's module is imported for every call of `posenc`, so it imports torch and the like inside
its functions.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import cast

import typer

COMMANDS = {
    "list": "posenc.listing:list_encodings",
    "compare": "posenc.study.command:compare",
    "report": "posenc.study.command:report",
    "bench": "posenc.bench.command:bench",
    "inspect": "posenc.inspect.command:inspect",
    "extend": "posenc.hf.command:extend",
    "doctor": "posenc.doctor.command:doctor",
}
"""name: "module:function"."""

# typer brings its own click, or uses the real one: reach the class through what it exports.
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_Abort = cast(type[Exception], typer.Abort)


class RunFailed(Exception):
    """The run itself failed: exit code 1. Wrong input is a ValueError, TypeError or OSError: 2."""


def app() -> typer.Typer:
    """The application with all commands."""
    application = typer.Typer(
        name="posenc",
        help="Position encodings for Transformers: use, compare, extend, inspect.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    application.callback()(_root)
    for name, path in COMMANDS.items():
        module, _, function = path.partition(":")
        application.command(name)(getattr(importlib.import_module(module), function))
    return application


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a problem is one line on stderr, and 2 (wrong input) or 1 (failed)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app()(args=list(arguments), standalone_mode=False)
    except (KeyboardInterrupt, _Abort):
        code = 130  # what typer itself makes of Ctrl-C
    except _UsageError as error:
        code = _complain(f"{error.format_message().rstrip('.')}; see posenc --help.", 2)  # type: ignore[attr-defined]
    except RunFailed as error:
        code = _complain(str(error), 1)
    except BrokenPipeError:  # `posenc list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        code = _complain(str(error), 1 if error.errno in _DISK_FULL else 2, error)
    except (ValueError, TypeError) as error:
        code = _complain(str(error), 2, error)
    except Exception as error:
        code = _complain(f"{type(error).__name__}: {error}", 1, error)
    if code == 130:
        _complain("stopped; the same command goes on from here.", code)
    sys.exit(code if isinstance(code, int) else 0)


def _root() -> None:
    """Position encodings for Transformers: use, compare, extend, inspect."""


def _complain(text: str, code: int, error: BaseException | None = None) -> int:
    if error is not None and os.environ.get("POSENC_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    sys.stderr.write(f"posenc: {' '.join(text.split())}\n")
    return code


if __name__ == "__main__":
    main()
