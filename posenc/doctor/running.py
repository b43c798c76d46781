"""Run `posenc doctor`: read, judge and print; or explain, compare, override, fix."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from posenc.dialects.ask import Asked
from posenc.dialects.computed import RefusedError
from posenc.dialects.files.attached import refuse_attached
from posenc.dialects.files.json_object import LARGEST_INDEX, read_json
from posenc.dialects.files.source import NoRotationError, Source, is_adapter, load
from posenc.dialects.meaning import UnknownFamilyError, meaning_of, naming
from posenc.dialects.model import BadConfigError
from posenc.dialects.record import Record, record_of
from posenc.dialects.runtimes import RUNTIMES
from posenc.dialects.runtimes.versions import asked_for
from posenc.dialects.writers.overrides import (
    SERVERS,
    check_override,
    intended,
    overridden,
    override,
)
from posenc.doctor import asking, comparing
from posenc.doctor.answer import terminal
from posenc.doctor.case import Case
from posenc.doctor.options import Options
from posenc.doctor.rule import Finding
from posenc.doctor.rules import RULES, findings
from posenc.doctor.rules.rest import OVERRIDES
from posenc.lazy import require
from posenc.report.files.record import bounded_json, strict_json
from posenc.report.machine.options import check_choice
from posenc.report.page.failure import in_words
from posenc.report.page.visible import inert

MODEL = ("model_type", "architectures", "n_heads")
"""A JSON object with one of these keys describes a model; other programs have a config.json too."""
UNCLEAR = ("PD004", "PD011", "PD050", "PD053")
"""Errors that a fix would have to guess at."""
GRAVITY = (0, 3, 1, 2)
"""Exit codes, the gravest last."""


class Answers(NamedTuple):
    """What runtimes answered for one file, and lines about interpreters that gave no answer."""

    by_runtime: Mapping[str, Asked] = {}
    notes: tuple[str, ...] = ()


def run(options: Options, own: Answers | None = None) -> tuple[str, int]:
    """Return what to print, and the exit code: 1 if an E fired, a fix is incomplete, or two files
    differ; 3 if posenc knows of no named runtime what it computes for the family.

    own: what the runtimes at hand answered for the one file; None to ask them here.

    Raises: ValueError and OSError for bad input.
    """
    try:
        said, code = _run(options, own)
    except BadConfigError as bad:
        raise ValueError(f"{options.paths[0]}: {str(bad).removeprefix('config.json: ')}") from bad
    except UnknownFamilyError as unknown:
        where = f"{options.paths[0]}: " if len(options.paths) == 1 else ""
        if options.as_json:
            return _json({"judged": False, "why": str(unknown)}), 3
        return f"{where}{unknown}. Nothing was judged, fixed or proved.", 3
    if options.as_json and options.out is not None:
        said = _json({"written": str(options.out), "said": said})
    return said, code


def _run(options: Options, own: Answers | None = None) -> tuple[str, int]:
    """own: what the runtimes at hand answered for the file; None to ask them here."""
    _check(options)
    if options.explain is not None:
        rule = RULES[check_choice("--explain", options.explain.upper(), RULES)]
        said = terminal.explain(rule)
        answer = {"code": rule.code, "title": rule.title, "text": said}
        return _json(answer) if options.as_json else said, 0
    if options.each:
        return _each(options)
    if len(options.paths) == 2:
        return _compare(options)
    if is_adapter(options.paths[0]):
        return _adapter(options), 0
    if options.layout or options.convert_layout is not None:
        return _layout(options)
    source = _loaded(options.paths[0])
    case = _case(source, options)
    if options.positions is not None:
        case.require_known()
        return _positions(case, options.positions, options.as_json)
    if options.overrides is not None:
        case.require_known()
        return _overrides(source, options)
    if options.fix:
        case.require_known()
        return _fixed(case, options)
    if options.with_ is not None:  # a server's override; who is asked reads the file alone
        return _judged(case, options, Answers())
    return _judged(case, options, _answers([source], options)[0] if own is None else own)


def _overrides(source: Source, options: Options) -> tuple[str, int]:
    """Return the command-line options that make a server read what the file means."""
    assert options.overrides is not None
    _need_config(source, "--overrides")
    if options.overrides not in RUNTIMES:  # override() says of a known one why it takes none
        check_choice("--overrides", options.overrides, SERVERS)
    from posenc.doctor.cures.fixing import require_no_guess

    meaning = meaning_of(source.config, options.length)
    require_no_guess(source, meaning, "no options can say it")
    said = override(source.raw, meaning, options.overrides)
    answer = {"server": options.overrides, "options": said}
    return _json(answer) if options.as_json else said, 0


def _fixed(case: Case, options: Options) -> tuple[str, int]:
    """Write the mended copy."""
    from posenc.doctor.cures.fixing import fix

    assert options.out is not None
    if found := _by_hand(case, findings(case)):
        raise ValueError(
            f"{case.source.path}: --fix writes nothing, correct the file by hand first. "
            f"{found.code}: {found.message}. {found.cure}"
        )
    named, versions = _named(options), _versions(options)
    return fix(case.source, options.out, named, options.length, options.like, versions)


def _answers(sources: Sequence[Source], options: Options) -> list[Answers]:
    """Ask the runtimes at hand about files, each interpreter once; return the answers by file."""
    if not any(name.startswith(asking.RUNTIME) for name in _named(options)):
        if options.ask is not None:
            raise ValueError(f"--ask asks {asking.RUNTIME}, which --for leaves out.")
        return [Answers() for _ in sources]
    given, notes = asking.answers(sources, options.length, options.ask)
    named = _named(options)
    versions = _versions(options)
    return [
        Answers(asking.matching(each, named, versions), tuple(lines))
        for each, lines in zip(given, notes, strict=True)
    ]


def _judged(case: Case, options: Options, own: Answers) -> tuple[str, int]:
    """Judge a file, with what the runtimes at hand answered themselves."""
    case, notes = replace(case, asked=own.by_runtime), own.notes
    try:
        case.require_known()
    except UnknownFamilyError as unknown:
        if not case.asked:
            told = " ".join(notes).rstrip(".")  # run() ends the sentence
            raise UnknownFamilyError(f"{unknown}. {told}" if told else f"{unknown}") from None
        if options.as_json:
            runtimes = {name: case.computed[name].as_json() for name in case.asked}
            answer = {"judged": False, "why": str(unknown), "runtimes": runtimes}
            return _json({**answer, "notes": list(notes)} if notes else answer), 3
        return "\n".join([*notes, terminal.asked_only(case, str(unknown))]), 3
    every, codes = findings(case), _ignored(options)
    if not every and case.why_unclear:
        raise ValueError(f"{case.source.path}: {case.why_unclear}.")
    found = [each for each in every if each.code not in codes]
    silenced = [each for each in every if each.code in codes]
    code = 1 if any(f.severity == "E" for f in found) else 0
    if options.as_json:
        answer = terminal.as_json(case, found, silenced)
        return _json({**answer, "notes": list(notes)} if notes else answer), code
    said = terminal.text(case, found, silenced, fixes=_by_hand(case, every) is None)
    return "\n".join([*notes, *([""] if notes else []), said]), code


def _json(answer: Any) -> str:
    return strict_json(answer, indent=2)


def _by_hand(case: Case, found: Sequence[Finding]) -> Finding | None:
    """Return the first finding that --fix leaves to the file's author."""
    for each in found if case.metadata is None else ():
        guessed = each.severity == "E" and (case.why_unclear or each.code in UNCLEAR)
        if each.contradiction or guessed:
            return each
    return None


