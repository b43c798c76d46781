"""Run `posenc doctor`: read and judge; or explain, compare, override, fix."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from posenc.command_line.errors import describe_os_error
from posenc.command_line.options import require_choice
from posenc.doctor import choose_interpreters, compare_files
from posenc.doctor.command import Options, actions_asked_for, check_options, ignored_codes
from posenc.doctor.copy_report import (
    report_of_converted_copy,
    report_of_fixed_copy,
    report_of_fixed_gguf,
    report_of_permuted_adapter,
    report_of_scaled_adapter,
)
from posenc.doctor.misreadings import Case
from posenc.doctor.report import (
    Judgement,
    report_of,
    report_of_answers,
    report_of_comparison,
    report_of_layout,
    report_of_options,
    report_of_position_ids,
    report_of_rule,
    report_of_several,
    report_without_judgement,
)
from posenc.doctor.rule import Finding
from posenc.doctor.rules import RULES, findings
from posenc.doctor.rules.overrides import OVERRIDES_KEY
from posenc.files.sealed_json import parse_bounded_json
from posenc.lazy import require_package
from posenc.report.report import Report
from posenc.runtimes.ask import RuntimeAnswer, as_computed
from posenc.runtimes.computed_positions import ComputedPositions, RefusedError
from posenc.runtimes.config_model import BadConfigError, model_of
from posenc.runtimes.families import SERVERS
from posenc.runtimes.files.json_object import MOST_BYTES_OF_INDEX, read_json
from posenc.runtimes.files.model_folder import refuse_attached_encoding
from posenc.runtimes.files.source import NoRotationError, Source, is_adapter, load
from posenc.runtimes.files.spelling import as_transformers
from posenc.runtimes.known import RUNTIMES, emulate
from posenc.runtimes.known.releases import runtime_and_version
from posenc.runtimes.meaning import UnknownFamilyError, meaning_of, path_in_errors
from posenc.runtimes.position_record import PositionRecord, record_of
from posenc.runtimes.writers.copies import config_changes
from posenc.runtimes.writers.overrides import (
    check_override,
    config_after_override,
    intended_config,
    override_options,
)

KEYS_OF_A_MODEL = ("model_type", "architectures", "n_heads")
"""A JSON object with one of these keys describes a model; other programs have a config.json too."""
CODES_OF_GUESSES = ("PD004", "PD011", "PD050", "PD053")
"""Errors that a fix would have to guess at: no base, no original length, no model_type, and
layer_types with unknown names or of another length."""
CODE_OF_HALF_WRITTEN_FILE = "PD059"
"""The rule about a GGUF file that lacks a part of its scaling, which its model's config has."""
EXIT_CODES_BY_GRAVITY = (0, 3, 1, 2)
"""Exit codes, the gravest last: all right, not known, an error was found, not readable."""


class RuntimeAnswers(NamedTuple):
    """What runtimes answered for one file, and lines about interpreters that gave no answer."""

    answer_by_runtime: Mapping[str, RuntimeAnswer] = {}
    notes: tuple[str, ...] = ()


def run(options: Options) -> tuple[Report, int]:
    """Return the answer, and the exit code: 1 if an E fired, a fix is incomplete, or two files
    differ; 3 if posenc knows of no named runtime what it computes for the family.

    Raises: ValueError and OSError for bad input.
    """
    try:
        return _run_on_rotating_model(options, None)
    except NoRotationError as no_rotation:
        if not _only_judges(options):
            raise
        reason = str(no_rotation)
        return report_without_judgement(reason, reason), 0


def _run_on_rotating_model(options: Options, answers: RuntimeAnswers | None) -> tuple[Report, int]:
    """Return the answer, and the exit code, as `run` does.

    answers: what the runtimes at hand answered for the one file; None to ask them here.

    Raises: NoRotationError for a model that rotates nothing; ValueError and OSError for bad input.
    """
    try:
        return _do_what_options_ask(options, answers)
    except BadConfigError as bad_config:
        raise ValueError(
            f"{options.paths[0]}: {str(bad_config).removeprefix('config.json: ')}"
        ) from bad_config
    except UnknownFamilyError as unknown_family:
        path_prefix = f"{options.paths[0]}: " if len(options.paths) == 1 else ""
        headline = f"{path_prefix}{unknown_family}. Nothing was judged, fixed or proved."
        return report_without_judgement(headline, str(unknown_family)), 3


