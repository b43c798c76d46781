"""Describe a module under test: how to call and read it, and its longest sequence."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from posenc.inspect.module.form import Form
from posenc.inspect.module.inputs import HEADS, Inputs
from posenc.inspect.module.view import View
from posenc.report.page.failure import one_line

Measured = tuple[bool | None, str]
"""True if a property holds (None: it does not apply), and the numbers."""


LONGEST = 4096
SLOW = 0.3
"""If a call takes longer, in seconds, no longer sequence is tried."""
MOST_NUMBERS = 2**23
_STATED = tuple(
    "max_position_embeddings max_positions max_seq_len max_seq_len_cached "
    "max_sequence_length max_seqlen max_length max_len num_positions num_embeddings".split()
)


@dataclass(frozen=True)
class Limit:
    """The smallest number of tokens that the module refused, and its message."""

    tokens: int
    error: str


@dataclass(frozen=True)
class Subject:
    """A module under test. fresh: makes an unused copy. length: number of tokens in the checks.
    stated: number of positions that it claims, or None. ignored: a way to call it with positions
    that have no effect, or None.
    """

    module: nn.Module
    fresh: Callable[[], nn.Module]
    form: Form
    view: View
    width: int
    heads: int = HEADS
    length: int = LONGEST
    limit: Limit | None = None
    stated: int | None = None
    ignored: str | None = None

    def inputs(self, positions: Tensor | int, **given: Any) -> Inputs:
        """Return the inputs of a call at these positions, or at the first `positions` ones."""
        if isinstance(positions, int):
            positions = torch.arange(positions)
        return Inputs(positions, self.width, probe=self.view.probe, heads=self.heads, **given)

    def see(
        self,
        inputs: Inputs,
        module: nn.Module | None = None,
        form: Form | None = None,
        row: int = 0,
    ) -> Tensor:
        """Return the module's result for these inputs, from a fresh copy unless one is given."""
        returned = (form or self.form).call(self.fresh() if module is None else module, inputs)
        return self.view.read(returned, inputs.batch, row)


def stated_positions(module: nn.Module) -> int | None:
    """Return how many positions a module or its config says it has."""
    claims, config = getattr(module, "claims", None), getattr(module, "config", None)
    if (own := getattr(claims, "max_positions", None)) is not None:
        return own
    for name in _STATED:
        for holder in (config, module):
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def with_length(subject: Subject) -> Subject:
    """Return the subject with the longest sequence that it runs in reasonable time, up to
    LONGEST."""
    good = 11
    for count in (2**i for i in range(4, LONGEST.bit_length())):
        start = time.perf_counter()
        error = _refusal(subject, count)
        if error is not None:
            return _bisected(subject, good, count, error)
        good = count
        size = subject.see(subject.inputs(count)).numel()
        grows = 4 if subject.view.kind == "bias" else 2
        if time.perf_counter() - start > SLOW or size * grows > MOST_NUMBERS:
            break
    return replace(subject, length=good)


def _bisected(subject: Subject, good: int, bad: int, error: str) -> Subject:
    while bad - good > 1:
        middle = (good + bad) // 2
        found = _refusal(subject, middle)
        if found is None:
            good = middle
        else:
            bad, error = middle, found
    return replace(subject, length=good, limit=Limit(bad, error))


def _refusal(subject: Subject, count: int) -> str | None:
    try:
        subject.see(subject.inputs(count))
    except Exception as error:  # foreign code: any exception is its limit
        return one_line(error)
    return None
