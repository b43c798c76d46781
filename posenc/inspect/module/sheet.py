"""Run every check on a foreign module, and write the sentence that comes first."""

import dataclasses
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from posenc.inspect.module.build import build
from posenc.inspect.module.checks import calls, compiled, precision, slopes
from posenc.inspect.module.find import find_subject
from posenc.inspect.module.subject import Measured, Subject
from posenc.report.page.console import print_table, stdout
from posenc.report.page.failure import one_line
from posenc.report.page.progress import tell

CHECKS: dict[str, Callable[[Subject], Measured]] = {
    "positions stay distinct": precision.apart,
    "bfloat16 activations keep positions": precision.activations,
    "module.bfloat16() keeps positions": precision.cast,
    "earlier calls leave no trace": calls.history,
    "a position keeps its values as the sequence grows": calls.growth,
    "a token alone is the token in its sequence": calls.alone,
    "queries and keys are rotated alike": calls.sides,
    "a row does not depend on the batch's farthest": calls.beside,
    "its own start moves its positions": calls.own_start,
    "positions are right as far as it states": precision.reach,
    "it runs beyond its length if it claims to": precision.beyond,
    "slopes of ALiBi are the authors'": slopes.slopes,
    "one compiled graph works for all lengths": compiled.one_graph,
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
        """Return the checks that fail."""
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


def measure_module(
    path: str, arguments: Sequence[str] = (), call: str | None = None
) -> ModuleSheet:
    """Build the module at "package.module:Class", find how it is called, and check it.

    Raises: ValueError for a module that cannot be built, called or judged, with a hint.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's deprecations
        made = partial(build, path, arguments)
        subject = find_subject(made(), arguments, call, made)
        return ModuleSheet(
            path.rpartition(":")[2],
            subject.form.name,
            _SHOWS[subject.view.how],
            subject.length,
            verdicts(subject),
        )


_SHOWS = {
    "turned content": "turned queries or keys",
    "sinusoids": "sines and cosines of positions",
    "cos and sin": "cosines and sines of angles",
    "angles": "angles",
    "complex": "angles as complex numbers",
    "bias": "a bias of the scores",
    "values": "values by position",
}


@torch.no_grad()
def verdicts(subject: Subject) -> list[Verdict]:
    """Check what every encoding of posenc must satisfy, as far as the module's form allows."""
    found = [_verdict(check, subject) for check in CHECKS]
    if subject.ignored is not None:
        said = f"{subject.ignored} gives the same wherever its tokens stand"
        found.append(Verdict("positions that it takes are used", False, said))
    return found


def _verdict(check: str, subject: Subject) -> Verdict:
    try:
        return Verdict(check, *CHECKS[check](subject))
    except Exception as error:  # foreign code: any exception is the finding
        return Verdict(check, None, f"does not run: {one_line(error)}")


def run(path: str, arguments: Sequence[str], call: str | None, as_json: bool) -> None:
    """Print the finding in a sentence, how the module is called, and a verdict for each check."""
    tell(f"measuring {path}")
    sheet = measure_module(path, arguments, call)
    tell("")
    if as_json:
        found = {
            "module": path,
            "called_as": sheet.called_as,
            "shows": sheet.shows,
            "length": sheet.length,
            "answer": sheet.answer,
            "checks": [dataclasses.asdict(verdict) for verdict in sheet.checks],
        }
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    words = {True: "yes", False: "no", None: "–"}
    rows = [(verdict.check, words[verdict.holds], verdict.measured) for verdict in sheet.checks]
    console = stdout(140)
    console.print(sheet.answer, markup=False, highlight=False)
    title = f"{path}, called as {sheet.called_as}, {sheet.length:,} tokens"
    console.print(title, markup=False, highlight=False, style="dim")
    print_table(console, ("check", "holds", "measured"), rows)
