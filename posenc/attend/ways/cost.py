"""What a way is expected to cost, for `explain`."""

from __future__ import annotations

from typing import NamedTuple

from posenc.attend.problem import Problem


class Cost(NamedTuple):
    time: str
    """How time grows."""
    extra_bytes: int
    """The most memory held at once beyond inputs, output and gradients; of the backward pass too
    where gradients are needed."""


def scores_bytes(problem: Problem, rows: int) -> int:
    """Return the bytes of the materialized scores of `rows` queries."""
    batch, heads = problem.q.shape[:2]
    return batch * heads * rows * problem.kv_len * max(4, problem.q.element_size())


def dense_bytes(problem: Problem, rows: int) -> int:
    """Return the bytes of scores, weights, in a backward pass a gradient, and what the term makes
    on the way, for `rows` queries."""
    known = problem.known
    arrays = 2 if problem.term is None else 2 + problem.term.held(known.needs_grad)
    if known.needs_grad:  # weights are kept as they were before rows without a key were emptied
        arrays += 1 if known.every_row_sees_a_key else 2
    return int(arrays * scores_bytes(problem, rows))
