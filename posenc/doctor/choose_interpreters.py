"""Decide whom `posenc doctor` asks, and ask each interpreter once for all files."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from posenc.runtimes.ask import (
    PROBES,
    AskError,
    RuntimeAnswer,
    ask,
    installed_runtime_version,
    runtime_name_of,
    runtimes_of,
)
from posenc.runtimes.files.source import Source
from posenc.runtimes.known.releases import RELEASES_IN_WORDS, is_recorded
from posenc.runtimes.meaning import UnknownFamilyError, meaning_of

SPELLING_OF_MOST = "transformers"
"""The spelling of the files that most runtimes are asked about: the config.json of transformers."""
OTHER_SPELLINGS = {"llama.cpp": "gguf"}
"""Runtime -> the spelling of the files that it is asked about, where that is another one."""
SPELLINGS_ASKED_ABOUT = {SPELLING_OF_MOST, *OTHER_SPELLINGS.values()}
NOTE_ON_KNOWN = "What posenc knows is shown."
NOTE_ON_LOADING = (
    "llama.cpp {version} was asked to load the file: whether it does, and what it takes for the "
    "base, the scaling, the lengths and the rotated channels, is its own answer; what it computes "
    "from them is known."
)
ASK_NOBODY = "none"
SHORT_LENGTH = 2
"""A length at which frequencies are compared with those at the length that is judged."""
DEFAULT_LENGTH = 4096
"""Tokens to judge at where neither the user nor the config names a length."""


class Interpreter(NamedTuple):
    """An interpreter to ask.

    python: its path; None for the one that runs posenc. runtime: the one that is asked of it, a key
    of PROBES; None for all that it has.
    """

    python: str | None
    runtime: str | None = None


def interpreters_to_ask(asked_for: Sequence[str] | None) -> list[Interpreter]:
    """Return the interpreters to ask.

    asked_for: the values of --ask, `PYTHON` or `RUNTIME=PYTHON`; None if it was not given.

    Raises: ValueError for `none` beside an interpreter.
    """
    if asked_for is None:
        return [
            Interpreter(None, name)
            for name in PROBES
            if installed_runtime_version(name) is not None
        ]
    if ASK_NOBODY in asked_for:
        if len(asked_for) > 1:
            raise ValueError("--ask none asks nobody: it goes with no other --ask.")
        return []
    return [_interpreter_named(value) for value in asked_for]


def _interpreter_named(value: str) -> Interpreter:
    """Return the interpreter that a value of --ask names. A path may have a = of its own.

    Raises: ValueError for RUNTIME=PYTHON without one of the two.
    """
    runtime, separator, python = value.partition("=")
    if not separator or "/" in runtime:
        return Interpreter(value)
    if runtime in PROBES:
        if not python:
            raise ValueError(f"--ask {value}: the interpreter is missing.")
        return Interpreter(python, runtime)
    if shutil.which(value) is not None:
        return Interpreter(value)
    raise ValueError(f"--ask {value}: {runtime!r} is none of {', '.join(PROBES)}.")


def is_asked_of(runtime: str, row_names: Collection[str]) -> bool:
    """Return True if a runtime, a key of PROBES, answers for one of these rows: "transformers" for
    "transformers-4" and "transformers-5", any other for the row of its own name."""
    return any(row_name == runtime or row_name.startswith(f"{runtime}-") for row_name in row_names)


def ask_about_sources(
    sources: Sequence[Source],
    length: int | None,
    asked_for: Sequence[str] | None,
    row_names: Collection[str],
) -> tuple[list[dict[str, RuntimeAnswer]], list[list[str]]]:
    """Ask the interpreters about all files, each runtime of an interpreter once.

    row_names: rows of the table that the user wants; other runtimes are not asked.

    Returns: for each source, row -> its own answer; and for each source, the lines to print about
    interpreters that gave no answer.

    llama.cpp is asked about GGUF files, the others about configs of transformers, whatever the file
    is called: they are asked about none of Meta's, Mistral's or DeepSeek's params.json.

    Raises: ValueError if two interpreters have the same runtime, as of transformers 5, or if those
    that the user named have none that answers for a row.
    """
    answers_by_source: list[dict[str, RuntimeAnswer]] = [{} for _ in sources]
    notes: list[list[str]] = [[] for _ in sources]
    interpreters = interpreters_to_ask(asked_for)
    has_named_interpreter = asked_for is not None and bool(interpreters)
    readable_indices = [
        i for i, source in enumerate(sources) if source.spelling in SPELLINGS_ASKED_ABOUT
    ]
    if readable_indices:
        to_ask, failures = _runtimes_of_interpreters(interpreters, row_names)
        for i in readable_indices:
            notes[i] += failures
        if has_named_interpreter and not to_ask and not failures:
            raise ValueError(
                f"--ask: nobody is asked about {', '.join(row_names)}, which --for names."
            )
        for python, runtime in to_ask:
            _ask_one_runtime(python, runtime, sources, length, answers_by_source, notes)
    if has_named_interpreter:
        _note_files_that_nobody_reads(sources, answers_by_source, notes)
    return answers_by_source, notes


def _ask_one_runtime(
    python: str | None,
    runtime: str,
    sources: Sequence[Source],
    length: int | None,
    answers_by_source: Sequence[dict[str, RuntimeAnswer]],
    notes: Sequence[list[str]],
) -> None:
    """Ask a runtime about all files that it reads, and add its answer to those of each file; or to
    the file's notes why there is none."""
    spelling = _spelling_read_by(runtime)
    indices = [i for i, source in enumerate(sources) if source.spelling == spelling]
    if not indices:
        return
    questions = [_question_about(sources[i], length) for i in indices]
    try:
        answers = ask(questions, python, runtime)
    except AskError as error:
        for i in indices:
            notes[i].append(f"{error} {NOTE_ON_KNOWN}")
        return
    for i, answer in zip(indices, answers, strict=True):
        _add_answer(answers_by_source[i], answer)


