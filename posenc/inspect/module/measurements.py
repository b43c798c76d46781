"""Run every check on a foreign module, and report what it returns and which checks fail."""

import shlex
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from posenc.arguments import explain_misfits
from posenc.command_line.errors import one_line
from posenc.inspect.module import (
    check_consistency,
    check_distances,
    check_precision,
    check_rotation,
    check_slopes,
)
from posenc.inspect.module.call_forms import (
    CALLS_BY_RETURN,
    NUM_HEADS,
    RETURNS_IN_WORDS,
    WIDTH,
    calls_in_words,
)
from posenc.inspect.module.load import load_factory
from posenc.inspect.module.result_reader import ResultMeaning
from posenc.inspect.module.subject import (
    ADAPTER_COMMAND,
    Caution,
    CheckResult,
    Subject,
    find_subject,
)
from posenc.report.report import Report, Section, Table

CHECKS: dict[str, Callable[[Subject], CheckResult | Caution]] = {  # in the order of the table
    "position 0 leaves content as it is": check_rotation.judge_position_zero,
    "pairs of channels are rotated": check_rotation.judge_rotation_of_pairs,
    "scores depend on distance only": check_rotation.judge_shifted_scores,
    "frequencies are those of its base and width": check_rotation.judge_frequencies,
    "keys before a query differ by distance": check_distances.judge_past_keys,
    "a distance takes its row of T5's table": check_distances.judge_rows_of_table,
    "a window hides what it states": check_distances.judge_window,
    "what it is given stays as it is": check_consistency.judge_writes_into_arguments,
    "positions stay distinct": check_precision.judge_distinct_positions,
    "bfloat16 activations keep positions": check_precision.judge_bfloat16_activations,
    "module.bfloat16() keeps positions": check_precision.judge_bfloat16_module,
    "earlier calls leave no trace": check_consistency.judge_repeated_calls,
    "a position keeps its values as the sequence grows": check_consistency.judge_growing_length,
    "a token alone is the token in its sequence": check_consistency.judge_single_token,
    "queries and keys are rotated alike": check_consistency.judge_queries_against_keys,
    "a row does not depend on the batch's farthest": check_consistency.judge_batch_rows,
    "its own start moves its positions": check_consistency.judge_start_arguments,
    "positions are right as far as it states": check_precision.judge_far_positions,
    "it runs beyond its length if it claims to": check_precision.judge_promised_length,
    "slopes of ALiBi are the authors'": check_slopes.judge_slopes,
    "one compiled graph works for all lengths": check_consistency.judge_compiled_graphs,
}
_MEANING_IN_WORDS = {
    "rotated content": "rotated queries or keys",
    "sinusoids": "sines and cosines of positions",
    "cos and sin": "cosines and sines of angles",
    "complex": "angles as complex numbers",
    "bias": "a bias of the scores",
    "values": "values by position",
}
"""What a module returns, by the meaning of its numbers."""
_VERDICT_IN_WORDS = {True: "yes", False: "no", None: "–"}
_CAUTION_IN_WORDS = "see note"


@dataclass(frozen=True)
class ModuleVerdict:
    """The result of one check.

    holds: True if the property named by `check` holds; None if it does not apply. measured: the
    measured numbers in words. note: the condition under which the module is right, in words; "" for
    none.
    """

    check: str
    holds: bool | None
    measured: str
    note: str = ""


@dataclass(frozen=True)
class ModuleSheet:
    """The findings about a module.

    path: "package:NAME" or "file.py:NAME", as the user wrote it. called_as: how it was called, as
    text. meaning: what the numbers that it returns are. length: tokens of the longest call.
    """

    path: str
    name: str
    called_as: str
    meaning: ResultMeaning
    length: int
    checks: list[ModuleVerdict]

    @property
    def wrong(self) -> list[ModuleVerdict]:
        """Return the verdicts of the checks that fail."""
        return [verdict for verdict in self.checks if verdict.holds is False]


