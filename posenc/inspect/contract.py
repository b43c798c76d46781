"""`posenc inspect NAME --contract`: hold encodings to the contract and print what fails."""

import json
import logging
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from posenc.encodings import create
from posenc.report.page.console import print_table, stderr, stdout
from posenc.report.page.failure import RunFailed
from posenc.report.page.progress import say, tell
from posenc.testing import VOIDING, Verdict, every_check, maker, unsourced, verdicts
from posenc.testing.harness import SHAPE


def run(names: Sequence[str], as_json: bool) -> None:
    """Print a verdict for each check of each encoding.

    Raises: ValueError for a name that is wrong, before anything is checked; RunFailed where an
    encoding fails a check, after all of them.
    """
    for name in names:
        _refuse_unbuildable(name)
    verdicts_of = {name: _run_checks(name) for name in dict.fromkeys(names)}
    tell("")
    if as_json:
        rows = [_json_object(name, outcomes) for name, outcomes in verdicts_of.items()]
        print(json.dumps(rows, indent=1))
    else:
        for name, outcomes in verdicts_of.items():
            _print_verdicts(name, outcomes)
    failed = []
    for name, outcomes in verdicts_of.items():
        count = sum(verdict.failure is not None for verdict in outcomes)
        if count:
            failed.append(f"{name} {count}")
    if failed:
        raise RunFailed(f"checks that fail: {', '.join(failed)}.")


def _json_object(name: str, outcomes: list[Verdict]) -> dict[str, Any]:
    """Return the verdicts on one encoding as an object of the JSON output."""
    return {
        "encoding": name,
        "checks": {v.check: {"holds": not v.failure, "failure": v.failure} for v in outcomes},
        "note": unsourced(create(name, SHAPE)),
    }


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
    say(stderr(), f"{name}: {_number_of_checks(checks)} of its behaviour, about half a minute.")
    outcomes = []
    with _without_logs():
        for i, verdict in enumerate(verdicts(maker(name), checks), 1):
            tell(f"{name}: {verdict.check.replace('_', ' ')} ({i} of {len(checks)})")
            outcomes.append(verdict)
    return outcomes


def _number_of_checks(checks: Sized) -> str:
    """Return how many checks there are, as text: "12 checks"."""
    return f"{len(checks)} {'check' if len(checks) == 1 else 'checks'}"


@contextmanager
def _without_logs() -> Iterator[None]:
    """Silence loggers: torch logs tracebacks where an encoding cannot be compiled or exported, and
    the table says that in a line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _print_verdicts(name: str, outcomes: list[Verdict]) -> None:
    """Print how many checks fail, and a table with the failing ones first."""
    console = stdout(140)
    failed = [v for v in outcomes if v.failure is not None]
    void = {v.check: VOIDING[v.check] for v in failed if v.check in VOIDING}
    not_finite = void.get("outputs_are_finite")
    if not_finite:  # NaN differs from itself, so all others may hold
        void = {"": f"{not_finite}, so that no check can compare them"}
    text = f"{name} passes the contract: {_number_of_checks(outcomes)}."
    if failed:
        text = f"{name} fails {len(failed)} of {_number_of_checks(outcomes)}."
    if void:
        text += f" Comparing it would mean nothing: {'; '.join(void.values())}."
    console.print(text, markup=False, highlight=False)
    rows = [
        [v.check.replace("_", " "), "no" if v.failure is not None else "yes", v.failure or ""]
        for v in sorted(outcomes, key=lambda v: v.failure is None)
    ]
    print_table(console, ("check", "holds", "what it found"), rows, overflow="fold")
    if note := unsourced(create(name, SHAPE)):
        say(console, f"Note on its words, which the contract does not judge: {note}.")