def _runtimes_of_interpreters(
    interpreters: Sequence[Interpreter], row_names: Collection[str]
) -> tuple[list[tuple[str | None, str]], list[str]]:
    """Return whom to ask, as pairs of an interpreter's path and a runtime, and a line about each
    interpreter that has none to be asked, or is none."""
    to_ask: list[tuple[str | None, str]] = []
    failure_lines: list[str] = []
    for interpreter in interpreters:
        try:
            runtimes = _runtimes_to_ask(interpreter, row_names)
        except AskError as error:
            failure_lines.append(f"{error} {NOTE_ON_KNOWN}")
        else:
            to_ask += [(interpreter.python, runtime) for runtime in runtimes]
    return to_ask, failure_lines


def _note_files_that_nobody_reads(
    sources: Sequence[Source],
    answers_by_source: Sequence[Mapping[str, RuntimeAnswer]],
    notes: Sequence[list[str]],
) -> None:
    """Add to `notes` a line for each file about which no runtime has answered, if none says why."""
    for source, answers, lines in zip(sources, answers_by_source, notes, strict=True):
        if not answers and not lines:
            lines.append(
                "--ask: the runtimes that are asked read no file of this kind "
                f"({source.spelling}). {NOTE_ON_KNOWN}"
            )


def _spelling_read_by(runtime: str) -> str:
    """Return the spelling of the files that a runtime is asked about."""
    return OTHER_SPELLINGS.get(runtime, SPELLING_OF_MOST)


def _question_about(
    source: Source, length: int | None
) -> tuple[Mapping[str, Any] | Path, list[int]]:
    """Return what a runtime is asked about a file, and at which lengths in tokens.

    The first is the config as a dict, or the path of a GGUF file. length: that of the command's
    option; None for the lengths that the file itself names.
    """
    if source.metadata is not None:
        return source.path, [length or source.metadata.context_length]
    return source.raw, lengths_to_ask_at(source, length)


