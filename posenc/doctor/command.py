"""Options of `posenc doctor`. Everything else loads when it runs, and torch never for a config."""

from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.command_line.options import with_options_of
from posenc.doctor.options import Options


@with_options_of(Options)
def doctor(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A folder of a model or a LoRA adapter, a config.json, params.json or .gguf file; "
            "two of them to compare, any number with --each.",
            show_default=False,
        ),
    ] = None,
    **given: Any,
) -> int:
    """Say what every runtime makes of a checkpoint's positions, and what to do about it.

    Exit code 1 where a rule of severity E fires, 2 for bad input, 3 for a family of which posenc
    does not know what a named runtime computes.
    """
    from posenc.doctor.run_command import run
    from posenc.report.escaping import without_runner_commands
    from posenc.report.terminal import as_text, print_report

    options = Options(tuple(paths or ()), **given)
    report, code = run(options)
    if options.each:
        # Names and values of a stranger's files must not command the runner that prints them.
        typer.echo(without_runner_commands(as_text(report)))
    else:
        print_report(report, options.as_json)
    if code == 2:  # of --each: what it is about stands above, file by file
        raise ValueError("not every path can be judged; see above.")
    return code
