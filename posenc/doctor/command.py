"""The command `posenc doctor`, its options, and which of them do not go together. Everything else
loads when it runs, and torch never for a config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.command_line.options import Json, option, require_choice, with_options_of


@dataclass(frozen=True)
class Options:
    """The arguments and options of one call of `posenc doctor`."""

    paths: tuple[Path, ...]
    length: Annotated[
        int | None,
        option("Tokens to judge at.", shown="the longest that is meant", min=1),
    ] = None
    for_: Annotated[
        str | None,
        option(
            "Runtimes that matter, with commas: transformers-4, transformers-5, vllm, sglang, "
            "mlx-lm, llama.cpp. NAME==VERSION asks for one version, as in transformers==5.9.",
            "--for",
            shown="all six that know the model",
        ),
    ] = None
    ask: Annotated[
        list[str] | None,
        option(
            "A Python interpreter whose transformers, vLLM, SGLang, mlx-lm and llama.cpp are asked "
            "what they compute; vllm=PYTHON asks that one only; again for a further one. `none` "
            "asks nobody.",
            shown="what is installed beside posenc",
            metavar="PYTHON",
        ),
    ] = None
    ignore: Annotated[
        str | None,
        option(
            "Rules that do not count, with commas: PD013,PD021. Says what they silenced.",
            metavar="CODES",
        ),
    ] = None
    overrides: Annotated[
        str | None,
        option("Print the command-line options for this server: vllm or sglang."),
    ] = None
    with_: Annotated[
        str | None,
        option(
            "JSON of --hf-overrides (vllm) or --json-model-override-args (--for sglang) to "
            "judge together with the file.",
            "--with",
        ),
    ] = None
    fix: Annotated[
        bool, option("Write a copy that the runtimes read alike, to --out.", "--fix")
    ] = False
    prefer: Annotated[
        str | None,
        option(
            "With --fix of a config that contradicts itself: the key that is right, such as "
            "rope_parameters or rope_scaling.rope_theta; several with commas.",
            metavar="KEY",
        ),
    ] = None
    out: Annotated[
        Path | None,
        option("New folder, or new file for GGUF, of --fix.", panel="Output"),
    ] = None
    like: Annotated[
        Path | None,
        option(
            "With --fix of a GGUF file: the config whose positions it is to have. With a LoRA "
            "adapter: the folder of its model."
        ),
    ] = None
    positions: Annotated[
        Path | None,
        option(
            "A JSON file with a batch's position_ids to compare with those that the family's "
            "code makes; see docs/doctor.md.",
            panel="Data",
        ),
    ] = None
    explain: Annotated[
        str | None, option("Explain a rule, such as PD017, instead.", metavar="CODE")
    ] = None
    layout: Annotated[
        bool,
        option(
            "Measure whether the rows of q and k are interleaved or half-split, by the loss "
            "on --text; runs the model.",
            "--layout",
        ),
    ] = False
    text: Annotated[
        Path | None,
        option("A few pages of text in UTF-8, for --layout.", panel="Data"),
    ] = None
    convert_layout: Annotated[
        str | None,
        option(
            "Write a copy to --out with the rows in this layout: interleaved or half-split; "
            "they are taken to be in the other one."
        ),
    ] = None
    each: Annotated[
        bool,
        option(
            "Judge every path separately, for hooks; JSON files that describe no model with "
            "rotary positions are skipped.",
            "--each",
        ),
    ] = False
    strict: Annotated[
        bool, option("With --each: fail for a family that is not known.", "--strict")
    ] = False
    as_json: Json = False


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
    # Code 2, bad input, comes from --each alone, whose report above names the errors file by file.
    # All commands end with code 2 by a ValueError.
    if code == 2:
        raise ValueError("not every path can be judged; see above.")
    return code


def check_options(options: Options) -> None:
    """Raise ValueError for options that do not go together, before any file is read."""
    ignored_codes(options)
    # A line break would tear apart the lines of the answer that name the path.
    if unclear_paths := [str(path) for path in options.paths if "\n" in str(path)]:
        raise ValueError(f"{unclear_paths[0]!r}: a line break in its name; rename it.")
    if options.explain is not None:
        if options != Options((), explain=options.explain, as_json=options.as_json):
            raise ValueError("--explain takes a rule's code, --json, no path and nothing else.")
    elif options.each:
        _check_options_beside_each(options)
    else:
        _check_options_for_one_or_two_paths(options)


def ignored_codes(options: Options) -> frozenset[str]:
    """Return the codes of --ignore. Raises: ValueError for a name that is no rule's."""
    from posenc.doctor.rules import RULES

    codes = [code.strip().upper() for code in (options.ignore or "").split(",")]
    return frozenset(require_choice("--ignore", code, RULES) for code in codes if code)


