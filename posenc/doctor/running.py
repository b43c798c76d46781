"""Run `posenc doctor`: read, judge and print; or explain, compare, override, fix."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from posenc.command_line.errors import describe_os_error
from posenc.command_line.options import check_choice
from posenc.dialects.ask import Asked, as_computed
from posenc.dialects.computed import ComputedPositions, RefusedError
from posenc.dialects.files.attached import refuse_attached_encoding
from posenc.dialects.files.json_object import LARGEST_INDEX, read_json
from posenc.dialects.files.source import NoRotationError, Source, is_adapter, load
from posenc.dialects.files.spelling import as_transformers
from posenc.dialects.meaning import UnknownFamilyError, meaning_of, path_in_errors
from posenc.dialects.model import BadConfigError, model_of
from posenc.dialects.record import Record, record_of
from posenc.dialects.runtimes import RUNTIMES, emulate
from posenc.dialects.runtimes.versions import runtime_and_version
from posenc.dialects.writers.changes import config_changes
from posenc.dialects.writers.overrides import (
    SERVERS,
    check_override,
    config_after_override,
    intended,
    override_options,
)
from posenc.doctor import asking, comparing
from posenc.doctor.answer import terminal
from posenc.doctor.case import Case
from posenc.doctor.options import Options
from posenc.doctor.refusals import actions_asked_for, check_options, ignored_codes
from posenc.doctor.rule import Finding
from posenc.doctor.rules import RULES, findings
from posenc.doctor.rules.rest import OVERRIDES
from posenc.files.sealed_json import parse_bounded_json, strict_json
from posenc.lazy import require_package
from posenc.report.escaping import without_runner_commands

MODEL = ("model_type", "architectures", "n_heads")
"""A JSON object with one of these keys describes a model; other programs have a config.json too."""
UNCLEAR = ("PD004", "PD011", "PD050", "PD053")
"""Errors that a fix would have to guess at."""
HALF_WRITTEN = "PD059"
"""The rule about a GGUF file that lacks a part of its scaling, which its model's config has."""
GRAVITY = (0, 3, 1, 2)
"""Exit codes, the gravest last: all right, not known, an error was found, not readable."""


class RuntimeAnswers(NamedTuple):
    """What runtimes answered for one file, and lines about interpreters that gave no answer."""

    by_runtime: Mapping[str, Asked] = {}
    notes: tuple[str, ...] = ()


def run(options: Options) -> tuple[str, int]:
    """Return what to print, and the exit code: 1 if an E fired, a fix is incomplete, or two files
    differ; 3 if posenc knows of no named runtime what it computes for the family.

    Raises: ValueError and OSError for bad input.
    """
    try:
        return _run_on_rotating_model(options, None)
    except NoRotationError as nothing:
        if not _only_judges(options):
            raise
        why = str(nothing)
        return (_json({"judged": False, "why": why}) if options.as_json else why), 0


def _run_on_rotating_model(options: Options, answers: RuntimeAnswers | None) -> tuple[str, int]:
    """Return what to print, and the exit code, as `run` does.

    answers: what the runtimes at hand answered for the one file; None to ask them here.

    Raises: NoRotationError for a model that rotates nothing; ValueError and OSError for bad input.
    """
    try:
        output, code = _do_what_options_ask(options, answers)
    except BadConfigError as bad:
        raise ValueError(f"{options.paths[0]}: {str(bad).removeprefix('config.json: ')}") from bad
    except UnknownFamilyError as unknown:
        where = f"{options.paths[0]}: " if len(options.paths) == 1 else ""
        if options.as_json:
            return _json({"judged": False, "why": str(unknown)}), 3
        return f"{where}{unknown}. Nothing was judged, fixed or proved.", 3
    if options.as_json and options.out is not None:
        output = _json({"written": str(options.out), "said": output})
    return output, code


def _only_judges(options: Options) -> bool:
    """Return True if the options ask for the judgement of one file, and for nothing else."""
    return len(options.paths) == 1 and not actions_asked_for(options)


