"""A rule: what it checks, its severity, the cure, and where users met the mistake."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from posenc.doctor.case import Case

Severity = Literal["E", "W", "I"]
SEVERITIES = {"E": "error", "W": "warning", "I": "note"}


@dataclass(frozen=True)
class Hit:
    """One place where a rule fired.

    message: what was found, with the user's own values. concerned: the named runtimes that compute
    something else than is meant, or refuse. affected: the runtimes that it is about. contradiction:
    True if the file contradicts itself, so that no reading can be right.
    """

    message: str
    concerned: tuple[str, ...] = ()
    affected: tuple[str, ...] = ()
    contradiction: bool = False
    cure: str = ""


@dataclass(frozen=True)
class Finding:
    """A hit with its rule: what the command prints."""

    code: str
    severity: Severity
    message: str
    runtimes: tuple[str, ...]
    cure: str

    def as_json(self) -> dict[str, object]:
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "runtimes": list(self.runtimes),
            "cure": self.cure,
        }


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    severity: E if a hit means a wrong result, W if runtimes differ in something else, I for a note.
    evidence: public threads, or the runtimes' own code.
    """

    code: str
    title: str
    severity: Severity
    cure: str
    evidence: str
    check: Callable[[Case], Iterable[Hit]]

    @property
    def why(self) -> str:
        return " ".join((inspect.getdoc(self.check) or "").split())

    def judge(self, case: Case) -> Iterator[Finding]:
        """Yield findings. An E becomes W if no named runtime is concerned."""
        for hit in self.check(case):
            severity: Severity = self.severity
            if severity == "E" and not hit.concerned and not hit.contradiction:
                severity = "W"
            runtimes = hit.concerned or tuple(r for r in hit.affected if case.computed[r].knows)
            yield Finding(self.code, severity, hit.message, runtimes, hit.cure or self.cure)


@dataclass
class Table:
    """The rules by code."""

    rules: dict[str, Rule] = field(default_factory=dict)

    def rule(
        self, code: str, severity: Severity, title: str, *, cure: str, evidence: str
    ) -> Callable[[Callable[[Case], Iterable[Hit]]], Callable[[Case], Iterable[Hit]]]:
        """Decorate check(case) -> hits; its docstring says why it matters."""

        def add(check: Callable[[Case], Iterable[Hit]]) -> Callable[[Case], Iterable[Hit]]:
            assert code not in self.rules, code
            self.rules[code] = Rule(code, title, severity, cure, evidence, check)
            return check

        return add


TABLE = Table()
rule = TABLE.rule


def names(runtimes: Iterable[str]) -> str:
    """ "a, b and c"."""
    *head, last = [*runtimes] or ["no named runtime"]
    return f"{', '.join(head)} and {last}" if head else last
