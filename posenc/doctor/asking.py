"""Decide whom `posenc doctor` asks, and ask each interpreter once for all files."""

from collections.abc import Mapping, Sequence

from posenc.dialects.ask import Asked, AskError, ask, installed_version, runtime_name_of
from posenc.dialects.files.source import Source
from posenc.dialects.meaning import UnknownFamilyError, meaning_of

RUNTIME = "transformers"
NOBODY = "none"
SHORT = 2
"""A length at which frequencies are compared with those at the length that is judged."""
LONGEST_WITHOUT_MEANING = 4096
"""Tokens to judge at where neither the user nor the config names a length."""


def interpreters_to_ask(asked_for: Sequence[str] | None) -> list[str | None]:
    """Return the interpreters to ask; None is the one that runs posenc.

    asked_for: the values of --ask; None if it was not given.

    Raises: ValueError for `none` beside an interpreter.
    """
    if asked_for is None:
        return [None] if installed_version(RUNTIME) is not None else []
    if NOBODY in asked_for:
        if len(asked_for) > 1:
            raise ValueError("--ask none asks nobody: it goes with no other --ask.")
        return []
    return list(asked_for)


def ask_about_sources(
    sources: Sequence[Source], length: int | None, asked_for: Sequence[str] | None
) -> tuple[list[dict[str, Asked]], list[list[str]]]:
    """Ask the interpreters about all files, each interpreter once.

    Returns: for each source, runtime -> its own answer; and for each source, the lines to print
    about interpreters that gave no answer.

    transformers is asked about its own configs, whatever the file is called: it opens no GGUF file
    and none of Meta's, Mistral's or DeepSeek's params.json.

    Raises: ValueError if two interpreters have the same runtime, as of transformers 5.
    """
    by_source: list[dict[str, Asked]] = [{} for _ in sources]
    notes: list[list[str]] = [[] for _ in sources]
    pythons = interpreters_to_ask(asked_for)
    about: list[int] = []
    for i, source in enumerate(sources):
        if source.spelling == RUNTIME:
            about.append(i)
        elif asked_for is not None and pythons:
            notes[i].append(
                f"--ask: transformers reads no file of this kind ({source.spelling}). What posenc "
                "knows is shown."
            )
    if not about:
        return by_source, notes
    questions = [(sources[i].raw, lengths_to_ask_at(sources[i], length)) for i in about]
    for python in pythons:
        try:
            answers_of_one = ask(questions, python)
        except AskError as error:
            for i in about:
                notes[i].append(f"{error} What posenc knows is shown.")
            continue
        for i, answer in zip(about, answers_of_one, strict=True):
            _add_answer(by_source[i], answer)
    return by_source, notes


def _add_answer(answers_to_one: dict[str, Asked], answer: Asked) -> None:
    """Add an interpreter's answer about a file to those of the other interpreters, in place.

    Raises: ValueError if one has answered for the same runtime.
    """
    row = runtime_name_of(answer)
    if row in answers_to_one:
        raise ValueError(
            f"--ask: two interpreters have {row}: {answers_to_one[row].version} and "
            f"{answer.version}; ask them one after the other."
        )
    answers_to_one[row] = answer


def answers_of_named_runtimes(
    answers: Mapping[str, Asked], named: Sequence[str], versions: Mapping[str, str]
) -> dict[str, Asked]:
    """Return only the answers of runtimes that --for names, and of the versions that it names."""
    kept = {}
    for row, answer in answers.items():
        wanted = versions.get(row)
        right = wanted is None or f"{answer.version}.".startswith(f"{wanted}.")
        if row in named and right:
            kept[row] = answer
    return kept


def lengths_to_ask_at(source: Source, length: int | None) -> list[int]:
    """Return the lengths, in tokens, at which a runtime is asked: first the one to judge at, then
    those that show whether the frequencies change with the length."""
    try:
        longest = meaning_of(source.config, length).max_length
    except (UnknownFamilyError, ValueError):
        longest = LONGEST_WITHOUT_MEANING
        named = source.config.get("max_position_embeddings")
        if isinstance(named, int) and not isinstance(named, bool) and 0 < named < 2**31:
            longest = named
    return [length or longest, SHORT, longest, 2 * longest]
