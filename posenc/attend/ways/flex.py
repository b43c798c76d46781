"""Attend by compiled FlexAttention, with the encoding's score_mod and a block mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc.attend.problem import Problem
from posenc.attend.ways.cost import Cost
from posenc.encodings import ScoreMod
from posenc.encodings.numbers.precision import without_autocast

BLOCK = 128
"""Queries, and keys, per block of FlexAttention's block mask."""


def cost(problem: Problem) -> Cost:
    """Return the expected time and memory."""
    heads, term = problem.q.shape[1], problem.term
    table = 0
    if term is not None:
        pairs = (
            problem.q_len + problem.kv_len if _is_run(problem) else problem.q_len * problem.kv_len
        )
        table = 4 * heads * pairs
    return Cost("O(visible blocks)", table + problem.q_len * problem.kv_len // BLOCK**2 * 8)


def _is_run(problem: Problem) -> bool:
    by_distance = problem.term is not None and problem.term.by_distance is not None
    return by_distance and problem.known.runs is not None


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by compiled FlexAttention."""
    grad = problem.known.needs_grad
    with torch.set_grad_enabled(grad):
        mod = score_mod(problem)
        out = _compiled(problem.q.device.type)(
            problem.q, problem.k, problem.v, score_mod=mod, block_mask=_block_mask(problem),
            scale=problem.scale, enable_gqa=problem.q.shape[1] != problem.k.shape[1],
            return_lse=problem.need_lse,
        )  # fmt: skip
    out, lse = out if problem.need_lse else (out, None)
    return out.to(problem.q.dtype), lse


def score_mod(problem: Problem) -> ScoreMod | None:
    """Return the term's score_mod for FlexAttention. For a bias by distance at consecutive
    positions it reads a table with one row per head."""
    term = problem.term
    if term is None:
        return None
    if not _is_run(problem):
        assert term.pair is not None
        with without_autocast(problem.q.device):
            return term.pair()
    assert problem.known.runs is not None and term.by_distance is not None
    farthest = problem.known.runs[0] + problem.q_len - 1 - problem.known.runs[1]
    table = term.by_distance(farthest, problem.q_len + problem.kv_len - 1, problem.q)
    last_query = problem.q_len - 1

    def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[head, last_query - q_idx + kv_idx]

    return mod


def _block_mask(problem: Problem) -> Any:
    if problem.mask is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    mask, q_where = problem.mask, problem.mask.q_positions
    assert problem.first_key == 0 and q_where is not None
    one_row = mask.exact and (isinstance(q_where, range) or q_where.ndim == 1)  # rows are alike
    return create_block_mask(
        mask, None if one_row else problem.q.shape[0], None, problem.q_len, problem.kv_len,
        device=problem.q.device,
    )  # fmt: skip


@functools.cache
def _compiled(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # With dynamic lengths, Inductor (torch 2.13) generates C++ for the CPU that does not compile.
    return torch.compile(flex_attention, dynamic=False if device == "cpu" else None)
