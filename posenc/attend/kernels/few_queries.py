"""One or two queries over many keys by a pass of C over keys and values, as decoding does at every
step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.attend.kernels import sdpa
from posenc.attend.kernels.cost import Cost, scores_bytes
from posenc.attend.problem import Problem
from posenc.numbers import native
from posenc.numbers.tracking import followed

MOST = 2
"""Queries: each reads all keys, for which more of them take torch's kernel less time."""
SHARED = 1 << 22
"""Bytes of keys and values from which threads share the work: waking them takes 0.1 ms."""
SOURCE = Path(__file__).with_suffix(".c")
FUNCTIONS = {torch.float32: "attend_f32", torch.bfloat16: "attend_bf16"}


def refuse(problem: Problem) -> str | None:
    tensors = problem.q, problem.k, problem.v
    if followed(*tensors):
        return "a compiler, a trace, a transform or forward mode looks at plain operations"
    if problem.q_len > MOST:
        return f"it is for {MOST} queries at most, and these are {problem.q_len}"
    if problem.q.device.type != "cpu" or {t.dtype for t in tensors} - {problem.product_dtype}:
        return "it computes on the CPU, in the dtype of queries, keys and values alike"
    if problem.product_dtype not in FUNCTIONS:
        return "it computes in float32 and bfloat16"
    if problem.needs_grad or problem.need_lse or problem.dropout_p:
        return "it has no gradients, no log-sum-exp and no dropout"
    if problem.term is not None and not sdpa.takes_rows(problem):
        return "it changes scores or values, which this kernel does not show"
    return "no C compiler here" if _library() is None else None


def cost(problem: Problem) -> Cost:
    held = 1 if problem.term is None else 2 + problem.term.held(False)
    return Cost("O(q_len * kv_len)", int(held * scores_bytes(problem, problem.q_len)))


def run(problem: Problem) -> tuple[Tensor, None]:
    bias = None
    if problem.term is not None:
        problem, bias = sdpa.with_rows(problem)
    q, k, v = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (problem.q, problem.k, problem.v)
    )
    batch, heads, rows, width = q.shape
    kv_heads, keys, v_width = k.shape[1], k.shape[2], v.shape[3]
    bias, visible = (
        native.in_rows(t, (batch, heads, rows, keys)) for t in (bias, problem.visible(0, rows))
    )
    bias = None if bias is None else bias.float()
    out = q.new_empty(batch, heads, rows, v_width)
    given = q, k, v, bias, visible
    strides = ((0, 0, 0) if t is None else t.stride()[:3] for t in given)
    native.run(
        getattr(_library(), FUNCTIONS[q.dtype]), batch * kv_heads, *given, out,
        *(batch, heads, kv_heads, rows, keys, width, v_width), *strides, float(problem.scale),
        threads=1 if k.nbytes + v.nbytes < SHARED else None,
    )  # fmt: skip
    return out, None


def _library() -> Any:
    return native.load(SOURCE, tuple(FUNCTIONS.values()))
