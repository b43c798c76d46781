"""What a plan says about its cost, and which keys may be left out."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.attend.problem import Problem


class Cost(NamedTuple):
    time: str
    """How time grows."""
    extra_bytes: int
    """The most memory held at once beyond inputs, output and gradients; of the backward pass too
    where gradients are needed."""


def scores_bytes(problem: Problem, rows: int) -> int:
    """What the scores of so many queries take."""
    batch, heads = problem.q.shape[:2]
    return batch * heads * rows * problem.kv_len * max(4, problem.q.element_size())


def dense_bytes(problem: Problem, rows: int) -> int:
    """What so many queries take whose scores are written out: scores, weights, in a backward pass
    a gradient, and what the term makes on the way."""
    arrays = 2 if problem.term is None else 2 + problem.term.held(problem.needs_grad)
    if problem.needs_grad:  # weights are kept as they were before rows without a key were emptied
        arrays += 1 if problem.every_row_sees_a_key else 2
    return int(arrays * scores_bytes(problem, rows))


def largest_norms(t: Tensor, dtype: torch.dtype) -> Tensor:
    """(batch, heads): the largest norm of the vectors in t, or a little more: for half types torch
    adds up in float32 and rounds once, and asking it for float32 would copy t."""
    room = 1 if t.dtype == dtype else 1 + 2 * torch.finfo(t.dtype).eps
    return torch.linalg.vector_norm(t, dim=-1).amax(-1).to(dtype) * room


def negligible(dtype: torch.dtype) -> float:
    """A key whose score is this far below a row's best has no part in the result: as many keys as
    1 / eps together would not move its last bit, 1e-7 of it in float32, by 1e-7."""
    return 3 * math.log(torch.finfo(dtype).eps)
