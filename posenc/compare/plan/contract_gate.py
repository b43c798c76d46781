"""Check users' encodings against the part of the contract that a comparison of losses requires."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from posenc.compare.plan.cost import lengths_of_tests
from posenc.compare.plan.encodings import ComparedEncoding
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.objectives import objective_of
from posenc.compare.trial.task_of_trial import shape_length
from posenc.encodings import create, entry, line_in_user_code, parse
from posenc.testing import CHECKS, VOIDING_FAILURES, maker, verdicts
from posenc.testing.contract import check_in_both_modes
from posenc.testing.harness import (
    SHAPE,
    Make,
    build_layer,
    differs,
    possible_length,
    random_embeddings,
    successive_positions,
)

_REQUIRED_CHECKS = {name: CHECKS[name] for name in VOIDING_FAILURES}


@contextlib.contextmanager
def exits_as_errors() -> Iterator[None]:
    """In the block under `with`, raise ValueError with the line where an encoding ends the program
    (sys.exit) or interrupts it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if at := line_in_user_code(error):
            raise ValueError(f"{at}: {type(error).__name__}, and nothing was trained.") from error
        raise


def find_contract_failures(
    compared: Sequence[ComparedEncoding], allowed: bool, trials: Sequence[TrialConfig] = ()
) -> dict[str, str]:
    """Return why results of an encoding would mean nothing: a dict from its text to the reason, for
    the user's encodings that break the contract.

    posenc's own encodings are skipped, since the test suite checks them.

    allowed: with --unchecked, return the reasons instead of raising.
    trials: one of each task, at whose shortest and longest length some checks are repeated.
    Raises: ValueError at the first such encoding, unless `allowed`.
    """
    reasons = {}
    causal = [t for t in trials if all(objective_of(t).stacks)]
    lengths = set()
    for trial in causal:
        tested = lengths_of_tests(trial)
        for length in (tested[0], max(tested)):
            lengths.add((shape_length(trial), length))
    check_lengths = check_in_both_modes(partial(_check_outputs_at_lengths, sorted(lengths)))
    checks = _REQUIRED_CHECKS | {"lengths_of_the_study": check_lengths}
    for encoding in compared:
        with contextlib.redirect_stdout(sys.stderr):  # its prints are no output of the command
            why = _contract_failure(encoding, checks) if encoding.code else None
        if why is None:
            continue
        if not allowed:
            raise ValueError(
                f"{encoding.label}: {why}. Its losses would be meaningless. --unchecked compares "
                "it anyway, with a note in the report."
            )
        reasons[encoding.text] = why
    return reasons


def _check_outputs_at_lengths(lengths: Sequence[tuple[int, int]], make: Make) -> None:
    """Check that outputs are finite, do not depend on later tokens, and are the same when later
    tokens are missing.

    lengths: the training length that the encoding is built for, and the tokens of a sequence.
    Raises: AssertionError, as the checks of posenc.testing do.
    """
    for train_length, length in lengths:
        model = build_layer(make, replace(SHAPE, train_length=train_length))
        positions = successive_positions(model.encoding, possible_length(model.encoding, length))
        states = random_embeddings(len(positions), batch=2)
        prefix = len(positions) // 2 + 1  # two sequences that differ after it only
        states[1, :prefix] = states[0, :prefix]
        with torch.no_grad():
            out = model(states, positions, length=len(positions))
            alone = model(states[:, :prefix], positions[:prefix], length=len(positions))
        at = f"in sequences of {length:,} tokens"
        is_finite = out.isfinite().all() and alone.isfinite().all()
        assert is_finite, f"{VOIDING_FAILURES['outputs_are_finite']} {at}"
        assert not differs(*out[:, :prefix]), f"{VOIDING_FAILURES['the_future_is_invisible']} {at}"
        assert not differs(alone, out[:, :prefix]), (
            f"{VOIDING_FAILURES['decoding_matches_prefill']} {at}"
        )


def _contract_failure(
    compared: ComparedEncoding, checks: dict[str, Callable[[Make], None]]
) -> str | None:
    """Return why results of a user's encoding would mean nothing: the first check that one of its
    parts fails; None if all pass."""
    for part in dict.fromkeys(parse(compared.text).parts):
        if not part.attribute and not entry(part.name_or_module).origin:
            continue  # posenc's own
        try:
            create(str(part), SHAPE)
        except (Exception, SystemExit) as error:  # a user's constructor may raise anything
            text = " ".join(str(error).split())[:300].rstrip(".")
            return (
                f"it could not be checked, because it cannot be built for {SHAPE.num_heads} query "
                f"heads and {SHAPE.num_kv_heads} key/value heads of {SHAPE.head_dim}: {text}"
            )
        for verdict in verdicts(maker(str(part)), checks):
            why = (verdict.failure or "").rstrip(".")
            if verdict.raised:
                return f"{why} (in the check {verdict.check})"
            if why:
                return (
                    f"{VOIDING_FAILURES[verdict.check]} ({why})"
                    if verdict.check in VOIDING_FAILURES
                    else why
                )
    return None