def _check_options_beside_each(options: Options) -> None:
    """Raise ValueError for options that --each does not take, and for --each without paths."""
    allowed_options = Options(
        options.paths,
        options.length,
        options.for_,
        options.ask,
        options.ignore,
        each=True,
        strict=options.strict,
    )
    if options != allowed_options:
        raise ValueError(
            "--each takes --length, --for, --ask, --ignore and --strict, and no other option."
        )
    if not options.paths:
        raise ValueError("--each: expected one path or more, got none.")


def _check_options_for_one_or_two_paths(options: Options) -> None:
    """Raise ValueError for options that do not fit one path that is judged, or two that are
    compared."""
    from posenc.runtimes.files.source import is_adapter

    if options.strict:
        raise ValueError("--strict goes with --each.")
    if not 1 <= len(options.paths) <= 2:
        raise ValueError(
            f"expected one path, or two to compare, got {len(options.paths)}; see posenc doctor "
            "--help."
        )
    _refuse_code_as_path(options.paths[0])
    _check_options_that_go_together(options)
    actions = actions_asked_for(options)
    if len(actions) > 1:
        raise ValueError(f"give {actions[0]} or {actions[1]}, not both.")
    is_comparison = len(options.paths) == 2
    is_for_adapter = not is_comparison and is_adapter(options.paths[0])
    _check_like(options, is_for_adapter)
    if actions or is_for_adapter or is_comparison:
        _refuse_judging_options(options, asks=options.fix and not (is_for_adapter or is_comparison))
    if options.overrides is not None and options.for_ is not None:
        raise ValueError("--overrides names its server itself: leave out --for.")
    if is_comparison and actions:
        raise ValueError(f"{actions[0]} takes one path, got two.")


def _refuse_code_as_path(path: Path) -> None:
    """Raise ValueError for a rule's code in the place of a path, where there is no such file."""
    from posenc.doctor.rules import RULES

    if str(path).upper() in RULES and not path.exists():
        raise ValueError(f"{path} is a rule: posenc doctor --explain {str(path).upper()}.")


def _check_options_that_go_together(options: Options) -> None:
    """Raise ValueError for one of two options that only make sense together, without the other."""
    if _writes_copy(options) != (options.out is not None):
        raise ValueError("--fix or --convert-layout, and --out go together: --fix --out NEW.")
    if options.prefer is not None and not options.fix:
        raise ValueError("--prefer goes with --fix.")
    if options.layout != (options.text is not None):
        raise ValueError("--layout and --text go together: --layout --text FILE.")


def _writes_copy(options: Options) -> bool:
    """Return True if the options ask for a copy: with --fix, or with --convert-layout."""
    return options.fix or options.convert_layout is not None


def _check_like(options: Options, is_for_adapter: bool) -> None:
    """Raise ValueError for --like where nothing is written that it describes.

    is_for_adapter: True if the one path is a folder of LoRA adapters.
    """
    writes_adapter = is_for_adapter and _writes_copy(options)
    if options.like is not None and not (options.fix or writes_adapter):
        raise ValueError(
            "--like goes with --fix of a GGUF file, or with --fix or --convert-layout of a LoRA "
            "adapter."
        )


def _refuse_judging_options(options: Options, *, asks: bool) -> None:
    """Raise ValueError for --ask and --ignore, which change nothing but the judgement of a file.

    asks: True where the action asks runtimes, as --fix does about the copy of a config.
    """
    if options.ask is not None and not asks:
        raise ValueError("--ask goes with judging a file or --fix, and with no other action.")
    if options.ignore is not None:
        raise ValueError("--ignore goes with judging a file, and with no other action.")


def actions_asked_for(options: Options) -> list[str]:
    """Return the names of the given options that ask for something else than judging a file."""
    given_by_action = {
        "--positions": options.positions is not None,
        "--overrides": options.overrides is not None,
        "--with": options.with_ is not None,
        "--fix": options.fix,
        "--layout": options.layout,
        "--convert-layout": options.convert_layout is not None,
    }
    return [name for name in given_by_action if given_by_action[name]]
