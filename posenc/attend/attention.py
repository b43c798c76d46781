"""Scaled dot-product attention with a position encoding, and `explain`, which describes it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from posenc.attend.cache import KVCache
from posenc.attend.choose import choose, others
from posenc.attend.problem import Problem
from posenc.attend.request import problems_of
from posenc.encodings.base.base import PositionEncoding
from posenc.encodings.base.boundary import either
from posenc.encodings.numbers.precision import at_least_float32
from posenc.encodings.terms.tokens import Tokens
from posenc.masks import Mask
from posenc.positions import KeyPositions, QueryPositions


@dataclass(frozen=True)
class Plan:
    """The way that runs, its expected cost, and why not the others.

    `time` is how time grows; `extra_bytes` is the peak of memory in addition to inputs, output and
    gradients, including the backward pass if gradients are needed.
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
    prepared: PositionEncoding | None = None,
    dropout_p: float = 0.0,
    sinks: Float[Tensor, " num_heads"] | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> (
    Float[Tensor, "batch num_heads q_len v_dim"]
    | tuple[Float[Tensor, "batch num_heads q_len v_dim"], Float[Tensor, "batch num_heads q_len"]]
):
    """Attend with a position encoding, at every place where it acts.

    out = softmax(scale * q' k'^T + position, over visible keys) v

    Args:
        encoding: any position encoding; None for none.
        q_positions, kv_positions: (len) or (batch, len), plus a last axis of components if the
            encoding needs several; or a range, which is known to be consecutive.
        q_state, kv_state: encoding.state for the tokens of q and of k.
        mask: which keys each query sees; bound to these positions unless it is bound already.
        cache: earlier keys and values; k, v, kv_positions and kv_state are appended, and queries
            attend to all of it.
        prepared: encoding.prepare(positions), used instead of the encoding: the same results, with
            tables computed once for all calls.
        dropout_p: probability of dropping an attention weight.
        sinks: one learned logit per query head, which takes part in the softmax and has no value,
            as in gpt-oss and DeepSeek-V4.
        return_lse: also return the log-sum-exp of each row's scores, and of its head's sink; -inf
            where nothing is visible.
        impl: "auto", or a way of posenc/attend/choose.py, which then runs or raises: "reference",
            "blocks", "sdpa" or "flex".

    Shapes: (batch, num_heads, q_len, v_dim) in the dtype of q; lse (batch, num_heads, q_len).
    Precision: scores, softmax and biases in float32 or better; under bfloat16 autocast queries,
    keys and values are rounded, and so are scores that torch computes. A query that sees no key
    gives zeros and zero gradient.
    Raises: ValueError if shapes, positions or `impl` do not fit, and for packed documents without a
    document mask (see `masks.causal`).

    >>> q = k = v = torch.randn(1, 4, 6, 16)
    >>> where = {"q_positions": torch.arange(6), "kv_positions": torch.arange(6)}
    >>> alibi = posenc.ALiBi(num_heads=4)
    >>> posenc.attention(q, k, v, alibi, mask=posenc.masks.causal, **where).shape
    torch.Size([1, 4, 6, 16])
    """
    with nullcontext() if cache is None else cache.unchanged_on_error():
        problems = problems_of(
            q, k, v, either(encoding, prepared), q_positions=q_positions,
            kv_positions=kv_positions, q_state=q_state, kv_state=kv_state, mask=mask, cache=cache,
            dropout_p=dropout_p, return_lse=return_lse, sinks=sinks,
        )  # fmt: skip
        results = [_run(p, impl) for p in problems]
        out, lse = results[0] if len(results) == 1 else _merge(results)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        out = problems[0].encoding.transform_output(_true(problems[0].queries).given(out))
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
    sinks: Float[Tensor, " num_heads"] | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Plan:
    """Return the way by which `attention` would run with the same arguments, without running it.
    For an encoding with several passes it is that of the first.

    >>> q = k = v = torch.randn(1, 4, 600, 16)
    >>> p = torch.arange(600)
    >>> plan = posenc.explain(q, k, v, posenc.CoPE(16), q_positions=p, kv_positions=p)
    >>> plan.impl
    'reference'
    """
    problems = problems_of(
        q, k, v, encoding, q_positions=q_positions, kv_positions=kv_positions, q_state=q_state,
        kv_state=kv_state, mask=mask, dropout_p=dropout_p, return_lse=return_lse, sinks=sinks,
    )  # fmt: skip
    choices = [choose(problem, impl) for problem in problems]
    costs = [choice.cost(problem) for choice, problem in zip(choices, problems, strict=True)]
    each = [cost.extra_bytes for cost in costs]
    # A backward pass needs the memory of all passes; otherwise each frees its own.
    extra = (sum(each) if problems[0].known.needs_grad else max(each)) + sum(
        t.numel() * t.element_size() * (1 if t.shape == own.shape else 2)
        for problem in problems
        for t, own in ((problem.q, q), (problem.k, k), (problem.v, v))
        if t is not own  # results of places 2 and 4, and temporary memory if it widens them
    )
    if len(problems) > 1:  # results of all passes until they are merged
        extra += 2 * len(problems) * problems[0].q.numel() * problems[0].q.element_size()
    way = choices[0].way
    return Plan(way, choices[0].reason, costs[0].time, extra, others(problems[0], way))


def _run(problem: Problem, impl: str) -> tuple[Tensor, Any]:
    choice = choose(problem, impl)
    if problem.q.numel() and problem.kv_len:
        return choice.run(problem)
    return _of_nothing(problem)


def _of_nothing(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Return zeros if there are no queries or no keys, with zero gradients for every tensor."""
    q, v, sides = problem.q, problem.v, (problem.queries, problem.keys)
    parts = [q, problem.k, v, *(t for side in sides for t in (side.x, side.state))]
    parts += problem.encoding.parameters()
    # Sum an empty part of each, because 0 times a number that is not finite would be NaN.
    none = sum(t.flatten()[:0].sum() for t in parts if t is not None)
    out = (q.new_zeros(*q.shape[:3], v.shape[-1]) + none).to(q.dtype)
    if not problem.need_lse:
        return out, None
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=at_least_float32(q.dtype))
    return out, (lse + none).to(lse.dtype)


def _true(tokens: Tokens) -> Tokens:
    """Return the tokens at their true positions, if those are mapped."""
    true = tokens.true_positions
    return tokens if true is None else tokens.at(true, mapped=False)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp with one more key per head, whose score is the head's
    sink and whose value is zero."""
    sink = sinks[:, None].to(lse.dtype)
    seen = lse.masked_fill(lse == -torch.inf, 0)  # where nothing is visible, the output is zero
    share = torch.sigmoid(seen - sink)[..., None]
    return (out * share).to(out.dtype), torch.logaddexp(lse, sink)


def _merge(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return attention over all keys from attention over disjoint sets of them."""
    lses = torch.stack([lse for _, lse in results])
    total = lses.logsumexp(0)
    safe = total.masked_fill(total == -torch.inf, 0)  # a row that no pass sees
    shares = (lses - safe).exp()[..., None]
    out = sum(share * out for share, (out, _) in zip(shares, results, strict=True))
    return out.to(results[0][0].dtype), total  # type: ignore[union-attr]
