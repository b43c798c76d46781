"""`posenc inspect contract NAMES`: run the checks of the contract on encodings, and say which
fail."""

import logging
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass

from posenc.command_line.errors import RunFailed
from posenc.command_line.progress import replace_status_line
from posenc.encodings import create
from posenc.report.report import Block, Report, Section, Table, section_on_training
from posenc.report.terminal import print_line, stderr_console
from posenc.testing.claims import note_on_missing_source
from posenc.testing.contract import VOIDING_FAILURES, Verdict, every_check, maker, verdicts
from posenc.testing.harness import SHAPE


@dataclass(frozen=True)
class ContractOutcome:
    """Hold the verdicts of every check on one encoding.

    name: the encoding as it was named. note: a sentence on what its documentation lacks, which no
    check judges; None if it lacks nothing.
    """

    name: str
    verdicts: list[Verdict]
    note: str | None

    @property
    def failed_verdicts(self) -> list[Verdict]:
        """Return the verdicts of the checks that fail."""
        return [verdict for verdict in self.verdicts if verdict.failure is not None]


def judge_contract(names: Sequence[str]) -> list[ContractOutcome]:
    """Run every check on each encoding once; stderr shows which one runs.

    Raises: ValueError for a name that is wrong, before anything is checked.
    """
    for name in names:
        _refuse_unbuildable(name)
    outcomes = []
    for name in dict.fromkeys(names):
        outcomes.append(
            ContractOutcome(name, _run_checks(name), note_on_missing_source(create(name, SHAPE)))
        )
    replace_status_line("")
    return outcomes


def refuse_failures(outcomes: Sequence[ContractOutcome]) -> None:
    """Raise RunFailed if a check fails, with the number of them by encoding."""
    failure_counts_in_words = [
        f"{outcome.name} {len(outcome.failed_verdicts)}"
        for outcome in outcomes
        if outcome.failed_verdicts
    ]
    if failure_counts_in_words:
        raise RunFailed(f"checks that fail: {', '.join(failure_counts_in_words)}.")


def report_of(outcomes: Sequence[ContractOutcome]) -> Report:
    """Return the report: how many checks fail, and for each encoding a table, the failing first."""
    encoding_facts = []
    for outcome in outcomes:
        facts_by_check = {
            verdict.check: {"holds": not verdict.failure, "failure": verdict.failure}
            for verdict in outcome.verdicts
        }
        encoding_facts.append(
            {"encoding": outcome.name, "checks": facts_by_check, "note": outcome.note}
        )
    sections = [Section(outcome.name, [*_blocks(outcome)]) for outcome in outcomes]
    passing = [outcome.name for outcome in outcomes if not outcome.failed_verdicts]
    if passing:
        sections.append(section_on_training(passing))
    return Report(
        "The contract",
        " ".join(map(_answer, outcomes)),
        {"encodings": encoding_facts},
        sections,
    )


def _answer(outcome: ContractOutcome) -> str:
    """Return sentences: how many checks fail, and why comparing the encoding would mean nothing if
    one of these makes it so."""
    checks_in_words = _checks_in_words(outcome.verdicts)
    if not outcome.failed_verdicts:
        return f"{outcome.name} passes the contract: {checks_in_words}."
    answer = f"{outcome.name} fails {len(outcome.failed_verdicts)} of {checks_in_words}."
    reasons = {
        v.check: VOIDING_FAILURES[v.check]
        for v in outcome.failed_verdicts
        if v.check in VOIDING_FAILURES
    }
    reason = reasons.get("outputs_are_finite")
    if reason:  # NaN differs from itself, so all others may hold
        reasons = {"": f"{reason}, so that no check can compare them"}
    if reasons:
        answer += f" Comparing it would mean nothing: {'; '.join(reasons.values())}."
    return answer


def _blocks(outcome: ContractOutcome) -> Iterator[Block]:
    """Yield the table of an encoding's checks, the failed ones first, and its note if it has
    one."""
    rows = []
    for verdict in sorted(outcome.verdicts, key=lambda verdict: verdict.failure is None):
        holds_in_words = "no" if verdict.failure is not None else "yes"
        rows.append([verdict.check.replace("_", " "), holds_in_words, verdict.failure or ""])
    yield Table(["check", "holds", "what it found"], rows, outcome.name)
    if outcome.note:
        yield f"Note on its words, which the contract does not judge: {outcome.note}."


def _refuse_unbuildable(name: str) -> None:
    """Raise ValueError if the encoding cannot be built for the model of the checks."""
    try:
        create(name, SHAPE)
    except Exception as error:
        raise ValueError(
            f"{name}: cannot be built for the model of the checks ({SHAPE.num_heads} heads of "
            f"{SHAPE.head_dim}, {SHAPE.num_kv_heads} for keys): {error}"
        ) from error


def _run_checks(name: str) -> list[Verdict]:
    """Run every check of the contract on one encoding, and return their verdicts; stderr shows
    which check runs."""
    checks = every_check()
    print_line(
        stderr_console(),
        f"{name}: {_checks_in_words(checks)} of its behaviour, about half a minute.",
    )
    collected_verdicts = []
    with _without_logs():
        for i, verdict in enumerate(verdicts(maker(name), checks), 1):
            replace_status_line(f"{name}: {verdict.check.replace('_', ' ')} ({i} of {len(checks)})")
            collected_verdicts.append(verdict)
    return collected_verdicts


def _checks_in_words(checks: Sized) -> str:
    """Return how many checks there are, as text: "12 checks"."""
    return f"{len(checks)} {'check' if len(checks) == 1 else 'checks'}"


@contextmanager
def _without_logs() -> Iterator[None]:
    """Silence loggers: torch logs tracebacks where an encoding cannot be compiled or exported, and
    the table says that in a line."""
    level_before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level_before)
