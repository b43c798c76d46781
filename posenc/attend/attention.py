"""Scaled dot-product attention with a position encoding: the function, and the plan that it
follows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from posenc.attend.cache import KVCache
from posenc.attend.kernels import (
    blockwise,
    by_head,
    few_queries,
    flex,
    fused_blocks,
    reference,
    sdpa,
    short_rows,
)
from posenc.attend.kernels.cost import scores_bytes
from posenc.attend.problem import Problem
from posenc.attend.request import Request
from posenc.encoding.base import PositionEncoding
from posenc.masks import Mask
from posenc.numbers.precision import at_least_float32
from posenc.positions import KeyPositions, QueryPositions

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "reference": reference,
    "short_rows": short_rows,
    "by_head": by_head,
    "few_queries": few_queries,
    "blockwise": blockwise,
    "sdpa": sdpa,
    "flex": flex,
}
"""Each has refuse(problem) -> reason or None, cost(problem) -> Cost, and run(problem) -> (out,
log-sum-exp or None)."""


@dataclass(frozen=True)
class Plan:
    """Which implementation runs, what it is expected to cost, and why not the others.

    `time` is the order in which time grows; `extra_bytes` is the most memory held at once beyond
    inputs, output and gradients, in the backward pass too where gradients are needed.
    """

    impl: str
    reason: str
    time: str
    extra_bytes: int
    rejected: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        extra = f"{self.extra_bytes / 2**20:.1f} MiB extra"
        lines = [f"{self.impl}: {self.reason}; time {self.time}, {extra}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.rejected.items()])


def attention(
    q: Float[Tensor, "batch num_heads q_len head_dim"],
    k: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
    v: Float[Tensor, "batch num_kv_heads kv_len v_dim"],
    encoding: PositionEncoding | None = None,
    *,
    q_positions: QueryPositions,
    kv_positions: KeyPositions,
    q_state: Shaped[Tensor, "batch state_heads q_len *state"] | None = None,
    kv_state: Shaped[Tensor, "batch state_heads kv_len *state"] | None = None,
    mask: Mask | None = None,
    cache: KVCache | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    impl: str = "auto",
) -> (
    Float[Tensor, "batch num_heads q_len v_dim"]
    | tuple[Float[Tensor, "batch num_heads q_len v_dim"], Float[Tensor, "batch num_heads q_len"]]
):
    """softmax(scale * q' k'^T + position, over visible keys) v, with every place of `encoding`
    applied.

    Args:
        encoding: any position encoding; None for none.
        q_positions, kv_positions: (len) or (batch, len), plus a last axis of components where the
            encoding takes several.
        q_state, kv_state: what encoding.state gave for the tokens of q and of k.
        mask: who may look at whom; bound to the positions here unless it already is.
        cache: earlier keys and values; k, v, kv_positions and kv_state are appended and all of it
            is attended to.
        dropout_p: probability of dropping an attention weight.
        return_lse: also return the log-sum-exp of each row's scores, -inf where nothing is visible.
        impl: "auto", or the name of an implementation, which then runs or raises.

    Shapes: (batch, num_heads, q_len, v_dim) in the dtype of q; lse (batch, num_heads, q_len).
    Precision: scores, softmax and biases in float32 or better; under bfloat16 autocast queries,
    keys and values are rounded, and scores too where torch multiplies them. A row that sees no key
    gives zeros and zero gradient.
    Raises: ValueError where shapes, positions or `impl` do not fit, and for documents packed under
    `masks.causal` alone, as far as it says they are seen.

    >>> q = k = v = torch.randn(1, 4, 6, 16)
    >>> where = {"q_positions": torch.arange(6), "kv_positions": torch.arange(6)}
    >>> alibi = posenc.ALiBi(num_heads=4)
    >>> posenc.attention(q, k, v, alibi, mask=posenc.masks.causal, **where).shape
    torch.Size([1, 4, 6, 16])
    """
    request = Request.of(
        q, k, v, encoding, q_positions=q_positions, kv_positions=kv_positions, q_state=q_state,
        kv_state=kv_state, mask=mask, cache=cache, dropout_p=dropout_p, return_lse=return_lse,
    )  # fmt: skip
    with nullcontext() if cache is None else cache.unchanged_on_error():
        problems = request.problems()
        results = [_run(p, impl) for p in problems]
        out, lse = results[0] if len(results) == 1 else _merge(results)
        if out.dtype != q.dtype:  # torch's kernels return the dtype of autocast
            out = out.to(q.dtype)
    return (out, lse) if return_lse else out


def explain(
    q: Float[Tensor, "batch num_heads q_len head_dim"],
    k: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
    v: Float[Tensor, "batch num_kv_heads kv_len v_dim"],
    encoding: PositionEncoding | None = None,
    *,
    q_positions: QueryPositions,
    kv_positions: KeyPositions,
    q_state: Shaped[Tensor, "batch state_heads q_len *state"] | None = None,
    kv_state: Shaped[Tensor, "batch state_heads kv_len *state"] | None = None,
    mask: Mask | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Plan:
    """What `attention` would do with the same arguments, without computing it. For an encoding of
    several passes this is the plan of the first.

    >>> q = k = v = torch.randn(1, 4, 600, 16)
    >>> p = torch.arange(600)
    >>> plan = posenc.explain(q, k, v, posenc.CoPE(16), q_positions=p, kv_positions=p)
    >>> plan.impl
    'reference'
    """
    request = Request.of(
        q, k, v, encoding, q_positions=q_positions, kv_positions=kv_positions, q_state=q_state,
        kv_state=kv_state, mask=mask, cache=None, dropout_p=dropout_p, return_lse=return_lse,
    )  # fmt: skip
    problems = request.problems()
    plans = [_plan(problem, impl) for problem in problems]
    each = [plan.extra_bytes for plan in plans]
    # A backward pass needs what all passes kept; without one, each lets go of its own.
    extra = (sum(each) if problems[0].needs_grad else max(each)) + sum(
        t.numel() * t.element_size() * (1 if t.shape == own.shape else 2)
        for problem in problems
        for t, own in ((problem.q, request.queries.x), (problem.k, request.new.x))
        if own is not None and t is not own  # what place 2 makes, by way of more where it widens
    )
    if len(plans) > 1:  # each has a result, until they are merged
        extra += 2 * len(plans) * problems[0].q.numel() * problems[0].q.element_size()
    return replace(plans[0], extra_bytes=extra)


def _run(problem: Problem, impl: str) -> tuple[Tensor, Any]:
    name = _best(problem)[0] if impl == "auto" else _asked(problem, impl)
    if problem.q.numel() and problem.kv_len:
        return IMPLEMENTATIONS[name].run(problem)
    return _of_nothing(problem)


def _of_nothing(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Without queries or without keys: zeros, and zero gradients for all that has a part where
    there are some."""
    q, v, sides = problem.q, problem.v, (problem.queries, problem.keys)
    parts = [q, problem.k, v, *(t for side in sides for t in (side.x, side.state))]
    parts += problem.encoding.parameters()
    # An empty part of each: 0 times a number that is not finite would be NaN.
    none = sum(t.flatten()[:0].sum() for t in parts if t is not None)
    out = (q.new_zeros(*q.shape[:3], v.shape[-1]) + none).to(q.dtype)
    if not problem.need_lse:
        return out, None
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=at_least_float32(q.dtype))
    return out, (lse + none).to(lse.dtype)