def _do_what_options_ask(options: Options, answers: RuntimeAnswers | None) -> tuple[str, int]:
    """Do what the options ask for; return what to print, and the exit code."""
    check_options(options)
    if options.explain is not None:
        return _explanation(options.explain, options.as_json), 0
    if options.each:
        return _judge_each(options)
    if len(options.paths) == 2:
        return _compare_two_files(options)
    if is_adapter(options.paths[0]):
        return _write_adapter(options), 0
    if options.layout or options.convert_layout is not None:
        return _measure_or_convert_layout(options)
    source = _load_without_encoding(options.paths[0])
    case = _case_to_judge(source, options)
    if options.positions is not None:
        case.require_known()
        return _compare_positions(case, options.positions, options.as_json)
    if options.overrides is not None:
        case.require_known()
        return _print_override_options(source, options)
    if options.fix:
        case.require_known()
        return _write_fixed_copy(case, options)
    if options.with_ is not None:  # a server's override; who is asked reads the file alone
        answers = RuntimeAnswers()
    elif answers is None:
        answers = _ask_runtimes([source], options)[0]
    return _judge(case, options, answers)


def _explanation(code: str, as_json: bool) -> str:
    """Return what --explain prints about a rule: its page, or a JSON object."""
    rule = RULES[check_choice("--explain", code.upper(), RULES)]
    explanation = terminal.explanation(rule)
    if as_json:
        return _json({"code": rule.code, "title": rule.title, "text": explanation})
    return explanation


def _print_override_options(source: Source, options: Options) -> tuple[str, int]:
    """Return what --overrides prints, the options with which a server computes what the file means,
    and the exit code 0."""
    assert options.overrides is not None
    _require_config(source, "--overrides")
    if options.overrides not in RUNTIMES:  # override() says of a known one why it takes none
        check_choice("--overrides", options.overrides, SERVERS)
    from posenc.doctor.cures.fixing import require_no_guess

    meaning = meaning_of(source.config, options.length)
    require_no_guess(source, meaning, "no options can say it")
    command_line = override_options(source.raw, meaning, options.overrides)
    answer = {"server": options.overrides, "options": command_line}
    return _json(answer) if options.as_json else command_line, 0


def _write_fixed_copy(case: Case, options: Options) -> tuple[str, int]:
    """Write the copy of --fix; return what to print, and the exit code.

    Raises: ValueError where the file must be corrected by hand first.
    """
    from posenc.doctor.cures.fixing import fix

    assert options.out is not None
    settled: list[str] = []
    if options.prefer is not None:
        source = _with_preferred_keys(case.source, options.prefer)
        changes = config_changes(case.source.raw, source.raw)
        settled = [f"as --prefer {options.prefer} says:", *(f"  {line}" for line in changes)]
        case = replace(case, source=source)
    finding = _first_finding_to_correct_by_hand(case, findings(case))
    is_said_by_config = case.metadata is not None and options.like is not None
    if finding and not is_said_by_config:
        raise ValueError(
            f"{case.source.path}: --fix writes nothing, correct the file by hand first. "
            f"{finding.code}: {finding.message}. {finding.cure}{_preferences(case, finding)}"
        )
    runtimes = _runtimes_named_by_for(options)
    versions = _versions_named_by_for(options)

    def ask(config: Mapping[str, Any]) -> dict[str, ComputedPositions]:
        copied = replace(case.source, raw=dict(config), config=as_transformers(config))
        asked = _ask_runtimes([copied], options)[0].by_runtime
        known = emulate(config, options.length, versions=versions)
        model = model_of(config)
        answers = {name: as_computed(answer, known[name], model) for name, answer in asked.items()}
        return {name: computed.with_stop_as_refusal for name, computed in answers.items()}

    who = None if options.ask is None else ask
    said, code = fix(
        case.source, options.out, runtimes, options.length, options.like, versions, who
    )
    return "\n".join([said, *settled]), code


def _with_preferred_keys(source: Source, preferred: str) -> Source:
    """Return a config without what contradicts the preferred keys.

    Raises: ValueError for another file, or a key that nothing contradicts.
    """
    from posenc.doctor.cures.preferred import with_preferred

    if source.spelling != "transformers":
        raise ValueError(f"--prefer needs a config.json, {source.path} is none.")
    raw = with_preferred(source.raw, preferred)
    with path_in_errors(source.path):
        return replace(source, raw=raw, config=as_transformers(raw))


