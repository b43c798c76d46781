"""Scaled dot-product attention with a position encoding, and `explain`, which describes it."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from posenc.arguments import explain_misfits
from posenc.attend.cache import KVCache, check_cache
from posenc.attend.choose import choose, reasons_against_others
from posenc.attend.problem import Cost, Problem
from posenc.attend.problem_builder import build_problems
from posenc.attend.sinks import merge_passes_and_sinks
from posenc.attend.ways import flex, reference
from posenc.encodings import ScoreMod
from posenc.encodings.base.check_inputs import prepared_or_encoding, transposed_if_bthd
from posenc.encodings.base.position_encoding import PositionEncoding
from posenc.encodings.numerics.precision import at_least_float32
from posenc.masks import Mask
from posenc.positions.tokens import KeyPositions, QueryPositions


@dataclass(frozen=True)
class AttentionPlan:
    """Describe how `attention` runs a call; `explain` returns it."""

    impl: str
    """Implementation that runs: "reference", "blocks", "sdpa" or "flex"."""
    reason: str
    """Why it was chosen."""
    time_growth: str
    """How its time grows with the lengths, such as "O(q_len * kv_len)"."""
    extra_bytes: int
    """Peak memory beyond inputs, output and gradients, including the backward pass if gradients are
    needed."""
    scale: float
    """Factor of q . k before any bias."""
    scale_origin: str
    """Where the scale comes from, such as "1/sqrt(head_dim)"."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Why each other implementation was not chosen, by its name."""

    def __str__(self) -> str:
        """Return the plan in a few lines, as `posenc.explain` is printed."""
        extra_memory = f"{self.extra_bytes / 2**20:.1f} MiB extra"
        lines = [
            f"{self.impl}: {self.reason}; time {self.time_growth}, {extra_memory}",
            f"  scale {self.scale:.6g}: {self.scale_origin}",
            *(f"  not {name}: {why}" for name, why in self.rejected.items()),
        ]
        return "\n".join(lines)