def _only_judges(options: Options) -> bool:
    """Return True if the options ask for the judgement of one file, and for nothing else."""
    return len(options.paths) == 1 and not actions_asked_for(options)


def _do_what_options_ask(options: Options, answers: RuntimeAnswers | None) -> tuple[Report, int]:
    """Do what the options ask for; return the answer, and the exit code."""
    check_options(options)
    if options.explain is not None:
        rule_code = require_choice("--explain", options.explain.upper(), RULES)
        return report_of_rule(RULES[rule_code]), 0
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
        return _compare_positions(case, options.positions)
    if options.overrides is not None:
        case.require_known()
        return _report_of_server_options(source, options), 0
    if options.fix:
        case.require_known()
        return _write_fixed_copy(case, options)
    if options.with_ is not None:  # a server's override; who is asked reads the file alone
        answers = RuntimeAnswers()
    elif answers is None:
        answers = _ask_runtimes([source], options)[0]
    return _judge(case, options, answers)


def _report_of_server_options(source: Source, options: Options) -> Report:
    """Return the options with which the server that --overrides names computes what the file
    means."""
    assert options.overrides is not None
    _require_config(source, "--overrides")
    if options.overrides not in RUNTIMES:  # override() says of a known one why it takes none
        require_choice("--overrides", options.overrides, SERVERS)
    from posenc.doctor.cures.fixing import require_no_guess

    meaning = meaning_of(source.config, options.length)
    require_no_guess(source, meaning, "no options can say it")
    server_options = override_options(source.raw, meaning, options.overrides)
    return report_of_options(options.overrides, server_options)


def _write_fixed_copy(case: Case, options: Options) -> tuple[Report, int]:
    """Write the copy of --fix; return what was written, and the exit code.

    Raises: ValueError where the file must be corrected by hand first.
    """
    from posenc.doctor.cures.fixing import fix_config, fix_gguf

    assert options.out is not None
    settled_changes: list[str] = []
    if options.prefer is not None:
        source = _with_preferred_keys(case.source, options.prefer)
        settled_changes = config_changes(case.source.raw, source.raw)
        case = replace(case, source=source)
    finding = _first_finding_to_correct_by_hand(case, findings(case))
    is_said_by_config = case.metadata is not None and options.like is not None
    if finding and not is_said_by_config:
        raise ValueError(
            f"{case.source.path}: --fix writes nothing, correct the file by hand first. "
            f"{finding.code}: {finding.message}. {finding.cure}"
            f"{_prefer_option_in_words(case, finding)}"
        )
    if case.metadata is not None:
        fixed = fix_gguf(case.source, options.out, options.like)
        return report_of_fixed_gguf(options.out, fixed), 0
    if options.like is not None:
        raise ValueError("--like goes with --fix of a GGUF file.")
    runtimes = _runtimes_named_by_for(options)
    versions = _versions_named_by_for(options)

    def ask(config: Mapping[str, Any]) -> dict[str, ComputedPositions]:
        source_of_copy = replace(case.source, raw=dict(config), config=as_transformers(config))
        asked_by_name = _ask_runtimes([source_of_copy], options)[0].answer_by_runtime
        known_by_name = emulate(config, options.length, versions=versions)
        model = model_of(config)
        computed_by_name = {
            name: as_computed(asked_answer, known_by_name[name], model)
            for name, asked_answer in asked_by_name.items()
        }
        return {name: computed.with_stop_as_refusal for name, computed in computed_by_name.items()}

    ask_or_none = None if options.ask is None else ask
    copy = fix_config(case.source, options.out, runtimes, options.length, versions, ask_or_none)
    exit_code = 1 if copy.recipe.misreadings else 0
    return report_of_fixed_copy(options.out, copy, options.prefer, settled_changes), exit_code


