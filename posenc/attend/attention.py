"""The host: scaled dot-product attention with a position encoding. It calls place 2 and chooses the
implementation, which calls places 3 and 4 through posenc.attend.problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attend.cache import KVCache
from posenc.attend.kernels import blockwise, flex, reference, sdpa
from posenc.attend.problem import Call
from posenc.encoding.base import PositionEncoding
from posenc.masks import Mask

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "reference": reference,
    "blockwise": blockwise,
    "sdpa": sdpa,
    "flex": flex,
}
"""Each has refuse(call) -> reason or None, cost(call) -> Cost, and run(call) -> (out,
log-sum-exp or None)."""


@dataclass(frozen=True)
class Plan:
    """Which implementation runs, what it is expected to cost, and why not the others.

    `time` is the order in which time grows; `extra_bytes` counts memory beyond inputs and output,
    per forward.
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
    q_positions: Tensor,
    kv_positions: Tensor,
    q_state: Tensor | None = None,
    kv_state: Tensor | None = None,
    mask: Mask | None = None,
    cache: KVCache | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q' k'^T + position, over visible keys) v, with every place of `encoding`
    applied.

    Args:
        encoding: any position encoding; None for none.
        q_positions, kv_positions: (len) or (batch, len), plus a last axis where encoding.num_axes >
        1.
        q_state, kv_state: what encoding.token_state gave for the tokens of q and of k.
        mask: who may look at whom; bound to the positions here unless it already is.
        cache: earlier keys and values; k, v, kv_positions and kv_state are appended and all of it
            is attended to.
        dropout_p: probability of dropping an attention weight.
        return_lse: also return the log-sum-exp of each row's scores, -inf where nothing is visible.
        impl: "auto", or the name of an implementation, which then runs or raises.

    Shapes: (batch, num_heads, q_len, v_dim) in the dtype of q; lse (batch, num_heads, q_len).
    Precision: scores, softmax and biases in float32 or better. A row that sees no key gives zeros
    and zero gradient.
    Raises: ValueError where shapes, positions or `impl` do not fit.
    """
    calls = _calls(
        q,
        k,
        v,
        encoding,
        q_positions,
        kv_positions,
        q_state,
        kv_state,
        mask,
        cache,
        dropout_p,
        return_lse,
    )
    results = [IMPLEMENTATIONS[_choose(call, impl).impl].run(call) for call in calls]
    out, lse = results[0] if len(results) == 1 else _merge(results)
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: PositionEncoding | None = None,
    *,
    q_positions: Tensor,
    kv_positions: Tensor,
    q_state: Tensor | None = None,
    kv_state: Tensor | None = None,
    mask: Mask | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Plan:
    """What `attention` would do with the same arguments, without computing it. An encoding of
    several
    passes is described by its first."""
    calls = _calls(
        q,
        k,
        v,
        encoding,
        q_positions,
        kv_positions,
        q_state,
        kv_state,
        mask,
        None,
        dropout_p,
        return_lse,
    )
    return _choose(calls[0], impl)


def _choose(call: Call, impl: str) -> Plan:
    if impl != "auto":
        if impl not in IMPLEMENTATIONS:
            raise ValueError(
                f"attention: unknown impl {impl!r}; known: auto, {', '.join(IMPLEMENTATIONS)}."
            )
        why_not = IMPLEMENTATIONS[impl].refuse(call)
        if why_not:
            raise ValueError(
                f"attention: impl={impl!r} cannot run {type(call.encoding).__name__}: {why_not}."
            )
        cost = IMPLEMENTATIONS[impl].cost(call)
        return Plan(impl, "asked for by name", cost.time, cost.extra_bytes)
    rejected = {
        name: why for name, kernel in IMPLEMENTATIONS.items() if (why := kernel.refuse(call))
    }
    name, reason = _best(call, rejected)
    cost = IMPLEMENTATIONS[name].cost(call)
    others = {n: "expected to be slower here" for n in IMPLEMENTATIONS if n != name}
    if call.q.device.type == "cpu" and name != "flex":
        others["flex"] = "compiling takes seconds; ask for it by name"
    return Plan(name, reason, cost.time, cost.extra_bytes, others | rejected)


SHORT_ROW = 512
"""Up to this many keys, dense softmax attention trains faster on the CPU than its flash kernel in
half types or with a bias; in plain float32 a step at 128 keys is 10 % faster with flash."""
DENSE_BYTES, LEAN_BYTES = 64 * 2**20, 16 * 2**20
"""Scores and weights below this size are computed whole; below the second on the CPU without
gradients, where blocks share one buffer."""


def _best(call: Call, rejected: dict[str, str]) -> tuple[str, str]:
    """An implementation that has not refused the call, and why it is the one."""
    on_cpu = call.q.device.type == "cpu"
    lean = on_cpu and not call.needs_grad
    dense = reference.cost(call).extra_bytes <= (LEAN_BYTES if lean else DENSE_BYTES)
    half = call.q.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cpu")
    slow_flash = half or call.changes_scores
    if on_cpu and call.needs_grad and call.kv_len <= SHORT_ROW and dense and slow_flash:
        return "reference", "short rows that need gradients"
    if "sdpa" not in rejected:
        return "sdpa", "torch's kernel computes it"
    if not on_cpu and not dense and "flex" not in rejected:
        return "flex", "one fused kernel with the encoding's score_mod"
    if dense:
        return "reference", "the scores are small"
    return "blockwise", "the scores are too large to hold at once"


def _calls(
    q,
    k,
    v,
    encoding,
    q_positions,
    kv_positions,
    q_state,
    kv_state,
    mask,
    cache,
    dropout_p,
    return_lse,
) -> list[Call]:
    encoding = PositionEncoding() if encoding is None else encoding
    _check(q, k, v, encoding, q_positions, kv_positions)
    scale = encoding.scale(q.shape[-1])
    raw_q, new_positions = q, kv_positions
    keep_raw = encoding.needs_raw_k
    if cache is not None:
        if not keep_raw:
            q, k = encoding.transform_qk(q, k, q_positions, kv_positions)
        axis = -2 if encoding.num_axes > 1 else -1
        k, v, kv_positions, kv_state = cache.append(
            k, v, kv_positions, kv_state, position_axis=axis
        )
    if mask is not None and not mask.bound:
        if (
            encoding.num_axes > 1
        ):  # order is the order in memory where a position has several components
            order = torch.arange(k.shape[2], device=k.device)
            mask = mask.bind(order[k.shape[2] - q.shape[2] :], order)
        else:
            same = q_positions is new_positions and k.shape[2] == q.shape[2]
            mask = mask.bind(q_positions, q_positions if same else kv_positions)
    passes = encoding.passes(q_positions, kv_positions)
    raw_k = _repeat_heads(k, q.shape[1]) if keep_raw and 3 in encoding.places else None
    calls = []
    for part in passes:
        if cache is not None and not keep_raw:
            pass_q, pass_k = q, k
        else:
            pass_q, pass_k = encoding.transform_qk(q, k, part.q_positions, part.kv_positions)
        if part.q_factor is not None:
            pass_q = (pass_q * part.q_factor[..., None, :, None]).to(pass_q.dtype)
        visible = mask
        if part.mask is not None:
            own = part.mask
            visible = own.bind(q_positions, kv_positions) if mask is None else own & mask
        calls.append(
            Call(
                pass_q, pass_k, v, raw_q, raw_k, encoding, part.q_positions, part.kv_positions,
                q_state, kv_state, visible, scale, dropout_p, return_lse or len(passes) > 1,
            )
        )  # fmt: skip
    return calls


def _merge(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over disjoint sets of keys, joined by their log-sum-exp."""
    lses = torch.stack([lse for _, lse in results])
    total = lses.logsumexp(0)
    safe = total.masked_fill(total == -torch.inf, 0)  # a row that no pass sees
    shares = (lses - safe).exp()[..., None]
    out = sum(share * out for share, (out, _) in zip(shares, results, strict=True))
    return out.to(results[0][0].dtype), total  # type: ignore[union-attr]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: PositionEncoding,
    q_positions: Tensor,
    kv_positions: Tensor,
):
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4:
            raise ValueError(
                f"attention: {name} must have shape (batch, heads, len, head_dim), "
                f"got {tuple(t.shape)}."
            )
    if q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: "
            "k and v share heads and length, q and k share head_dim, all share the batch."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: {k.shape[1]} key/value heads do not divide {q.shape[1]} query heads."
        )
    for name, positions, t in (("q_positions", q_positions, q), ("kv_positions", kv_positions, k)):
        tokens = positions.shape[: positions.ndim - (encoding.num_axes > 1)]
        # Compared one by one: a set would hash the sizes, and compiled code be made per length.
        batched = len(tokens) == 2 and (tokens[0] == 1 or tokens[0] == t.shape[0])
        if not (len(tokens) == 1 or batched) or tokens[-1] != t.shape[2]:
            raise ValueError(
                f"attention: {name} must have shape ({t.shape[2]},) or ({t.shape[0]}, {t.shape[2]})"
                f"{' plus an axis of components' if encoding.num_axes > 1 else ''}, "
                f"got {tuple(positions.shape)}."
            )


def _repeat_heads(k: Tensor, num_heads: int) -> Tensor:
    return k if k.shape[1] == num_heads else k.repeat_interleave(num_heads // k.shape[1], dim=1)