def _asked(problem: Problem, impl: str) -> str:
    """An implementation that the call names. Raises: ValueError where it cannot run."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention: unknown impl {impl!r}; known: auto, {', '.join(IMPLEMENTATIONS)}."
        )
    why_not = IMPLEMENTATIONS[impl].refuse(problem)
    if why_not:
        raise ValueError(
            f"attention: impl={impl!r} cannot run {type(problem.encoding).__name__}: {why_not}."
        )
    return impl


def _plan(problem: Problem, impl: str) -> Plan:
    if impl != "auto":
        cost = IMPLEMENTATIONS[_asked(problem, impl)].cost(problem)
        return Plan(impl, "asked for by name", cost.time, cost.extra_bytes)
    name, reason = _best(problem)
    rejected = {n: why for n, kernel in IMPLEMENTATIONS.items() if (why := kernel.refuse(problem))}
    cost = IMPLEMENTATIONS[name].cost(problem)
    others = {n: "expected to be slower here" for n in IMPLEMENTATIONS if n != name}
    if problem.q.device.type == "cpu" and name != "flex":
        others["flex"] = "compiling takes seconds; ask for it by name"
    return Plan(name, reason, cost.time, cost.extra_bytes, others | rejected)


SHORT_ROW = 512
"""Up to this many keys, dense softmax attention trains faster on the CPU than its flash kernel in
half types or with a bias; in plain float32 a step at 128 keys is 10 % faster with flash."""
DENSE_BYTES, LEAN_BYTES = 64 * 2**20, 4 * 2**20
"""Scores and weights below this size are computed whole; below the second on the CPU without
gradients, where blocks share one buffer."""


def _best(problem: Problem) -> tuple[str, str]:
    """An implementation that does not refuse the call, and why it is the one."""

    def runs(name: str) -> bool:
        return IMPLEMENTATIONS[name].refuse(problem) is None

    on_cpu = problem.q.device.type == "cpu"
    trains = on_cpu and problem.needs_grad
    if trains and problem.kv_len <= SHORT_ROW and _is_dense(problem) and _slows_flash(problem):
        name = "short_rows" if runs("short_rows") else "reference"
        return name, "short rows that need gradients"
    if runs("few_queries"):
        return "few_queries", "one or two queries by a pass of C over keys and values"
    if runs("by_head"):
        return "by_head", "one pass of C over each head, which is faster in bfloat16 here"
    if runs("sdpa"):
        few = sdpa.takes_rows(problem)
        how = "a row of bias for each of a few queries" if few else "torch's kernel computes it"
        return "sdpa", how
    dense = _is_dense(problem)
    if not on_cpu and not dense and runs("flex"):
        return "flex", "one fused kernel with the encoding's score_mod"
    if fused_blocks.suits(problem) and runs("blockwise"):
        return "blockwise", "torch's kernel takes what the encoding adds as a mask"
    if dense or not runs("blockwise"):
        return "reference", "the scores are small" if dense else "nothing else can run here"
    return "blockwise", "the scores are too large to hold at once"


def _is_dense(problem: Problem) -> bool:
    """Whether scores and weights are small enough to be computed whole."""
    lean = problem.q.device.type == "cpu" and not problem.needs_grad
    return 2 * scores_bytes(problem, problem.q_len) <= (LEAN_BYTES if lean else DENSE_BYTES)


def _slows_flash(problem: Problem) -> bool:
    half = problem.q.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cpu")
    return half or problem.term is not None


def _merge(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over disjoint sets of keys, joined by their log-sum-exp."""
    lses = torch.stack([lse for _, lse in results])
    total = lses.logsumexp(0)
    safe = total.masked_fill(total == -torch.inf, 0)  # a row that no pass sees
    shares = (lses - safe).exp()[..., None]
    out = sum(share * out for share, (out, _) in zip(shares, results, strict=True))
    return out.to(results[0][0].dtype), total  # type: ignore[union-attr]