@explain_misfits
def measure_module(
    path: str,
    returns: str | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    width: int = WIDTH,
    heads: int = NUM_HEADS,
) -> ModuleSheet:
    """Check a position module of another library, or one of your own, for known mistakes.

    Args:
        path: "package.module:NAME" or "file.py:NAME" of a class, a module or a function.
        returns: what it returns: "cos-sin", "rotate", "bias", "scores" or "add", see
            docs/inspect.md; None if NAME is one of these words, as cos_sin.
        arguments: arguments of the constructor, by name.
        width: channels of a token, or of a head.
        heads: heads of queries, keys and scores.

    Returns: the sheet with a verdict for each check.

    Raises: ValueError for a module that cannot be built, called or judged, with two ways to help.

    >>> sheet = posenc.inspect.measure_module("mine.py:rotate", "rotate")  # doctest: +SKIP
    >>> [verdict.check for verdict in sheet.wrong]  # doctest: +SKIP
    ['pairs of channels are rotated']
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's deprecations
        make_copy = load_factory(path, arguments or {})
        constructor_arguments = dict(arguments or {})
        name = path.rpartition(":")[2]
        as_word = _resolve_returns(returns, path, name)
        subject = find_subject(make_copy, as_word, name, width, heads, constructor_arguments)
        called_as = name + subject.form.call_in_words
        meaning = subject.reader.meaning
        checks = judge_subject(subject)
        return ModuleSheet(path, name, called_as, meaning, subject.length, checks)


def _resolve_returns(chosen: str | None, path: str, name: str) -> str:
    """Return the word of --as: `chosen`, or if that is None the `name` of the function, if it is
    one of the words: "cos_sin" -> "cos-sin".

    Raises: ValueError with all words, and how to write an adapter.
    """
    if chosen in CALLS_BY_RETURN:
        return chosen
    if chosen is None and name.replace("_", "-") in CALLS_BY_RETURN:
        return name.replace("_", "-")
    calls_of_all_words = "; ".join(
        f"--as {word}: {calls_in_words(word)} returns {RETURNS_IN_WORDS[word]}"
        for word in CALLS_BY_RETURN
    )
    got_in_words = f", got {chosen!r}" if chosen is not None else ""
    raise ValueError(
        f"say what {name} returns by --as{got_in_words}, as in `posenc inspect module "
        f"{shlex.quote(path)} "
        f"--as cos-sin`. {calls_of_all_words}. Or write an adapter that is called so and calls "
        f"yours, as this line does: {ADAPTER_COMMAND}"
    )


@torch.no_grad()
def judge_subject(subject: Subject) -> list[ModuleVerdict]:
    """Return a verdict for each of CHECKS. For a module that ignores the positions that it is
    given, return a verdict that says so, and all others as not applicable."""
    name_of_use_check = "positions that it takes are used"
    if subject.ignores_positions:
        text = f"{subject.form.call_in_words} gives the same wherever its tokens are"
        unknown_verdicts = [
            ModuleVerdict(check, None, "its positions change nothing") for check in CHECKS
        ]
        return [ModuleVerdict(name_of_use_check, False, text), *unknown_verdicts]
    return [_run_check(check, subject) for check in CHECKS]


def _run_check(check: str, subject: Subject) -> ModuleVerdict:
    """Return the verdict of the check with this name in CHECKS; if the check raises an error, a
    verdict of None with the error as text."""
    try:
        result = CHECKS[check](subject)
    except Exception as error:  # foreign code: any exception is the finding
        return ModuleVerdict(check, None, f"does not run: {one_line(error)}")
    if isinstance(result, Caution):
        return ModuleVerdict(check, None, result.measured, result.note)
    return ModuleVerdict(check, *result)


def report_of(sheet: ModuleSheet) -> Report:
    """Return the report: the finding in a sentence or two, the call, and a verdict for each
    check."""
    answer = _answer(sheet)
    call = f"{sheet.path}, called as {sheet.called_as}, {sheet.length:,} tokens"
    rows = [
        [
            verdict.check,
            _CAUTION_IN_WORDS if verdict.note else _VERDICT_IN_WORDS[verdict.holds],
            verdict.measured,
        ]
        for verdict in sheet.checks
    ]
    return Report(
        f"The positions of {sheet.name}",
        answer,
        {
            "module": sheet.path,
            "called_as": sheet.called_as,
            "shows": _MEANING_IN_WORDS[sheet.meaning],
            "length": sheet.length,
            "answer": answer,
            "checks": sheet.checks,
        },
        [Section("Checks", [call, Table(["check", "holds", "measured"], rows)])],
    )


def _answer(sheet: ModuleSheet) -> str:
    """Return sentences: what the module returns, which of the checks that apply fail, and under
    which conditions it is right."""
    notes = "; ".join(verdict.note for verdict in sheet.checks if verdict.note)
    note_in_words = f" Note: {notes}." if notes else ""
    num_passed = sum(verdict.holds is True for verdict in sheet.checks)
    opening = f"{sheet.name} returns {_MEANING_IN_WORDS[sheet.meaning]}, computed from positions."
    if not sheet.wrong:
        return f"{opening} All {num_passed} checks that apply pass.{note_in_words}"
    names_of_wrong = "; ".join(verdict.check for verdict in sheet.wrong)
    return (
        f"{opening} {len(sheet.wrong)} of {num_passed + len(sheet.wrong)} checks fail: "
        f"{names_of_wrong}.{note_in_words}"
    )