def _preferences(case: Case, finding: Finding) -> str:
    """Return the options of --prefer that settle what a finding says; empty if none does."""
    from posenc.doctor.cures.preferred import contradictions

    settling = [
        found.in_words
        for found in contradictions(case.source.raw)
        if any(path[-1] in finding.message for path in found.paths)
    ]
    return f" Or say which is right: {settling[0]}." if settling else ""


def _ask_runtimes(sources: Sequence[Source], options: Options) -> list[RuntimeAnswers]:
    """Ask the runtimes at hand about files, each interpreter once; return one answer per file, in
    their order."""
    runtimes = _runtimes_named_by_for(options)
    if not any(asking.is_asked_of(runtime, runtimes) for runtime in asking.PROBES):
        if options.ask is not None:
            raise ValueError(f"--ask asks {', '.join(asking.PROBES)}, which --for leaves out.")
        return [RuntimeAnswers() for _ in sources]
    answers_by_file, notes_by_file = asking.ask_about_sources(
        sources, options.length, options.ask, runtimes
    )
    versions = _versions_named_by_for(options)
    answers_and_notes: list[RuntimeAnswers] = []
    for answers, notes in zip(answers_by_file, notes_by_file, strict=True):
        kept = asking.answers_of_named_runtimes(answers, runtimes, versions)
        lines = (*notes, *asking.notes_on_releases(kept))
        answers_and_notes.append(RuntimeAnswers(kept, lines))
    return answers_and_notes


def _judge(case: Case, options: Options, answers: RuntimeAnswers) -> tuple[str, int]:
    """Judge a file by all rules; return what to print, and the exit code.

    answers: what the runtimes at hand answered themselves.
    """
    case = replace(case, own_answers=answers.by_runtime)
    try:
        case.require_known()
    except UnknownFamilyError as unknown:
        return _show_answers_of_asked_runtimes(case, options, answers.notes, unknown)
    all_findings = findings(case)
    if not all_findings and case.why_unclear:
        raise ValueError(f"{case.source.path}: {case.why_unclear}.")
    ignored = ignored_codes(options)
    counted = [finding for finding in all_findings if finding.code not in ignored]
    silenced = [finding for finding in all_findings if finding.code in ignored]
    code = 1 if any(finding.severity == "E" for finding in counted) else 0
    if options.as_json:
        return _json_with_notes(terminal.as_json(case, counted, silenced), answers.notes), code
    fixes = _first_finding_to_correct_by_hand(case, all_findings) is None
    judgement = terminal.answer_for_terminal(case, counted, silenced, fixes=fixes)
    if not answers.notes:
        return judgement, code
    return "\n".join([*answers.notes, "", judgement]), code


def _show_answers_of_asked_runtimes(
    case: Case, options: Options, notes: Sequence[str], unknown: UnknownFamilyError
) -> tuple[str, int]:
    """Return what the runtimes at hand compute for a family whose meaning posenc does not know.

    Raises: UnknownFamilyError if none of them answered.
    """
    if not case.own_answers:
        why_nobody_answered = " ".join(notes).rstrip(".")  # run() ends the sentence
        if not why_nobody_answered and case.source.spelling == asking.READS:
            why_nobody_answered = "--ask PYTHON asks a runtime that has it"
        if not why_nobody_answered:
            raise unknown
        raise UnknownFamilyError(f"{unknown}. {why_nobody_answered}") from None
    if options.as_json:
        runtimes = {name: case.computed[name].as_json() for name in case.own_answers}
        answer = {"judged": False, "why": str(unknown), "runtimes": runtimes}
        return _json_with_notes(answer, notes), 3
    return "\n".join([*notes, terminal.answers_of_asked_runtimes(case, str(unknown))]), 3


def _json_with_notes(answer: dict[str, Any], notes: Sequence[str]) -> str:
    return _json({**answer, "notes": list(notes)} if notes else answer)


def _json(answer: Any) -> str:
    return strict_json(answer, indent=2)


def _first_finding_to_correct_by_hand(
    case: Case, all_findings: Sequence[Finding]
) -> Finding | None:
    """Return the first finding that only the file's author can correct; None without one."""
    if case.metadata is not None:
        return next((f for f in all_findings if f.code == HALF_WRITTEN), None)
    for finding in all_findings:
        guessed = finding.severity == "E" and (case.why_unclear or finding.code in UNCLEAR)
        if finding.contradiction or guessed:
            return finding
    return None


