"""Refuse options of `posenc doctor` that do not go together, before any file is read."""

from pathlib import Path

from posenc.command_line.options import require_choice
from posenc.doctor.command import Options
from posenc.doctor.rules import RULES
from posenc.runtimes.files.source import is_adapter


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