def _with_preferred_keys(source: Source, preferred_keys: str) -> Source:
    """Return a config without what contradicts the preferred keys.

    Raises: ValueError for another file, or a key that nothing contradicts.
    """
    from posenc.doctor.cures.preferred import with_preferred

    if source.spelling != "transformers":
        raise ValueError(f"--prefer needs a config.json, {source.path} is none.")
    raw = with_preferred(source.raw, preferred_keys)
    with path_in_errors(source.path):
        return replace(source, raw=raw, config=as_transformers(raw))


def _prefer_option_in_words(case: Case, finding: Finding) -> str:
    """Return the options of --prefer that settle what a finding says; empty if none does."""
    from posenc.doctor.cures.preferred import contradictions

    settling_options = [
        contradiction.in_words
        for contradiction in contradictions(case.source.raw)
        if any(path[-1] in finding.message for path in contradiction.paths)
    ]
    return f" Or say which is right: {settling_options[0]}." if settling_options else ""


def _ask_runtimes(sources: Sequence[Source], options: Options) -> list[RuntimeAnswers]:
    """Ask the runtimes at hand about files, each interpreter once; return one answer per file, in
    their order."""
    runtimes = _runtimes_named_by_for(options)
    answers_by_file, notes_by_file = choose_interpreters.ask_about_sources(
        sources, options.length, options.ask, runtimes
    )
    versions = _versions_named_by_for(options)
    answers_and_notes: list[RuntimeAnswers] = []
    for answers, notes in zip(answers_by_file, notes_by_file, strict=True):
        answers_of_named = choose_interpreters.answers_of_named_runtimes(
            answers, runtimes, versions
        )
        all_notes = (*notes, *choose_interpreters.notes_on_releases(answers_of_named))
        answers_and_notes.append(RuntimeAnswers(answers_of_named, all_notes))
    return answers_and_notes


def _judge(case: Case, options: Options, answers: RuntimeAnswers) -> tuple[Report, int]:
    """Judge a file by all rules; return the answer, and the exit code.

    answers: what the runtimes at hand answered themselves.
    """
    case = replace(case, own_answers=answers.answer_by_runtime)
    try:
        case.require_known()
    except UnknownFamilyError as unknown_family:
        return _report_of_asked_runtimes(case, answers.notes, unknown_family), 3
    all_findings = findings(case)
    if not all_findings and case.why_unclear:
        raise ValueError(f"{case.source.path}: {case.why_unclear}.")
    codes_to_ignore = ignored_codes(options)
    counted_findings = [finding for finding in all_findings if finding.code not in codes_to_ignore]
    silenced_findings = [finding for finding in all_findings if finding.code in codes_to_ignore]
    can_be_fixed = _first_finding_to_correct_by_hand(case, all_findings) is None
    judgement = Judgement(case, counted_findings, silenced_findings, can_be_fixed, answers.notes)
    exit_code = 1 if any(finding.severity == "E" for finding in counted_findings) else 0
    return report_of(judgement), exit_code


def _report_of_asked_runtimes(
    case: Case, notes: Sequence[str], unknown_family: UnknownFamilyError
) -> Report:
    """Return what the runtimes at hand compute for a family whose meaning posenc does not know.

    Raises: UnknownFamilyError if none of them answered.
    """
    # Of this family posenc knows nothing that could be shown instead.
    reasons = [note.removesuffix(f" {choose_interpreters.NOTE_ON_KNOWN}") for note in notes]
    if case.own_answers:
        return report_of_answers(case, str(unknown_family), reasons)
    why_nobody_answered = " ".join(reasons).rstrip(".")  # the headline ends the sentence
    if not why_nobody_answered and case.source.spelling == choose_interpreters.SPELLING_OF_MOST:
        why_nobody_answered = "--ask PYTHON asks a runtime that has it"
    if not why_nobody_answered:
        raise unknown_family
    raise UnknownFamilyError(f"{unknown_family}. {why_nobody_answered}") from None


def _first_finding_to_correct_by_hand(
    case: Case, all_findings: Sequence[Finding]
) -> Finding | None:
    """Return the first finding that only the file's author can correct; None without one."""
    if case.metadata is not None:
        return next((f for f in all_findings if f.code == CODE_OF_HALF_WRITTEN_FILE), None)
    for finding in all_findings:
        is_guessed = finding.severity == "E" and (
            case.why_unclear or finding.code in CODES_OF_GUESSES
        )
        if finding.is_contradiction or is_guessed:
            return finding
    return None


