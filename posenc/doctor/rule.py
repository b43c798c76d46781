"""A rule: what it checks, its severity, and its page in `pages/`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Literal

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.report.report import join_names

Severity = Literal["E", "W", "I"]
COMMAND_INDENT = "    "
"""Begins a line of a cure that is to be copied, and is not wrapped."""
SEVERITIES = {"E": "error", "W": "warning", "I": "note"}
"""Severity -> its name in messages."""


@dataclass(frozen=True)
class Hit:
    """One place where a rule fired.

    message: what was found, with the user's own values. concerned: the runtimes for which this is a
    wrong result: those named by --for that compute something else than is meant, or refuse; without
    any, an error becomes a warning. affected: all runtimes, named or not, that the message speaks
    of; a finding lists them where no runtime is concerned. is_contradiction: True if the file
    contradicts itself, so that no reading can be right. cure: what to do; "" for the cure of the
    rule's page.
    """

    message: str
    concerned: tuple[str, ...] = ()
    affected: tuple[str, ...] = ()
    is_contradiction: bool = False
    cure: str = ""


def contradiction_hit(message: str, cure: str = "") -> Hit:
    """Return a hit for a file that contradicts itself, so that no runtime can read it right."""
    return Hit(message, affected=ALL_RUNTIMES, is_contradiction=True, cure=cure)


Check = Callable[[Case], Iterable[Hit]]


@dataclass(frozen=True)
class Finding:
    """What the command prints of one Hit.

    code: the rule's, such as PD017. severity: the rule's, or W for a hit of an error that concerns
    no named runtime. message, cure: in words. runtimes: those that compute something else; where
    none does, those that the message speaks of. is_contradiction: as of the Hit.
    """

    code: str
    severity: Severity
    message: str
    runtimes: tuple[str, ...]
    cure: str
    is_contradiction: bool = False

    def as_json(self) -> dict[str, object]:
        """Return the object that --json prints: all fields but is_contradiction."""
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "runtimes": list(self.runtimes),
            "cure": self.cure,
        }


@dataclass(frozen=True)
class Rule:
    """A rule of the doctor, by its code, such as PD017.

    severity: E if a hit means a wrong result, W if runtimes differ in something else, I for a note.
    """

    code: str
    severity: Severity
    check: Check

    @cached_property
    def page(self) -> str:
        """Return the rule's page in Markdown: what, why, an example, the cure, and threads."""
        page_file = resources.files("posenc.doctor").joinpath("pages", f"{self.code}.md")
        return page_file.read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        """Return the first line of the page, without the code."""
        return self.page.partition("\n")[0].partition(": ")[2]

    def section(self, name: str) -> str:
        """Return the text of a section of the page, without its heading; "" if there is none.

        name: Why, Example, Cure or Threads.
        """
        return self.page.partition(f"\n## {name}\n")[2].partition("\n## ")[0].strip()

    @property
    def why(self) -> str:
        """Return why the rule matters, in one line."""
        return " ".join(self.section("Why").split())

    @property
    def cure(self) -> str:
        """Return the text of the section Cure before its code block (the example's mended config),
        in one line."""
        return " ".join(self.section("Cure").partition("```")[0].split())

    def judge(self, case: Case) -> Iterator[Finding]:
        """Yield the findings of this rule about a file. An error becomes a warning if no named
        runtime computes something else."""
        for hit in self.check(case):
            severity: Severity = self.severity
            if severity == "E" and not hit.concerned and not hit.is_contradiction:
                severity = "W"
            runtimes = hit.concerned or tuple(r for r in hit.affected if case.computed[r].is_known)
            cure = hit.cure or self.cure
            yield Finding(self.code, severity, hit.message, runtimes, cure, hit.is_contradiction)


RULES_BY_CODE: dict[str, Rule] = {}
"""The rules by code."""


def rule(code: str, severity: Severity) -> Callable[[Check], Check]:
    """Return a decorator that puts a check into RULES_BY_CODE as the rule `code`.

    The check is a function of a Case that yields a Hit for each thing it finds. Its docstring says
    what it reports, and its page is pages/CODE.md.

    >>> @rule("PD099", "W")  # doctest: +SKIP
    ... def no_heads(case: Case) -> Iterator[Hit]:
    ...     if case.config.get("num_attention_heads") == 0:
    ...         yield contradiction_hit("the model has no heads")
    """

    def add(check: Check) -> Check:
        assert code not in RULES_BY_CODE, code
        RULES_BY_CODE[code] = Rule(code, severity, check)
        return check

    return add


def join_runtimes(runtimes: Iterable[str]) -> str:
    """Return names of runtimes in words, such as "a, b and c"; "no named runtime" for none."""
    return join_names([*runtimes] or ["no named runtime"])
