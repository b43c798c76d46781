"""Attend by dense scores and a plain softmax; defines the result for every other way.

    weights = softmax(scale * q k^T + position, over visible keys)
    out     = weights v

A query that sees no key gets weights 0 and log-sum-exp -inf, where a plain softmax gives NaN.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.problem import Cost, Problem
from posenc.attend.ways import flash
from posenc.encodings.numerics.torch_modes import inside_functorch_transform, is_readable


def cost(problem: Problem) -> Cost:
    """Return the expected time and memory of attention with all scores at once."""
    return Cost("O(q_len * kv_len)", problem.dense_bytes(problem.q_len))


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend from all queries at once. Return the output (batch, num_heads, q_len, v_dim), and the
    log-sum-exp (batch, num_heads, q_len) if needed, else None."""
    return attend(problem.with_prepared_term(problem.q_len), 0, problem.q_len)


def attend(problem: Problem, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Attend from queries [start, stop) to all keys. Return the output (batch, num_heads, stop -
    start, v_dim), and the log-sum-exp (batch, num_heads, stop - start) if needed, else None."""
    visible = problem.visibility_mask(start, stop)
    # An exact mask is causality and a window, which hide tokens only. Another mask may hide
    # padding, which may be NaN, and its weight 0 times NaN would be NaN.
    if visible is not None and problem.mask is not None and not problem.mask.exact:
        k, v = flash.zero_hidden_keys(visible, problem.k, problem.v)
        problem = replace(problem, k=k, v=v)
    weights, lse = weights_and_lse(problem, start, stop, visible)
    if problem.dropout_p:
        weights = F.dropout(weights, problem.dropout_p)
    return problem.sum_values(weights, start, stop), lse


def weights_and_lse(
    problem: Problem, start: int, stop: int, visible: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the weights of all keys for queries [start, stop), (batch, num_heads, stop - start,
    kv_len), and the log-sum-exp of these queries if needed, else None.

    visible: the mask of these pairs, True for visible keys; None if all are visible.
    """
    scores = problem.scores(start, stop, visible)
    # Autograd and traces may observe operations in place.
    is_observed = (
        problem.needs_grad or torch.compiler.is_compiling() or inside_functorch_transform()
    )
    if not is_observed:
        problem.mask_scores_in_place(scores, start, stop)
    elif visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    sees_no_key = _sees_no_key(scores)
    if sees_no_key is None:
        return scores.softmax(-1), scores.logsumexp(-1) if problem.needs_lse else None
    # A softmax over -inf only would be NaN, and so would its gradient.
    scores = scores.masked_fill(sees_no_key, 0)
    lse = None
    if problem.needs_lse:
        lse = scores.logsumexp(-1).masked_fill(sees_no_key[..., 0], -torch.inf)
    return scores.softmax(-1).masked_fill(sees_no_key, 0), lse


def _sees_no_key(scores: Tensor) -> Tensor | None:
    """Return True for queries that see no key, (..., rows, 1), from masked scores; None if all
    queries are known to see one, or if there are no keys at all.

    Without keys the softmax has no numbers that could be NaN, and its sum of values is 0, as it
    must be. Scores are read and not the mask, because a bias may hide keys, too.
    """
    if scores.shape[-1] == 0:
        return None
    sees_no_key = scores.detach().amax(-1, keepdim=True) == -torch.inf
    if is_readable(sees_no_key) and not bool(sees_no_key.any()):
        return None
    return sees_no_key