@explain_misfits
def attention(
    q: Float[Tensor, "batch _ _ head_dim"],
    k: Float[Tensor, "batch _ _ head_dim"],
    v: Float[Tensor, "batch _ _ v_dim"],
    encoding: PositionEncoding | None = None,
    *,
    q_positions: QueryPositions,
    kv_positions: KeyPositions,
    q_state: Shaped[Tensor, "batch state_heads _ *state"] | None = None,
    kv_state: Shaped[Tensor, "batch state_heads _ *state"] | None = None,
    mask: Mask | None = None,
    cache: KVCache | None = None,
    prepared: PositionEncoding | None = None,
    dropout_p: float = 0.0,
    sinks: Float[Tensor, " num_heads"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "bhtd",
    impl: str = "auto",
) -> (
    Float[Tensor, "batch _ _ v_dim"]
    | tuple[Float[Tensor, "batch _ _ v_dim"], Float[Tensor, "batch num_heads _"]]
):
    """Compute attention with a position encoding.

    out = softmax(scale * q' k'^T + bias, over visible keys) v

    q' and k' are q and k as the encoding transforms them, `bias` is what it adds to the scores.
    scale is 1/sqrt(head_dim), unless it is given or the encoding claims `own_scale`.

    Args:
        encoding: any position encoding; None for none.
        q_positions, kv_positions: (len) or (batch, len), plus a last axis of components if the
            encoding needs several; or a range, which is known to be consecutive.
        q_state, kv_state: results of encoding.state for the tokens of q and of k; None if the
            encoding has no state.
        mask: which keys each query sees; None: all. A mask that is not bound yet is bound to these
            positions. Positions of several components have no order, so a mask then compares the
            order in memory, in which the queries are the last tokens.
        cache: earlier keys and values. k, v, kv_positions and kv_state are appended to it, and the
            queries attend to all keys in it.
        prepared: what encoding.prepare(positions) returned. It is used instead of the encoding, and
            gives the same results; its tables were computed once for all calls.
        dropout_p: probability of dropping an attention weight.
        sinks: one learned logit per query head, which takes part in the softmax and has no value,
            as in gpt-oss and DeepSeek-V4.
        scale: factor of q . k before any bias, above 0, instead of encoding.scale(head_dim).
            Encodings whose terms are multiplied by the scale (DeBERTa, Shaw, Transformer-XL, CoPE)
            use it too.
        return_lse: also return the log-sum-exp of each query's scores and of its head's sink; -inf
            where no key is visible.
        layout: "bhtd", or "bthd" if q, k, v and the result are (batch, len, heads, head_dim).
        impl: "auto" for the fastest that can run, or one of "reference", "blocks", "sdpa" and
            "flex", which then runs or raises.

    Shapes: q (batch, num_heads, q_len, head_dim), k (batch, num_kv_heads, kv_len, head_dim), v
    (batch, num_kv_heads, kv_len, v_dim) -> (batch, num_heads, q_len, v_dim) in the dtype of q; lse
    (batch, num_heads, q_len).
    Precision: scores, softmax and biases in float32 or better; under bfloat16 autocast queries,
    keys and values are rounded, and so are scores that torch computes. A query that sees no key
    gives zeros and zero gradient. Second derivatives come from every impl but "flex"; where they
    are asked for (create_graph=True), the backward pass materializes all scores.
    Raises: ValueError if shapes, positions, `scale` or `impl` do not fit; for packed documents
    without a document mask, see `masks.causal`; and if a mask compares the order in memory, and the
    positions of the queries are not those of the last keys.

    >>> q = k = v = torch.randn(1, 4, 6, 16)
    >>> where = {"q_positions": torch.arange(6), "kv_positions": torch.arange(6)}
    >>> alibi = posenc.ALiBi(num_heads=4)
    >>> posenc.attention(q, k, v, alibi, mask=posenc.masks.causal, **where).shape
    torch.Size([1, 4, 6, 16])
    """
    q, k, v = transposed_if_bthd("attention", layout, q, k, v)
    check_cache("attention", cache)
    with nullcontext() if cache is None else cache.unchanged_on_error():
        problems = build_problems(
            q,
            k,
            v,
            prepared_or_encoding(encoding, prepared),
            q_positions=q_positions,
            kv_positions=kv_positions,
            q_state=q_state,
            kv_state=kv_state,
            mask=mask,
            cache=cache,
            dropout_p=dropout_p,
            return_lse=return_lse,
            sinks=sinks,
            scale=scale,
        )
        results = [_run_pass(problem, impl) for problem in problems]
        if len(results) == 1 and sinks is None:
            out, lse = results[0]
        else:
            out, lse = merge_passes_and_sinks(results, sinks)
        # Outputs are encoded at the true positions, also where a position map (Self-Extend) gave
        # the pass others. Without a map these are the same.
        queries = problems[0].queries.unmapped()
        out = problems[0].encoding.transform_output(queries.with_vectors(out))
    (out,) = transposed_if_bthd(
        "attention", layout, out.to(q.dtype)
    )  # kernels return autocast's dtype
    return (out, lse) if return_lse else out


@explain_misfits
def attention_weights(
    q: Float[Tensor, "batch num_heads q_len head_dim"],
    k: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
    encoding: PositionEncoding | None = None,
    *,
    q_positions: QueryPositions,
    kv_positions: KeyPositions,
    q_state: Shaped[Tensor, "batch state_heads q_len *state"] | None = None,
    kv_state: Shaped[Tensor, "batch state_heads kv_len *state"] | None = None,
    mask: Mask | None = None,
    sinks: Float[Tensor, " num_heads"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "batch num_heads q_len kv_len"]:
    """Return the weight of each key for each query, as `attention` computes it.

    A row sums to 1, to less with a sink, and to 0 where a query sees no key. The arguments are
    those of `attention`; all pairs are materialized, in at least float32.

    >>> q = k = torch.zeros(1, 1, 3, 16)
    >>> posenc.attention_weights(
    ...     q, k, q_positions=range(3), kv_positions=range(3), mask=posenc.masks.causal)[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    problems = build_problems(
        q,
        k,
        k,
        encoding,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_state=q_state,
        kv_state=kv_state,
        mask=mask,
        return_lse=True,
        sinks=sinks,
        scale=scale,
    )
    q_len = q.shape[2]
    weights_and_lses = []
    for problem in problems:
        visible = problem.visibility_mask(0, q_len)
        prepared_problem = problem.with_prepared_term(q_len)
        weights_and_lses.append(reference.weights_and_lse(prepared_problem, 0, q_len, visible))
    # Weights are joined as outputs are: each row of a pass counts by its log-sum-exp.
    weights, _ = merge_passes_and_sinks(weights_and_lses, sinks)
    return weights


@explain_misfits
def score_mod(
    q: Float[Tensor, "batch num_heads q_len head_dim"],
    k: Float[Tensor, "batch num_kv_heads kv_len head_dim"],
    encoding: PositionEncoding,
    *,
    q_positions: QueryPositions,
    kv_positions: KeyPositions,
    q_state: Shaped[Tensor, "batch state_heads q_len *state"] | None = None,
    kv_state: Shaped[Tensor, "batch state_heads kv_len *state"] | None = None,
    scale: float | None = None,
) -> ScoreMod:
    """Return the score_mod by which FlexAttention adds this encoding to its scores.

    Tables are computed now; call it again when positions or weights change. A mask of
    posenc.masks, bound to positions, is a mask_mod already. Give flex_attention the scale that
    posenc.explain names: scale=encoding.scale(head_dim), or the `scale` given here.

    Raises: ValueError for an encoding that changes queries, keys, values or what is visible, or
    reads whole rows of scores.

    >>> q = k = torch.zeros(1, 4, 6, 16)
    >>> where = {"q_positions": range(6), "kv_positions": range(6)}
    >>> mod = posenc.score_mod(q, k, posenc.ALiBi(num_heads=4), **where)
    >>> mod(torch.zeros(()), *(torch.tensor(i) for i in (0, 0, 5, 3)))  # batch, head, q, key
    tensor(-0.5000)
    """
    problems = build_problems(
        q,
        k,
        k,
        encoding,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_state=q_state,
        kv_state=kv_state,
        scale=scale,
    )
    problem = problems[0]
    encoding_name = type(problem.encoding).__name__
    term = problem.term
    # Claims.places: 1 embeddings, 2 queries and keys, 3 scores, 4 values.
    changes_scores_only = set(problem.encoding.claims.places) == {3}
    if len(problems) > 1 or problem.mask is not None or not changes_scores_only:
        raise ValueError(
            f"score_mod: {encoding_name} does not change scores only. Rotate queries and keys "
            "yourself, and give the encoding of the scores alone."
        )
    if term is None or term.sum_values is not None or term.make_score_mod is None:
        raise ValueError(
            f"score_mod: {encoding_name} reads whole rows of scores, a score_mod one element."
        )
    mod = flex.score_mod(problem)
    assert mod is not None
    return mod


@explain_misfits
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
    scale: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> AttentionPlan:
    """Return how `attention` would run with the same arguments, without running it. An encoding
    that needs several softmax attentions (Self-Extend: near keys and far keys) gets the
    implementation of the first.

    >>> q = k = v = torch.randn(1, 4, 600, 16)
    >>> p = torch.arange(600)
    >>> plan = posenc.explain(q, k, v, posenc.CoPE(16), q_positions=p, kv_positions=p)
    >>> plan.impl
    'reference'
    """
    problems = build_problems(
        q,
        k,
        v,
        encoding,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_state=q_state,
        kv_state=kv_state,
        mask=mask,
        dropout_p=dropout_p,
        return_lse=return_lse,
        sinks=sinks,
        scale=scale,
    )
    choices = [choose(problem, impl) for problem in problems]
    costs = [choice.cost(problem) for choice, problem in zip(choices, problems, strict=True)]
    used_impl = choices[0].impl
    scale_used = problems[0].scale
    scale_origin = _scale_origin(scale_used, scale is not None, q.shape[-1], problems[0].encoding)
    return AttentionPlan(
        impl=used_impl,
        reason=choices[0].reason,
        time_growth=costs[0].time_growth,
        extra_bytes=_extra_bytes(problems, costs, (q, k, v)),
        scale=scale_used,
        scale_origin=scale_origin,
        rejected=reasons_against_others(problems[0], used_impl),
    )


def _extra_bytes(
    problems: list[Problem], costs: list[Cost], arguments: tuple[Tensor, Tensor, Tensor]
) -> int:
    """Return the peak memory of all passes beyond inputs, output and gradients, in bytes.

    problems, costs: each pass of the encoding (most have one), and its expected time and memory.
    arguments: q, k and v as the caller gave them.
    """
    bytes_of_passes = [cost.extra_bytes for cost in costs]
    # A backward pass needs the memory of all passes; otherwise each pass frees its own.
    num_bytes = sum(bytes_of_passes) if problems[0].needs_grad else max(bytes_of_passes)
    for problem in problems:
        for transformed, argument in zip((problem.q, problem.k, problem.v), arguments, strict=True):
            if transformed is argument:
                continue
            num_bytes += transformed.nbytes
            if transformed.shape != argument.shape:  # widening needs temporary memory, too
                num_bytes += transformed.nbytes
    if len(problems) > 1:
        # The output of each pass, and as much again while `merge_passes_and_sinks` joins them.
        num_bytes += 2 * len(problems) * problems[0].q.nbytes
    return num_bytes


def _scale_origin(
    scale: float, is_argument: bool, head_dim: int, encoding: PositionEncoding
) -> str:
    """Return where the scale of an attention comes from, such as "1/sqrt(head_dim)", for `explain`.
    `is_argument`: True if the caller gave the scale."""
    usual_scale = head_dim**-0.5
    if is_argument:
        return "as given"
    if math.isclose(scale, usual_scale):
        return "1/sqrt(head_dim)"
    factor = scale / usual_scale
    return f"{type(encoding).__name__}'s own, {factor:.6g} times 1/sqrt(head_dim)"


def _run_pass(problem: Problem, impl: str) -> tuple[Tensor, Any]:
    """Run one pass of an encoding (most have one) by the implementation `impl`. Return its output
    (batch, num_heads, q_len, v_dim), and its log-sum-exp (batch, num_heads, q_len) or None."""
    # Also without pairs, because an `impl` that is unknown or cannot run this must raise.
    choice = choose(problem, impl)
    if problem.q.numel() == 0 or problem.kv_len == 0:
        return _result_without_pairs(problem)
    return choice.run(problem)


def _result_without_pairs(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Return the result of a problem without queries or without keys: an output of zeros, with zero
    gradients for every tensor, and a log-sum-exp of -inf, or None if it is not needed."""
    q = problem.q
    v = problem.v
    tensors = [q, problem.k, v]
    tensors += [problem.queries.x, problem.queries.state, problem.keys.x, problem.keys.state]
    tensors += problem.encoding.parameters()
    # This zero ties the output to every tensor, so that all get a gradient. It is the sum of an
    # empty part of each, because 0 times a number that is not finite would be NaN.
    zero = sum(t.flatten()[:0].sum() for t in tensors if t is not None)
    out = (q.new_zeros(*q.shape[:3], v.shape[-1]) + zero).to(q.dtype)
    if not problem.needs_lse:
        return out, None
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=at_least_float32(q.dtype))
    return out, (lse + zero).to(lse.dtype)