def _judge_each(options: Options) -> tuple[Report, int]:
    """Judge files one by one; return all answers and the gravest exit code. What is not known
    passes with a notice, unless --strict is given."""
    reports: list[Report] = []
    exit_codes = [0]
    for path, answers in zip(options.paths, _ask_about_each_path(options), strict=True):
        report, exit_code = _judge_or_skip(path, options, answers)
        reports.append(report)
        exit_codes.append(exit_code)
    num_not_judged = exit_codes.count(3)
    if not options.strict:
        exit_codes = [0 if exit_code == 3 else exit_code for exit_code in exit_codes]
    joint_report = report_of_several(options.paths, reports, num_not_judged)
    return joint_report, max(exit_codes, key=EXIT_CODES_BY_GRAVITY.index)


def _ask_about_each_path(options: Options) -> list[RuntimeAnswers]:
    """Ask the runtimes at hand, once, about all paths that can be read; return the answers by path,
    empty for the others."""
    source_by_path: dict[Path, Source] = {}
    for path in options.paths:
        with suppress(OSError, ValueError):  # said when its turn comes
            if not (_describes_no_model(path) or is_adapter(path)):
                source_by_path[path] = load(path)
    answers = dict(
        zip(source_by_path, _ask_runtimes([*source_by_path.values()], options), strict=True)
    )
    return [answers.get(path, RuntimeAnswers()) for path in options.paths]


def _describes_no_model(path: Path) -> bool:
    """Return True for a JSON file without any key of a model's config."""
    if path.suffix != ".json" or not path.is_file():
        return False
    return not read_json(path).keys() & {*KEYS_OF_A_MODEL}


def _judge_or_skip(path: Path, options: Options, answers: RuntimeAnswers) -> tuple[Report, int]:
    """Judge one of several files; return its answer, which may be an error, and its exit code."""
    try:
        if _describes_no_model(path):
            why_skipped = "it describes no model"
            return report_without_judgement(f"{path}: skipped, {why_skipped}.", why_skipped), 0
        return _run_on_rotating_model(
            replace(options, paths=(path,), each=False, strict=False), answers
        )
    except NoRotationError as no_rotation:
        return report_without_judgement(f"skipped: {no_rotation}", str(no_rotation)), 0
    except OSError as error:
        why = describe_os_error(error)
        return report_without_judgement(why, why), 2
    except ValueError as error:
        why = f"{error}" if str(path) in str(error) else f"{path}: {error}"
        return report_without_judgement(why, why), 2


def _write_adapter(options: Options) -> Report:
    """Write the LoRA adapter that goes with a fixed or permuted model.

    Raises: ValueError if neither --fix nor --convert-layout is given: an adapter has no positions
    of its own, so there is nothing to judge.
    """
    from posenc.doctor.cures import adapters, measure_layout

    folder = options.paths[0]
    if options.fix:
        assert options.out is not None
        runtimes = _runtimes_named_by_for(options)
        versions = _versions_named_by_for(options)
        scaled_adapter = adapters.fix_adapter(
            folder, options.like, options.out, runtimes, options.length, versions
        )
        return report_of_scaled_adapter(
            options.out, scaled_adapter.num_tensors, scaled_adapter.factor
        )
    if options.convert_layout is not None:
        assert options.out is not None
        is_interleaved = measure_layout.is_interleaved(options.convert_layout)
        num_tensors = adapters.convert_layout(
            folder, options.like, options.out, to_interleaved=is_interleaved
        )
        return report_of_permuted_adapter(options.out, num_tensors)
    raise ValueError(
        f"{folder} is a LoRA adapter: its positions are its model's. --fix or --convert-layout, "
        "with --like MODEL --out NEW, write the one that goes with a fixed model."
    )