def _runtimes_to_ask(interpreter: Interpreter, row_names: Collection[str]) -> list[str]:
    """Return the runtimes that an interpreter is asked as: the one that the user named, else those
    that it has and that answer for one of the rows.

    Raises: AskError if it has none that can be asked, or is no interpreter.
    """
    if interpreter.runtime is not None:
        return [interpreter.runtime] if is_asked_of(interpreter.runtime, row_names) else []
    runtimes_there = runtimes_of(interpreter.python)
    if not runtimes_there:
        raise AskError(
            f"--ask {interpreter.python}: it has no such runtime: none of {', '.join(PROBES)} can "
            "be imported."
        )
    return [runtime for runtime in runtimes_there if is_asked_of(runtime, row_names)]


def _add_answer(answers_to_one: dict[str, RuntimeAnswer], answer: RuntimeAnswer) -> None:
    """Add an interpreter's answer about a file to those of the other interpreters, in place.

    Raises: ValueError if one has answered for the same runtime.
    """
    row_name = runtime_name_of(answer)
    if row_name in answers_to_one:
        raise ValueError(
            f"--ask: two interpreters have {row_name}: {answers_to_one[row_name].version} and "
            f"{answer.version}; ask them one after the other, or name the runtime to ask, as in "
            "--ask vllm=PYTHON."
        )
    answers_to_one[row_name] = answer


def answers_of_named_runtimes(
    answers: Mapping[str, RuntimeAnswer], named_runtimes: Sequence[str], versions: Mapping[str, str]
) -> dict[str, RuntimeAnswer]:
    """Return only the answers of runtimes that --for names, and of the versions that it names."""
    kept_answers = {}
    for row_name, answer in answers.items():
        wanted_version = versions.get(row_name)
        is_right_version = wanted_version is None or f"{answer.version}.".startswith(
            f"{wanted_version}."
        )
        if row_name in named_runtimes and is_right_version:
            kept_answers[row_name] = answer
    return kept_answers


def notes_on_releases(answers: Mapping[str, RuntimeAnswer]) -> list[str]:
    """Return a line for each runtime that answered in a release of which nothing is recorded, and
    for one that was asked for a part of its answer only."""
    notes = []
    for row_name, answer in answers.items():
        if answer.why_unmeasured:
            why = answer.why_unmeasured.rstrip(".")
            notes.append(f"{answer.runtime} {answer.version}: {why}. {NOTE_ON_KNOWN}")
        if answer.loaded:
            notes.append(NOTE_ON_LOADING.format(version=answer.version))
        if not _is_recorded(row_name, answer.version):
            notes.append(
                f"Installed is {answer.runtime} {answer.version}, and posenc has recorded "
                f"{RELEASES_IN_WORDS[row_name]}. Its row is its own answer; what is meant, and "
                "what programs do that load configs by it, is judged by the recorded releases."
            )
    return notes


def _is_recorded(row_name: str, version: str) -> bool:
    """Return True if facts of a release are recorded; a development version is no release."""
    try:
        return is_recorded(row_name, version)
    except ValueError:  # such as 5.25.0.dev0
        return False


def lengths_to_ask_at(source: Source, length: int | None) -> list[int]:
    """Return the lengths, in tokens, at which a runtime is asked: first the one to judge at, then
    those that show whether the frequencies change with the length."""
    try:
        meant_length = meaning_of(source.config, length).max_length
    except (UnknownFamilyError, ValueError):
        meant_length = DEFAULT_LENGTH
        stated_length = source.config.get("max_position_embeddings")
        if (
            isinstance(stated_length, int)
            and not isinstance(stated_length, bool)
            and 0 < stated_length < 2**31
        ):
            meant_length = stated_length
    # Without `length`, the runtime is judged at the meant one, which is then in the list twice.
    return [length or meant_length, SHORT_LENGTH, meant_length, 2 * meant_length]