def _judge_each(options: Options) -> tuple[str, int]:
    """Judge files one by one; return what to print and the gravest exit code. What is not known
    passes with a notice, unless --strict is given."""
    pages: list[str] = []
    codes = [0]
    for path, answers in zip(options.paths, _ask_about_each_path(options), strict=True):
        page, code = _judge_or_skip(path, options, answers)
        pages.append(page)
        codes.append(code)
    if unknown := codes.count(3):
        pages.append(f"notice: {unknown} of {len(options.paths)} files were not judged, see above.")
        if not options.strict:
            codes = [0 if code == 3 else code for code in codes]
    # Names and values of a stranger's files must not command the runner that prints them.
    return without_runner_commands("\n\n".join(pages)), max(codes, key=GRAVITY.index)


def _ask_about_each_path(options: Options) -> list[RuntimeAnswers]:
    """Ask the runtimes at hand, once, about all paths that can be read; return the answers by path,
    empty for the others."""
    readable: dict[Path, Source] = {}
    for path in options.paths:
        with suppress(OSError, ValueError):  # said when its turn comes
            if not (_describes_no_model(path) or is_adapter(path)):
                readable[path] = load(path)
    answers = dict(zip(readable, _ask_runtimes([*readable.values()], options), strict=True))
    return [answers.get(path, RuntimeAnswers()) for path in options.paths]


def _describes_no_model(path: Path) -> bool:
    """Return True for a JSON file without any key of a model's config."""
    return path.suffix == ".json" and path.is_file() and not read_json(path).keys() & {*MODEL}


def _judge_or_skip(path: Path, options: Options, answers: RuntimeAnswers) -> tuple[str, int]:
    """Judge one of several files; return its page, which may be an error, and its exit code."""
    try:
        if _describes_no_model(path):
            return f"{path}: skipped, it describes no model.", 0
        return _run_on_rotating_model(
            replace(options, paths=(path,), each=False, strict=False), answers
        )
    except NoRotationError as nothing:
        return f"skipped: {nothing}", 0
    except OSError as error:
        return describe_os_error(error), 2
    except ValueError as error:
        return f"{error}" if str(path) in str(error) else f"{path}: {error}", 2


def _write_adapter(options: Options) -> str:
    """Write the LoRA adapter that goes with a fixed or permuted model; return what to print.

    Raises: ValueError without --fix and --convert-layout: an adapter has nothing to judge.
    """
    from posenc.doctor.cures import adapters, layout

    folder = options.paths[0]
    if options.fix:
        assert options.out is not None
        runtimes = _runtimes_named_by_for(options)
        versions = _versions_named_by_for(options)
        return adapters.fix(folder, options.like, options.out, runtimes, options.length, versions)
    if options.convert_layout is not None:
        assert options.out is not None
        interleaved = layout.is_interleaved(options.convert_layout)
        return adapters.convert_layout(
            folder, options.like, options.out, to_interleaved=interleaved
        )
    raise ValueError(
        f"{folder} is a LoRA adapter: its positions are its model's. --fix or --convert-layout, "
        "with --like MODEL --out NEW, write the one that goes with a fixed model."
    )


def _measure_or_convert_layout(options: Options) -> tuple[str, int]:
    """Do what --layout or --convert-layout asks for; return what to print, and the exit code."""
    if options.layout:
        require_package("transformers", "--layout")
    from posenc.doctor.cures import layout

    folder = options.paths[0]
    if options.convert_layout is not None:
        assert options.out is not None
        return layout.write_converted_copy(folder, options.out, options.convert_layout), 0
    assert options.text is not None
    return layout.report_layout(folder, options.text, as_json=options.as_json)


def _runtimes_named_by_for(options: Options) -> tuple[str, ...]:
    """Return the runtimes that --for names, each once; all of them without --for.

    Raises: ValueError for a name that is no runtime's.
    """
    names = (
        RUNTIMES
        if options.for_ is None
        else [name for name, _ in _runtimes_and_versions_in_for(options)]
    )
    names = names or [""]  # only commas: refused like an unknown name
    return tuple(dict.fromkeys(check_choice("--for", name, RUNTIMES) for name in names))