def _check(options: Options) -> None:
    """Raise ValueError for options that do not go together, before any file is read."""
    _ignored(options)
    if unclear := [str(path) for path in options.paths if "\n" in str(path)]:
        raise ValueError(f"{unclear[0]!r}: a line break in its name; rename it.")
    if options.explain is not None:
        if options != Options((), explain=options.explain, as_json=options.as_json):
            raise ValueError("--explain takes a rule's code, --json, no path and nothing else.")
    elif options.each:
        _check_each(options)
    else:
        _check_one_or_two(options)


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
    writes = options.fix or options.convert_layout is not None
    if writes != (options.out is not None):
        raise ValueError("--fix or --convert-layout, and --out go together: --fix --out NEW.")
    if options.layout != (options.text is not None):
        raise ValueError("--layout and --text go together: --layout --text FILE.")
    actions = _actions(options)
    if len(actions) > 1:
        raise ValueError(f"give {actions[0]} or {actions[1]}, not both.")
    compares = len(options.paths) == 2
    adapter = not compares and is_adapter(options.paths[0])
    if options.like is not None and not (options.fix or (adapter and writes)):
        raise ValueError(
            "--like goes with --fix of a GGUF file, or with --fix or --convert-layout of a LoRA "
            "adapter."
        )
    judges = not (actions or adapter or compares)
    if options.ask is not None and not judges:
        raise ValueError("--ask goes with judging a file, and with no other action.")
    if options.ignore is not None and not judges:
        raise ValueError("--ignore goes with judging a file, and with no other action.")
    if options.overrides is not None and options.for_ is not None:
        raise ValueError("--overrides names its server itself: leave out --for.")
    if compares and actions:
        raise ValueError(f"{actions[0]} takes one path, got two.")


