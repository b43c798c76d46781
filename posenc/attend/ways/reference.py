"""Attend by dense scores and a plain softmax; defines the result for every other way."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.cost import Cost, dense_bytes
from posenc.attend.problem import Problem
from posenc.attend.ways import flash
from posenc.encodings.numbers.tracking import readable, transformed


def cost(problem: Problem) -> Cost:
    """Return the expected time and memory."""
    return Cost("O(q_len * kv_len)", dense_bytes(problem, problem.q_len))


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend from all queries at once."""
    return attend(problem.ready(problem.q_len), 0, problem.q_len)


def attend(problem: Problem, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Attend from queries [start, stop) to all keys; return the output, and the log-sum-exp if
    needed."""
    visible = problem.visible(start, stop)
    if visible is not None and problem.mask is not None and not problem.mask.exact:
        k, v = flash.seen(visible, problem.k, problem.v)
        problem = replace(problem, k=k, v=v)
    weights, lse = weigh(problem, start, stop, visible)
    if problem.dropout_p:
        weights = F.dropout(weights, problem.dropout_p)
    return problem.combine(weights, start, stop), lse


def weigh(
    problem: Problem, start: int, stop: int, visible: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the weights of all keys for queries [start, stop), and the log-sum-exp if needed."""
    scores = problem.scores(start, stop, visible)
    if not (problem.needs_grad or torch.compiler.is_compiling() or transformed()):
        problem.hide(scores, start, stop)
    elif visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    # A bias may hide keys, too.
    blind = scores.detach().amax(-1, keepdim=True) == -torch.inf if problem.kv_len else None
    if blind is None or (readable(blind) and not bool(blind.any())):
        return scores.softmax(-1), scores.logsumexp(-1) if problem.need_lse else None
    scores = scores.masked_fill(blind, 0)  # its softmax would be NaN, and so would its gradient
    lse = scores.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf) if problem.need_lse else None
    return scores.softmax(-1).masked_fill(blind, 0), lse