def _runtimes_and_versions_in_for(options: Options) -> list[tuple[str, str | None]]:
    return [runtime_and_version(part) for part in (options.for_ or "").split(",") if part.strip()]


def _versions_named_by_for(options: Options) -> dict[str, str]:
    """Return the versions that --for names, such as transformers==5.9.

    Raises: ValueError for two versions of one runtime.
    """
    versions: dict[str, str] = {}
    for name, version in _runtimes_and_versions_in_for(options):
        if version is None:
            continue
        earlier = versions.setdefault(name, version)
        if earlier != version:
            raise ValueError(f"--for: one version of {name} at a time, {earlier} or {version}.")
    return versions


def _require_config(source: Source, what: str) -> None:
    """Raise ValueError for a GGUF file. what: the option that needs a config."""
    if source.metadata is not None:
        raise ValueError(f"{what} needs a config, {source.path} is a GGUF file.")


def _compare_positions(case: Case, path: Path, as_json: bool) -> tuple[str, int]:
    """Return how the position ids of the batch in a JSON file differ from those that the family's
    code makes, in words or JSON, and the exit code: 1 if they differ."""
    from posenc.dialects.position_ids import compare_position_ids

    _require_config(case.source, "--positions")
    with path_in_errors(path):
        lines, notes = compare_position_ids(read_json(path, LARGEST_INDEX), case.model)
    code = int(bool(lines))
    if as_json:
        return _json({"same": not lines, "differences": lines, "notes": notes}), code
    details = [*lines, *(f"note: {note}" for note in notes)]
    indented = [f"  {line}" for line in details]
    if lines:
        return "\n".join([f"{path}:", *indented]), code
    who = "the paper makes" if notes else f"the code of {case.model.model_type} makes"
    return "\n".join([f"{path}: position ids are as {who} them.", *indented]), code


def _case_to_judge(source: Source, options: Options) -> Case:
    """Return the case that the rules judge: the file, or with --with, the file as its author means
    it after the overrides, and as the server then reads it."""
    runtimes = _runtimes_named_by_for(options)
    if options.with_ is None:
        return Case(source, runtimes, options.length, versions=_versions_named_by_for(options))
    _require_config(source, "--with")
    try:
        overrides = parse_bounded_json(options.with_)
    except ValueError as error:
        raise ValueError(f"--with: expected JSON, {error}.") from error
    if not isinstance(overrides, dict):
        raise ValueError(f"--with: expected a JSON object, got {type(overrides).__name__}.")
    server = "sglang" if runtimes == ("sglang",) else "vllm"
    check_override(source.config, overrides, server)
    served = config_after_override(source.config, overrides, server)
    raw = {**source.raw, OVERRIDES: overrides}
    source = replace(source, raw=raw, config=intended(source.config, overrides))
    return Case(source, (server,), options.length, served, _versions_named_by_for(options))


def _load_without_encoding(path: Path) -> Source:
    """Read a file, or the config in a folder. Raise ValueError if the model of this config has an
    encoding attached, of which the config says nothing. A GGUF file beside it is another model."""
    source = load(path)
    if source.path.name == "config.json":
        refuse_attached_encoding(source.folder)
    return source


def _compare_two_files(options: Options) -> tuple[str, int]:
    """Return how the positions of two files differ, in words or JSON, and the exit code: 1 if they
    differ."""
    sources = []
    for path in options.paths:
        with path_in_errors(path):
            sources.append(_load_without_encoding(path))
    one, other = sources
    one_path, other_path = options.paths
    first = _record_at_length(one, one_path, options.length)
    second = _record_at_length(other, other_path, options.length)
    lines = comparing.differences(first, second)
    if not lines and options.length is None:
        # Files that mean the same at their longest lengths may change at others.
        def both_at(length: int) -> tuple[Record, Record]:
            return _record_at_length(one, one_path, length), _record_at_length(
                other, other_path, length
            )

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


def _record_at_length(source: Source, path: Path, length: int | None) -> Record:
    """Return what a file means at a length. Errors name it as the user did."""
    with path_in_errors(path):
        try:
            return record_of(source, length)
        except RefusedError as refused:
            raise ValueError(str(refused)) from refused