def _measure_or_convert_layout(options: Options) -> tuple[Report, int]:
    """Do what --layout or --convert-layout asks for; return the answer, and the exit code."""
    if options.layout:
        require_package("transformers", "--layout")
    from posenc.doctor.cures import measure_layout

    folder = options.paths[0]
    if options.convert_layout is not None:
        assert options.out is not None
        copy = measure_layout.write_converted_copy(folder, options.out, options.convert_layout)
        return report_of_converted_copy(options.out, copy), 0
    assert options.text is not None
    verdict = measure_layout.measure_layout(folder, options.text)
    return report_of_layout(verdict), int(verdict.mismatch)


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
    return tuple(dict.fromkeys(require_choice("--for", name, RUNTIMES) for name in names))


def _runtimes_and_versions_in_for(options: Options) -> list[tuple[str, str | None]]:
    """Return (runtime, version) for each name in --for; None for a name without ==VERSION. Empty
    without --for."""
    return [runtime_and_version(part) for part in (options.for_ or "").split(",") if part.strip()]


def _versions_named_by_for(options: Options) -> dict[str, str]:
    """Return the versions that --for names, such as transformers==5.9.

    Raises: ValueError for two versions of one runtime.
    """
    versions: dict[str, str] = {}
    for name, version in _runtimes_and_versions_in_for(options):
        if version is None:
            continue
        version_before = versions.setdefault(name, version)
        if version_before != version:
            raise ValueError(
                f"--for: one version of {name} at a time, {version_before} or {version}."
            )
    return versions


def _require_config(source: Source, option_name: str) -> None:
    """Raise ValueError for a GGUF file. option_name: the option that needs a config."""
    if source.metadata is not None:
        raise ValueError(f"{option_name} needs a config, {source.path} is a GGUF file.")


def _compare_positions(case: Case, path: Path) -> tuple[Report, int]:
    """Return how the position ids of the batch in a JSON file differ from those that the family's
    code makes, and the exit code: 1 if they differ."""
    from posenc.doctor.check_position_ids import compare_position_ids

    _require_config(case.source, "--positions")
    with path_in_errors(path):
        differences, notes = compare_position_ids(read_json(path, MOST_BYTES_OF_INDEX), case.model)
    report = report_of_position_ids(path, differences, notes, case.model.model_type)
    return report, int(bool(differences))


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
    served_config = config_after_override(source.config, overrides, server)
    raw = {**source.raw, OVERRIDES_KEY: overrides}
    source = replace(source, raw=raw, config=intended_config(source.config, overrides))
    return Case(source, (server,), options.length, served_config, _versions_named_by_for(options))


def _load_without_encoding(path: Path) -> Source:
    """Read a file, or the config in a folder.

    Raises: ValueError if a config.json's folder says that the model has an encoding of posenc
    attached: the config alone then does not tell how the model rotates. A GGUF file is read without
    this check, since what the folder says of config.json is not about it.
    """
    source = load(path)
    if source.path.name == "config.json":
        refuse_attached_encoding(source.folder)
    return source


def _compare_two_files(options: Options) -> tuple[Report, int]:
    """Return how the positions of two files differ, and the exit code: 1 if they differ."""
    sources = []
    for path in options.paths:
        with path_in_errors(path):
            sources.append(_load_without_encoding(path))
    first_source, second_source = sources
    first_path, second_path = options.paths
    first_record = _record_at_length(first_source, first_path, options.length)
    second_record = _record_at_length(second_source, second_path, options.length)
    difference_lines = compare_files.differences(first_record, second_record)
    if not difference_lines and options.length is None:
        # Files that mean the same at their longest lengths may change at others.
        def both_at(length: int) -> tuple[PositionRecord, PositionRecord]:
            return (
                _record_at_length(first_source, first_path, length),
                _record_at_length(second_source, second_path, length),
            )

        difference_lines = compare_files.differences_at_switches(
            first_record, second_record, both_at
        )
    at_length_in_words = ""
    if options.length is not None and {first_record.switch, second_record.switch} != {"static"}:
        at_length_in_words = f" at {options.length} tokens"
    report = report_of_comparison(
        options.paths, (first_record, second_record), difference_lines, at_length_in_words
    )
    return report, int(bool(difference_lines))


def _record_at_length(source: Source, path: Path, length: int | None) -> PositionRecord:
    """Return what a file means at a length. Errors name it as the user did."""
    with path_in_errors(path):
        try:
            return record_of(source, length)
        except RefusedError as refused:
            raise ValueError(str(refused)) from refused
