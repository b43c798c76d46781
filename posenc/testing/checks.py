"""Every check by its name. Each takes `make(shape)`, so that the contract and the mistakes planted
against it run the same code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from posenc.encodings.base.base import PositionEncoding
from posenc.encodings.base.shape import ModelShape
from posenc.encodings.registry import create
from posenc.testing import claims, memory, modules, numbers, sequences, tracing
from posenc.testing.harness import Make

CHECKS: dict[str, Callable[[Make], None]] = {
    name.removeprefix("assert_"): function
    for module in (numbers, claims, sequences, modules, memory)
    for name, function in vars(module).items()
    if name.startswith("assert_")
    and function.__module__ == module.__name__
    and len(inspect.signature(function).parameters) == 1
}
"""The checks that take milliseconds."""

TRACED: dict[str, Callable[[Make], None]] = {
    name.removeprefix("assert_"): function
    for name, function in vars(tracing).items()
    if name.startswith("assert_") and function.__module__ == tracing.__name__
}
"""The checks that take seconds."""

VOIDING = {
    "outputs_are_finite": "its results are not finite",
    "gradients_are_finite": "its gradients are not finite",
    "the_future_is_invisible": "a query sees later tokens",
    "decoding_matches_prefill": "its results depend on how a sequence is cut into calls",
    "rows_are_independent": "its results depend on other rows of the batch",
    "earlier_calls_leave_no_trace": "its results depend on earlier calls",
}
"""Checks without which the losses of a comparison mean nothing, and what it means to fail one."""


HARMLESS = {
    "every": "which layers of RNoPE rotate; layer 0, which is checked, always does",
    "num_positions": "CoPE counts open gates, fewer than its rows at the length that is checked",
    "init_std": "the start of parameters, which a checkpoint replaces",
}
"""Numeric options that may leave the result as it is, and why."""


@dataclass(frozen=True)
class Verdict:
    """What a check found. failure: None where the encoding holds to it."""

    check: str
    failure: str | None


def every_check(harmless: Collection[str] = ()) -> dict[str, Callable[[Make], None]]:
    """The whole contract. harmless: more numeric options that may leave the result as it is."""
    options = functools.partial(
        modules.assert_no_option_is_ignored, harmless=frozenset({*HARMLESS, *harmless})
    )
    return {**CHECKS, "no_option_is_ignored": options, **TRACED}


def maker(encoding: type[PositionEncoding] | str, **options: Any) -> Make:
    """Builds the encoding for a shape, from its class or from a text that `posenc.create` takes."""

    def make(shape: ModelShape, **more: Any) -> PositionEncoding:
        if isinstance(encoding, str):
            return create(encoding, shape, **{**options, **more})
        return encoding.from_shape(shape, **{**options, **more})

    return make


def verdicts(make: Make, checks: dict[str, Callable[[Make], None]]) -> Iterator[Verdict]:
    """Run the checks one by one. An encoding that raises fails the check.

    Raises: ValueError under `python -O`, where checks see nothing.
    """
    if not __debug__:
        raise ValueError("The contract is made of assertions: run Python without -O.")
    for name, check in checks.items():
        yield Verdict(name, _failure(check, make))


def _failure(check: Callable[[Make], None], make: Make) -> str | None:
    try:
        check(make)
    except Exception as error:  # of somebody's encoding: it may raise anything
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
        text = " ".join(lines)[:300] or "fails"
        return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
    return None
