"""Attend by dense scores and a plain softmax; defines the result for every other way."""

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.problem import Problem
from posenc.attend.ways.cost import Cost, dense_bytes
from posenc.encodings.numbers.tracking import transformed


def cost(problem: Problem) -> Cost:
    """Return the expected time and memory."""
    return Cost("O(q_len * kv_len)", dense_bytes(problem, problem.q_len))


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend from all queries at once."""
    return attend(problem.ready(problem.q_len), 0, problem.q_len)


def attend(problem: Problem, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Attend from queries [start, stop) to all keys; return the output, and the log-sum-exp if
    needed."""
    weights, lse = weigh(problem, start, stop)
    if problem.dropout_p:
        weights = F.dropout(weights, problem.dropout_p)
    return problem.combine(weights, start, stop), lse


def weigh(problem: Problem, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Return the weights of all keys for queries [start, stop), and the log-sum-exp if needed."""
    visible = problem.visible(start, stop)
    scores = problem.scores(start, stop, visible)
    # The lowest finite number, not -inf: a row that sees no key must not become NaN before it is
    # set to zero.
    lowest = torch.finfo(scores.dtype).min
    if not (problem.needs_grad or torch.compiler.is_compiling() or transformed()):
        problem.hide(scores, start, stop, lowest)
    elif visible is not None:
        scores = scores.masked_fill(~visible, lowest)
    weights = scores.softmax(-1)
    lse = scores.logsumexp(-1) if problem.need_lse else None
    if visible is not None and not problem.every_row_sees_a_key:
        weights = weights.masked_fill(~visible, 0)
        if lse is not None:
            lse = lse.masked_fill(~visible.any(-1), -torch.inf)
    return weights, lse
