"""Estimate the time and memory of an attention, for `explain`."""

from typing import NamedTuple

from posenc.attend.problem import Problem


class Cost(NamedTuple):
    """Expected time and memory of one softmax attention."""

    time: str
    """Growth of the time with the lengths, such as "O(q_len * kv_len)"."""
    extra_bytes: int
    """Peak memory in addition to inputs, output and gradients, including the backward pass if
    gradients are needed."""


def scores_bytes(problem: Problem, rows: int) -> int:
    """Return the bytes needed to materialize the scores of `rows` queries."""
    batch, heads = problem.q.shape[:2]
    element_bytes = max(4, problem.q.element_size())  # scores are float32 or wider
    return batch * heads * rows * problem.kv_len * element_bytes


def dense_bytes(problem: Problem, rows: int) -> int:
    """Return the bytes needed to attend from `rows` queries at once: scores, weights, temporary
    results of the term and, if gradients are needed, saved weights."""
    arrays: float = 2  # scores and weights
    if problem.term is not None:
        arrays += problem.term.extra_score_arrays(problem.needs_grad)
    if problem.needs_grad:  # weights are saved before rows without a key are set to zero
        arrays += 1 if problem.every_row_sees_a_key else 2
    return int(arrays * scores_bytes(problem, rows))