def _actions(options: Options) -> list[str]:
    """Return the options given that ask for something else than judging a file."""
    given = {
        "--positions": options.positions is not None,
        "--overrides": options.overrides is not None,
        "--with": options.with_ is not None,
        "--fix": options.fix,
        "--layout": options.layout,
        "--convert-layout": options.convert_layout is not None,
    }
    return [name for name, is_given in given.items() if is_given]


def _each(options: Options) -> tuple[str, int]:
    """Judge files one by one; return what to print and the gravest exit code. What is not known
    passes with a notice, unless --strict is given."""
    pages, codes = [], [0]
    for path, own in zip(options.paths, _asked_about_each(options), strict=True):
        said, code = _one(path, options, own)
        pages.append(said)
        codes.append(code)
    if unknown := codes.count(3):
        pages.append(f"notice: {unknown} of {len(options.paths)} files were not judged, see above.")
        codes = codes if options.strict else [0 if code == 3 else code for code in codes]
    # Names and values of a stranger's files must not command the runner that prints them.
    return inert("\n\n".join(pages)), max(codes, key=GRAVITY.index)


def _asked_about_each(options: Options) -> list[Answers]:
    """Ask once about all files that can be read."""
    readable: dict[Path, Source] = {}
    for path in options.paths:
        with suppress(OSError, ValueError):  # said when its turn comes
            if not (_describes_no_model(path) or is_adapter(path)):
                readable[path] = load(path)
    answers = dict(zip(readable, _answers([*readable.values()], options), strict=True))
    return [answers.get(path, Answers()) for path in options.paths]


def _describes_no_model(path: Path) -> bool:
    return path.suffix == ".json" and path.is_file() and not read_json(path).keys() & {*MODEL}


def _one(path: Path, options: Options, own: Answers) -> tuple[str, int]:
    try:
        if _describes_no_model(path):
            return f"{path}: skipped, it describes no model.", 0
        return run(replace(options, paths=(path,), each=False, strict=False), own)
    except NoRotationError as nothing:
        return f"skipped: {nothing}", 0
    except OSError as error:
        return in_words(error), 2
    except ValueError as error:
        return f"{error}" if str(path) in str(error) else f"{path}: {error}", 2


def _adapter(options: Options) -> str:
    """Write a fixed LoRA adapter and return what to print. An adapter has nothing to judge."""
    from posenc.doctor.cures import adapters, layout

    folder = options.paths[0]
    if options.fix:
        assert options.out is not None
        named, versions = _named(options), _versions(options)
        return adapters.fix(folder, options.like, options.out, named, options.length, versions)
    if options.convert_layout is not None:
        assert options.out is not None
        to = layout.is_interleaved(options.convert_layout)
        return adapters.convert_layout(folder, options.like, options.out, to_interleaved=to)
    raise ValueError(
        f"{folder} is a LoRA adapter: its positions are its model's. --fix or --convert-layout, "
        "with --like MODEL --out NEW, write the one that goes with a fixed model."
    )


def _layout(options: Options) -> tuple[str, int]:
    if options.layout:
        require("transformers", "--layout")
    from posenc.doctor.cures import layout

    folder = options.paths[0]
    if options.convert_layout is not None:
        assert options.out is not None
        return layout.write(folder, options.out, options.convert_layout), 0
    assert options.text is not None
    return layout.report(folder, options.text, as_json=options.as_json)


def _named(options: Options) -> tuple[str, ...]:
    names = RUNTIMES if options.for_ is None else [name for name, _ in _asked(options)]
    return tuple(dict.fromkeys(check_choice("--for", name, RUNTIMES) for name in names or [""]))


