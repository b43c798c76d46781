"""Run every check on a foreign module, and write the sentence that comes first."""

import dataclasses
import json
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posenc.arguments import answered
from posenc.inspect.module.call import HEADS, RETURNS, WAYS, WIDTH, calls_in_words
from posenc.inspect.module.checks import calls, compiled, precision, rotation, slopes
from posenc.inspect.module.load import load_maker, parse_arguments
from posenc.inspect.module.subject import ADAPTER, Finding, Subject, find_subject
from posenc.report.page.console import print_table, stdout
from posenc.report.page.failure import one_line
from posenc.report.page.progress import tell

CHECKS: dict[str, Callable[[Subject], Finding]] = {  # in the order of the table
    "position 0 leaves content as it is": rotation.judge_position_zero,
    "pairs of channels are rotated": rotation.judge_rotation_of_pairs,
    "scores depend on distance only": rotation.judge_shifted_scores,
    "frequencies are those of its base and width": rotation.judge_frequencies,
    "keys before a query differ by distance": slopes.judge_past_keys,
    "what it is given stays as it is": calls.judge_writes_into_arguments,
    "positions stay distinct": precision.judge_distinct_positions,
    "bfloat16 activations keep positions": precision.judge_bfloat16_activations,
    "module.bfloat16() keeps positions": precision.judge_bfloat16_module,
    "earlier calls leave no trace": calls.judge_repeated_calls,
    "a position keeps its values as the sequence grows": calls.judge_growing_length,
    "a token alone is the token in its sequence": calls.judge_single_token,
    "queries and keys are rotated alike": calls.judge_queries_against_keys,
    "a row does not depend on the batch's farthest": calls.judge_batch_rows,
    "its own start moves its positions": calls.judge_start_arguments,
    "positions are right as far as it states": precision.judge_far_positions,
    "it runs beyond its length if it claims to": precision.judge_promised_length,
    "slopes of ALiBi are the authors'": slopes.judge_slopes,
    "one compiled graph works for all lengths": compiled.judge_compiled_graphs,
}


@dataclass(frozen=True)
class Verdict:
    """One property of a module: True if it holds (None: it does not apply), and the numbers."""

    check: str
    holds: bool | None
    measured: str


@dataclass(frozen=True)
class ModuleSheet:
    """The findings about a module. called_as: how it was called. shows: what it returns."""

    name: str
    called_as: str
    shows: str
    length: int
    checks: list[Verdict]

    @property
    def wrong(self) -> list[Verdict]:
        """Return the verdicts of the checks that fail."""
        return [verdict for verdict in self.checks if verdict.holds is False]

    @property
    def answer(self) -> str:
        """Return the finding in one or two sentences."""
        held = sum(verdict.holds is True for verdict in self.checks)
        start = f"{self.name} returns {self.shows}, which depend on positions."
        if not self.wrong:
            return f"{start} All {held} checks that apply pass."
        names = "; ".join(verdict.check for verdict in self.wrong)
        return f"{start} {len(self.wrong)} of {held + len(self.wrong)} checks fail: {names}."


@answered
def measure_module(
    path: str,
    way: str | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    width: int = WIDTH,
    heads: int = HEADS,
) -> ModuleSheet:
    """Check a position module of another library, or one of your own, for known mistakes.

    Args:
        path: "package.module:NAME" or "file.py:NAME" of a class, a module or a function.
        way: what it returns: "cos-sin", "rotate", "bias", "scores" or "add", see docs/inspect.md;
            None where NAME is one of these words, as cos_sin.
        arguments: of the constructor.
        width: channels of a token, or of a head.
        heads: heads of queries, keys and scores.

    Raises: ValueError for a module that cannot be built, called or judged, with two ways out.

    >>> sheet = posenc.inspect.measure_module("mine.py:rotate", "rotate")  # doctest: +SKIP
    >>> [verdict.check for verdict in sheet.wrong]  # doctest: +SKIP
    ['pairs of channels are rotated']
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's deprecations
        fresh = load_maker(path, arguments or {})
        constructor_arguments = dict(arguments or {})
        name = path.rpartition(":")[2]
        way = _resolve_way(way, path, name)
        subject = find_subject(fresh, way, name, width, heads, constructor_arguments)
        called_as = name + subject.form.name
        shows = _RESULT_IN_WORDS[subject.view.how]
        return ModuleSheet(name, called_as, shows, subject.length, judge_subject(subject))


def _resolve_way(given: str | None, path: str, name: str) -> str:
    """Return the word of --as: `given`, or without it the `name` of the function if it is one.

    Raises: ValueError with all words, and how to write an adapter.
    """
    if given in WAYS:
        return given
    if given is None and name.replace("_", "-") in WAYS:
        return name.replace("_", "-")
    calls = "; ".join(
        f"--as {word}: {calls_in_words(word)} returns {RETURNS[word]}" for word in WAYS
    )
    came = f", got {given!r}" if given is not None else ""
    raise ValueError(
        f"say what {name} returns by --as{came}, as in `posenc inspect module {shlex.quote(path)} "
        f"--as cos-sin`. {calls}. Or write an adapter that is called so and calls yours, as this "
        f"line does: {ADAPTER}"
    )


_RESULT_IN_WORDS = {
    "rotated content": "rotated queries or keys",
    "sinusoids": "sines and cosines of positions",
    "cos and sin": "cosines and sines of angles",
    "complex": "angles as complex numbers",
    "bias": "a bias of the scores",
    "values": "values by position",
}


@torch.no_grad()
def judge_subject(subject: Subject) -> list[Verdict]:
    """Return a verdict for each of CHECKS; where the module ignores the positions that it is given,
    one that says so, and the others as not applicable."""
    used = "positions that it takes are used"
    if subject.ignores:
        alike = f"{subject.form.name} gives the same wherever its tokens are"
        unknown = [Verdict(check, None, "its positions change nothing") for check in CHECKS]
        return [Verdict(used, False, alike), *unknown]
    return [_run_check(check, subject) for check in CHECKS]


def _run_check(check: str, subject: Subject) -> Verdict:
    """Return the verdict of one of CHECKS; the error as its text if the check raises one."""
    try:
        return Verdict(check, *CHECKS[check](subject))
    except Exception as error:  # foreign code: any exception is the finding
        return Verdict(check, None, f"does not run: {one_line(error)}")


def run(
    path: str, way: str | None, arguments: Sequence[str], width: int, heads: int, as_json: bool
) -> None:
    """Print the finding in a sentence, how the module is called, and a verdict for each check."""
    options = parse_arguments(arguments)
    tell(f"measuring {path}")
    sheet = measure_module(path, way, arguments=options, width=width, heads=heads)
    tell("")
    if as_json:
        content = {
            "module": path,
            "called_as": sheet.called_as,
            "shows": sheet.shows,
            "length": sheet.length,
            "answer": sheet.answer,
            "checks": [dataclasses.asdict(verdict) for verdict in sheet.checks],
        }
        print(json.dumps(content, indent=1, allow_nan=False))
        return
    words = {True: "yes", False: "no", None: "–"}
    rows = [(verdict.check, words[verdict.holds], verdict.measured) for verdict in sheet.checks]
    console = stdout(140)  # columns where stdout is no terminal
    console.print(sheet.answer, markup=False, highlight=False)
    title = f"{path}, called as {sheet.called_as}, {sheet.length:,} tokens"
    console.print(title, markup=False, highlight=False, style="dim")
    print_table(console, ("check", "holds", "measured"), rows)
