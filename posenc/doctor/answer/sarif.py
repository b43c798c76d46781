"""Convert findings to SARIF 2.1.0, which code review tools read."""

from collections.abc import Sequence
from typing import Any

from posenc import __version__
from posenc.doctor.case import Case
from posenc.doctor.rule import SEVERITIES, Finding
from posenc.doctor.rules import RULES
from posenc.report.files.opened import text_of

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def report(case: Case, found: Sequence[Finding]) -> dict[str, Any]:
    """Return one SARIF run with the rules that fired."""
    codes = sorted({finding.code for finding in found})
    results = [_result(case, finding, codes) for finding in found]
    return _log([_rule(code) for code in codes], results=results)


def unjudged(why: str) -> dict[str, Any]:
    """Return a SARIF run without results that says why nothing was judged."""
    said = [{"level": "error", "message": {"text": why}}]
    failed = {"executionSuccessful": False, "toolExecutionNotifications": said}
    return _log([], results=[], invocations=[failed])


def _log(rules: list[dict[str, Any]], **run: Any) -> dict[str, Any]:
    driver = {"name": "posenc doctor", "version": __version__, "rules": rules}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, **run}]}


def _rule(code: str) -> dict[str, Any]:
    rule = RULES[code]
    return {
        "id": code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.cure},
        "defaultConfiguration": {"level": SEVERITIES[rule.severity]},
    }


def _result(case: Case, finding: Finding, codes: list[str]) -> dict[str, Any]:
    return {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": SEVERITIES[finding.severity],
        "message": {"text": f"{finding.message}. {finding.cure}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": case.source.path.as_posix()},
                    "region": {"startLine": _line(case, finding.message)},
                }
            }
        ],
        "properties": {"runtimes": list(finding.runtimes)},
    }


def _line(case: Case, message: str) -> int:
    """Return the line of the first rotary key that the message names; 1 for GGUF."""
    if case.metadata is not None:
        return 1
    lines = text_of(case.source.path, errors="replace").splitlines()
    for word in message.replace(".", " ").replace(",", " ").split():
        for number, line in enumerate(lines, 1):
            if f'"{word}"' in line:
                return number
    return 1