def _asked(options: Options) -> list[tuple[str, str | None]]:
    return [asked_for(part) for part in (options.for_ or "").split(",") if part.strip()]


def _versions(options: Options) -> dict[str, str]:
    """Return the versions that --for names, such as transformers==5.9.

    Raises: ValueError for two versions of one runtime.
    """
    found: dict[str, str] = {}
    for name, version in _asked(options):
        if version is not None and found.setdefault(name, version) != version:
            raise ValueError(f"--for: one version of {name} at a time, {found[name]} or {version}.")
    return found


def _need_config(source: Source, what: str) -> None:
    if source.metadata is not None:
        raise ValueError(f"{what} needs a config, {source.path} is a GGUF file.")


def _positions(case: Case, path: Path, as_json: bool) -> tuple[str, int]:
    """Return how a batch's position ids differ from the family's own, and 1 if they do."""
    from posenc.dialects.position_ids import judged

    _need_config(case.source, "--positions")
    with naming(path):
        lines, notes = judged(read_json(path, LARGEST_INDEX), case.model)
    code = int(bool(lines))
    if as_json:
        return _json({"same": not lines, "differences": lines, "notes": notes}), code
    who = "the paper makes" if notes else f"the code of {case.model.model_type} makes"
    said = "" if lines else f"position ids are as {who} them."
    more = [*lines, *(f"note: {note}" for note in notes)]
    return "\n".join([f"{path}: {said}".rstrip(), *(f"  {line}" for line in more)]), code


def _case(source: Source, options: Options) -> Case:
    named = _named(options)
    if options.with_ is None:
        return Case(source, named, options.length, versions=_versions(options))
    _need_config(source, "--with")
    try:
        given = bounded_json(options.with_)
    except ValueError as error:
        raise ValueError(f"--with: expected JSON, {error}.") from error
    if not isinstance(given, dict):
        raise ValueError(f"--with: expected a JSON object, got {type(given).__name__}.")
    server = "sglang" if named == ("sglang",) else "vllm"
    check_override(source.config, given, server)
    served = overridden(source.config, given, server)
    raw = {**source.raw, OVERRIDES: given}
    source = replace(source, raw=raw, config=intended(source.config, given))
    return Case(source, (server,), options.length, served, _versions(options))


def _ignored(options: Options) -> frozenset[str]:
    """Return the codes of --ignore. Raises: ValueError for a name that is no rule's."""
    parts = [part.strip().upper() for part in (options.ignore or "").split(",")]
    return frozenset(check_choice("--ignore", part, RULES) for part in parts if part)


def _loaded(path: Path) -> Source:
    """Read a file, or the config in a folder. Raise ValueError if the model of this config has an
    encoding attached, of which the config says nothing. A GGUF file beside it is another model."""
    source = load(path)
    if source.path.name == "config.json":
        refuse_attached(source.folder)
    return source


def _compare(options: Options) -> tuple[str, int]:
    sources = []
    for path in options.paths:
        with naming(path):
            sources.append(_loaded(path))
    one, other = sources
    one_path, other_path = options.paths
    first = _record(one, one_path, options.length)
    second = _record(other, other_path, options.length)
    lines = comparing.differences(first, second)
    if not lines and options.length is None:

        def both_at(length: int) -> tuple[Record, Record]:
            return _record(one, one_path, length), _record(other, other_path, length)

        lines = comparing.differences_at_switches(first, second, both_at)
    if options.as_json:
        answer = {
            "same": not lines,
            "differences": lines,
            "records": [first.as_json(), second.as_json()],
        }
        return _json(answer), int(bool(lines))
    names = " and ".join(str(path) for path in options.paths)
    if lines:
        return "\n".join([f"{names} mean other positions:", *(f"  {line}" for line in lines)]), 1
    where = ""
    if options.length is not None and {first.switch, second.switch} != {"static"}:
        where = f" at {options.length} tokens"
    return f"{names} mean the same positions{where}.", 0


def _record(source: Source, path: Path, length: int | None) -> Record:
    """Return what a file means at a length. Errors name it as the user did."""
    with naming(path):
        try:
            return record_of(source, length)
        except RefusedError as refused:
            raise ValueError(str(refused)) from refused
