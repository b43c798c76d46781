"""Refuse options of `posenc doctor` that do not go together, before any file is read."""

from posenc.dialects.files.source import is_adapter
from posenc.doctor.options import Options
from posenc.doctor.rules import RULES
from posenc.report.machine.options import check_choice


def check_options(options: Options) -> None:
    """Raise ValueError for options that do not go together, before any file is read."""
    ignored_codes(options)
    if unclear := [str(path) for path in options.paths if "\n" in str(path)]:
        raise ValueError(f"{unclear[0]!r}: a line break in its name; rename it.")
    if options.explain is not None:
        if options != Options((), explain=options.explain, as_json=options.as_json):
            raise ValueError("--explain takes a rule's code, --json, no path and nothing else.")
    elif options.each:
        _check_each(options)
    else:
        _check_one_or_two(options)


def ignored_codes(options: Options) -> frozenset[str]:
    """Return the codes of --ignore. Raises: ValueError for a name that is no rule's."""
    parts = [part.strip().upper() for part in (options.ignore or "").split(",")]
    return frozenset(check_choice("--ignore", part, RULES) for part in parts if part)


def _check_each(options: Options) -> None:
    """Raise ValueError for what --each does not take."""
    allowed = Options(
        options.paths,
        options.length,
        options.for_,
        options.ask,
        options.ignore,
        each=True,
        strict=options.strict,
    )
    if options != allowed:
        raise ValueError(
            "--each takes --length, --for, --ask, --ignore and --strict, and no other option."
        )
    if not options.paths:
        raise ValueError("--each: expected one path or more, got none.")


def _check_one_or_two(options: Options) -> None:
    """Raise ValueError for what cannot be asked of one path, or of two that are compared."""
    if options.strict:
        raise ValueError("--strict goes with --each.")
    if not 1 <= len(options.paths) <= 2:
        raise ValueError(
            f"expected one path, or two to compare, got {len(options.paths)}; see posenc doctor "
            "--help."
        )
    _check_pairs(options)
    actions = _actions(options)
    if len(actions) > 1:
        raise ValueError(f"give {actions[0]} or {actions[1]}, not both.")
    compares = len(options.paths) == 2
    adapter = not compares and is_adapter(options.paths[0])
    _check_like(options, adapter)
    if actions or adapter or compares:
        _refuse_what_only_judging_takes(options)
    if options.overrides is not None and options.for_ is not None:
        raise ValueError("--overrides names its server itself: leave out --for.")
    if compares and actions:
        raise ValueError(f"{actions[0]} takes one path, got two.")


def _check_pairs(options: Options) -> None:
    """Raise ValueError for an option without the one that completes it."""
    if _writes(options) != (options.out is not None):
        raise ValueError("--fix or --convert-layout, and --out go together: --fix --out NEW.")
    if options.layout != (options.text is not None):
        raise ValueError("--layout and --text go together: --layout --text FILE.")


def _writes(options: Options) -> bool:
    return options.fix or options.convert_layout is not None


def _check_like(options: Options, adapter: bool) -> None:
    """Raise ValueError for --like where nothing is written that it describes.

    adapter: True if the one path is a folder of LoRA adapters.
    """
    writes_adapter = adapter and _writes(options)
    if options.like is not None and not (options.fix or writes_adapter):
        raise ValueError(
            "--like goes with --fix of a GGUF file, or with --fix or --convert-layout of a LoRA "
            "adapter."
        )


def _refuse_what_only_judging_takes(options: Options) -> None:
    """Raise ValueError for options that change what is said of a judged file."""
    if options.ask is not None:
        raise ValueError("--ask goes with judging a file, and with no other action.")
    if options.ignore is not None:
        raise ValueError("--ignore goes with judging a file, and with no other action.")


def _actions(options: Options) -> list[str]:
    """Return the given options that ask for something else than judging a file."""
    is_given = {
        "--positions": options.positions is not None,
        "--overrides": options.overrides is not None,
        "--with": options.with_ is not None,
        "--fix": options.fix,
        "--layout": options.layout,
        "--convert-layout": options.convert_layout is not None,
    }
    return [name for name in is_given if is_given[name]]
