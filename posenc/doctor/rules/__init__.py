"""The rules from PD001 on, one kind of mistake per file."""

from posenc.doctor.misreadings import Case
from posenc.doctor.rule import RULES_BY_CODE, Finding, Rule
from posenc.doctor.rules import (  # noqa: F401 - importing a file fills the table
    attention,
    byte_order_mark,
    dynamic,
    foreign_names,
    gguf,
    impossible_numbers,
    layer_kinds,
    lengths,
    longer_texts,
    longrope,
    misplaced_keys,
    model_type,
    mrope,
    overrides,
    rope_dicts,
    rope_types,
    unexplained,
    unread_keys,
    weights,
    yarn,
)

RULES: dict[str, Rule] = dict(sorted(RULES_BY_CODE.items()))
"""Code -> rule, in the order of the codes."""
SEVERITY_ORDER = {"E": 0, "W": 1, "I": 2}
"""Severity -> its place among the findings; the gravest is first."""
CODES_OF_REFUSALS = ("PD015", "PD042")
"""Warnings that already report a refusal: of a length, as max_position_embeddings was not raised
with yarn (PD015), and of dual chunk attention (PD042)."""
CATCH_ALL_CODES = ("PD038", "PD039")
"""Rules for what no other rule explains, and so read the others' findings: a runtime computes
something else (PD038), or refuses the file (PD039)."""


def findings(case: Case) -> list[Finding]:
    """Return what all rules find in a case: errors, warnings, notes, and in each by code.

    Raises: ValueError where a rule cannot calculate with the values of the file.
    """
    found: list[Finding] = []
    for code, rule in RULES.items():
        if code not in CATCH_ALL_CODES:
            try:
                found += rule.judge(case)
            except (ArithmeticError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise ValueError(
                    f"{case.source.path}: {code} cannot judge these values "
                    f"({type(error).__name__}: {error})."
                ) from error
    explained_runtimes = {
        name
        for f in found
        if f.severity == "E" or f.code in CODES_OF_REFUSALS
        for name in f.runtimes
    }
    found += unexplained.unexplained_findings(case, explained_runtimes)
    return sorted(found, key=lambda f: (SEVERITY_ORDER[f.severity], f.code))
